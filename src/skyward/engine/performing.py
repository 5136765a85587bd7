"""Turns the actions that dispatch decides on into messages on lanes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, assert_never, cast

from skyward.engine.calls import CallGang, CallTable, LiveCall
from skyward.engine.dispatch import Action, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId
from skyward.engine.futures import RawOutcome
from skyward.engine.slots import Slot, given_up, used_up
from skyward.wire.messages import CancelCalls, RevokeCalls
from skyward.wire.pickling import PackedError

__all__ = ["Performer"]

log = logging.getLogger("skyward.engine")

_CANCEL_PATIENCE_S = 1.0
_RENEWALS = 2
_ECHO_S = 0.5
_ECHO_PATIENCE_S = 10.0


class Performer:
    """Sends calls, takes them back, gives them up. Belongs to the event loop.

    Args:
        dispatch: decides.
        calls: those that are not over.
        slots: every worker's place, by id; whoever owns the mapping keeps it true.

    Attributes:
        unsettled: workers whose call of a gang has raised, while it is not known yet whether that is the gang's end.
            Their processes must live until then, or others would die of their end instead.
    """

    def __init__(self, dispatch: Dispatch, calls: CallTable, slots: Mapping[WorkerId, Slot]) -> None:
        self._dispatch = dispatch
        self._calls = calls
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self.unsettled: set[WorkerId] = set()
        self._actions: deque[Action] = deque()
        self._performing = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def perform(self, actions: Sequence[Action]) -> None:
        """Do what dispatch decided, in order: what follows from an action waits until those before it are done."""
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
        slot = self._slots.get(action.worker)
        match action:
            case GiveUp():
                self._give_up(action)
            case _ if slot is None:
                pass  # the worker is gone for good since, and dispatch has moved its calls
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
                continue  # taken away again by what was done for those before it
            if not call.sink.begin():
                slot.unsent.add(call.id)
                self.drop(call)
            elif not call.parcel.blobs or slot.hold_present(call):
                ready.append(call)
            else:
                self.spawn(slot.ship(call, self._fail))
        slot.push(ready)

    def _fail(self, call: LiveCall, raw: RawOutcome) -> None:
        actions = self._dispatch.finished([(call.id, 0.0)], self._loop.time())
        self.complete(call, raw)
        self.perform(actions)

    def give_back(self, call_ids: Sequence[int]) -> None:
        """These calls are on no worker: dispatch decides anew."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                call.let_go()
        self.perform(self._dispatch.given_back(call_ids, self._loop.time()))

    def begin_anew(self, call_ids: Sequence[int], why: str) -> None:
        """These calls need a fresh process. Where fresh ones were of no use, it is the call that uses them up."""
        for call in filter(None, map(self._calls.get, call_ids)):
            call.renewals += 1
            if call.renewals > _RENEWALS:
                self._fail(call, RawOutcome(error=used_up(call, why)))
        self.give_back(call_ids)

    def _give_up(self, action: GiveUp) -> None:
        call = self._calls.get(action.call.id)
        if call is not None:
            self.complete(call, RawOutcome(error=given_up(call, action, self._slots.get(action.worker))))

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """A call is over; if it has failed, those that it ran together with have failed with it, and are ended.

        What one of a gang raises is its last word only if no other one turns out to be lost: that others cannot reach
        a lost one any more is often known sooner than the loss.
        """
        if call.gang is not None and len(call.gang.calls) > 1 and isinstance(raw.error, PackedError):
            call.gang.raised.add(call.id)
            if raw.worker is not None:
                self.unsettled.add(raw.worker)
            self._loop.call_later(_ECHO_S, self._settle, call, call.gang, raw, self._loop.time() + _ECHO_PATIENCE_S)
        else:
            self._complete(call, raw)

    def _settle(self, call: LiveCall, gang: CallGang, raw: RawOutcome, until: float) -> None:
        """Wait on while the link to one that has not raised anything is down: it may be lost, or will say so soon."""
        silent = [member for member in gang.calls if member.id not in gang.raised]
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
        others = [other for other in call.gang.calls if self._calls.get(other.id) is other]
        actions = self._dispatch.cancel([other.id for other in others], kill=True)
        for other in others:
            self._calls.complete(other, raw)
        self.perform(actions)

    def held(self, calls: Iterable[LiveCall]) -> Iterator[tuple[Slot, LiveCall]]:
        """Those of the calls that a worker has, each with its slot."""
        for call in calls:
            if call.worker is not None and (slot := self._slots.get(call.worker)) is not None:
                yield slot, call

    def _take_back(self, slot: Slot, action: Revoke | Cancel) -> None:
        unsent = slot.unsent.intersection(action.call_ids)
        sent = [call_id for call_id in action.call_ids if call_id not in unsent]
        slot.unsent -= unsent
        if unsent:
            self.give_back(list(unsent))
        if sent:
            slot.lane.push(CancelCalls(sent) if isinstance(action, Cancel) else RevokeCalls(sent))
            slot.lane.flush()
        if sent and isinstance(action, Cancel):
            slot.end_for("a cancelled call was ended", sent)
            self._loop.call_later(_CANCEL_PATIENCE_S, self._insist, slot, sent, slot.lane.incarnation)

    def _insist(self, slot: Slot, call_ids: list[int], incarnation: str) -> None:
        """A call that holds the interpreter's lock keeps its worker from listening: the supervisor ends it."""
        held = any(self._dispatch.call(call_id) for call_id in call_ids)
        if held and slot.lane.incarnation == incarnation and slot.alive and slot.id in self._slots:
            self.spawn(slot.node.handle.kill_worker(slot.id.worker, incarnation))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background, until :meth:`close` at the latest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("in the background: %s", error)

    def drop(self, call: LiveCall) -> None:
        """A call's future was cancelled while it waited."""
        self.perform(self._dispatch.cancel([call.id], kill=False))
        self.complete(call, RawOutcome(error=CancelledError()))

    async def close(self) -> None:
        """Do nothing more. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
