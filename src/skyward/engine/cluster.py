"""The client's side of a pool at work: drives :mod:`skyward.engine.dispatch` over the lanes to all workers."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from skyward._waiting import EAGER_S, PROMPT_S
from skyward.engine.calls import CallTable, LiveCall
from skyward.engine.dispatch import Dispatch, WorkerId
from skyward.engine.futures import RawOutcome
from skyward.engine.lane import Lane
from skyward.engine.performing import Performer
from skyward.engine.receiving import Incoming
from skyward.engine.slots import AttachedNode, Slot
from skyward.errors import PoolStateError
from skyward.events import EventBus, WorkerLost, WorkerReplaced
from skyward.provision.nodes import NodeHandle
from skyward.wire.messages import Kind
from skyward.wire.session import Item

__all__ = ["Cluster"]

log = logging.getLogger("skyward.engine")

_REBALANCE_S = 0.1
_EXIT_PATIENCE_S = 2.0


class Cluster:
    """The workers of attached nodes and the calls on them. Belongs to the event loop: no method is thread-safe.

    Attributes:
        slots: every worker's place.
    """

    def __init__(self, tls: ssl.SSLContext, bus: EventBus) -> None:
        self.slots: dict[WorkerId, Slot] = {}
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._bus = bus
        self._dispatch = Dispatch()
        self._calls = CallTable()
        self._acting = Performer(self._dispatch, self._calls, self.slots)
        self._busy_since = 0.0
        self._eager = False
        self._closed = False
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def ended_calls(self) -> int:
        """How many calls have ended so far, failed ones included."""
        return self._calls.ended

    # --- nodes and workers ------------------------------------------------------------------------------------------

    def attach(self, handle: NodeHandle) -> None:
        """Open lanes to the workers of a node."""
        node = AttachedNode(handle)
        for index, address in enumerate(handle.ready.lanes):
            worker_id = WorkerId(handle.rank, index)
            self.slots[worker_id] = Slot(Lane(worker_id, address, self._tls, self), node)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when every worker has answered once.

        Raises:
            BootstrapError: a worker cannot start, or has not answered in time.
        """
        slots = list(self.slots.values())

        def lose_patience() -> None:
            for slot in slots:
                slot.give_up(f"{slot} did not answer for {timeout_s:g} s; its log: {slot.log_path}")

        patience = self._loop.call_later(timeout_s, lose_patience)
        try:
            await asyncio.gather(*(slot.ready for slot in slots))
        finally:
            patience.cancel()

    async def close(self) -> None:
        """Fail what is unfinished and hang up. Idempotent."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        error = PoolStateError("the pool was closed before the call was done")
        for call in self._calls:
            self._calls.complete(call, RawOutcome(error=error))
        hanging_up = [slot.lane.close() for slot in self.slots.values()]
        nodes = {slot.node for slot in self.slots.values()}
        await asyncio.gather(
            self._acting.close(), *hanging_up, *(node.blobs.close() for node in nodes), return_exceptions=True
        )

    def worker_started(self, worker_id: WorkerId) -> None:
        """The node's supervisor saw a worker start."""
        slot = self.slots.get(worker_id)
        if slot is not None and not slot.linked:
            slot.lane.nudge()

    def worker_exited(self, worker_id: WorkerId, incarnation: str, reason: str) -> None:
        """The node's supervisor saw a worker end."""
        slot = self.slots.get(worker_id)
        if slot is None:
            return
        if slot.lane.incarnation != incarnation:
            if (hopeless := slot.start_failed(reason)) is not None:
                self._worker_gone(slot, hopeless)
            return
        slot.exit_reason = reason
        if slot.linked:  # what it sent last may still be on its way; a child that holds the link open must not keep us
            self._loop.call_later(_EXIT_PATIENCE_S, slot.lane.drop_link, incarnation)
        else:
            self._lose(slot)

    def node_gone(self, rank: int, reason: str) -> None:
        """A node was lost for good."""
        for slot in [slot for slot in self.slots.values() if slot.id.node == rank]:
            slot.give_up(reason)
            self._worker_gone(slot, reason)

    def _worker_gone(self, slot: Slot, reason: str) -> None:
        self.slots.pop(slot.id, None)
        self._acting.spawn(slot.lane.close())
        self._calls.leave(slot.id)
        self._acting.perform(self._dispatch.worker_gone(slot.id, reason, self._loop.time()))

    # --- calls ------------------------------------------------------------------------------------------------------

    def enter(self, calls: Sequence[LiveCall]) -> None:
        """Take new calls."""
        if self._closed:
            for call in calls:
                call.sink.deliver(call.index, RawOutcome(error=PoolStateError("the pool is closed")))
            return
        now = self._loop.time()
        alone = not self._calls and len(calls) == 1
        if not self._calls:
            self._busy_since = now
        self._calls.add(calls)
        self._acting.perform(self._dispatch.submit(calls, now))
        if self._eager and alone:
            self._stay_awake()
        if not self.slots:
            for call in calls:
                self._calls.complete(call, RawOutcome(error=PoolStateError("every node of the pool is gone")))
        if self._ticking is None and self._calls:
            self._ticking = self._loop.call_later(_REBALANCE_S, self._tick)

    def _stay_awake(self) -> None:
        """Keep the loop from sleeping for a moment: the last call was back at once."""
        if self._calls and self._loop.time() < self._busy_since + EAGER_S:
            self._loop.call_soon(self._stay_awake)

    def cancel(self, calls: Iterable[LiveCall], *, kill: bool) -> None:
        """Drop what waits; end what runs with its worker, or let it run to an end that nobody waits for."""
        unfinished = [call for call in calls if self._calls.get(call.id) is call]
        actions = self._dispatch.cancel([call.id for call in unfinished], kill=kill)
        for call in unfinished:
            self._calls.complete(call, RawOutcome(error=CancelledError("the call was cancelled")))
        self._acting.perform(actions)

    def drop(self, call: LiveCall) -> None:
        """A call's future was cancelled while it waited."""
        self._acting.drop(call)

    # --- LaneOwner --------------------------------------------------------------------------------------------------

    def lane_up(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self.slots[lane.worker_id]
        if slot.ready.done():
            self._bus.publish(WorkerReplaced(slot.id.node, slot.id.worker, slot.node.handle.instance.id))
        slot.up()
        self._acting.perform(self._dispatch.worker_up(slot.id, self._loop.time(), round_trip_s=lane.round_trip_s))

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        slot = self.slots.get(lane.worker_id)
        if slot is None:
            return
        slot.linked = linked
        if not linked and slot.exit_reason:
            self._lose(slot)

    def lane_lost(self, lane: Lane) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        self._lose(self.slots[lane.worker_id])

    def lane_items(self, lane: Lane, items: Sequence[Item]) -> None:
        """See :class:`~skyward.engine.lane.LaneOwner`."""
        finished: list[tuple[int, float]] = []
        for item in items:
            match item[0]:
                case Kind.RESULTS:
                    finished += self._succeed(lane.worker_id, item)
                case Kind.RESULT:
                    finished.append(self._finish(lane.worker_id, item[1], item[2]))
                case _:
                    self._note(lane, item)
        if finished:
            now = self._loop.time()
            self._acting.perform(self._dispatch.finished(finished, now))
            self._eager = not self._calls and now < self._busy_since + PROMPT_S

    def _note(self, lane: Lane, item: Item) -> None:
        match item[0]:
            case Kind.CHUNK:
                if (call := self._calls.get(item[1])) is not None:
                    call.arriving().add_chunk(item)
            case Kind.LINES | Kind.EVENT:
                self._publish(lane, item)
            case Kind.REVOKED:
                self._acting.give_back(item[1])
            case Kind.MISSING:
                self.slots[lane.worker_id].node.blobs.forget(item[2])
                self._acting.give_back([item[1]])
            case unknown:
                log.error("unknown item %r from worker %s", unknown, lane.worker_id)

    # --- what follows -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(_REBALANCE_S, self._tick) if self._calls else None
        self._acting.perform(self._dispatch.rebalance(self._loop.time()))

    def _succeed(self, worker_id: WorkerId, item: Item) -> Iterator[tuple[int, float]]:
        _, call_ids, all_seconds, pickles = item
        for call_id, seconds, data in zip(call_ids, all_seconds, pickles, strict=True):
            if (call := self._calls.get(call_id)) is not None:
                self._calls.complete(call, RawOutcome(data, seconds, worker_id))
            yield call_id, seconds

    def _finish(self, worker_id: WorkerId, call_id: int, wire: Sequence[Any]) -> tuple[int, float]:
        if (call := self._calls.get(call_id)) is not None:
            self._calls.complete(call, call.arriving().outcome(wire, worker_id))
        return call_id, float(wire[0])

    def _lose(self, slot: Slot) -> None:
        if not slot.alive:
            return
        slot.alive = False
        reason = slot.exit_reason or "its process is gone"
        if slot.cancelling:
            reason = f"ended with a call that was cancelled ({reason})"
        self._calls.leave(slot.id)
        self._bus.publish(WorkerLost(slot.id.node, slot.id.worker, slot.node.handle.instance.id, reason))
        unsent = frozenset(slot.unsent)
        self._acting.perform(self._dispatch.worker_lost(slot.id, reason, self._loop.time(), unsent=unsent))

    def _publish(self, lane: Lane, item: Item) -> None:
        call = self._calls.get(item[1])
        incoming, callbacks = (call.arriving(), call.callbacks) if call is not None else (Incoming(), ())
        handle = self.slots[lane.worker_id].node.handle
        for event in incoming.events(item, node=lane.worker_id.node, instance_id=handle.instance.id):
            self._bus.publish(event, callbacks)
