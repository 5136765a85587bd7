"""The client's side of a pool at work: drives :mod:`skyward.engine.dispatch` over the lanes to all workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, assert_never

from skyward.engine.blobs import NodeBlobs
from skyward.engine.dispatch import Action, CallState, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId
from skyward.engine.futures import BatchWatch, RawOutcome, RemoteFuture
from skyward.engine.lane import Lane
from skyward.engine.packing import Parcel
from skyward.engine.receiving import Incoming
from skyward.errors import BootstrapError, PoolStateError, SkywardError, WorkerLostError
from skyward.events import EventBus, WorkerLost, current_callbacks
from skyward.provision.nodes import NodeHandle
from skyward.wire.messages import CallHeader, Kind
from skyward.wire.session import Item

__all__ = ["Engine"]

log = logging.getLogger("skyward.engine")

_REBALANCE_S = 0.1
_CANCEL_PATIENCE_S = 2.0
_FAILED_STARTS = 3


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    state: CallState
    parcel: Parcel
    header: CallHeader
    future: RemoteFuture
    incoming: Incoming
    held_on: NodeBlobs | None = None


class _Node:
    def __init__(self, handle: NodeHandle) -> None:
        self.handle = handle
        self.blobs = NodeBlobs(handle.ready, handle.transport)
        self.call_ports = itertools.cycle(handle.ready.call_ports)

    def worker_log(self, worker: int) -> str:
        return f"{self.handle.access.workdir}/worker-{worker}.log"


@dataclass(slots=True, eq=False)
class _Slot:
    lane: Lane
    node: _Node
    ready: asyncio.Future[None]
    failed_starts: int = 0
    linked: bool = False
    alive: bool = False
    exit_reason: str = ""
    unsent: set[int] = field(default_factory=set)


class Engine:
    """Runs calls on the workers of attached nodes.

    ``submit``, ``broadcast`` and ``cancel`` are thread-safe; everything else belongs to the event loop.

    Attributes:
        ended_calls: how many calls have ended so far, failed ones included.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connection_args: dict[str, Any], bus: EventBus) -> None:
        self._loop = loop
        self._connection_args = connection_args
        self._bus = bus
        self.ended_calls = 0
        self._dispatch = Dispatch()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._slots: dict[WorkerId, _Slot] = {}
        self._intake: deque[_Call] = deque()
        self._intake_due = False
        self._ticking = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="skyward-callbacks")

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, parcels: Sequence[Parcel], watch: BatchWatch | None = None) -> list[RemoteFuture]:
        """Queue calls, each for any worker."""
        calls = [self._new_call(parcel, CallHeader(label=parcel.label)) for parcel in parcels]
        return self._enter(calls, watch)

    def broadcast(self, parcel: Parcel, watch: BatchWatch | None = None) -> list[RemoteFuture]:
        """Queue one call on every worker, ordered by (node, worker)."""
        workers = sorted(self._slots)
        seed, port = random.getrandbits(32), next(self._slots[workers[0]].node.call_ports)
        calls = [
            self._new_call(
                parcel,
                CallHeader(label=parcel.label, world=len(workers), rank=rank, seed=seed, head_port=port),
                pinned=worker,
            )
            for rank, worker in enumerate(workers)
        ]
        return self._enter(calls, watch)

    def cancel(self, futures: Iterable[Future[Any]], *, kill: bool = True) -> None:
        """Drop what waits; end what runs by ending its worker, or let it run to an end that nobody waits for."""
        unwanted = {future for future in futures if not future.done()}
        if unwanted and not self._closed:
            self._loop.call_soon_threadsafe(self._cancel, unwanted, kill)

    def _new_call(self, parcel: Parcel, header: CallHeader, pinned: WorkerId | None = None) -> _Call:
        state = CallState(id=next(self._ids), kind=parcel.function_id, retries=parcel.retries, pinned=pinned)

        def drop() -> None:
            self._loop.call_soon_threadsafe(self._drop, state.id)

        future = RemoteFuture(drop=drop, run_callback=self._run_callback)
        return _Call(
            state=state, parcel=parcel, header=header, future=future, incoming=Incoming(callbacks=current_callbacks())
        )

    def _enter(self, calls: list[_Call], watch: BatchWatch | None) -> list[RemoteFuture]:
        if self._closed:
            raise PoolStateError("the pool is closed; open it with `with ComputePool(...) as pool:`")
        for call in calls:
            call.future.watch = watch
        self._intake.extend(calls)
        if not self._intake_due:
            self._intake_due = True
            self._loop.call_soon_threadsafe(self._take_in)
        return [call.future for call in calls]

    def _run_callback(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Callbacks may block and take locks: never on the loop."""
        if threading.current_thread() is self._loop_thread:
            self._callbacks.submit(_logged, fn, future)
        else:
            fn(future)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called once, on the loop."""
        self._loop_thread = threading.current_thread()

    def attach(self, handle: NodeHandle) -> None:
        """Open lanes to the workers of a node."""
        node = _Node(handle)
        for index, address in enumerate(handle.ready.workers):
            worker_id = WorkerId(handle.rank, index)
            lane = Lane(worker_id, address, self._connection_args, self)
            self._slots[worker_id] = _Slot(lane, node, self._loop.create_future())

    async def wait_ready(self) -> None:
        """Return when every worker has answered once.

        Raises:
            BootstrapError: a worker cannot start.
        """
        await asyncio.gather(*(slot.ready for slot in self._slots.values()))

    async def close(self) -> None:
        """Fail what is unfinished and hang up. Idempotent."""
        self._closed = True
        self._take_in()
        error = PoolStateError("the pool was closed before the call was done")
        for call in list(self._calls.values()):
            self._complete(call, RawOutcome(error=error))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, *(slot.lane.close() for slot in self._slots.values()), return_exceptions=True
        )
        await asyncio.to_thread(self._callbacks.shutdown)

    def worker_started(self, worker_id: WorkerId) -> None:
        """The node's supervisor saw a worker start."""
        slot = self._slots.get(worker_id)
        if slot is not None and not slot.linked:
            slot.lane.nudge()

    def worker_exited(self, worker_id: WorkerId, incarnation: str, reason: str) -> None:
        """The node's supervisor saw a worker end."""
        slot = self._slots.get(worker_id)
        if slot is not None and not slot.ready.done():
            self._start_failed(slot, reason)
        if slot is None or slot.lane.incarnation != incarnation:
            return
        slot.exit_reason = reason
        if not slot.linked:
            self._lose(slot)

    def _start_failed(self, slot: _Slot, reason: str) -> None:
        slot.failed_starts += 1
        if slot.failed_starts < _FAILED_STARTS:
            return
        node, worker = slot.lane.worker_id.node, slot.lane.worker_id.worker
        log_path = slot.node.worker_log(worker)
        message = f"worker {worker} of node {node} does not start: {reason}; its log on the node: {log_path}"
        slot.ready.set_exception(BootstrapError(message, node=node, step="server", log_path=log_path))

    def node_gone(self, rank: int, reason: str) -> None:
        """A node was lost for good."""
        for worker_id in [worker_id for worker_id in self._slots if worker_id.node == rank]:
            slot = self._slots.pop(worker_id)
            self._spawn(slot.lane.close())
            self._perform(self._dispatch.worker_gone(worker_id, reason, self._loop.time()))

    # --- LaneOwner ------------------------------------------------------------------------------------------------

    def lane_up(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self._slots[lane.worker_id]
        slot.alive, slot.exit_reason = True, ""
        if not slot.ready.done():
            slot.ready.set_result(None)
        actions = self._dispatch.worker_up(lane.worker_id, self._loop.time(), round_trip_s=lane.round_trip_s)
        self._perform(actions)

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self._slots.get(lane.worker_id)
        if slot is None:
            return
        slot.linked = linked
        if not linked and slot.exit_reason:
            self._lose(slot)

    def lane_lost(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        self._lose(self._slots[lane.worker_id])

    def lane_item(self, lane: Lane, item: Item) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        match item[0]:
            case Kind.RESULT:
                self._finish(lane.worker_id, item[1], item[2])
            case Kind.CHUNK:
                if (call := self._calls.get(item[1])) is not None:
                    call.incoming.add_chunk(item)
            case Kind.LINES | Kind.EVENT:
                self._publish(lane, item)
            case Kind.REVOKED:
                self._given_back(item[1])
            case Kind.MISSING:
                self._slots[lane.worker_id].node.blobs.forget(item[2])
                self._given_back([item[1]])
            case unknown:
                log.error("unknown item %r from worker %s", unknown, lane.worker_id)

    # --- what happens ---------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        self._intake_due = False
        calls: list[_Call] = []
        while self._intake:
            calls.append(self._intake.popleft())
        for call in calls:
            self._calls[call.state.id] = call
        self._perform(self._dispatch.submit([call.state for call in calls], self._loop.time()))
        if not self._slots and calls:
            for call in calls:
                self._complete(call, RawOutcome(error=PoolStateError("every node of the pool is gone")))
        if not self._ticking and self._calls:
            self._ticking = True
            self._loop.call_later(_REBALANCE_S, self._tick)

    def _tick(self) -> None:
        self._ticking = bool(self._calls) and not self._closed
        if self._ticking:
            self._perform(self._dispatch.rebalance(self._loop.time()))
            self._loop.call_later(_REBALANCE_S, self._tick)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    slot = self._slots[action.worker]
                    for state in action.calls:
                        self._send(slot, self._calls[state.id])
                case Revoke():
                    self._slots[action.worker].lane.push([Kind.REVOKE, list(action.call_ids)])
                case Cancel():
                    self._cancel_on(self._slots[action.worker], list(action.call_ids))
                case GiveUp():
                    self._give_up(action)
                case _:
                    assert_never(action)

    def _send(self, slot: _Slot, call: _Call) -> None:
        if not call.future.running() and not call.future.set_running_or_notify_cancel():
            self._drop(call.state.id)
            return
        blobs = call.parcel.blobs
        if not blobs or slot.node.blobs.has(blobs):
            self._push(slot, call)
        else:
            slot.unsent.add(call.state.id)
            self._spawn(self._ship(slot, call, slot.lane.incarnation))

    def _push(self, slot: _Slot, call: _Call) -> None:
        lane, parcel = slot.lane, call.parcel
        if parcel.blobs:
            slot.node.blobs.hold(parcel.blobs)
            call.held_on = slot.node.blobs
        if parcel.function_id not in lane.functions:
            lane.functions.add(parcel.function_id)
            function = parcel.function.payload
            lane.push([Kind.FUNCTION, parcel.function_id, function.to_wire()], len(function.data) + 64)
        payload = parcel.arguments.payload
        item = [Kind.CALL, call.state.id, parcel.function_id, payload.to_wire(), call.header.to_wire()]
        lane.push(item, len(payload.data) + 128)

    async def _ship(self, slot: _Slot, call: _Call, incarnation: str) -> None:
        try:
            await slot.node.blobs.ensure(call.parcel.blobs)
        except (SkywardError, OSError) as error:
            self._settle(call, RawOutcome(error=error), seconds=0.0)
            return
        finally:
            slot.unsent.discard(call.state.id)
        still_here = call.state.id in self._calls and call.state.worker == slot.lane.worker_id
        if still_here and slot.lane.incarnation == incarnation:
            self._push(slot, call)

    def _finish(self, worker_id: WorkerId, call_id: int, wire: Sequence[Any]) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            raw = call.incoming.outcome(wire, where=f"node {worker_id.node}, worker {worker_id.worker}")
            self._settle(call, raw, seconds=raw.seconds or 0.0)

    def _settle(self, call: _Call, raw: RawOutcome, *, seconds: float) -> None:
        actions = self._dispatch.finished(call.state.id, seconds, self._loop.time())
        self._complete(call, raw)
        self._perform(actions)

    def _complete(self, call: _Call, raw: RawOutcome) -> None:
        self.ended_calls += 1
        self._calls.pop(call.state.id, None)
        self._let_go(call)
        call.future.deliver(raw)

    def _let_go(self, call: _Call) -> None:
        if call.held_on is not None:
            call.held_on.release(call.parcel.blobs)
            call.held_on = None

    def _given_back(self, call_ids: Sequence[int]) -> None:
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                self._let_go(call)
        self._perform(self._dispatch.given_back(call_ids, self._loop.time()))

    def _lose(self, slot: _Slot) -> None:
        if not slot.alive:
            return
        slot.alive = False
        worker_id, reason = slot.lane.worker_id, slot.exit_reason or "its process is gone"
        held = [call for call in self._calls.values() if call.state.worker == worker_id]
        for call in held:
            self._let_go(call)
            call.incoming.reset()
        self._bus.publish(
            WorkerLost(worker_id.node, worker_id.worker, slot.node.handle.instance.id, reason),
        )
        actions = self._dispatch.worker_lost(worker_id, reason, self._loop.time(), unsent=frozenset(slot.unsent))
        self._perform(actions)

    def _give_up(self, action: GiveUp) -> None:
        call = self._calls.get(action.call.id)
        if call is None:
            return
        node, worker = action.worker.node, action.worker.worker
        log_path = self._slots[action.worker].node.worker_log(worker) if action.worker in self._slots else ""
        message = (
            f"{call.parcel.label} lost its worker {action.call.losses} times, the last one on node {node}, worker "
            f"{worker}: {action.reason}. Its log on the node: {log_path or 'gone with the node'}"
        )
        error = WorkerLostError(message, node=node, worker=worker, reason=action.reason, log_path=log_path)
        self._complete(call, RawOutcome(error=error))

    def _cancel(self, futures: set[Future[Any]], kill: bool) -> None:
        self._take_in()
        calls = [call for call in self._calls.values() if call.future in futures]
        actions = self._dispatch.cancel([call.state.id for call in calls], kill=kill)
        for call in calls:
            if not call.future.cancel():
                self._complete(call, RawOutcome(error=CancelledError("the call was cancelled while it ran")))
        self._perform(actions)

    def _drop(self, call_id: int) -> None:
        self._perform(self._dispatch.cancel([call_id], kill=False))
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._let_go(call)
            if call.future.watch is not None:
                call.future.watch.note(call.future, failed=True)

    def _cancel_on(self, slot: _Slot, call_ids: list[int]) -> None:
        slot.lane.push([Kind.CANCEL, call_ids])
        self._loop.call_later(_CANCEL_PATIENCE_S, self._insist, slot, call_ids, slot.lane.incarnation)

    def _insist(self, slot: _Slot, call_ids: list[int], incarnation: str) -> None:
        """A call that holds the interpreter's lock keeps its worker from listening: the supervisor ends it."""
        held = any(self._dispatch.call(call_id) for call_id in call_ids)
        if held and slot.lane.incarnation == incarnation and slot.alive and not self._closed:
            self._spawn(slot.node.handle.kill_worker(slot.lane.worker_id.worker, incarnation))

    def _publish(self, lane: Lane, item: Item) -> None:
        call = self._calls.get(item[1])
        incoming = call.incoming if call is not None else Incoming()
        handle = self._slots[lane.worker_id].node.handle
        for event in incoming.events(item, node=lane.worker_id.node, instance_id=handle.instance.id):
            self._bus.publish(event, incoming.callbacks)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _logged(fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        fn(future)
    except Exception:
        log.exception("a callback of a call raised")
