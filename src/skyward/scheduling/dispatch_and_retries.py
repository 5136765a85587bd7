"""Assignment of calls to workers. Pure: events in, actions out; no I/O and no clock of its own.

There is one shared queue, and a small window of calls in flight per worker. The window follows from the time that such
calls took before: about 20 ms of work, or two round trips where those are longer. A call of an unknown kind, a call
that was interrupted by the loss of its worker, a call of a gang and a generator each go to an idle worker alone. Calls
that come back from a worker are queued before new ones, and interrupted ones first of all. The cost of a call does not
depend on the number of workers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from skyward.market.autoscale import Workload

# Work in flight per worker: enough that it need not wait for the next message, a round trip of 0.4 ms (decision 007).
# Not more, because all of it may have begun when a whole node is lost, and uses up retries then (decision 014).
_TARGET_S = 0.02
# Bounds a window of calls that take no measurable time, and so the calls that one lost worker can hold.
_MAX_IN_FLIGHT = 1024
# Functions made in a loop are a new kind each time; without a bound their times would be kept for ever.
_KNOWN_KINDS = 4096
# Calls behind the running one are not taken back before this: a revocation costs a round trip itself.
_OVERDUE_S = 0.05
# Of a queue longer than this, each 101st call is looked at, so that a million take 20 ms; a prime number, since
# functions may alternate.
_LONG_QUEUE, _STEP = 10_000, 101


class WorkerId(NamedTuple):
    """Identity of a worker: node rank and index on the node. A replacement of a lost worker has the same id."""

    # A tuple, as the generated __hash__ of a dataclass is Python, and a call looks its worker up eleven times.
    node: int
    worker: int


@dataclass(slots=True, eq=False)
class CallState:
    """Unfinished call, as dispatch sees it.

    Attributes:
        id: number, unique in the pool, never 0.
        kind: id of the function; calls of one kind are expected to take about the same time.
        retries: number of lost workers that the call survives; any number of preempted ones if it is not 0.
        pinned: the only worker that may run the call; None allows any.
        together: True for a call of a gang, which is not run again once it has begun.
        streams: True for a generator, which takes as long as its reader.
        losses: number of lost workers on which the call may have begun and that count against its retries.
        interrupted: True once a worker was lost that ran the call, or that may have begun it at the cost of a retry.
        position: number among the calls sent to its worker, counted from 1; 0 while it has not left the client.
        cancelled: True once nothing waits for the call any more.
        worker: the worker that holds the call; None while it is queued.
        expected_s: expected duration in seconds; infinite if the call needs a worker to itself.
    """

    id: int
    kind: str
    retries: int = 3
    pinned: WorkerId | None = None
    together: bool = False
    streams: bool = False
    losses: int = 0
    interrupted: bool = False
    position: int = 0
    cancelled: bool = False
    worker: WorkerId | None = None
    expected_s: float = math.inf

    @property
    def final(self) -> bool:
        """True if the call may not run again once it has begun."""
        return self.together or self.losses >= self.retries


@dataclass(frozen=True, slots=True)
class Send:
    """Order to send these calls to this worker, in order."""

    worker: WorkerId
    calls: Sequence[CallState]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Order to request from the worker those of these calls that it has not begun."""

    worker: WorkerId
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to have the worker drop these calls; a running one ends with its worker."""

    worker: WorkerId
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Order to fail a call whose worker was lost too often, or whose only worker is gone for good."""

    call: CallState
    worker: WorkerId
    reason: str
    overran: bool = False
    """True if the worker was ended because the call exceeded one of its own limits."""


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
    runs_job: bool = False
    is_told: bool = False

    def busy_for_s(self, now: float) -> float:
        """Return the seconds until its call ends, as far as can be expected; infinite if nothing is known."""
        head = next(iter(self.in_flight.values()), None)
        if head is None:
            return math.inf if self.runs_job else 0.0
        since_s = now - self.busy_since
        return head.expected_s - since_s if since_s < head.expected_s else since_s

    @property
    def takes_calls(self) -> bool:
        return self.up and not self.draining and not self.runs_job

    def accepts(self, expected_s: float) -> bool:
        if not self.in_flight:
            return True  # even a call expected to last for ever has to run somewhere
        return not self.overdue and len(self.in_flight) < _MAX_IN_FLIGHT and self.load_s + expected_s <= self.target_s


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Present load of one worker.

    Attributes:
        call: the call that runs there; None if there is none.
        since: time at which it began, by the clock of dispatch.
        behind: number of calls sent to the worker that wait behind it.
    """

    call: CallState | None
    since: float
    behind: int


class Dispatch:
    """Queue and windows of all calls of a pool. Every method takes an event and returns the actions that follow."""

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
        """Number of calls that wait or run."""
        return len(self._calls)

    def call(self, call_id: int) -> CallState | None:
        """Return an unfinished call; None once it is over."""
        return self._calls.get(call_id)

    def running(self) -> list[CallState]:
        """Return the calls that run now, the first of each worker, without those that nothing waits for."""
        heads = (next(iter(worker.in_flight.values()), None) for worker in self._workers.values())
        return [call for call in heads if call is not None and not call.cancelled]

    def load(self, worker_id: WorkerId) -> WorkerLoad | None:
        """Return the load of a worker; None if it accepts no calls at present."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.up:
            return None
        return WorkerLoad(
            next(iter(worker.in_flight.values()), None), worker.busy_since, max(0, len(worker.in_flight) - 1)
        )

    def busy_for_s(self, node: int, now: float) -> float:
        """Return the seconds until a node's running calls end, as far as can be expected; infinite if unknown."""
        return max((each.busy_for_s(now) for each in self._workers.values() if each.id.node == node), default=0.0)

    def workload(self, now: float) -> Workload:
        """Return the work that waits and runs, as far as any worker may take it, and since when nodes have none.

        Of a queue of more than ten thousand calls it is an estimate. Nodes that leave do not count.
        """
        ran_s: dict[str, float] = {}
        idle_s: dict[int, float] = {}
        calls, work_s = 0, 0.0
        for worker in self._workers.values():
            if worker.draining and not worker.holding:
                continue
            head, since_s = next(iter(worker.in_flight.values()), None), now - worker.busy_since
            is_busy = head is not None or worker.runs_job
            is_idle = worker.up and not (is_busy or worker.own_queue or worker.holding)
            idle_s[worker.id.node] = min(idle_s.get(worker.id.node, math.inf), since_s if is_idle else 0.0)
            if is_busy:
                calls += max(1, len(worker.in_flight))  # those behind the first take 20 ms together
                rest_s = (self._expected_s.get(head.kind, 0.0) if head is not None else 0.0) - since_s
                work_s += rest_s if rest_s > 0 else since_s
            if head is not None:
                ran_s[head.kind] = max(ran_s.get(head.kind, 0.0), since_s)
        step = _STEP if len(self._queue) > _LONG_QUEUE else 1
        kinds = [call.kind for call in islice(self._queue, 0, None, step) if not call.cancelled]
        work_s += step * sum(max(self._expected_s.get(kind, 0.0), ran_s.get(kind, 0.0)) for kind in kinds)
        return Workload(calls=calls + step * len(kinds), work_s=work_s, idle_s=idle_s)

    def foreign(self, worker_id: WorkerId, call_ids: Sequence[int]) -> int | None:
        """Return the first of these calls that is unfinished and not with this worker; None if there is none."""
        worker = self._workers.get(worker_id)
        held = worker.in_flight if worker is not None else {}
        for call_id in call_ids:
            if call_id not in held and call_id in self._calls:
                return call_id
        return None

    def submit(self, calls: Iterable[CallState], now: float) -> list[Action]:
        """Queue new calls, and assign as many as possible."""
        stranded: list[Action] = []
        for call in calls:
            self._calls[call.id] = call
            if call.pinned is None:  # here, as it is paid for every call
                self._queue.append(call)
            elif call.pinned in self._gone:
                stranded.append(self._give_up(call, call.pinned, self._gone[call.pinned]))
            else:
                self._enqueue(call)
        return stranded + self._assign(now)

    def expect(self, worker_id: WorkerId) -> None:
        """Announce a worker that will come up, so that calls wait for it instead of failing."""
        self._gone.pop(worker_id, None)
        self._workers.setdefault(worker_id, _Worker(worker_id))

    def drain(self, worker_id: WorkerId, *, comes_back: bool = False) -> list[Action]:
        """Take a worker out of use: it gets only calls pinned to it, and gives back the calls that it has not begun.

        If it ``comes_back``, calls pinned to it wait for its successor.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        worker.draining, worker.holding = True, comes_back
        self._sort(worker)
        movable = [call.id for call in worker.in_flight.values() if comes_back or call.pinned is None]
        return [Revoke(worker_id, movable)] if movable else []

    def drained(self, worker_id: WorkerId, *, waiting: bool = False) -> bool:
        """Return True if the worker has no calls left; ``waiting`` counts those for its next process, too."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return True
        waits = worker.own_queue and (waiting or not worker.holding)
        return not (worker.in_flight or waits or worker.runs_job)

    def job_running(self, worker_id: WorkerId, now: float, *, runs: bool) -> list[Action]:
        """Send a worker no calls while it runs a job's, which may take hours; take back those that wait there."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        worker.runs_job, worker.is_told = runs, False
        worker.busy_since = now
        self._sort(worker)
        if runs:
            return [Revoke(worker_id, list(worker.in_flight))] if worker.in_flight else []
        return self._assign(now)

    def held_up(self) -> list[WorkerId]:
        """Return the workers that run jobs while calls wait that they could run, each once in every run of a job."""
        waits = self._queue and not (self._idle or self._open)
        if not waits and not self._pinned:
            return []
        jobs = (worker for worker in self._workers.values() if worker.runs_job and not worker.is_told)
        workers = [worker for worker in jobs if waits or worker.own_queue]
        for worker in workers:
            worker.is_told = True
        return [worker.id for worker in workers]

    def worker_up(
        self, worker_id: WorkerId, now: float, *, round_trip_s: float = 0.0, retired: bool = False, held: bool = False
    ) -> list[Action]:
        """Use a worker that is ready and idle: a ``retired`` one for pinned calls only, a ``held`` one for none yet."""
        self._gone.pop(worker_id, None)
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        worker.up, worker.draining, worker.holding, worker.overdue = True, retired or held, held, False
        worker.busy_since = now  # idle from now on, until it gets a call
        worker.target_s, worker.round_trip_s = max(_TARGET_S, 2 * round_trip_s), round_trip_s
        self._sort(worker)
        return self._assign(now)

    def worker_lost(
        self,
        worker_id: WorkerId,
        reason: str,
        now: float,
        *,
        begun: int | None = None,
        preempted: bool = False,
        overran: int = 0,
    ) -> list[Action]:
        """Move the calls of a worker that died; each call that may have begun uses up a retry.

        A call may have begun if it was sent, unless its position is above ``begun``: the position of the last call
        that the worker began, or None if unknown. A finished call counts as well if its result was lost. If the
        provider took the machine back (``preempted``), no call with ``retries`` of at least 1 uses one up. The call at
        the position ``overran``, for whose limits the worker was ended, does not run again.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        worker.up = worker.runs_job = False
        held, worker.in_flight, worker.load_s = list(worker.in_flight.values()), {}, 0.0
        self._sort(worker)
        actions: list[Action] = []
        moved: list[CallState] = []
        for call in held:
            # Not only the first of them: results gather on a worker before they are sent. With that assumption up to
            # 149 of 400 calls with retries=0 ran twice (decision 014).
            may_have_begun = call.position > 0 and (begun is None or call.position <= begun)
            has_overrun = call.position == overran > 0
            call.worker, call.position = None, 0
            if call.cancelled:
                self._calls.pop(call.id, None)
                continue
            if has_overrun:
                actions.append(self._give_up(call, worker_id, reason, overran=True))
                continue
            # Such a call may be repeated, and the machine's end is no sign that another run would end the same way.
            forgiven = preempted and call.retries > 0 and not call.together
            charged = may_have_begun and not forgiven
            exhausted = charged and call.final
            call.losses += charged
            # The first one ran. Forgiven ones behind it most likely did not, and are not sent one by one.
            call.interrupted |= charged or (may_have_begun and call is held[0])
            if exhausted:
                actions.append(self._give_up(call, worker_id, reason))
            else:
                moved.append(call)
        self._requeue(moved)
        return actions + self._assign(now)

    def begun_on(self, worker_id: WorkerId, begun: int | None) -> CallState | None:
        """Return the call that ran on a worker that died, before :meth:`worker_lost`; None if none is known.

        Args:
            worker_id: the worker.
            begun: as for :meth:`worker_lost`.
        """
        worker = self._workers.get(worker_id)
        held = [call for call in worker.in_flight.values() if call.position > 0] if worker else []
        if begun is None:
            return held[0] if held else None
        return next((call for call in held if call.position == begun), None)

    def worker_gone(self, worker_id: WorkerId, reason: str, now: float, *, planned: bool = False) -> list[Action]:
        """Remove a worker for good: calls pinned to it fail; if it was the last worker, all queued calls do.

        Calls that came while the last worker left as ``planned`` wait for the next one.
        """
        actions = self.worker_lost(worker_id, reason, now)
        worker = self._workers.pop(worker_id, None)
        self._gone[worker_id] = reason  # a broadcast may be pinned to it already, and be submitted after this
        stranded = list(worker.own_queue) if worker else []
        if not self._workers and not planned:
            stranded += self._queue
            self._queue.clear()
        return actions + [self._give_up(call, worker_id, reason) for call in stranded if not call.cancelled]

    def finished(self, ended: Iterable[tuple[int, float]], now: float) -> list[Action]:
        """Remove calls that ended on their workers, with the seconds that each took; failed ones included."""
        touched: dict[WorkerId, _Worker] = {}
        for call_id, seconds in ended:
            call = self._calls.pop(call_id, None)
            if call is None:
                continue
            # At once to a longer one, slowly to a shorter one: too long an expectation costs some batching, too short a
            # one queues calls behind a long one.
            known = self._expected_s.get(call.kind)
            self._expected_s[call.kind] = seconds if known is None or seconds > known else 0.8 * known + 0.2 * seconds
            self._expected_s.move_to_end(call.kind)
            if len(self._expected_s) > _KNOWN_KINDS:
                self._expected_s.popitem(last=False)
            if (worker := self._take_back(call)) is not None:
                worker.busy_since, worker.overdue = now, False  # the next call on it begins now
                touched[worker.id] = worker
        for worker in touched.values():  # once, as a message may end a thousand calls
            self._sort(worker)
        return self._assign(now)

    def given_back(self, call_ids: Iterable[int], now: float) -> list[Action]:
        """Queue calls again that a worker gave back unbegun; they come first and use up no retry."""
        returned: list[CallState] = []
        for call_id in call_ids:
            call = self._calls.get(call_id)
            if call is None:
                continue
            if (worker := self._take_back(call)) is not None:
                self._sort(worker)
            if call.cancelled:
                del self._calls[call_id]
            else:
                returned.append(call)
        self._requeue(returned)
        return self._assign(now)

    def cancel(self, call_ids: Iterable[int], *, kill: bool) -> list[Action]:
        """Drop calls that nothing waits for any more; with ``kill``, running ones are ended."""
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
        """Take back calls that wait behind an unexpectedly long one while other workers go on. Called periodically."""
        # Not only for idle workers: as long as new calls come, no worker is idle, and these would wait for ever.
        prompt = sum(worker.takes_calls and not worker.overdue for worker in self._workers.values())
        actions: list[Action] = []
        for worker in self._workers.values():
            others = prompt - (goes_on := worker.takes_calls)
            if len(worker.in_flight) <= 1 or worker.overdue or not others:
                continue
            head = next(iter(worker.in_flight.values()))
            # Expectations are averages: only a call that takes four times as long counts as slow.
            patience = max(_OVERDUE_S, 4 * head.expected_s) if head.expected_s < math.inf else _OVERDUE_S
            # A call far away cannot have answered within a round trip, however short it is.
            if now - worker.busy_since > worker.round_trip_s + patience:
                worker.overdue = True
                prompt -= goes_on
                self._sort(worker)
                movable = [call.id for call in worker.in_flight.values() if call is not head and call.pinned is None]
                actions += [Revoke(worker.id, movable)] if movable else []
        return actions

    def _requeue(self, calls: Sequence[CallState]) -> None:
        """Queue calls that came back from a worker, in order, before all others; interrupted ones come first of all."""
        waiting: list[CallState] = []
        while self._queue and self._queue[0].interrupted:
            waiting.append(self._queue.popleft())
        begun = [*waiting, *(call for call in calls if call.interrupted)]
        for call in reversed([*begun, *(call for call in calls if not call.interrupted)]):
            self._enqueue(call, front=True)

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
        # At most a fair share of the queue at once, else the first worker would take the whole of a small batch.
        share = math.ceil(len(self._queue) / max(1, len(self._workers)))
        while self._queue and (self._idle or self._open):
            # Of the idle ones take the last used: code after a sleep runs from cold memory, two to four times as long
            # (decision 007). Those with room are filled in turns.
            worker = next(reversed(self._idle.values()) if self._idle else iter(self._open.values()))
            if not self._hand_over(worker, self._queue, share, now, sends):
                self._open.pop(worker.id, None)  # too full for this call; sorted again when it finishes one
        return sends

    def _hand_over(self, worker: _Worker, queue: deque[CallState], limit: int, now: float, sends: list[Action]) -> bool:
        batch: list[CallState] = []
        while queue and worker.up and not (worker.holding or worker.runs_job) and len(batch) < limit:
            call = queue[0]
            if call.cancelled:
                queue.popleft()
                continue
            # An interrupted call goes alone: one that kills its worker takes no neighbours with it then, and one that
            # had begun does not wait behind one that may take hours. So does a call of a gang, so that of two gangs all
            # workers run the same one first: otherwise late blobs could have one worker begin with the second gang, and
            # both would wait for ever. And so does a generator: a call behind it would wait for the generator's reader.
            alone = call.interrupted or call.together or call.streams
            call.expected_s = math.inf if alone else self._expected_s.get(call.kind, math.inf)
            if not worker.accepts(call.expected_s):
                break  # in order: shorter calls that overtook a long one could keep it waiting for ever
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
        """File a worker under the idle ones, those with room, or neither."""
        self._idle.pop(worker.id, None)
        self._open.pop(worker.id, None)
        if worker.takes_calls:
            if not worker.in_flight:
                self._idle[worker.id] = worker  # at the end: the last used is the first taken
            elif worker.accepts(0.0):
                self._open[worker.id] = worker
        if worker.own_queue and worker.up:
            self._pinned[worker.id] = worker

    def _take_back(self, call: CallState) -> _Worker | None:
        """Remove a call from the worker that holds it; return that, to be sorted again."""
        worker = self._workers.get(call.worker) if call.worker is not None else None
        call.worker, call.position = None, 0
        if worker is None or worker.in_flight.pop(call.id, None) is None:
            return None
        # Exactly 0 when empty, else the rounding errors of many sums would add up; and inf - inf is no number.
        worker.load_s = worker.load_s - call.expected_s if worker.in_flight and call.expected_s < math.inf else 0.0
        return worker

    def _give_up(self, call: CallState, worker_id: WorkerId, reason: str, *, overran: bool = False) -> GiveUp:
        del self._calls[call.id]
        return GiveUp(call, worker_id, reason, overran)
