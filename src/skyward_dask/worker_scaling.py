"""Scaling a fleet the way Dask's tools ask for it: in workers, by hand or with the work."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

from distributed import Status
from distributed.deploy.adaptive import Adaptive
from distributed.utils import NoOpAwaitable

from skyward.errors import ConfigurationError, PoolStateError
from skyward.submission import FleetStatus
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
    """The sizes of a cluster: what there should be, what there is, and how to change it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._said: set[str] = set()
        self._most_nodes = 1

    async def _connect(self) -> None:
        await super()._connect()
        self._most_nodes = self.pool.status.wanted

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there are meant to be."""
        status = self._status()
        return planned_workers(status) if status else set()

    @property
    def requested(self) -> set[str]:
        """Names of the workers on nodes that the provider has been asked for."""
        status = self._status()
        return requested_workers(status) if status else set()

    @property
    def observed(self) -> set[str]:
        """Names of the workers that have told the scheduler that they are there."""
        return {str(worker["name"]) for worker in self.known_workers.values()}

    def whole_nodes(self, workers: float) -> int:
        """How many workers there are on the fewest nodes that have ``workers`` of them."""
        per_node = self._open_status().workers_per_node
        return nodes_for(workers, per_node) * per_node

    def scale(self, n: int = 0, memory: str | int | None = None, cores: int | None = None) -> Any:
        """Have at least ``n`` workers, on as few nodes as have them; ends adaptive scaling.

        Returns at once: :meth:`wait_for_workers` waits. Nodes that go finish their calls first, and hand Dask's data
        to others.

        Args:
            n: the number of workers.
            memory: memory of all workers together, such as ``"64 GiB"``.
            cores: threads of all workers together.

        Raises:
            ConfigurationError: a number is wrong.
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
        """Grow to at least ``n`` workers, and let adaptive scaling go on."""
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
        """Grow and shrink with the work that Dask has, until :meth:`scale` is called.

        What is not given is the setting ``skyward.adaptive.*``; without a maximum, no more nodes than asked for before.

        Args:
            Adaptive: decides; a subclass of Dask's.
            minimum: the fewest workers.
            maximum: the most workers; ``math.inf`` is no limit.
            minimum_cores: the fewest threads.
            maximum_cores: the most threads.
            minimum_memory: the least memory of all workers together, such as ``"64 GiB"``.
            maximum_memory: the most memory of all workers together.
            interval: how often to look.
            wait_count: how many looks in a row must find a node superfluous before it goes; 0 and 1 are the same.
            target_duration: how long the work at hand should take.
            **kwargs: for ``Adaptive``.

        Raises:
            ConfigurationError: a number is wrong, or the minimum above the maximum.
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
            self._say_head_stays("adapt(minimum=0)", status)
        return bounds

    def _default_maximum(self, minimum: int, status: FleetStatus) -> float:
        """As the settings say; else as many as were ever asked for, so that it never costs more than that."""
        if (configured := setting("adaptive.maximum")) is not None:
            return most_workers(SizeParams(prefix="maximum_", workers=configured), self._size())
        most = max(self._most_nodes * status.workers_per_node, minimum)
        self._say_once(f"adapt(): at most {most} workers, as many as were asked for before; maximum= allows more")
        return most

    def _status(self) -> FleetStatus | None:
        """The fleet; None where there is none, before the start and after the end."""
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
                await cast("Awaitable[object]", self)  # the next scheduler, while one is being replaced
                left_s = None if deadline is None else max(0.1, deadline - time.monotonic())
                return await super()._wait_for_workers(n_workers, timeout=left_s)
            except TimeoutError:
                raise
            except OSError:  # it was lost meanwhile
                if deadline is not None and time.monotonic() > deadline:
                    raise

    def _size(self) -> WorkerSize:
        return WorkerSize.of(self.known_workers)

    def _rounded(self, workers: int, status: FleetStatus) -> int:
        """The nodes for that many workers; what is rounded is said."""
        nodes, per_node = nodes_for(workers, status.workers_per_node), status.workers_per_node
        if workers == 0:
            self._say_head_stays("scale(0)", status)
        elif nodes * per_node != workers:
            self._log(f"scale({workers}): {nodes} nodes of {per_node} workers each make {nodes * per_node}")
        return nodes

    def _say_head_stays(self, what: str, status: FleetStatus) -> None:
        per_node = status.workers_per_node
        self._say_once(
            f"{what}: node 0 stays, with its {per_node} {'worker' if per_node == 1 else 'workers'}, since the "
            "scheduler runs there; closing the cluster ends it"
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log(text)

    def _scale_fleet(self, nodes: int, drop: Collection[int] = ()) -> None:
        self.pool.scale(nodes, drop=drop).add_done_callback(self._report_scaling)

    def _report_scaling(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()):
            _logger.debug("the fleet of %s could not be scaled", self.label, exc_info=error)
            self._say_once(f"the fleet could not be scaled: {error}")


def _duration(name: str, value: object) -> float:
    """What was given, else the setting; in seconds."""
    return seconds(name, setting(f"adaptive.{name.replace('_', '-')}") if value is None else value)
