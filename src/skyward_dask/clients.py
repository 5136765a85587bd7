"""Dask clients of pools: certificates found by the scheduler's address, the user's modules sent along.

Some libraries take an address and no certificates, such as tsfresh's ``ClusterDaskDistributor``: Dask asks
:func:`load_security` then, for clients of this process only. The certificates stay in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast
from weakref import WeakValueDictionary, ref

import dask.config
from distributed import Client, Security
from tornado.ioloop import IOLoop

from skyward.errors import ConfigurationError
from skyward.shipping.project_modules import SentSources
from skyward.submission import ElasticFleet, SchedulerInfo
from skyward_dask.dask_parts import add_client_extension
from skyward_dask.modules import MODULES, missing_modules
from skyward_dask.security import PoolSecurity
from skyward_dask.service import DASK

NO_DIRECT_ACCESS = (
    "cannot work here: this process reaches only the scheduler of the pool, through a tunnel, and none of its workers. "
    "Leave it out: data then comes through the scheduler"
)
_LOADER = "distributed.client.security-loader"
_CLOSE_S = 5.0
_by_address: WeakValueDictionary[str, PoolSecurity] = WeakValueDictionary()


def scheduler_of(pool: ElasticFleet) -> SchedulerInfo:
    """Return the address of a pool's scheduler, and the certificates, which clients find by it from now on."""
    access = pool.service(DASK)
    address = f"tls://{access.address}"
    security = _by_address.get(address)
    if security is None or security.identity != access.identity:
        security = PoolSecurity(access.identity, tunnelled=access.tunnelled)
        _by_address[address] = security
    add_client_extension("skyward", _PoolClient)
    if dask.config.get(_LOADER, default=None) is None:  # leave the user's own
        dask.config.set({_LOADER: f"{__name__}.{load_security.__name__}"})
    return SchedulerInfo(address, security, tunnelled=access.tunnelled)


def load_security(info: Mapping[str, Any]) -> Security | None:
    """Return the certificates for a client of a pool's scheduler; Dask calls it for clients without certificates."""
    return _by_address.get(str(info.get("address")))


def client_of(pool: ElasticFleet, options: dict[str, Any]) -> Client:
    """Return a Dask client of a pool, with ``options`` of :class:`distributed.Client`.

    Raises:
        ConfigurationError: ``direct_to_workers`` is set although workers cannot be reached.
    """
    scheduler = scheduler_of(pool)
    return Client(scheduler.address, security=scheduler.security, **options)


def close_client(client: ref[Client]) -> None:
    """Close a client whose pool closes, unless its user has: it would log that it has lost the scheduler."""
    pools = client()
    if pools is None or pools.status == "closed":
        return
    with suppress(Exception):
        if pools.asynchronous:  # perhaps on its event loop, which must not wait
            cast("IOLoop", pools.loop).add_callback(pools.close)
        else:
            pools.close(timeout=_CLOSE_S)


class _PoolClient:
    """Extension of a new Dask client of a pool; it ignores other clients, to which Dask adds it as well.

    The client sends the user's own modules along with graphs, shows no token in notebooks, whose files are passed on,
    and makes no direct connections to workers past a tunnel: it would wait half a minute for them. It is an extension
    because a cluster cannot see its clients' options.

    Raises:
        ConfigurationError: the client requires direct connections to unreachable workers.
    """

    def __init__(self, client: Client) -> None:
        own: Any = client
        if not isinstance(own.security, PoolSecurity):
            return
        if own.security.tunnelled and own.direct_to_workers:
            if (changed := getattr(own, "_set_config", None)) is not None:
                with changed:  # undo its registration as Dask's default scheduler
                    pass
            raise ConfigurationError(f"direct_to_workers=True {NO_DIRECT_ACCESS}")
        own._send_to_scheduler = _Sender(client)  # noqa: SLF001 - see dask_parts.py
        view = own._repr_html_
        own._repr_html_ = lambda: without_token(view())


class _Sender:
    """Sender of a client's messages, in the place of its method: sources of modules go ahead of graphs."""

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


def without_token(html: str) -> str:
    """Return a notebook's view of a cluster with a link that asks for the token: a notebook's file is passed on."""
    return re.sub(r"\?token=[\w-]+", "", html)


def check_versions(versions: Mapping[str, Any]) -> None:
    """Refuse a client whose Python, dask, distributed or cloudpickle are not those of the nodes.

    Of Python only the minor version counts.

    Args:
        versions: result of :meth:`distributed.Client.get_versions`: the versions of client, scheduler and workers.

    Raises:
        ConfigurationError: they differ; the message names both sides and the remedy.
    """
    here = _relevant(versions["client"])
    there = {"the scheduler": versions["scheduler"], **versions["workers"]}
    for where, remote in there.items():
        found = _relevant(remote)
        if different := [name for name in here if here[name] != found[name]]:
            mine = ", ".join(f"{name} {here[name]}" for name in different)
            theirs = ", ".join(f"{name} {found[name]}" for name in different)
            raise ConfigurationError(
                f"this process has {mine}, but {where} has {theirs}: one may be unable to load the pickles of the "
                f"other. {_remedy(different, here)}"
            )


def _remedy(different: list[str], here: Mapping[str, str]) -> str:
    if "python" in different:
        return f"Run this process with the nodes' Python, or ask for nodes with yours: Image(python={here['python']!r})"
    pins = ", ".join(f'"{name}=={here[name]}"' for name in different)
    return f"Install the nodes' versions here, or yours there: pip=[{pins}]"


def _relevant(versions: Mapping[str, Any]) -> dict[str, str]:
    packages: Mapping[str, str | None] = versions["packages"]
    python = ".".join((packages.get("python") or "unknown").split(".")[:2])
    return {"python": python, **{name: packages.get(name) or "missing" for name in DASK.distributions}}
