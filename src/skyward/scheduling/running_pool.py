"""Opening and closing of a pool, and what it costs in between."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skyward.base.loop import LoopThread
from skyward.base.waiting import SYSTEM_CLOCK, keep
from skyward.environment.skyward_wheel import read_own_wheel
from skyward.errors import BudgetError, ConfigurationError, PoolStateError, SkywardError
from skyward.events import (
    Callback,
    Error,
    InstancePreempted,
    Metrics,
    NodeReachable,
    NodeUnreachable,
    Notice,
    PoolStarted,
    PoolStopped,
    PoolStopping,
    Progress,
    SkywardEvent,
    TimeoutApproaching,
)
from skyward.events.bus import EventBus
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot
from skyward.fleet.fleet import Fleet
from skyward.fleet.kept import FleetKeeping, words_on_leaving
from skyward.fleet.node import LinkDown, LinkUp, Node
from skyward.ledger.fleet_record import FleetFolder, FleetRecord, parts_for_machines, parts_for_nodes
from skyward.ledger.keeper import start_keepers
from skyward.ledger.ledger import Ledger
from skyward.ledger.sweep import Sweep, opening_sweeps, settle_sweeps
from skyward.market.spending import Spending
from skyward.providers.base import Provider
from skyward.providers.several import provider_record
from skyward.request.request import PoolRequest
from skyward.scheduling.calls import CallObserver
from skyward.scheduling.certificates import issue
from skyward.scheduling.elastic import ElasticSize
from skyward.scheduling.jobs import FleetJobs
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services
from skyward.shipping.function_cache import FunctionCache
from skyward.shipping.pickling import LARGE_BYTES, LARGE_HERE_BYTES
from skyward.submission import FleetStatus, NodeStatus
from skyward.wire.control import (
    JobRunning,
    Message,
    NodeMetrics,
    Preempting,
    PreemptionLikely,
    SupervisorTrouble,
    TimeoutWarning,
    VolumeTrouble,
    WorkerExit,
)
from skyward.wire.frames import TlsIdentity, client_context
from skyward.wire.node_config import CHECKPOINTS

_REQUESTS_EVERY_S = 1.0


class PoolParts(NamedTuple):
    """Parts of a pool that need no machine.

    Attributes:
        pool_id: id, unique among all pools.
        loop: the client's loop thread.
        bus: receiver of the pool's events; closed by its maker.
        subscribed: callbacks that receive everything on the bus already.
        folder: the pool's folder in the user's state folder; None if it cannot be written to.
        observer: receiver of the calls; None without telemetry.
        kept: the fleet's folder, which this process holds; None for a fleet that ends with the pool.
        record: the kept fleet as it was found; None if there is none.
    """

    pool_id: str
    loop: LoopThread
    bus: EventBus
    subscribed: tuple[Callback, ...]
    folder: Path | None
    observer: CallObserver | None
    kept: FleetFolder | None = None
    record: FleetRecord | None = None


class RunningPool:
    """Opening and closing of a pool, and all that it holds in between.

    Args:
        parts: the parts that need no machine.
        provider: source of the machines.
        request: the validated request.
        restart: what is to be applied to the nodes of a kept fleet that was found, in words; empty for nothing.
        as_found: True to take a kept fleet as it is, and only while one of its nodes lives.

    Attributes:
        loop: the client's loop thread.
        fleet: the nodes, once the pool opens.
        services: the services of front-ends on them.
        scheduler: the calls on them.
        jobs: the jobs on them; None for a pool that is not kept.
    """

    fleet: Fleet
    services: Services
    scheduler: Scheduler
    jobs: FleetJobs | None = None

    def __init__(
        self, parts: PoolParts, provider: Provider, request: PoolRequest, *, restart: str = "", as_found: bool = False
    ) -> None:
        self._restart, self._as_found = restart, as_found
        self._opened = False
        self._keeping: FleetKeeping | None = None
        self._watching: asyncio.Task[None] | None = None
        self._parts = parts
        self._provider = provider
        self._request = request
        self.loop, self._bus = parts.loop, parts.bus
        self._is_complete = False
        self._opening: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._to_close = AsyncExitStack()
        self._spent: SkywardError | None = None
        self._begun_s = SYSTEM_CLOCK.elapsed()
        self._metrics: dict[str, Metrics] = {}

    async def open(self) -> None:
        """Provision and connect. If that fails or is interrupted, terminate everything before raising. On the loop."""
        self._opening = asyncio.current_task()
        try:
            if self._parts.kept is not None:
                self._watching = asyncio.create_task(self._watch_requests(self._parts.kept))
            spending = await self._prepare()
            spending.watch()
            if not self._provider.this_machine:  # every machine gets it; the first is still to be bought or reached
                asyncio.get_running_loop().run_in_executor(None, read_own_wheel)
            if self._keeping is None:
                await self.fleet.start(self.scheduler)
                self._opened = True
            else:
                await self._open_kept_fleet(self._keeping)
            nodes = len(self.fleet.wanted)
            if self.jobs is not None:
                self.jobs.open()
            self._bus.publish(PoolStarted(nodes, nodes * self._request.workers_per_node))
            spending.report()
            self._begin_to_follow_work()
        except BaseException as error:
            await self._close()
            if self._spent is not None:  # the cause, in place of a CancelledError
                raise self._spent from error
            raise

    async def _open_kept_fleet(self, keeping: FleetKeeping) -> None:
        """Bring a fleet up that is kept, or take over the one that was found."""
        found = self._found
        await keeping.begin()
        if found is None:
            await self.fleet.start(self.scheduler)
            self._opened = True
        else:
            if found.project != os.getcwd():
                self._bus.publish(Notice(f"the kept fleet {found.name!r} was opened by a program in {found.project}"))
            await self.fleet.resume(self.scheduler, found, restart=self._restart, must_live=self._as_found)
            self._opened = True  # from now on, its nodes have to be left
            if self._as_found:
                keeping.end_restart()
            else:
                await self.fleet.scale(self._request.size_of_kept(len(found.nodes)), ())
                keeping.asked_for(self._request, machines=self._machine_parts(), applied=parts_for_nodes(self._request))
        await keeping.settle()

    async def _watch_requests(self, folder: FleetFolder) -> None:
        """Do what other processes ask of the client of a kept fleet: leave it at any time, keep it once it is open."""
        asked: dict[str, Any] = {}

        async def serve() -> None:
            while True:
                asked.update(await asyncio.to_thread(folder.take_requests))
                if self._opened and isinstance(seconds := asked.pop("keep", None), int | float):
                    await self.fleet.keep_for(seconds)
                if "leave" in asked:
                    self._end_for(PoolStateError(f"another process has taken over the kept fleet {folder.name!r}"))
                    return
                await SYSTEM_CLOCK.sleep(_REQUESTS_EVERY_S)

        await keep(serve, what=f"the requests to the client of the kept fleet {folder.name!r}")

    def close(self) -> None:
        """Fail unfinished calls, terminate every machine and confirm it. Idempotent."""
        # Ctrl-C has to wait: interrupted half-way, machines would go on and cost money.
        try:
            self.loop.finish(self._abandon())
        finally:
            if self._is_complete:
                self.scheduler.join()

    def scale(self, nodes: int, drop: Collection[int]) -> Future[None]:
        """Change the target size of the fleet; the future is done when it is reached."""
        waiting = self.loop.call(self._begin_to_scale(nodes, drop))
        return asyncio.run_coroutine_threadsafe(waiting, self.loop.loop)

    async def _begin_to_scale(self, nodes: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        if not nodes and self.services.in_use:
            raise ConfigurationError("nodes must be at least 1: a service of a front-end runs on node 0")
        return self.fleet.scale(nodes, drop)

    def have_a_node(self) -> None:
        """Wait until an elastic pool that has no node has one: for calls on all workers, and for services."""
        elastic = self._request.elastic
        if elastic is not None and not self.fleet.wanted:
            waiting = self.loop.call(self._begin_to_have(max(1, elastic.minimum)))
            asyncio.run_coroutine_threadsafe(waiting, self.loop.loop).result()

    async def _begin_to_have(self, nodes: int) -> Coroutine[Any, Any, None]:
        return self.fleet.scale(max(nodes, len(self.fleet.wanted)), ())  # more may have been ordered meanwhile

    def _begin_to_follow_work(self) -> None:
        request = self._request
        if request.elastic is not None:
            size = ElasticSize(
                self.fleet,
                request.elastic,
                workload=self.scheduler.workload,
                per_node=request.workers_per_node,
                serves=lambda: self.services.in_use,
                publish=self._bus.publish,
            )
            self._to_close.callback(size.close)
            size.begin()

    async def take_snapshot(self) -> PoolSnapshot:
        """Return the present state of the pool, which may be opening. On the loop."""
        fleet = self.fleet.status() if self._is_complete else FleetStatus(wanted=0, workers_per_node=0)
        base = PoolSnapshot(
            pool_id=self._parts.pool_id,
            provider=self._provider.name,
            taken_at=time.time(),
            open_s=SYSTEM_CLOCK.elapsed() - self._begun_s,
            nodes=tuple(_node_snapshot(node, self._metrics.get(node.instance_id)) for node in fleet.nodes),
            hourly_rate=sum(node.price_per_hour or 0.0 for node in fleet.nodes),
            cost=fleet.cost,
            cost_by_provider=fleet.cost_by_provider,
        )
        return self.scheduler.snapshot(base) if self._is_complete else base

    def publish(self, event: SkywardEvent) -> None:
        """Publish an event of a front-end; add to its progress the number of calls that run."""
        if isinstance(event, Progress) and self._is_complete:
            self.scheduler.calls.report(event)
        else:
            self._bus.publish(event)

    def _complete(self, function: Callable[..., Any], error: ModuleNotFoundError) -> ModuleNotFoundError:
        """Return a node's error with all packages that the function needs and the image lacks."""
        # Here, as it reads metadata: nothing else of an open pool does.
        from skyward.environment.image_mirror import with_all_missing

        return with_all_missing(error, function, self._request.image)

    async def _prepare(self) -> Spending:
        """Make the fleet, which has no machine yet, and all that uses it."""
        request, publish, to_close = self._request, self._bus.publish, self._to_close
        record = self._parts.record
        tls = self._found.tls if self._found else await asyncio.to_thread(issue, request.timeout_s)
        ledger = await asyncio.to_thread(Ledger.of_user)
        if record is not None and not record.nodes:  # its client was killed while it opened it
            await Sweep(ledger).end_pool(record.pool_id)
        self._keeping = self._make_keeping(tls, ledger)
        await asyncio.to_thread(start_keepers)
        new = "" if record is not None else request.name
        sweeps = opening_sweeps(self._provider.members, ledger, publish=publish, pool_id=self._parts.pool_id, fleet=new)
        for sweep in sweeps:
            sweep.begin()
        to_close.push_async_callback(settle_sweeps, sweeps)
        folder = self._parts.folder
        fleet = self.fleet = Fleet(
            self._provider,
            request,
            pool_id=self._parts.pool_id,
            tls=tls,
            publish=publish,
            ledger=ledger,
            make_node=partial(Node, on_message=self._on_node_message, logs_to=folder and folder / "system"),
            keeping=self._keeping,
        )
        spending = Spending(fleet.cost, max_cost=request.max_cost, publish=publish, on_spent=self._end_for)
        to_close.push_async_callback(self._end_machines, spending)
        self.services = Services(
            fleet, tls=tls, publish=self.publish, opened_with=(request.service_name, request.service)
        )
        self.scheduler = Scheduler(
            client_context(tls),
            self._bus,
            workers_per_node=request.workers_per_node,
            thread=self.loop,
            services=self.services,
            functions=FunctionCache(self._complete),
            large_bytes=LARGE_HERE_BYTES if self._provider.this_machine else LARGE_BYTES,
            subscribed=self._parts.subscribed,
            observer=self._parts.observer,
            bring_node=self.have_a_node if request.elastic else None,
            checkpoints=folder and folder / CHECKPOINTS,
        )
        self.jobs = self.scheduler.jobs = self._make_jobs(fleet)
        to_close.push_async_callback(self._end_calls)
        to_close.callback(fleet.close)
        to_close.callback(spending.close)
        self._is_complete = True
        return spending

    def _make_jobs(self, fleet: Fleet) -> FleetJobs | None:
        if not self._request.keep_s:
            return None
        jobs = FleetJobs(
            self._request.name,
            self._parts.pool_id,
            nodes=lambda: [node.jobs() for node in fleet.started_nodes()],
            present=lambda: [member.node.instance.id for member in fleet.members.values() if member.node],
            publish=lambda text: self._bus.publish(Notice(text)),
        )
        self._to_close.push_async_callback(jobs.close)
        return jobs

    @property
    def _found(self) -> FleetRecord | None:
        """The kept fleet that was found, with nodes."""
        record = self._parts.record
        return record if record is not None and record.nodes else None

    def _machine_parts(self) -> dict[str, str]:
        return parts_for_machines(self._request, self._provider)

    def _make_keeping(self, tls: TlsIdentity, ledger: Ledger) -> FleetKeeping | None:
        folder, request = self._parts.kept, self._request
        if folder is None:
            return None
        name, settings = provider_record(self._provider)
        record = self._found or FleetRecord(
            pool_id=self._parts.pool_id,
            name=folder.name,
            keep_s=request.keep_s,
            provider=name,
            settings=settings,
            machines=self._machine_parts(),
            applied=parts_for_nodes(request),
            request=request,
            project=os.getcwd(),
            tls=tls,
        )
        return FleetKeeping(folder, record, ledger, timeout_s=request.timeout_s, publish=self._bus.publish)

    async def _end_machines(self, spending: Spending) -> None:
        """End the machines, or leave those of a kept fleet to its next client."""
        keeping = self._keeping
        if keeping is None or isinstance(self._spent, BudgetError) or not (self._opened or self._found):
            await self.fleet.stop()
            if keeping is not None:
                await keeping.leave((), spent={})
        elif self._opened and await self.fleet.leave():
            self._bus.publish(Notice(words_on_leaving(keeping.record)))
        spending.publish_final()

    async def _abandon(self) -> None:
        """Wait until nothing is left, also of an opening that was interrupted, even at its very end."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._close()

    def _end_for(self, error: SkywardError) -> None:
        """Close the pool before its time: an opening, or all unfinished calls, fail with ``error``."""
        self._spent = error
        self._bus.publish(Error(str(error)))
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
        elif self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())

    async def _close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)  # a cancelled waiter must not leave machines running

    async def _shut_down(self) -> None:
        self._bus.publish(PoolStopping())
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self._to_close.aclose()
        finally:
            await self._provider.close()
            if self._parts.kept is not None:
                self._parts.kept.release()
        self._bus.publish(PoolStopped(self.scheduler.calls.ended if self._is_complete else 0))

    async def _end_calls(self) -> None:
        if self._keeping is not None:  # the node stays, and so would a call that runs there
            error = self._spent or PoolStateError("the pool was closed before the call was done")
            self.scheduler.end_calls(self.scheduler.calls, kill=True, error=error)
        await self.scheduler.close(self._spent)

    def _note_jobs(self, jobs: FleetJobs, node: Node, message: Message | LinkDown | LinkUp) -> None:
        match message:
            case Preempting():
                jobs.note_loss(node.instance.id, preempted=True)
            case WorkerExit() | JobRunning(job=""):
                jobs.look_soon()
            case _:
                pass

    def _on_node_message(self, node: Node, message: Message | LinkDown | LinkUp) -> None:
        self.scheduler.handle(node, message)
        if self.jobs is not None:
            self._note_jobs(self.jobs, node, message)
        if (event := _event_of(node, message)) is not None:
            if isinstance(event, Metrics):
                self._metrics[event.instance_id] = event
            self._bus.publish(event)


def _node_snapshot(node: NodeStatus, metrics: Metrics | None) -> NodeSnapshot:
    return NodeSnapshot(
        node=node.rank,
        state=node.state,
        instance_id=node.instance_id,
        instance_type=node.instance_type,
        spot=node.spot,
        price_per_hour=node.price_per_hour,
        workers=tuple(WorkerSnapshot(worker=index) for index in range(len(node.workers))),
        metrics=metrics,
    )


def _event_of(node: Node, message: Message | LinkDown | LinkUp) -> SkywardEvent | None:
    """Return the event for a node's message; None for messages between node and engine only."""
    instance_id = node.instance.id
    match message:
        case NodeMetrics():
            return message.to_event(instance_id=instance_id, node=node.rank)
        case LinkDown():
            return NodeUnreachable(instance_id, node.rank, message.reason)
        case LinkUp():
            return NodeReachable(instance_id, node.rank, message.seconds)
        case TimeoutWarning():
            return TimeoutApproaching(instance_id, message.seconds_left)
        case Preempting():
            return InstancePreempted(instance_id, node.rank, message.seconds_left)
        case PreemptionLikely():
            return Notice(f"the provider will probably take the machine of node {node.rank} back", instance_id)
        case SupervisorTrouble():
            return Error(f"the supervisor of node {node.rank}: {message.reason}", instance_id)
        case VolumeTrouble():
            return Error(f"changes of volumes are not written back: {message.reason}", instance_id)
        case _:
            return None
