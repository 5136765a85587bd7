"""Execution of dispatch's actions: sends, revocations and failures of calls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, assert_never, cast

from skyward.engine.calls import CallGang, CallTable, LiveCall
from skyward.engine.dispatch import Action, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId
from skyward.engine.futures import RawOutcome
from skyward.engine.slots import Slot, given_up, used_up
from skyward.events.works import CALL_CANCELLED
from skyward.wire.messages import CancelCalls, PackedError, RevokeCalls

__all__ = ["Performer"]

log = logging.getLogger("skyward.engine")

# After this the supervisor kills a worker that has not ended a cancelled call: a call may hold the interpreter's lock.
_CANCEL_PATIENCE_S = 1.0
# Fresh processes for one call. A third would be used up by the call's own arguments or module (decision 013).
_RENEWALS = 2
# A killed rank's connections close at once, so other ranks may report errors before its supervisor reports its end.
_ECHO_S = 0.5
# Limit of the wait while the link to a silent rank is down: the rank that raised keeps its worker that long.
_ECHO_PATIENCE_S = 10.0


class Performer:
    """Driver of dispatch: sends calls, takes them back, fails them. Belongs to the event loop.

    Args:
        dispatch: source of the actions.
        calls: the unfinished calls.
        slot_of: returns the slot of a worker, None if its node is gone.

    Attributes:
        unsettled: workers whose call of a gang has raised, until the gang's outcome is settled. Their processes must
            live that long: some frameworks end all other ranks when one process goes.
    """

    def __init__(self, dispatch: Dispatch, calls: CallTable, slot_of: Callable[[WorkerId], Slot | None]) -> None:
        self._dispatch = dispatch
        self._calls = calls
        self._slot_of = slot_of
        self._loop = asyncio.get_running_loop()
        self.unsettled: set[WorkerId] = set()
        self._actions: deque[Action] = deque()
        self._performing = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, actions: Sequence[Action]) -> None:
        """Execute actions in order; actions that result from one of them run after the rest."""
        # Sending may fail a call, which leads to more actions: nested, they would overtake those already decided.
        self._actions.extend(actions)
        if self._performing or self._closed:
            return
        self._performing = True
        try:
            while self._actions:
                self._perform_one(self._actions.popleft())
        finally:
            self._performing = False

    def _perform_one(self, action: Action) -> None:
        slot = self._slot_of(action.worker)
        match action:
            case GiveUp():
                self._give_up(action)
            case _ if slot is None:
                pass  # the worker has gone since the action was decided, and dispatch has moved its calls
            case Send():
                self._send(slot, cast("Sequence[LiveCall]", action.calls))
            case Revoke() | Cancel():
                self._take_back(slot, action)
            case _:
                assert_never(action)

    def _send(self, slot: Slot, calls: Sequence[LiveCall]) -> None:
        ready: list[LiveCall] = []
        for call in calls:
            if call.worker != slot.id:
                continue  # taken away by an action that an earlier call of this batch led to
            if not call.sink.begin():
                slot.unsent.add(call.id)  # so that the cancellation is settled here, without a message
                self.drop(call)
                continue
            if call.trace is not None:
                call.trace.sent(slot.id)
            if not call.parcel.blobs or slot.hold_present(call):
                ready.append(call)
            else:
                self.spawn(slot.ship(call, self._fail))
        slot.push(ready)

    def _fail(self, call: LiveCall, raw: RawOutcome) -> None:
        actions = self._dispatch.finished([(call.id, 0.0)], self._loop.time())
        self.complete(call, raw)
        self.perform(actions)

    def give_back(self, call_ids: Sequence[int]) -> None:
        """Return calls that are on no worker to dispatch, which assigns them again."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                call.let_go()
        self.perform(self._dispatch.given_back(call_ids, self._loop.time()))

    def restart(self, call_ids: Sequence[int], why: str) -> None:
        """Give calls back that need a fresh process; a call that used up several of them fails."""
        for call in filter(None, map(self._calls.get, call_ids)):
            call.renewals += 1
            if call.renewals > _RENEWALS:
                self._fail(call, RawOutcome(error=used_up(call, why)))
        self.give_back(call_ids)

    def _give_up(self, action: GiveUp) -> None:
        call = self._calls.get(action.call.id)
        if call is not None:
            self.complete(call, RawOutcome(error=given_up(call, action, self._slot_of(action.worker))))

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """Complete a call; if it has failed, the other calls of its gang fail with it and are ended.

        An exception from a call of a gang is held back for a moment: if another rank turns out to be lost, that loss
        is the cause, although the broken connections to the lost rank are reported sooner.
        """
        if call.gang is not None and len(call.gang.calls) > 1 and isinstance(raw.error, PackedError):
            call.gang.raised.add(call.id)
            if raw.worker is not None:
                self.unsettled.add(raw.worker)
            self._loop.call_later(_ECHO_S, self._settle, call, call.gang, raw, self._loop.time() + _ECHO_PATIENCE_S)
        else:
            self._complete(call, raw)

    def _settle(self, call: LiveCall, gang: CallGang, raw: RawOutcome, until: float) -> None:
        """Complete a call of a gang, after waiting for ranks that have not raised and whose link is down."""
        silent = [member for member in gang.calls if member.id not in gang.raised]
        # A rank without a link may be lost, which its supervisor reports, or still has an error on the way.
        doubtful = any(not slot.linked or slot.exit_reason for slot, _ in self.held(silent))
        if doubtful and not gang.failed and self._loop.time() < until:
            self._loop.call_later(_ECHO_S, self._settle, call, gang, raw, until)
        else:
            self._complete(call, raw)
            if raw.worker is not None:
                self.unsettled.discard(raw.worker)

    def _complete(self, call: LiveCall, raw: RawOutcome) -> None:
        self._calls.complete(call, raw)
        if call.gang is None or raw.error is None or not call.gang.fail():
            return
        # Killed, not taken down: jax waits at a barrier for stuck ranks, TensorFlow never leaves (decision 013).
        others = [other for other in call.gang.calls if self._calls.get(other.id) is other]
        actions = self._dispatch.cancel([other.id for other in others], kill=True)
        for other in others:
            self._calls.complete(other, raw)  # before they are ended, or each would fail with its own end as the cause
        self.perform(actions)

    def held(self, calls: Iterable[LiveCall]) -> Iterator[tuple[Slot, LiveCall]]:
        """Yield the calls that a worker holds, each with its slot."""
        for call in calls:
            if call.worker is not None and (slot := self._slot_of(call.worker)) is not None:
                yield slot, call

    def _take_back(self, slot: Slot, action: Revoke | Cancel) -> None:
        unsent = slot.unsent.intersection(action.call_ids)
        sent = [call_id for call_id in action.call_ids if call_id not in unsent]
        slot.unsent -= unsent
        if unsent:  # still on this side, waiting for blobs: the worker has never seen them
            self.give_back(list(unsent))
        if sent:
            slot.lane.push(CancelCalls(sent) if isinstance(action, Cancel) else RevokeCalls(sent))
            slot.lane.flush()
        if sent and isinstance(action, Cancel):
            slot.end_for(CALL_CANCELLED, sent)
            self._loop.call_later(_CANCEL_PATIENCE_S, self._insist, slot, sent, slot.lane.incarnation)

    def _insist(self, slot: Slot, call_ids: list[int], incarnation: str) -> None:
        """Have the supervisor kill a worker that still holds cancelled calls."""
        # A call that holds the interpreter's lock keeps its worker from reading the cancellation.
        held = any(self._dispatch.call(call_id) for call_id in call_ids)
        if held and slot.lane.incarnation == incarnation and slot.alive and self._slot_of(slot.id) is slot:
            self.spawn(slot.node.handle.kill_worker(slot.id.worker, incarnation))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background, until :meth:`close` at the latest."""
        # The loop keeps weak references only: a task that nothing else refers to may be collected half-way.
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("in the background: %s", error)

    def drop(self, call: LiveCall) -> None:
        """Remove a call whose future was cancelled while it waited."""
        self.perform(self._dispatch.cancel([call.id], kill=False))
        self.complete(call, RawOutcome(error=CancelledError()))

    async def close(self) -> None:
        """End background work and ignore further actions. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
