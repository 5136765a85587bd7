"""Dask's adaptive scaling, in whole nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, cast

import cloudpickle

from skyward.wire.dask_parts import Adaptive
from skyward_dask.pool_handle import PoolLike
from skyward_dask.sizing import superfluous

__all__ = ["NodeAdaptive"]

_logger = logging.getLogger("skyward.dask")

# A lambda is pickled by value, so that the scheduler does not need this module.
_BY_NODE: Callable[[Any], str] = lambda worker: str(worker.name).rpartition("-")[0]  # noqa: E731


class _NodeCluster(Protocol):
    """Members of a cluster that this module needs in addition to Dask's."""

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
    """Dask's adaptive scaling, which closes workers by whole nodes.

    A node is removed when all its workers are superfluous; the scheduler's node stays. Before its machine ends, a node
    finishes its work, native and joblib calls included.
    """

    @property
    def _nodes(self) -> _NodeCluster:
        return cast("_NodeCluster", self.cluster)

    @property
    def requested(self) -> set[str]:
        """Names of requested workers that have arrived; :meth:`workers_to_close` handles the others, by node."""
        return self._nodes.requested & self.observed

    @property
    def observed(self) -> set[str]:
        """Names of the workers registered with the scheduler."""
        return self._nodes.observed

    async def target(self) -> int:
        """Return the target number of workers, from the next scheduler while one is being replaced."""
        await cast("Awaitable[object]", self.cluster)
        return cast("int", await super().target())

    async def adapt(self) -> None:
        """Run one round of scaling; skip it while the scheduler is being replaced."""
        try:
            await super().adapt()
        except OSError as error:
            _logger.debug("adaptive scaling could not ask the scheduler: %s", error)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return the action for ``target`` workers: see Dask's method."""
        return cast("dict[str, Any]", await super().recommendations(self._nodes.whole_nodes(target)))

    async def workers_to_close(self, target: int) -> list[str]:
        """Return names of workers to close until ``target`` remain, by whole nodes, the cheapest first."""
        order = await cast("Any", self.scheduler).workers_to_close(
            target=0, key=cloudpickle.dumps(_BY_NODE), attribute="name"
        )
        return superfluous(
            self._nodes.pool.status, target=target, observed=self.observed, cheapest_first=cast("Sequence[str]", order)
        )

    async def scale_up(self, n: int) -> None:
        """Grow to ``n`` workers."""
        if self.state != "stopped":  # a round may outlive the stop
            self._nodes.scale_up(n)

    async def scale_down(self, workers: Collection[str]) -> None:
        """Close these workers. The pool itself drains their native calls first."""
        if self.state != "stopped":
            self._nodes.scale_down(workers)
