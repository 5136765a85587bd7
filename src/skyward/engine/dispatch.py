"""Which call goes to which worker, when. Pure: events in, actions out; no I/O and no clock of its own.

One shared queue, and a small window of calls in flight per worker. How many calls a worker may hold follows from what
such calls took on workers before: about 20 ms of work, or two round trips where those are longer. A call of a kind not
seen before, one whose worker was lost, or one of a gang goes to an idle worker alone. The cost of a call does not
depend on the number of workers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Action", "CallState", "Cancel", "Dispatch", "GiveUp", "Revoke", "Send", "WorkerId"]

_TARGET_S = 0.02
_MAX_IN_FLIGHT = 1024
_KNOWN_KINDS = 4096
_OVERDUE_S = 0.05


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """A worker's slot: node rank and index on the node. A worker that replaces a lost one has the same id."""

    node: int
    worker: int


@dataclass(slots=True, eq=False)
class CallState:
    """A call on its way.

    Attributes:
        id: unique in the pool, never 0.
        kind: calls of one kind take about the same time (the function's id).
        retries: how many losses of its worker it survives.
        pinned: the only worker that may run it.
        together: whether it runs together with others, and so not again once it has begun.
        losses: how many workers were lost on which it may have begun.
        position: number among the calls sent to its worker's place, counted from 1; 0 while it has not left the client.
    """

    id: int
    kind: str
    retries: int = 3
    pinned: WorkerId | None = None
    together: bool = False
    losses: int = 0
    position: int = 0
    cancelled: bool = False
    worker: WorkerId | None = None
    expected_s: float = math.inf

    @property
    def final(self) -> bool:
        """Return whether the call may not run again once it has begun."""
        return self.together or self.losses >= self.retries


@dataclass(frozen=True, slots=True)
class Send:
    """Send these calls to this worker, in order."""

    worker: WorkerId
    calls: Sequence[CallState]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Ask the worker to give back those of these calls that it has not begun."""

    worker: WorkerId
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask the worker to drop these calls; one that runs ends with its worker."""

    worker: WorkerId
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The call's worker was lost too often, or its only worker is gone for good."""

    call: CallState
    worker: WorkerId
    reason: str


Action = Send | Revoke | Cancel | GiveUp


@dataclass(slots=True)
class _Worker:
    id: WorkerId
    target_s: float = _TARGET_S
    round_trip_s: float = 0.0
    in_flight: dict[int, CallState] = field(default_factory=dict[int, CallState])
    own_queue: deque[CallState] = field(default_factory=deque[CallState])
    load_s: float = 0.0
    busy_since: float = 0.0
    overdue: bool = False
    up: bool = False
    draining: bool = False
    holding: bool = False

    def accepts(self, expected_s: float) -> bool:
        if not self.in_flight:
            return True
        return not self.overdue and len(self.in_flight) < _MAX_IN_FLIGHT and self.load_s + expected_s <= self.target_s


class Dispatch:
    """The state of all calls of a pool. Every method returns the actions that follow from the event."""

    def __init__(self) -> None:
        self._queue: deque[CallState] = deque()
        self._workers: dict[WorkerId, _Worker] = {}
        self._idle: dict[WorkerId, _Worker] = {}
        self._open: dict[WorkerId, _Worker] = {}
        self._pinned: dict[WorkerId, _Worker] = {}
        self._calls: dict[int, CallState] = {}
        self._expected_s: OrderedDict[str, float] = OrderedDict()
        self._gone: dict[WorkerId, str] = {}

    @property
    def unfinished(self) -> int:
        """How many calls wait or run."""
        return len(self._calls)

    def call(self, call_id: int) -> CallState | None:
        """An unfinished call."""
        return self._calls.get(call_id)

    def foreign(self, worker_id: WorkerId, call_ids: Iterable[int]) -> int | None:
        """Return the first of these calls that is unfinished and not with this worker; None if there is none."""
        worker = self._workers.get(worker_id)
        held = worker.in_flight if worker is not None else {}
        return next((call_id for call_id in call_ids if call_id not in held and call_id in self._calls), None)

    def submit(self, calls: Iterable[CallState], now: float) -> list[Action]:
        """New calls."""
        stranded: list[Action] = []
        for call in calls:
            self._calls[call.id] = call
            if call.pinned in self._gone:
                stranded.append(self._give_up(call, call.pinned, self._gone[call.pinned]))
            else:
                self._enqueue(call)
        return stranded + self._assign(now)

    def expect(self, worker_id: WorkerId) -> None:
        """A worker will come up there: what waits may wait for it."""
        self._gone.pop(worker_id, None)
        self._workers.setdefault(worker_id, _Worker(worker_id))

    def drain(self, worker_id: WorkerId, *, comes_back: bool = False) -> list[Action]:
        """Take a worker out of use: it gets only calls pinned to it, and gives back those that it has not begun.

        Where it ``comes_back``, pinned calls wait for that.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        worker.draining, worker.holding = True, comes_back
        self._sort(worker)
        movable = [call.id for call in worker.in_flight.values() if comes_back or call.pinned is None]
        return [Revoke(worker_id, movable)] if movable else []

    def drained(self, worker_id: WorkerId, *, waiting: bool = False) -> bool:
        """Whether the worker has nothing left to do; what waits for the next process there counts if ``waiting``."""
        worker = self._workers.get(worker_id)
        return worker is None or not (worker.in_flight or (worker.own_queue and (waiting or not worker.holding)))

    def worker_up(
        self, worker_id: WorkerId, now: float, *, round_trip_s: float = 0.0, retired: bool = False, held: bool = False
    ) -> list[Action]:
        """A worker, new or not, is ready and idle: if retired for its own calls only, if held not even for them."""
        self._gone.pop(worker_id, None)
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        worker.up, worker.draining, worker.holding = True, retired or held, held
        worker.target_s, worker.round_trip_s = max(_TARGET_S, 2 * round_trip_s), round_trip_s
        self._sort(worker)
        return self._assign(now)

    def worker_lost(self, worker_id: WorkerId, reason: str, now: float, *, begun: int | None = None) -> list[Action]:
        """Move the calls of a worker that died; each that may have begun uses up a retry, whatever the reason.

        A call may have begun if it was sent, unless its position is above ``begun``, the position of the last call that
        the worker began; None if that is unknown. A call that ran may be among them, if its result was lost.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        worker.up = False
        held, worker.in_flight, worker.load_s = list(worker.in_flight.values()), {}, 0.0
        self._sort(worker)
        actions: list[Action] = []
        for call in reversed(held):
            may_have_begun = call.position > 0 and (begun is None or call.position <= begun)
            call.worker, call.position = None, 0
            if call.cancelled:
                self._calls.pop(call.id, None)
                continue
            exhausted = may_have_begun and call.final
            call.losses += may_have_begun
            if exhausted:
                actions.append(self._give_up(call, worker_id, reason))
            else:
                self._enqueue(call, front=True)
        return actions + self._assign(now)

    def worker_gone(self, worker_id: WorkerId, reason: str, now: float) -> list[Action]:
        """A worker was lost for good: what is pinned to it can never run; with no worker left, nothing can."""
        actions = self.worker_lost(worker_id, reason, now)
        worker = self._workers.pop(worker_id, None)
        self._gone[worker_id] = reason
        stranded = list(worker.own_queue) if worker else []
        if not self._workers:
            stranded += self._queue
            self._queue.clear()
        return actions + [self._give_up(call, worker_id, reason) for call in stranded if not call.cancelled]

    def finished(self, ended: Iterable[tuple[int, float]], now: float) -> list[Action]:
        """Calls ended on their workers after so many seconds each, whatever their outcome."""
        for call_id, seconds in ended:
            call = self._calls.pop(call_id, None)
            if call is not None:
                self._learn(call.kind, seconds)
                self._release(call, now)
        return self._assign(now)

    def given_back(self, call_ids: Iterable[int], now: float) -> list[Action]:
        """A worker gave calls back unbegun."""
        for call_id in reversed(list(call_ids)):
            call = self._calls.get(call_id)
            if call is None:
                continue
            self._take_back(call)
            if call.cancelled:
                del self._calls[call_id]
            else:
                self._enqueue(call, front=True)
        return self._assign(now)

    def cancel(self, call_ids: Iterable[int], *, kill: bool) -> list[Action]:
        """Nobody waits for these calls any more; ``kill`` says whether those that run are to be ended."""
        held: dict[WorkerId, list[int]] = {}
        for call_id in call_ids:
            call = self._calls.get(call_id)
            if call is None or call.cancelled:
                continue
            call.cancelled = True
            if call.worker is None:
                del self._calls[call_id]  # it stays in the queue, marked, and is skipped there
            else:
                held.setdefault(call.worker, []).append(call_id)
        kind = Cancel if kill else Revoke
        return [kind(worker_id, ids) for worker_id, ids in held.items()]

    def rebalance(self, now: float) -> list[Action]:
        """Call this now and then: takes back what waits behind an unexpectedly long call while others are idle."""
        if self._queue or not self._idle:
            return []
        actions: list[Action] = []
        for worker in self._workers.values():
            head, *rest = worker.in_flight.values() or (None,)
            if head is None or not rest:
                continue
            patience = max(_OVERDUE_S, 4 * head.expected_s) if head.expected_s < math.inf else _OVERDUE_S
            if now - worker.busy_since > worker.round_trip_s + patience:
                worker.overdue = True
                self._sort(worker)
                movable = [call.id for call in rest if call.pinned is None]
                actions += [Revoke(worker.id, movable)] if movable else []
        return actions

    def _enqueue(self, call: CallState, *, front: bool = False) -> None:
        queue = self._queue
        if call.pinned is not None:
            worker = self._workers.setdefault(call.pinned, _Worker(call.pinned))
            self._pinned[call.pinned] = worker
            queue = worker.own_queue
        queue.appendleft(call) if front else queue.append(call)

    def _assign(self, now: float) -> list[Action]:
        sends: list[Action] = []
        for worker in list(self._pinned.values()):
            self._hand_over(worker, worker.own_queue, _MAX_IN_FLIGHT, now, sends)
            if not worker.own_queue or not worker.up:
                del self._pinned[worker.id]
        share = math.ceil(len(self._queue) / max(1, len(self._workers)))
        while self._queue and (self._idle or self._open):
            # Of the idle ones, who worked last has its caches warm; the others fill in turns.
            worker = next(reversed(self._idle.values()) if self._idle else iter(self._open.values()))
            if not self._hand_over(worker, self._queue, share, now, sends):
                self._open.pop(worker.id, None)  # full for the next call; it is looked at again when it finishes one
        return sends

    def _hand_over(self, worker: _Worker, queue: deque[CallState], limit: int, now: float, sends: list[Action]) -> bool:
        batch: list[CallState] = []
        while queue and worker.up and not worker.holding and len(batch) < limit:
            call = queue[0]
            if call.cancelled:
                queue.popleft()
                continue
            call.expected_s = math.inf if _needs_worker_alone(call) else self._expected_s.get(call.kind, math.inf)
            if not worker.accepts(call.expected_s):
                break
            queue.popleft()
            call.worker = worker.id
            worker.busy_since = worker.busy_since if worker.in_flight else now
            worker.in_flight[call.id] = call
            worker.load_s += call.expected_s
            batch.append(call)
        if batch:
            sends.append(Send(worker.id, batch))
            self._sort(worker)
        return bool(batch)

    def _sort(self, worker: _Worker) -> None:
        """Into the idle, those with room, or neither."""
        self._idle.pop(worker.id, None)
        self._open.pop(worker.id, None)
        if worker.up and not worker.draining:
            if not worker.in_flight:
                self._idle[worker.id] = worker
            elif worker.accepts(0.0):
                self._open[worker.id] = worker
        if worker.own_queue and worker.up:
            self._pinned[worker.id] = worker

    def _release(self, call: CallState, now: float) -> None:
        """The call is over; the next one on its worker begins."""
        worker = self._workers.get(call.worker) if call.worker is not None else None
        if worker is not None:
            worker.busy_since, worker.overdue = now, False
        self._take_back(call)

    def _take_back(self, call: CallState) -> None:
        worker = self._workers.get(call.worker) if call.worker is not None else None
        call.worker, call.position = None, 0
        if worker is None or worker.in_flight.pop(call.id, None) is None:
            return
        worker.load_s = worker.load_s - call.expected_s if worker.in_flight and call.expected_s < math.inf else 0.0
        self._sort(worker)

    def _learn(self, kind: str, seconds: float) -> None:
        """Quick to believe in long calls, slow to believe in short ones."""
        known = self._expected_s.get(kind)
        self._expected_s[kind] = seconds if known is None or seconds > known else 0.8 * known + 0.2 * seconds
        self._expected_s.move_to_end(kind)
        if len(self._expected_s) > _KNOWN_KINDS:
            self._expected_s.popitem(last=False)

    def _give_up(self, call: CallState, worker_id: WorkerId, reason: str) -> GiveUp:
        del self._calls[call.id]
        return GiveUp(call, worker_id, reason)


def _needs_worker_alone(call: CallState) -> bool:
    """Whether it lost its worker before, or waits for calls on other workers.

    Of two gangs all workers run the same one first then, whatever comes between a call and its worker.
    """
    return call.losses > 0 or call.together
