"""Dask's adaptive scaling, in whole nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, cast

from distributed.deploy.adaptive import Adaptive
from distributed.protocol import pickle

from skyward_dask.pool_handle import PoolLike
from skyward_dask.sizing import superfluous

__all__ = ["NodeAdaptive"]

_logger = logging.getLogger("skyward.dask")

# A lambda travels by value: the scheduler need not have this module.
_BY_NODE: Callable[[Any], str] = lambda worker: str(worker.name).rpartition("-")[0]  # noqa: E731


class _NodeCluster(Protocol):
    """What is needed of a cluster here and not by Dask's own."""

    @property
    def pool(self) -> PoolLike: ...

    @property
    def requested(self) -> set[str]: ...

    @property
    def observed(self) -> set[str]: ...

    def whole_nodes(self, workers: float) -> int: ...

    def scale_up(self, n: int) -> object: ...

    def scale_down(self, workers: Collection[str]) -> object: ...


class NodeAdaptive(Adaptive):
    """Decides how many workers there should be, as Dask's own does, and closes whole nodes of them.

    A node goes when all its workers are superfluous; the scheduler's never goes. What a node still has to do, native
    and joblib calls included, ends before its machine does.
    """

    @property
    def _nodes(self) -> _NodeCluster:
        return cast("_NodeCluster", self.cluster)

    @property
    def requested(self) -> set[str]:
        """Those of the requested workers that have arrived: the others are chosen among with the rest, by node."""
        return self._nodes.requested & self.observed

    @property
    def observed(self) -> set[str]:
        """Names of the workers that the scheduler knows."""
        return self._nodes.observed

    async def target(self) -> int:
        """How many workers there should be; asked of the next scheduler while one is being replaced."""
        await cast("Awaitable[object]", self.cluster)
        return cast("int", await super().target())

    async def adapt(self) -> None:
        """Look once. While the scheduler is being replaced there is nothing to see: the next look asks the next one."""
        try:
            await super().adapt()
        except OSError as error:
            _logger.debug("adaptive scaling could not ask the scheduler: %s", error)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """What to do for ``target`` workers: see Dask's."""
        return cast("dict[str, Any]", await super().recommendations(self._nodes.whole_nodes(target)))

    async def workers_to_close(self, target: int) -> list[str]:
        """Names of the workers to close for ``target`` to remain: those of whole nodes, the cheapest first."""
        order = await cast("Any", self.scheduler).workers_to_close(
            target=0, key=pickle.dumps(_BY_NODE), attribute="name"
        )
        return superfluous(
            self._nodes.pool.status, target=target, observed=self.observed, cheapest_first=cast("Sequence[str]", order)
        )

    async def scale_up(self, n: int) -> None:
        """Grow to ``n`` workers."""
        if self.state != "stopped":  # a round may be under way when it is
            self._nodes.scale_up(n)

    async def scale_down(self, workers: Collection[str]) -> None:
        """Close these workers. The pool retires them itself: it drains native calls first."""
        if self.state != "stopped":
            self._nodes.scale_down(workers)
