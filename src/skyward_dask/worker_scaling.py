"""Scaling of a pool in numbers of workers, manual or adaptive, with the interface of Dask's cluster classes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

from distributed import Status

from skyward.errors import ConfigurationError, PoolStateError
from skyward.submission import FleetStatus
from skyward.wire.dask_parts import Adaptive, NoOpAwaitable
from skyward_dask.adaptive import NodeAdaptive
from skyward_dask.scheduler_connection import ConnectedCluster
from skyward_dask.settings import seconds, setting
from skyward_dask.sizing import (
    Bounds,
    SizeParams,
    WorkerSize,
    fewest_workers,
    most_workers,
    nodes_for,
    planned_workers,
    ranks_named,
    requested_workers,
    whole_bounds,
    worker_count,
)

__all__ = ["ElasticCluster"]

_logger = logging.getLogger("skyward.dask")


class ElasticCluster(ConnectedCluster):
    """Connected cluster with target sizes, current sizes, and methods to change them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logged: set[str] = set()
        self._most_nodes = 1

    async def _connect(self) -> None:
        await super()._connect()
        self._most_nodes = self.pool.status.wanted

    @property
    def plan(self) -> set[str]:
        """Names of the workers of the target number of nodes."""
        status = self._status()
        return planned_workers(status) if status else set()

    @property
    def requested(self) -> set[str]:
        """Names of the workers of nodes that exist, or are requested from the provider."""
        status = self._status()
        return requested_workers(status) if status else set()

    @property
    def observed(self) -> set[str]:
        """Names of the workers registered with the scheduler."""
        return {str(worker["name"]) for worker in self.known_workers.values()}

    def whole_nodes(self, workers: float) -> int:
        """Return ``workers`` rounded up to whole nodes."""
        per_node = self._open_status().workers_per_node
        return nodes_for(workers, per_node) * per_node

    def scale(self, n: int = 0, memory: str | int | None = None, cores: int | None = None) -> Any:
        """Scale to at least ``n`` workers, on the minimum number of nodes; end adaptive scaling.

        Returns at once: :meth:`wait_for_workers` waits. Removed nodes finish their calls first, and hand Dask's data
        over to others.

        Args:
            n: the number of workers.
            memory: memory of all workers together, such as ``"64 GiB"``.
            cores: threads of all workers together.

        Raises:
            ConfigurationError: a value is wrong.
            PoolStateError: the cluster or its pool is closed.
        """
        status = self._open_status()
        wanted = fewest_workers(SizeParams(prefix="", workers=n, cores=cores, memory=memory), self._size())
        if isinstance(self._adaptive, NodeAdaptive) and self._adaptive.state in ("starting", "running"):
            self._adaptive.stop(reason="scaled by hand")
            self._log("adaptive scaling has ended: the cluster was scaled by hand")
        nodes = self._rounded(wanted, status)
        self._most_nodes = max(self._most_nodes, nodes)
        self._scale_fleet(nodes)
        return NoOpAwaitable() if self.asynchronous else None

    def scale_up(self, n: int) -> NoOpAwaitable | None:
        """Grow to at least ``n`` workers; adaptive scaling continues."""
        status = self._open_status()
        nodes = nodes_for(worker_count("n", n), status.workers_per_node)
        if nodes > status.wanted:
            self._scale_fleet(nodes)
        return NoOpAwaitable() if self.asynchronous else None

    def scale_down(self, workers: Collection[str]) -> NoOpAwaitable | None:
        """Close the nodes all of whose workers are named; never the scheduler's.

        Args:
            workers: names of workers, such as ``["node1-worker0", "node1-worker1"]``.
        """
        status = self._open_status()
        if isinstance(workers, str) or not all(isinstance(worker, str) for worker in workers):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f'workers must be names of workers such as ["node1-worker0"], got {workers!r}')
        if ranks := ranks_named(status, workers):
            self._scale_fleet(max(status.wanted - len(ranks), 1), drop=ranks)
        return NoOpAwaitable() if self.asynchronous else None

    def adapt(
        self,
        Adaptive: type[Adaptive] = NodeAdaptive,  # noqa: N803 - Dask's name
        minimum: int | None = None,
        maximum: float | None = None,
        *,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: str | None = None,
        maximum_memory: str | None = None,
        interval: Any = None,
        wait_count: int | None = None,
        target_duration: Any = None,
        **kwargs: Any,
    ) -> Adaptive:
        """Grow and shrink with Dask's load, until :meth:`scale` is called.

        Parameters default to the settings ``skyward.adaptive.*``. Without a maximum, the limit is the highest number of
        nodes requested so far.

        Args:
            Adaptive: the deciding class, a subclass of Dask's.
            minimum: minimum number of workers.
            maximum: maximum number of workers; ``math.inf`` is no limit.
            minimum_cores: minimum number of threads.
            maximum_cores: maximum number of threads.
            minimum_memory: minimum memory of all workers together, such as ``"64 GiB"``.
            maximum_memory: maximum memory of all workers together.
            interval: time between two checks.
            wait_count: number of consecutive checks that must find a node superfluous before its removal; 0 and 1 are
                the same.
            target_duration: desired duration of the current work.
            **kwargs: parameters of ``Adaptive``.

        Raises:
            ConfigurationError: a value is wrong, or the minimum is above the maximum.
            PoolStateError: the cluster or its pool is closed.
        """
        fewest = SizeParams(prefix="minimum_", workers=minimum, cores=minimum_cores, memory=minimum_memory)
        most = SizeParams(prefix="maximum_", workers=maximum, cores=maximum_cores, memory=maximum_memory)
        bounds = self._bounds(fewest, most)
        return super().adapt(
            Adaptive=Adaptive,
            minimum=bounds.minimum,
            maximum=bounds.maximum,
            interval=_duration("interval", interval),
            wait_count=worker_count("wait_count", setting("adaptive.wait-count") if wait_count is None else wait_count),
            target_duration=_duration("target_duration", target_duration),
            **kwargs,
        )

    def _bounds(self, fewest: SizeParams, most: SizeParams) -> Bounds:
        status, size = self._open_status(), self._size()
        if fewest.is_open:
            fewest = SizeParams(prefix="minimum_", workers=setting("adaptive.minimum"))
        minimum = fewest_workers(fewest, size)
        maximum = self._default_maximum(minimum, status) if most.is_open else most_workers(most, size)
        bounds = whole_bounds(minimum, maximum, status.workers_per_node)
        if minimum == 0:
            self._log_head_stays("adapt(minimum=0)", status)
        return bounds

    def _default_maximum(self, minimum: int, status: FleetStatus) -> float:
        """Return the maximum of the settings, else the highest number requested so far, which limits the cost."""
        if (configured := setting("adaptive.maximum")) is not None:
            return most_workers(SizeParams(prefix="maximum_", workers=configured), self._size())
        most = max(self._most_nodes * status.workers_per_node, minimum)
        self._log_once(f"adapt(): at most {most} workers, the highest number requested so far; maximum= allows more")
        return most

    def _status(self) -> FleetStatus | None:
        """Return the fleet's status; None before the start and after the end."""
        if self.status != Status.running:
            return None
        with suppress(PoolStateError):
            return self.pool.status
        return None

    def _open_status(self) -> FleetStatus:
        if self.status == Status.created:
            raise PoolStateError(f"the cluster {self.label} has not started: await it, or use `async with`")
        if self.status != Status.running:
            raise PoolStateError(f"the cluster {self.label} is {self.status.name}: make another SkywardCluster")
        return self.pool.status

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:  # noqa: ASYNC109 - Dask's
        self._open_status()
        deadline = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        while True:
            try:
                await cast("Awaitable[object]", self)  # waits for the next scheduler while one is being replaced
                left_s = None if deadline is None else max(0.1, deadline - time.monotonic())
                return await super()._wait_for_workers(n_workers, timeout=left_s)
            except TimeoutError:
                raise
            except OSError:  # the scheduler was lost in the meantime
                if deadline is not None and time.monotonic() > deadline:
                    raise

    def _size(self) -> WorkerSize:
        return WorkerSize.of(self.known_workers)

    def _rounded(self, workers: int, status: FleetStatus) -> int:
        """Return the number of nodes for that many workers; log the rounding."""
        nodes, per_node = nodes_for(workers, status.workers_per_node), status.workers_per_node
        if workers == 0:
            self._log_head_stays("scale(0)", status)
        elif nodes * per_node != workers:
            self._log(f"scale({workers}): {nodes} nodes of {per_node} workers each make {nodes * per_node}")
        return nodes

    def _log_head_stays(self, what: str, status: FleetStatus) -> None:
        per_node = status.workers_per_node
        self._log_once(
            f"{what}: node 0 stays, with its {per_node} {'worker' if per_node == 1 else 'workers'}, because the "
            "scheduler runs there; closing the cluster ends it"
        )

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)

    def _scale_fleet(self, nodes: int, drop: Collection[int] = ()) -> None:
        self.pool.scale(nodes, drop=drop).add_done_callback(self._report_scaling)

    def _report_scaling(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()):
            _logger.debug("the fleet of %s could not be scaled", self.label, exc_info=error)
            self._log_once(f"the fleet could not be scaled: {error}")


def _duration(name: str, value: object) -> float:
    """Return ``value``, or the setting if it is None, in seconds."""
    return seconds(name, setting(f"adaptive.{name.replace('_', '-')}") if value is None else value)
