"""Dask clients of pools: the user's own modules come along with their graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from skyward.errors import ConfigurationError
from skyward.shipping.graph_modules import MODULES, missing_modules
from skyward.shipping.sources import SentSources
from skyward.submission import SchedulerInfo

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["bring_modules", "make_client"]


def make_client(scheduler: SchedulerInfo, options: dict[str, Any]) -> Client:
    """Return a Dask client of a pool's scheduler, with ``options`` of :class:`distributed.Client`.

    Raises:
        ConfigurationError: ``direct_to_workers`` is set although workers cannot be reached.
    """
    from distributed import Client

    if scheduler.tunnelled and options.get("direct_to_workers"):
        raise ConfigurationError(
            "direct_to_workers=True cannot work here: this process reaches only the pool's scheduler, through "
            "a tunnel; leave it out: data then comes through the scheduler"
        )
    client = Client(scheduler.address, security=scheduler.security, **options)
    bring_modules(client)
    return client


def bring_modules(client: Client) -> None:
    """Have a client of a pool's scheduler send the sources of the user's modules ahead of its graphs. Idempotent."""
    own: Any = client
    if not isinstance(own._send_to_scheduler, _Sender):  # noqa: SLF001 - see dask_parts.py
        own._send_to_scheduler = _Sender(client)  # noqa: SLF001


class _Sender:
    """Sender of a client's messages, in the place of its method."""

    def __init__(self, client: Client) -> None:
        self._client = ref(client)
        self._connection: object = None
        self._sent = SentSources()

    def __call__(self, msg: dict[str, Any]) -> None:
        client: Any = self._client()
        if msg["op"] == "update-graph":
            if client.scheduler_comm is not self._connection:  # another scheduler may answer there
                self._connection, self._sent = client.scheduler_comm, SentSources()
            if (modules := missing_modules(self._sent, msg["expr_ser"].frames)) is not None:
                type(client)._send_to_scheduler(client, {"op": MODULES, "modules": modules})  # noqa: SLF001
        type(client)._send_to_scheduler(client, msg)  # noqa: SLF001
