"""Calls of an open pool on all its workers: :mod:`skyward.engine.dispatch` driven over the lanes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import assert_never, cast

from skyward._concurrency.waiting import EAGER_S, PROMPT_S
from skyward.engine.calls import CallTable, Incoming, LiveCall
from skyward.engine.dispatch import Dispatch, WorkerId
from skyward.engine.futures import RawOutcome
from skyward.engine.lane import Lane
from skyward.engine.membership import Membership
from skyward.engine.slots import Slot, out_of_reach
from skyward.errors import PoolStateError, SkywardError
from skyward.events import Error, LogLine, Progress
from skyward.events.bus import EventBus
from skyward.events.lines import handle_record
from skyward.events.snapshot import PoolSnapshot, WorkerSnapshot
from skyward.events.works import WorkCount
from skyward.provision.preparing.node_handle import NodeHandle
from skyward.wire.messages import (
    CallResult,
    EmittedEvent,
    GangAddress,
    GangAddresses,
    Kind,
    LoggedRecord,
    MissingBlobs,
    PrintedLines,
    ResultChunk,
    RevokedCalls,
    SmallResults,
    SpentProcess,
    ToClient,
    answered_calls,
    to_client,
)
from skyward.wire.session import Item

__all__ = ["Cluster"]

log = logging.getLogger("skyward.engine")

# Between two looks for overdue calls, so that calls behind one wait no longer than this once it counts as overdue.
_REBALANCE_S = 0.1


class Cluster:
    """Calls on the workers of a fleet's nodes. Belongs to the event loop: no method is thread-safe.

    Attributes:
        members: the workers; owner of their slots.
    """

    def __init__(self, tls: ssl.SSLContext, bus: EventBus, *, workers_per_node: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._bus = bus
        self._dispatch = Dispatch()
        self._calls = CallTable(bus.publish)
        self.members = Membership(
            tls=tls, bus=bus, dispatch=self._dispatch, calls=self._calls, workers_per_node=workers_per_node
        )
        self._acting = self.members.acting
        self._busy_since = 0.0
        self._eager = False
        self._closed = False
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def ended_calls(self) -> int:
        """Number of calls that have ended so far, failed ones included."""
        return self._calls.ended

    def snapshot(self, base: PoolSnapshot) -> PoolSnapshot:
        """Return ``base`` with the calls, and with the present state of its nodes' workers."""
        now, calls = self._loop.time(), self._calls
        nodes = tuple(
            replace(node, workers=tuple(self._worker(WorkerId(node.node, each.worker), now) for each in node.workers))
            for node in base.nodes
        )
        running = len(self._dispatch.running())
        return replace(
            base,
            nodes=nodes,
            queued=len(calls) - running,
            running=running,
            done=calls.ended - calls.failed - calls.cancelled,
            failed=calls.failed,
            cancelled=calls.cancelled,
            last_failure=calls.last_failure,
            works=calls.works.all(self._running_works()),
        )

    def completed(self, event: Progress) -> Progress:
        """See :meth:`skyward.events.works.WorkCounts.completed`. Thread-safe."""
        return self._calls.works.completed(event)

    def _running_works(self) -> Iterator[WorkCount | None]:
        return (cast("LiveCall", call).work for call in self._dispatch.running())

    def _worker(self, worker_id: WorkerId, now: float) -> WorkerSnapshot:
        load = self._dispatch.load(worker_id)
        if load is None:
            return WorkerSnapshot(worker=worker_id.worker)
        if load.call is None:
            return WorkerSnapshot(worker=worker_id.worker, state="idle")
        call = cast("LiveCall", load.call)
        return WorkerSnapshot(
            worker=worker_id.worker,
            state="running",
            call=call.name,
            seconds=max(0.0, now - load.since),
            waiting=load.behind,
        )

    async def attach(self, node: NodeHandle, timeout_s: float) -> None:
        """Open lanes to a node's workers, and return when each of them has answered once.

        Raises:
            BootstrapError: a worker cannot start, or has not answered in time.
        """
        self.members.attach(node, self)
        await self.members.wait_ready(node.rank, timeout_s)

    async def close(self, reason: SkywardError | None = None) -> None:
        """Fail unfinished calls, with ``reason`` if there is one, and close all lanes. Idempotent."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        error = reason or PoolStateError("the pool was closed before the call was done")
        for call in self._calls:
            self._calls.complete(call, RawOutcome(error=error))
        await self.members.close()

    # --- calls ------------------------------------------------------------------------------------------------------

    def enter(self, calls: Sequence[LiveCall]) -> None:
        """Submit new calls; without a worker, or once closed, they fail at once."""
        if self._closed or not self.members.places:
            why = "the pool is closed" if self._closed else "every node of the pool is gone"
            for call in calls:
                call.sink.deliver(call.index, RawOutcome(error=PoolStateError(why)))
            return
        now = self._loop.time()
        alone = not self._calls and len(calls) == 1
        if not self._calls:
            self._busy_since = now
        self._calls.add(calls, now)
        self._acting.perform(self._dispatch.submit(calls, now))
        # Waking an idle core takes 20 to 40 µs, and cold caches cost more: staying awake took a round trip of one call
        # after the other from 610 to 400 µs, and left gather as it was (decision 007).
        if self._eager and alone:
            self._stay_awake()
        if self._ticking is None and self._calls:
            self._ticking = self._loop.call_later(_REBALANCE_S, self._tick)

    def _stay_awake(self) -> None:
        """Keep the loop from sleeping for ``EAGER_S``, because the last call was answered within ``PROMPT_S``."""
        if self._calls and self._loop.time() < self._busy_since + EAGER_S:
            self._loop.call_soon(self._stay_awake)

    def cancel(self, calls: Iterable[LiveCall], *, kill: bool) -> None:
        """Drop queued calls; end running ones with their worker, or without ``kill`` ignore their results."""
        self._end(calls, CancelledError("the call was cancelled"), kill=kill)

    def _end(self, calls: Iterable[LiveCall], error: Exception, *, kill: bool) -> None:
        unfinished = [call for call in calls if self._calls.get(call.id) is call]
        actions = self._dispatch.cancel([call.id for call in unfinished], kill=kill)
        for call in unfinished:
            self._acting.complete(call, RawOutcome(error=error))
        self._acting.perform(actions)

    def drop(self, call: LiveCall) -> None:
        """Remove a call whose future was cancelled while it waited."""
        self._acting.drop(call)

    # --- LaneOwner --------------------------------------------------------------------------------------------------

    def lane_up(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        if self._slot_of(lane) is not None:
            self.members.up(lane)

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self._slot_of(lane)
        if slot is None:
            return
        slot.linked = linked
        if not linked and slot.exit_reason:
            self.members.lose(slot)

    async def lane_lost(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        if (slot := self._slot_of(lane)) is not None:
            await self.members.lose_reported(slot)

    def lane_items(self, lane: Lane, items: Sequence[Item]) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self._slot_of(lane)
        if slot is None:
            return  # its node is gone, and its calls run elsewhere
        if not slot.alive:  # its calls run elsewhere by now; only printed lines are still of use
            items = [item for item in items if item[0] in (Kind.LINES, Kind.EVENT, Kind.RECORD)]
        finished: list[tuple[int, float]] = []
        foreign: int | None = None
        with self._bus.together():
            for item in items:
                try:
                    # Answers count only from the worker that has the call: it runs user code, and may send anything.
                    if (foreign := self._dispatch.foreign(lane.worker_id, answered_calls(item))) is not None:
                        break
                    match to_client(item):
                        case SmallResults() as results:
                            finished += self._succeed(lane.worker_id, results)
                        case CallResult() as result:
                            finished.append(self._finish(lane.worker_id, result))
                        case record:
                            self._note(lane, record)
                except Exception as error:  # items behind this one belong to other calls, which must not wait for ever
                    log.exception("an item of kind %s from worker %s could not be handled", item[0], lane.worker_id)
                    finished += self._spoil(item, error)
        if finished:  # together: dispatch assigns once for a message, not once for each of its calls
            now = self._loop.time()
            self._acting.perform(self._dispatch.finished(finished, now))
            self._eager = not self._calls and now < self._busy_since + PROMPT_S
        if foreign is not None:
            self.members.expel(slot, foreign)

    def lane_failed(self, lane: Lane, why: str) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self._slot_of(lane)
        self._bus.publish(Error(why, slot.node.handle.instance.id if slot is not None else ""))

    def _note(self, lane: Lane, item: ToClient) -> None:
        match item:
            case ResultChunk():
                if (call := self._calls.get(item.call_id)) is not None:
                    call.arriving().add_chunk(item)
            case PrintedLines():
                slot = self.members.slots[lane.worker_id]
                slot.log_end = max(slot.log_end, item.log_end)
                self._publish(lane, item)
            case EmittedEvent() | LoggedRecord():
                self._publish(lane, item)
            case RevokedCalls():
                self._acting.give_back(item.call_ids)
            case MissingBlobs():
                self.members.slots[lane.worker_id].node.blobs.forget(item.blob_ids)
                self._acting.give_back([item.call_id])
            case GangAddress():
                self._collect_address(item)
            case SpentProcess():
                self.members.renew(lane.worker_id, lane.incarnation, "a call needed a fresh process")
                self._acting.restart(item.call_ids, item.why)
            case SmallResults() | CallResult():
                pass  # handled together by lane_items, so that dispatch is asked once
            case _:
                assert_never(item)

    def _slot_of(self, lane: Lane) -> Slot | None:
        """Return the slot of a lane; None if the slot has another lane by now, or none."""
        slot = self.members.slots.get(lane.worker_id)
        return slot if slot is not None and slot.lane is lane else None

    # --- consequences -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(_REBALANCE_S, self._tick) if self._calls else None
        now = self._loop.time()
        self._calls.works.look(now, self._running_works)
        self._acting.perform(self._dispatch.rebalance(now))

    def _succeed(self, worker_id: WorkerId, results: SmallResults) -> Iterator[tuple[int, float]]:
        for call_id, seconds, data in zip(results.call_ids, results.seconds, results.pickles, strict=True):
            if (call := self._calls.get(call_id)) is not None:
                self._calls.complete(call, RawOutcome(data, seconds, worker_id))
            yield call_id, seconds

    def _finish(self, worker_id: WorkerId, result: CallResult) -> tuple[int, float]:
        if (call := self._calls.get(result.call_id)) is not None:
            self._acting.complete(call, call.arriving().outcome(result.outcome, worker_id))
        return result.call_id, float(result.outcome.seconds)

    def _spoil(self, item: Item, error: Exception) -> Iterator[tuple[int, float]]:
        """Fail the calls whose results cannot be decoded: no other answer will arrive for them."""
        for call_id in answered_calls(item) if item[0] in (Kind.RESULT, Kind.RESULTS) else ():
            if (call := self._calls.get(call_id)) is not None:
                self._acting.complete(call, RawOutcome(error=error))
                yield call.id, 0.0

    def _collect_address(self, item: GangAddress) -> None:
        call = self._calls.get(item.call_id)
        if call is None or call.gang is None or call.header is None:
            return
        texts = call.gang.add_address(call.header.rank, item.text)
        if texts is None:
            return
        if apart := self.members.separation():  # a node was added or replaced since the submission
            self._end(call.gang.calls, out_of_reach(call.parcel.label, apart), kill=True)
            return
        for slot, member in self._acting.held(call.gang.calls):
            slot.lane.push(GangAddresses(member.id, texts))
            slot.lane.flush()

    def _publish(self, lane: Lane, item: PrintedLines | LoggedRecord | EmittedEvent) -> None:
        call = self._calls.get(item.call_id)
        own = call is not None and call.worker == lane.worker_id
        incoming = call.arriving() if call is not None and own else Incoming()
        callbacks = call.callbacks if call is not None else ()
        # A dropped call that had begun runs on, and its lines have its name.
        named = call or self._dispatch.call(item.call_id)
        name = named.name if isinstance(named, LiveCall) else ""
        instance_id = self.members.slots[lane.worker_id].node.handle.instance.id
        for event in incoming.events(item, worker=lane.worker_id, instance_id=instance_id, call=name):
            self._bus.publish(event, callbacks)
            if isinstance(item, LoggedRecord) and isinstance(event, LogLine):
                self._bus.run(partial(handle_record, item.values, event.place))
        incoming.shown = self._bus.delivery()
