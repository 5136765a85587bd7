"""What a pool knows of its own size: growing, shrinking, and the Dask scheduler under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from skyward.engine.running import RunningPool
from skyward.errors import ConfigurationError
from skyward.request.request import checked_nodes, checked_ranks
from skyward.submission import FleetStatus, SchedulerInfo

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Scales"]


class Scales(ABC):
    """A pool as :class:`skyward.submission.ElasticFleet`."""

    @property
    @abstractmethod
    def _ready(self) -> RunningPool: ...

    @property
    def status(self) -> FleetStatus:
        """The pool's nodes, how many are wanted, and what they have cost so far.

        Raises:
            PoolStateError: the pool is not open.
        """
        return self._ready.elastic.status()

    def scale(self, nodes: int, *, drop: Collection[int] = ()) -> Future[None]:
        """Grow or shrink to ``nodes`` nodes, while calls run.

        Returns at once; ``pool.scale(4).result()`` waits. New nodes are made in parallel and take calls as they come
        up; ``@`` counts them from now on. Nodes that go finish what they have begun, and what only they may run; the
        rest of their calls runs elsewhere. A later call overrides an earlier one.

        Args:
            nodes: how many, at least 1: node 0 stays, because the scheduler runs there.
            drop: ranks of the nodes to go first; without them the highest go.

        Returns:
            Done when the pool has that size; raises why a node cannot be had, and then the pool stays smaller. It is
            cancelled when a later call overrides this one.

        Raises:
            ConfigurationError: ``nodes`` or ``drop`` is wrong.
            PoolStateError: the pool is not open.
        """
        return self._ready.scale(checked_nodes(nodes), checked_ranks("drop", drop))

    @property
    def total_slots(self) -> int:
        """Number of calls that run at once on the wanted nodes: nodes times workers per node.

        Raises:
            PoolStateError: the pool is not open.
        """
        status = self.status
        return status.wanted * status.workers_per_node

    @property
    def scheduler(self) -> SchedulerInfo:
        """The address and the certificates of the Dask scheduler under the pool, for Dask clients.

        Another one after the head node, where it runs, was replaced.

        Raises:
            ConfigurationError: Dask or Python differ between this process and a node.
            PoolStateError: the pool is not open, or its head node is being replaced.
        """
        return self._ready.scheduler()

    def dask_client(self, **options: Any) -> Client:
        """A Dask client of this pool; close it before the pool.

        Args:
            **options: :class:`distributed.Client`'s, such as ``set_as_default`` or ``asynchronous``.

        Raises:
            ConfigurationError: Dask or Python differ between this process and a node; or ``direct_to_workers`` was
                asked for where workers cannot be reached.
            PoolStateError: the pool is not open, or its head node is being replaced.
        """
        from distributed import Client

        info = self.scheduler
        if info.tunnelled and options.get("direct_to_workers"):
            raise ConfigurationError(
                "direct_to_workers=True cannot work here: this process reaches only the pool's scheduler, through "
                "a tunnel; leave it out, and data comes through the scheduler"
            )
        return Client(info.address, security=info.security, **options)

    def forward(self, address: str) -> str:
        """See :meth:`skyward.submission.ElasticFleet.forward`."""
        return self._ready.forward(address)
