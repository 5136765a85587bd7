"""Open pool: its fleet, lanes, events and costs, from opening to closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skyward.base.exits import uninterrupted
from skyward.base.loop import LoopThread
from skyward.base.waiting import SYSTEM_CLOCK, Clock, keep
from skyward.errors import BudgetError, PoolStateError
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
from skyward.fleet.node_handle import LinkDown, LinkUp, NodeHandle, open_node
from skyward.fleet.supervisor_start import start_template_ahead
from skyward.ledger.ledger import Ledger
from skyward.ledger.sweep import OpeningSweep
from skyward.market.cost import Budget, CostReport
from skyward.providers.base import Provider
from skyward.request.request import PoolRequest
from skyward.scheduling.calls import CallBatch, CallObserver, RemoteFuture
from skyward.scheduling.certificates import issue
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services
from skyward.shipping.parcels import FunctionCache, wrap
from skyward.submission import ArgumentMemo, FleetStatus, Invocation, NodeService, NodeStatus, ServiceAccess
from skyward.wire.control import (
    Message,
    NodeMetrics,
    Preempting,
    PreemptionLikely,
    SupervisorTrouble,
    TimeoutWarning,
    VolumeTrouble,
)
from skyward.wire.frames import client_context

T = TypeVar("T")

_REPORT_S = 30.0
# The rate changes with the machines: a projection of the costs is valid no longer than this.
_LOOK_S = 5.0


class Spending:
    """Costs of an open pool: reported periodically, and kept below their limit. Belongs to the event loop.

    Args:
        cost: returns the costs of the pool up to a reading of the clock.
        max_cost: limit in USD; None is no limit.
        publish: receiver of the cost events; must not block.
        on_spent: called once, when the pool has to end so as not to exceed ``max_cost``.
        clock: the clock of the costs; its ``elapsed`` goes on while the machine sleeps.
    """

    def __init__(
        self,
        cost: Callable[[float], CostReport],
        *,
        max_cost: float | None,
        publish: Callable[[SkywardEvent], None],
        on_spent: Callable[[BudgetError], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cost = cost
        self._budget = None if max_cost is None else Budget(max_cost=max_cost)
        self._publish = publish
        self._on_spent = on_spent
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        """Check from now on that the limit is not about to be reached."""
        if self._budget is not None:
            budget = self._budget
            self._begin("watching the costs", lambda: self._watch(budget))

    def report(self) -> None:
        """Publish the costs from now on, every 30 s."""
        self._begin("reporting the costs", self._report)

    def close(self) -> None:
        """Stop watching and reporting; :meth:`publish_final` still works. Idempotent."""
        for task in self._tasks:
            task.cancel()

    def publish_final(self) -> None:
        """Publish the total costs."""
        self._publish(self._cost(self._clock.elapsed()).final())

    def _begin(self, what: str, live: Callable[[], Awaitable[None]]) -> None:
        def report(why: str) -> None:
            self._publish(Error(why))

        self._tasks.append(asyncio.ensure_future(keep(live, what=what, report=report, clock=self._clock)))

    async def _report(self) -> None:
        while True:
            self._publish(self._cost(self._clock.elapsed()).update())
            await self._clock.sleep(_REPORT_S)

    async def _watch(self, budget: Budget) -> None:
        while True:
            now = self._clock.elapsed()
            usages = self._cost(now).usages
            left_s = budget.seconds_left(usages, now)
            if left_s <= 0:
                self._on_spent(budget.spent(usages, now))
                return
            await self._clock.sleep(min(left_s, _LOOK_S))


class RunningPool:
    """Owner of everything that a pool holds while it is open.

    Args:
        pool_id: id, unique among all pools.
        provider: source of the machines.
        request: the validated request.
        loop: the client's loop thread.
        bus: receiver of the pool's events; closed by its maker.
        subscribed: callbacks that receive everything on the bus already.
        folder: the pool's folder in the user's state folder; None if it cannot be written to.
        observer: receiver of the calls; None without telemetry.
    """

    def __init__(
        self,
        *,
        pool_id: str,
        provider: Provider,
        request: PoolRequest,
        loop: LoopThread,
        bus: EventBus,
        subscribed: tuple[Callback, ...],
        folder: Path | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        self.folder = folder
        self._observer = observer
        self._pool_id = pool_id
        self._provider = provider
        self._request = request
        self._loop = loop
        self._bus = bus
        self._subscribed = subscribed
        self._fleet: Fleet | None = None
        self._scheduler: Scheduler | None = None
        self._is_open = False
        self._opening: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._services: Services | None = None
        self._functions = FunctionCache(self._complete)
        self._spending: Spending | None = None
        self._spent: BudgetError | None = None
        self._sweep: OpeningSweep | None = None
        self._begun_s = SYSTEM_CLOCK.elapsed()
        self._metrics: dict[str, Metrics] = {}
        self._reported: dict[str, Progress] = {}

    @property
    def instance_count(self) -> int:
        """Number of nodes, without lost ones."""
        return len(self._fleet.nodes) if self._fleet else 0

    @property
    def fleet(self) -> Fleet:
        """The nodes; only while the pool is open."""
        return self._while_open(self._fleet)

    async def open(self) -> None:
        """Provision and connect. If that fails or is interrupted, terminate everything before raising. On the loop."""
        self._opening = asyncio.current_task()
        if self._provider.this_machine:  # its imports take a third of the opening, on another core
            threading.Thread(target=start_template_ahead, args=(self._request,), daemon=True).start()
        try:
            tls = await asyncio.to_thread(issue, self._request.timeout_s)
            ledger = await asyncio.to_thread(Ledger.of_user)
            self._sweep = OpeningSweep(self._provider, ledger, publish=self._bus.publish)
            self._sweep.begin()
            fleet = self._fleet = Fleet(
                self._provider,
                self._request,
                pool_id=self._pool_id,
                tls=tls,
                publish=self._bus.publish,
                on_node_message=self._on_node_message,
                ledger=ledger,
                open_node=partial(open_node, logs_to=self.folder and self.folder / "system"),
            )
            self._spending = Spending(
                fleet.cost, max_cost=self._request.max_cost, publish=self._bus.publish, on_spent=self._end_for
            )
            self._spending.watch()
            self._services = Services(
                fleet, tls=tls, publish=self.publish, opened_with=(self._request.service_name, self._request.service)
            )
            self._scheduler = Scheduler(
                client_context(tls),
                self._bus,
                workers_per_node=self._request.workers_per_node,
                thread=self._loop,
                services=self._services,
                subscribed=self._subscribed,
                observer=self._observer,
            )
            await fleet.start(self._scheduler)
            self._is_open = True
        except BaseException as error:
            await self._close()
            if self._spent is not None:  # the cause, in place of a CancelledError
                raise self._spent from error
            raise
        workers = self._request.nodes * self._request.workers_per_node
        self._bus.publish(PoolStarted(self._request.nodes, workers))
        self._spending.report()

    def close(self) -> None:
        """Fail unfinished calls, terminate every machine and confirm it. Idempotent."""
        # Ctrl-C has to wait: interrupted half-way, machines would go on and cost money.
        scheduler = self._scheduler
        try:
            self._loop.finish(self._abandon())
        finally:
            if scheduler is not None:
                scheduler.join()

    def submit(self, calls: Sequence[Invocation], memo: ArgumentMemo) -> list[RemoteFuture]:
        """Pickle calls in this thread, and queue them."""
        return self._open_scheduler.submit(wrap(calls, memo, self._functions))

    def broadcast(self, call: Invocation) -> list[RemoteFuture]:
        """Pickle a call in this thread, and queue it on every worker."""
        (parcel,) = wrap([call], ArgumentMemo(), self._functions)
        return self._open_scheduler.broadcast(parcel)

    def run(self, calls: Sequence[Invocation], *, all_of_them: bool = False, everywhere: bool = False) -> CallBatch:
        """As :meth:`submit`, and wait: the first failure drops the other calls, except with ``all_of_them``.

        With ``everywhere``, the one call runs on every worker. Ctrl-C ends running calls: their workers are replaced,
        and the pool stays usable.
        """
        scheduler, parcels, batch = self._open_scheduler, wrap(calls, ArgumentMemo(), self._functions), CallBatch()
        try:
            # Ctrl-C may come once the first call has begun, before this returns.
            scheduler.broadcast(parcels[0], batch) if everywhere else scheduler.submit(parcels, batch)
            while not batch.wait(_LOOK_S) or (all_of_them and batch.remaining):
                if all_of_them:
                    batch.rearm()
            if batch.remaining:
                scheduler.cancel(batch.calls, kill=False)  # running ones go on: ending them would cost their workers
        except BaseException:
            with uninterrupted():
                scheduler.cancel(batch.calls)
            raise
        return batch

    def cancel(self, calls: Sequence[Any], *, kill: bool = True) -> None:
        """See :meth:`skyward.scheduling.scheduler.Scheduler.cancel`."""
        self._open_scheduler.cancel(calls, kill=kill)

    def scale(self, nodes: int, drop: Collection[int]) -> Future[None]:
        """Change the target size of the fleet; the future is done when it is reached."""
        waiting = self._loop.call(self._begin_to_scale(nodes, drop))
        return asyncio.run_coroutine_threadsafe(waiting, self._loop.loop)

    async def _begin_to_scale(self, nodes: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        return self.fleet.scale(nodes, drop)

    def fetch(self, patterns: Sequence[str], to: Path, node: int | None) -> list[Path]:
        """Fetch files of nodes that run; see :meth:`skyward.api.pool.ComputePool.fetch`."""
        return self._loop.call(self.fleet.fetch(patterns, to, node))

    def service(self, service: NodeService) -> ServiceAccess:
        """See :meth:`skyward.submission.ElasticFleet.service`."""
        return self._loop.call(self._while_open(self._services).use(service))

    async def take_snapshot(self) -> PoolSnapshot:
        """Return the present state of the pool, which may be opening. On the loop."""
        fleet = self._fleet.status() if self._fleet is not None else FleetStatus(wanted=0, workers_per_node=0)
        base = PoolSnapshot(
            pool_id=self._pool_id,
            provider=self._provider.name,
            taken_at=time.time(),
            open_s=SYSTEM_CLOCK.elapsed() - self._begun_s,
            nodes=tuple(_node_snapshot(node, self._metrics.get(node.instance_id)) for node in fleet.nodes),
            hourly_rate=sum(node.price_per_hour or 0.0 for node in fleet.nodes),
            cost=fleet.cost,
        )
        if self._scheduler is None:
            return base
        whole = self._scheduler.snapshot(base)
        reported = map(self._scheduler.completed, list(self._reported.values()))
        return replace(whole, works=(*whole.works, *reported))

    def forward(self, address: str) -> str:
        """See :meth:`skyward.fleet.fleet.Fleet.forward`."""
        return self._loop.call(self.fleet.forward(address))

    def publish(self, event: SkywardEvent) -> None:
        """Publish an event of a front-end; add to its progress the number of calls that run."""
        if isinstance(event, Progress) and self._scheduler is not None:
            event = self._scheduler.completed(event)
            self._reported.pop(event.label, None)
            if not event.over:
                self._reported[event.label] = event
        self._bus.publish(event)

    def _complete(self, function: Callable[..., Any], error: ModuleNotFoundError) -> ModuleNotFoundError:
        """Return a node's error with all packages that the function needs and the image lacks."""
        # Here, as it reads metadata: nothing else of an open pool does.
        from skyward.environment.image_mirror import with_all_missing

        return with_all_missing(error, function, self._request.image)

    @property
    def _open_scheduler(self) -> Scheduler:
        return self._while_open(self._scheduler)

    def _while_open(self, part: T | None) -> T:
        if part is None or not self._is_open:
            raise PoolStateError(
                "the pool is not open; use it inside `with ComputePool(...) as pool:` or after pool.open()"
            )
        return part

    async def _abandon(self) -> None:
        """Wait until nothing is left, also of an opening that was interrupted, even at its very end."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._close()

    def _end_for(self, error: BudgetError) -> None:
        """Close the pool because its budget is spent: an opening, or all unfinished calls, fail with ``error``."""
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
        if self._spending is not None:
            self._spending.close()
        self._bus.publish(PoolStopping())
        if self._fleet is not None:
            self._fleet.close()
        try:
            if self._scheduler is not None:
                await self._scheduler.close(self._spent)
        finally:
            try:
                if self._fleet is not None:
                    await self._fleet.stop()
                    if self._spending is not None:
                        self._spending.publish_final()
            finally:
                if self._sweep is not None:
                    await self._sweep.settle()
                await self._provider.close()
        self._bus.publish(PoolStopped(self._scheduler.calls.ended if self._scheduler else 0))

    def _on_node_message(self, node: NodeHandle, message: Message | LinkDown | LinkUp) -> None:
        if self._scheduler is not None:
            self._scheduler.handle(node, message)
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


def _event_of(node: NodeHandle, message: Message | LinkDown | LinkUp) -> SkywardEvent | None:
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
