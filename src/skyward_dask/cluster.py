"""``SkywardCluster``: a pool with the interface of Dask's cluster classes."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast
from weakref import WeakKeyDictionary, WeakSet

import cloudpickle
import dask.config
from distributed import Security, Status
from distributed.core import rpc
from tornado.ioloop import IOLoop

from skyward.api.named_pools import make_named
from skyward.api.node_template import start_template
from skyward.base.exits import at_exit
from skyward.errors import ConfigurationError, PoolStateError, UnreachableError
from skyward.hidden_frames import from_callers_line
from skyward.request.checks import option_names, refuse_unknown
from skyward.request.request import parse_request
from skyward.shipping.project_modules import loaded_by_the_user
from skyward.submission import ElasticFleet, FleetStatus, SchedulerInfo
from skyward_dask.clients import NO_DIRECT_ACCESS, scheduler_of, without_token
from skyward_dask.dask_parts import Adaptive, Cluster, check_parts
from skyward_dask.scaling import (
    SizeParams,
    WorkerSize,
    fewest_workers,
    most_workers,
    nodes_for,
    planned_workers,
    ranks_named,
    requested_workers,
    staying,
    superfluous,
    whole_bounds,
    worker_count,
)
from skyward_dask.security import PoolSecurity
from skyward_dask.service import with_dask
from skyward_dask.settings import seconds, setting

if TYPE_CHECKING:
    from skyward import Image
    from skyward.api.pool import ComputePool
    from skyward.events import Callback
    from skyward.request.accelerators import Accelerator
    from skyward.request.request import SpotLike
    from skyward.request.volume import Volume

_logger = logging.getLogger("skyward.dask")
_ATTEMPT_S = 15.0
"""Seconds for one attempt to reach a new scheduler, before its address is requested again."""

_GOODBYE_S = 5.0
_CANCEL_AGAIN_S = 0.5

_ROUND_S = 10.0
"""Seconds for one round of adaptive scaling, before it is given up and the next one begins."""

_REPLACED_S = 120.0
"""Seconds for which a new client waits for a scheduler that is being replaced."""

# A scheduler reports its workers to a single cluster object, the last one that connected.
_reported_to: WeakKeyDictionary[ElasticFleet, int] = WeakKeyDictionary()
# A lambda is pickled by value, so that the scheduler does not need this module.
_BY_NODE: Callable[[Any], str] = lambda worker: str(worker.name).rpartition("-")[0]  # noqa: E731
_clusters: WeakSet[SkywardCluster] = WeakSet()
_AT_EXIT_S = 10
_CELL = '<td style="text-align: left;"><strong>{}:</strong> {}</td>'


class PoolParams(TypedDict, total=False):
    """Parameters of :class:`~skyward.ComputePool`, which documents them."""

    provider: Any
    image: Image | None
    nodes: int | tuple[int, int]
    idle: str | float | None
    machine: str | None
    accelerator: str | Accelerator | Sequence[str | Accelerator] | None
    cpu: int | None
    memory: str | None
    volume: Sequence[Volume] | None
    spot: SpotLike
    timeout: str | float
    env: Mapping[str, str] | None
    concurrency: int
    display: str
    on_event: Callback | None
    collect_metrics: bool
    pip: Sequence[str] | None
    lease: str | float
    away: str | float
    max_cost: float | None
    max_price_per_hour: float | None
    prefer: str
    wait_for_capacity: str | float | None


_OF_NO_MACHINE = ("provider", "display", "on_event")
"""Those of them that do not concern its machines."""

_ELSEWHERE = {
    "n_workers": "nodes= is the number of machines, concurrency= the number of workers on each",
    "workers": "nodes= is the number of machines, concurrency= the number of workers on each",
    "processes": "workers are always processes; concurrency= is their number on each node",
    "threads_per_worker": "a worker runs one Dask task at a time; concurrency= is the number of workers on each node",
    "nthreads": "a worker runs one Dask task at a time; concurrency= is the number of workers on each node",
    "memory_limit": "workers share their node's memory; memory= selects machines with enough of it",
    "dashboard_address": "cluster.dashboard_link starts the dashboard, at an address of its own",
    "spread": "Dask's workers have to reach each other, so that all nodes come from one place",
    "security": "every pool has its own certificates",
    "shutdown_on_close": "a cluster's pool ends with it; open a ComputePool yourself and pass it, and it stays open",
    "shutdown_scheduler": "a cluster's pool ends with it; open a ComputePool yourself and pass it, and it stays open",
}


def _refuse_other_pool(pool: object, params: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` unless this is a pool, passed without parameters of another one."""
    if params:
        raise ConfigurationError(
            f"{', '.join(params)}: an open pool has its parameters already; pass either a pool or parameters"
        )
    if not all(hasattr(type(pool), name) for name in ("service", "scale", "forward", "is_active")):
        raise ConfigurationError(f"pool must be an open ComputePool, got {type(pool).__name__}")


def _make_pool(params: dict[str, Any], cluster: type[object], *, opens_now: bool) -> ComputePool:
    """Return a pool whose nodes load Dask from the start and reach each other; else it does not open.

    Args:
        params: its parameters.
        cluster: the class of the cluster, for errors.
        opens_now: whether its nodes on this machine may be prepared.

    Raises:
        ConfigurationError: a parameter is wrong.
        TypeError: neither a pool nor the class of the cluster has such a parameter.
    """
    for name in params.keys() & _ELSEWHERE.keys():
        raise TypeError(f"{cluster.__name__} has no option {name!r}: {_ELSEWHERE[name]}")
    refuse_unknown(cluster.__name__, params, [*option_names(cluster), *PoolParams.__annotations__])
    if "provider" not in params:
        raise ConfigurationError(
            "provider is missing: name the source of the machines, such as provider=sky.Local(), or pass a pool"
        )
    if opens_now and getattr(params["provider"], "this_machine", False):
        request = parse_request(**{name: value for name, value in params.items() if name not in _OF_NO_MACHINE})
        start_template(params["provider"], with_dask(request))
    from skyward_dask.own_pool import DaskPool  # takes a third as long as Dask: nodes import that meanwhile

    return DaskPool(**params)


class NodeAdaptive(Adaptive):
    """Dask's adaptive scaling, which closes workers by whole nodes.

    A node is removed when all its workers are superfluous; the scheduler's node stays. Before its machine ends, a node
    finishes its work, native and joblib calls included. Dask's rule for growing is that of elastic pools
    (``skyward.market.autoscale``): as many workers as have a task, and as much work as ``target_duration``.

    Attributes:
        follows_boots: True if ``target_duration`` is the time that the latest node took to boot.
    """

    follows_boots = False

    @property
    def _nodes(self) -> SkywardCluster:
        return cast("SkywardCluster", self.cluster)

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
        if self.follows_boots:
            self.target_duration = self._nodes.boot_s
        return cast("int", await super().target())

    async def adapt(self) -> None:
        """Run one round of scaling; skip it while the scheduler is being replaced."""
        try:
            async with asyncio.timeout(_ROUND_S):  # one that ends may have accepted a connection that it never serves
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


class SkywardCluster(Cluster):
    """Dask cluster on ephemeral machines: ``Client(SkywardCluster(provider=sky.Local(), nodes=2))``.

    With the parameters of a pool it opens its own pool now, and closes it at the end. With an open pool it uses that
    one, and leaves it open. :attr:`pool` is this pool; native and joblib calls run on it as well as Dask's tasks.

    Dask counts workers, and a pool consists of whole nodes: numbers of workers are rounded up. The scheduler runs on
    node 0, so that one node always stays.

    Args:
        pool: an open pool, instead of a pool's parameters.
        name: name for :meth:`from_name`; None selects the setting ``skyward.name``, else a random name.
        asynchronous: True for use in a running event loop: ``async with SkywardCluster(..., asynchronous=True)``.
            Nothing is created before the cluster is awaited or entered.
        scheduler_sync_interval: interval of updates from the scheduler: seconds, or text such as ``"500ms"``.
        loop: a running event loop to use instead of a new one.
        **pool_params: parameters of :class:`~skyward.ComputePool`.

    Raises:
        ConfigurationError: a parameter is wrong, and nothing was created; or this process and the nodes have different
            versions of Dask or Python.
        PoolStateError: the pool passed is not open.
        TypeError: there is no such parameter.
    """

    def __init__(
        self,
        pool: ElasticFleet | None = None,
        *,
        name: str | None = None,
        asynchronous: bool = False,
        scheduler_sync_interval: Any = 1,
        loop: IOLoop | None = None,
        **pool_params: Unpack[PoolParams],
    ) -> None:
        name = setting("name") if name is None else name
        if name is not None and not (isinstance(name, str) and name.strip()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"name must be non-empty text, got {name!r}")
        params = cast("dict[str, Any]", pool_params)
        if pool is not None:
            _refuse_other_pool(pool, params)
        self._own_pool = _make_pool(params, type(self), opens_now=not asynchronous) if pool is None else None
        check_parts()
        self._interval_s = seconds("scheduler_sync_interval", scheduler_sync_interval)
        super().__init__(
            asynchronous=asynchronous,
            loop=loop,
            quiet=params.get("display") == "quiet",
            name=name,
            scheduler_sync_interval=cast("Any", self._interval_s),
        )
        self._pool = pool or cast("ElasticFleet", self._own_pool)
        self._own_name: str = self.name
        self.security: Security | None = None
        self._starting = asyncio.Lock()
        self._releasing = asyncio.Lock()
        self._connected = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._logged: set[str] = set()
        self._most_nodes = 1
        self._link = ""
        self._finding_link: asyncio.Task[str] | None = None
        _clusters.add(self)
        _close_clusters_at_exit()  # not on import: pools, which are closed after them, have to be registered before
        if not asynchronous:
            self._start_here()

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return the running cluster of that name in this process, with which all its clusters end.

        Raises:
            ConfigurationError: no such cluster is running; the message lists the running ones.
        """
        running = [cluster for cluster in _clusters if cluster.status == Status.running and isinstance(cluster, cls)]
        for cluster in running:
            if cluster.name == name:
                return cluster
        known = ", ".join(sorted(cluster.label for cluster in running)) or "none"
        raise ConfigurationError(f"name must be the name of a running cluster of this process ({known}), got {name!r}")

    @classmethod
    @from_callers_line
    def named(cls, name: str, /, **changes: Any) -> Self:
        """Return a cluster with the pool of that name in the settings; see :meth:`skyward.ComputePool.named`.

        Args:
            name: the table's name.
            **changes: parameters of the cluster and its pool; they count instead of the table's.
        """
        return make_named(cls, name, changes)

    # --- the connection to the scheduler

    @property
    def label(self) -> str:
        """The cluster's name, quoted, for messages."""
        return repr(cast("object", self.name))

    @property
    def known_workers(self) -> dict[str, dict[str, Any]]:
        """The scheduler's information about each worker, by address."""
        return cast("dict[str, dict[str, Any]]", self.scheduler_info["workers"])

    @property
    def pool(self) -> ElasticFleet:
        """The pool, which runs native and joblib calls as well as Dask's tasks."""
        return self._pool

    def _start_here(self) -> None:
        """Open the pool in this thread, then connect on a separate event loop."""
        # The first task would wait for it. While the nodes start, this process has little to do.
        threading.Thread(target=loaded_by_the_user, daemon=True).start()
        try:
            if self._own_pool is not None:
                self._own_pool.open()
            else:
                self._refuse_closed_pool()
            self._loop_runner.start()
            self.sync(self._connect)
        except BaseException:
            self.close()
            raise

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ready().__await__()

    async def _ready(self) -> Self:
        """Start the cluster if necessary; wait for the next scheduler while one is being replaced."""
        async with self._starting:
            if self.status == Status.created:
                await self._start_async()
        if self.status != Status.running:
            raise PoolStateError(f"the cluster {self.label} is {self.status.name}; make another one")
        await self._confirm()
        if not self._connected.is_set():
            try:
                await asyncio.wait_for(self._connected.wait(), _REPLACED_S)
            except TimeoutError:
                raise UnreachableError(
                    f"waited {_REPLACED_S:g} s for the scheduler of the cluster {self.label} to be replaced"
                ) from None
        return self

    async def _confirm(self) -> None:
        """Detect a replacement of the scheduler at once, instead of at the next periodic check."""
        try:
            scheduler = await asyncio.to_thread(self._scheduler)
        except PoolStateError:
            self._connected.clear()
        else:
            if scheduler.address != self.scheduler_address:
                self._connected.clear()

    async def _start_async(self) -> None:
        self.status = Status.starting
        try:
            if self._own_pool is not None:
                await self._own_pool.__aenter__()
            else:
                self._refuse_closed_pool()
            if self.status != Status.starting:
                raise PoolStateError(f"the cluster {self.label} was closed while it started")
            await self._connect()
        except BaseException:
            await self._release()
            await self._end_pool()
            raise

    def _refuse_closed_pool(self) -> None:
        if not self.pool.is_active:
            raise PoolStateError(
                "the pool is not open: make the cluster inside `with ComputePool(...) as pool:`, "
                "or pass the pool's parameters to SkywardCluster, which then opens its own pool"
            )

    def _close_pool(self) -> None:
        """Close an own pool. Blocks until it is closed, also if another thread is closing it. Idempotent."""
        if self._own_pool is not None:
            self._own_pool.close()

    async def _end_pool(self) -> None:
        if self._own_pool is not None:
            await self._own_pool.__aexit__(None, None, None)

    async def _connect(self) -> None:
        await self._join(await asyncio.to_thread(self._scheduler))
        self._refuse_direct_access()
        status = self.pool.status
        self._most_nodes = status.wanted
        self._following = asyncio.create_task(self._follow())
        if status.elastic is not None:
            self.adapt()

    def _scheduler(self) -> SchedulerInfo:
        return scheduler_of(self.pool)

    async def _join(self, scheduler: SchedulerInfo) -> None:
        """Connect to ``scheduler`` and make it the cluster's."""
        self.security = scheduler.security
        self.scheduler_comm = rpc(
            scheduler.address, timeout=_ATTEMPT_S, connection_args=scheduler.security.get_connection_args("client")
        )
        await super()._start()
        _reported_to[self.pool] = id(self)
        self.name = self._own_name  # Dask adopts the name of the cluster that was connected to this scheduler before
        self._connected.set()

    def _refuse_direct_access(self) -> None:
        """Refuse a setting by which clients connect to workers past a tunnel."""
        tunnelled = isinstance(self.security, PoolSecurity) and self.security.tunnelled
        if tunnelled and dask.config.get("distributed.client.direct-to-workers", default=None):
            raise ConfigurationError(f"distributed.client.direct-to-workers {NO_DIRECT_ACCESS}")

    async def _follow(self) -> None:
        while self.status == Status.running:
            watching = self._watch_worker_status_task
            assert watching is not None
            await asyncio.wait([watching], timeout=self._interval_s)
            try:
                await self._look_for_scheduler(lost=watching.done())
            except Exception as error:
                if not self.pool.is_active:
                    self._log("the pool was closed, and so was the cluster")
                    await self._release()
                    return
                _logger.debug("could not find the scheduler of %s", self.label, exc_info=error)
                await self._pause()

    async def _look_for_scheduler(self, *, lost: bool) -> None:
        scheduler = await asyncio.to_thread(self._scheduler)
        if not lost and scheduler.address == self.scheduler_address:
            if _reported_to.get(self.pool) != id(self):
                known: Any = cast("Any", type(self.scheduler_info))  # a mapping that shows itself in notebooks
                self.scheduler_info = known(await self.scheduler_comm.identity())
            self._connected.set()
            return
        self._connected.clear()
        await self._leave()
        joining = asyncio.create_task(self._join(scheduler))
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                while not (await asyncio.wait([joining], timeout=self._interval_s))[0]:
                    if (await asyncio.to_thread(self._scheduler)).address != scheduler.address:
                        return
            joining.result()
        finally:
            await _end(joining)
        self._log(f"connected to the scheduler at {scheduler.address}")

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove" or msg in self.known_workers:  # the last refresh may have removed it already
            super()._update_worker_status(op, msg)

    async def _pause(self) -> None:
        """Wait for the sync interval. No one completes the future, so only the timeout ends the wait."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), self._interval_s)

    async def _leave(self) -> None:
        """Disconnect from a scheduler that may be gone; adaptive scaling and the cluster's status stay as they are."""
        self._forget_link()
        adaptive, self._adaptive = self._adaptive, None
        rounds = adaptive.periodic_callback if adaptive is not None else None
        if rounds is not None:
            rounds.stop()  # a round that finds the status closing would end adaptive scaling for good
        try:
            await self._disconnect()
        finally:
            self._adaptive = adaptive
            self.status = Status.running
            if rounds is not None and adaptive is not None and adaptive.state == "running":
                rounds.start()

    async def _disconnect(self) -> None:
        """Close the connection to a scheduler that may be gone."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await super()._close()
        except OSError as error:
            _logger.debug("the connection of %s was not closed in order: %s", self.label, error)

    async def _release(self) -> None:
        """Disconnect, and set the status of Dask's cluster object to closed. Idempotent."""
        async with self._releasing:
            if self.status == Status.closed:
                return
            self.status = Status.closing
            if self._following is not asyncio.current_task():
                await _end(self._following)
            await self._disconnect()
            self.status = Status.closed

    async def _close(self) -> None:
        await self._release()
        await self._end_pool()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Close the connection, and the pool if the cluster owns it. Idempotent.

        Args:
            timeout: limit for the disconnection, in seconds; the end of the pool's machines is not limited.

        Returns:
            None; in asynchronous use an awaitable.
        """
        if self.asynchronous:
            return super().close(timeout)
        try:
            if self._loop_runner.is_started() and self.status != Status.closed:
                self.sync(self._release, callback_timeout=timeout)
        finally:
            self.status = Status.closed
            self._close_pool()
            self._loop_runner.stop()
        return None

    # --- scaling

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

    @property
    def boot_s(self) -> float:
        """Seconds that the latest node took to boot, at least 1."""
        return max(1.0, self._open_status().boot_s)

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
        return _Done() if self.asynchronous else None

    def scale_up(self, n: int) -> Awaitable[None] | None:
        """Grow to at least ``n`` workers; adaptive scaling continues."""
        status = self._open_status()
        nodes = nodes_for(worker_count("n", n), status.workers_per_node)
        if nodes > status.wanted:
            self._scale_fleet(nodes)
        return _Done() if self.asynchronous else None

    def scale_down(self, workers: Collection[str]) -> Awaitable[None] | None:
        """Close the nodes all of whose workers are named; never the scheduler's.

        Args:
            workers: names of workers, such as ``["node1-worker0", "node1-worker1"]``.
        """
        status = self._open_status()
        if isinstance(workers, str) or not all(isinstance(worker, str) for worker in workers):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f'workers must be names of workers such as ["node1-worker0"], got {workers!r}')
        if ranks := ranks_named(status, workers):
            self._scale_fleet(max(status.wanted - len(ranks), 1), drop=ranks)
        return _Done() if self.asynchronous else None

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

        Parameters default to the limits and the idle time of an elastic pool, which adapts from the beginning, then to
        the settings ``skyward.adaptive.*``. Without a maximum, the limit is the highest number of nodes requested so
        far.

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
            target_duration: desired duration of the current work; by default, what the latest node took to boot.
            **kwargs: parameters of ``Adaptive``.

        Raises:
            ConfigurationError: a value is wrong, or the minimum is above the maximum.
            PoolStateError: the cluster or its pool is closed.
        """
        fewest = SizeParams(prefix="minimum_", workers=minimum, cores=minimum_cores, memory=minimum_memory)
        most = SizeParams(prefix="maximum_", workers=maximum, cores=maximum_cores, memory=maximum_memory)
        lowest, highest = self._bounds(fewest, most)
        interval_s = _duration("interval", interval)
        target_duration = setting("adaptive.target-duration") if target_duration is None else target_duration
        adaptive = super().adapt(
            Adaptive=Adaptive,
            minimum=lowest,
            maximum=highest,
            interval=interval_s,
            wait_count=self._wait_count(wait_count, interval_s),
            target_duration=self.boot_s if target_duration is None else seconds("target_duration", target_duration),
            **kwargs,
        )
        if isinstance(adaptive, NodeAdaptive):
            adaptive.follows_boots = target_duration is None
        return adaptive

    def _wait_count(self, given: int | None, interval_s: float) -> int:
        elastic = self._open_status().elastic
        if given is None and elastic is not None:
            return math.ceil(elastic.idle_s / interval_s)
        return worker_count("wait_count", setting("adaptive.wait-count") if given is None else given)

    def _bounds(self, fewest: SizeParams, most: SizeParams) -> tuple[int, float]:
        status, size = self._open_status(), self._size()
        elastic, per_node = status.elastic, status.workers_per_node
        if fewest.is_open:
            workers = elastic.minimum * per_node if elastic else setting("adaptive.minimum")
            fewest = SizeParams(prefix="minimum_", workers=workers)
        minimum = fewest_workers(fewest, size)
        maximum = self._default_maximum(minimum, status) if most.is_open else most_workers(most, size)
        if elastic is not None:
            maximum = min(maximum, elastic.maximum * per_node)
        if minimum == 0:
            self._log_head_stays("adapt(minimum=0)", status)
        return whole_bounds(minimum, maximum, per_node)

    def _default_maximum(self, minimum: int, status: FleetStatus) -> float:
        """Return the maximum of the settings, else the highest number requested so far, which limits the cost."""
        if (configured := setting("adaptive.maximum")) is not None:
            return most_workers(SizeParams(prefix="maximum_", workers=configured), self._size())
        if status.elastic is not None:
            return status.elastic.maximum * status.workers_per_node
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

    # --- presentation

    @property
    def dashboard_link(self) -> str:
        """Link to Dask's dashboard for this machine's browser, with its token.

        The first access starts the dashboard, which costs the scheduler a second and some memory. The link is empty
        until it has started: on the event loop, which must not wait, and elsewhere after the setting
        ``skyward.dashboard-timeout``. Never raises; :meth:`get_dashboard_link` raises the reason for a missing link.
        """
        if self._link or self.status != Status.running:
            return self._link
        try:
            if self.asynchronous:
                self._request_link()
            elif self._finding_link is None or self._finding_link.done():
                limit_s = seconds("skyward.dashboard-timeout", setting("dashboard-timeout"))
                self.sync(self._wait_for_link, callback_timeout=limit_s)
        except Exception as error:
            self._log_once(f"no dashboard: {error}")
        return self._link

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: FBT001, FBT002 - Dask's
        """Return logs by source: the cluster object, the scheduler, and each worker by its address.

        Args:
            cluster: True includes the cluster object's log.
            scheduler: True includes the scheduler's log.
            workers: True includes all workers, or a list of their addresses.

        Raises:
            PoolStateError: the cluster or its pool is closed.
        """
        self._open_status()
        return cast("Any", super().get_logs(cluster=cluster, scheduler=scheduler, workers=workers))

    def get_dashboard_link(self) -> Any:
        """Return :attr:`dashboard_link` once the dashboard has started; in asynchronous use, an awaitable of it.

        Raises:
            UnreachableError: the scheduler has no dashboard; the message gives the reason.
            PoolStateError: the cluster or its pool is closed.
        """
        self._open_status()
        return cast("Any", self.sync(self._wait_for_link))

    def _request_link(self) -> asyncio.Task[str]:
        """Request the dashboard's link, or return the pending request, which all callers share."""
        if self._finding_link is None or (self._finding_link.done() and not self._link):
            self._finding_link = asyncio.ensure_future(self._find_link())
            self._finding_link.add_done_callback(_log_missing_dashboard)
        return self._finding_link

    async def _wait_for_link(self) -> str:
        return await asyncio.shield(self._request_link())

    async def _find_link(self) -> str:
        answer = cast("object", await self.scheduler_comm.skyward_dashboard())
        reply = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if "address" not in reply:
            reason = reply.get("error", "its version of Skyward does not serve one")
            raise UnreachableError(f"the pool's scheduler has no dashboard: {reason}")
        address = await asyncio.to_thread(self.pool.forward, reply["address"])
        self._link = f"http://{address}/status?token={reply['token']}"
        return self._link

    def _forget_link(self) -> None:
        """Drop the link: the next scheduler has another dashboard."""
        self._link = ""
        if self._finding_link is not None:
            self._finding_link.cancel()
            self._finding_link = None

    def _scaling_status(self) -> str:
        adapts = self._adaptive is not None and self._adaptive.periodic_callback is not None
        return scaling_table(
            mode="Adaptive" if adapts else "Manual",
            observed=len(self.observed),
            wanted=len(self.plan),
            status=self._status(),
        )

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = self._status()
        rows = fleet_rows(status) if status else ""
        return without_token(super()._repr_html_(cluster_status=rows + (cluster_status or "")))


def _log_missing_dashboard(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.info("no dashboard: %s", error)


async def _end(task: asyncio.Task[Any] | None) -> None:
    # More than once: Cluster._close takes a cancellation for that of a task which it has cancelled itself.
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


class _Done:
    """Awaitable that is done, and need not be awaited."""

    def __await__(self) -> Generator[None]:
        return
        yield


def _duration(name: str, value: object) -> float:
    """Return ``value``, or the setting if it is None, in seconds."""
    return seconds(name, setting(f"adaptive.{name.replace('_', '-')}") if value is None else value)


def fleet_rows(status: FleetStatus) -> str:
    """Return nodes, accelerators, markets and cost as two rows of HTML."""
    nodes = staying(status)
    ready = sum(node.state == "ready" for node in nodes)
    spot = sum(node.spot for node in nodes)
    devices = Counter(name for node in nodes for name in node.accelerators)
    per_hour = sum(node.price_per_hour or 0.0 for node in nodes)
    return _row(
        ("Nodes", f"{ready}" if ready == status.wanted else f"{ready} of {status.wanted}"),
        ("Accelerators", ", ".join(f"{name} x {count}" for name, count in devices.items()) or "none"),
    ) + _row(
        ("Bought", f"{spot} spot, {len(nodes) - spot} on demand"),
        ("Cost so far", f"{status.cost:.2f} USD, {per_hour:.2f} USD per hour"),
    )


def scaling_table(*, mode: str, observed: int, wanted: int, status: FleetStatus | None) -> str:
    """Return the current and target numbers of workers and nodes as an HTML table."""
    workers = f"{observed}" if observed == wanted else f"{observed} / {wanted}"
    lines = [("Scaling mode", mode), ("Workers", workers)]
    if status is not None:
        lines.append(("Nodes", f"{status.wanted}, of {status.workers_per_node} workers each"))
    return "<table>" + "".join(map(_row, lines)) + "</table>"


def _row(*cells: tuple[str, str]) -> str:
    return "<tr>" + "".join(_CELL.format(escape(name), escape(value)) for name, value in cells) + "</tr>"


def close_clusters() -> None:
    """Close all clusters, and so their own pools, at the end of the process."""
    for cluster in list(_clusters):
        if cluster.status != Status.closed:
            with suppress(Exception):
                cluster.close(timeout=_AT_EXIT_S)


@cache
def _close_clusters_at_exit() -> None:
    at_exit(close_clusters)
