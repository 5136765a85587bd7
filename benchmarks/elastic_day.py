"""A day of bursts on elastic and fixed pools, simulated: ``python -m benchmarks.elastic_day`` prints what it costs.

Calls go through the pool's own dispatch, and the size follows its own policy (``skyward.market.autoscale``); machines
are a boot, a price, and the seconds in between.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles

from skyward.market.autoscale import Backlog, wanted
from skyward.request.request import NodeRange
from skyward.scheduling.dispatch_and_retries import Action, CallState, Dispatch, Send, WorkerId

__all__ = ["Burst", "DayResult", "Machine", "TimedCalls", "day", "simulate_day"]

_HOUR_S = 3600.0
_NIGHTLY = "nightly"
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Burst:
    """Calls of one function that are submitted together.

    Attributes:
        at_s: seconds since midnight.
        calls: number of calls.
        seconds: duration of each.
        function: the function.
    """

    at_s: float
    calls: int
    seconds: float
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machines that the pool rents.

    Attributes:
        workers: workers on each.
        boot_s: seconds from its order until its workers take calls.
        ending_s: seconds from its end until it costs nothing.
        price_per_hour: USD.
    """

    workers: int = 2
    boot_s: float = 90.0
    ending_s: float = 5.0
    price_per_hour: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DayResult:
    """What a day was like.

    Attributes:
        cost: USD.
        waits: function of each call, and the seconds that it waited until it began.
    """

    cost: float
    waits: Sequence[tuple[str, float]]

    @property
    def mean_wait_s(self) -> float:
        """Average of the waits."""
        return mean(wait_s for _, wait_s in self.waits)

    def row(self) -> str:
        """Return cost and waits as cells of a table; those of the nightly job apart, for which nobody waits."""
        by_day = [wait_s for function, wait_s in self.waits if function != _NIGHTLY]
        nightly_s = max(wait_s for function, wait_s in self.waits if function == _NIGHTLY)
        slow_s = quantiles(by_day, n=20)[-1]
        return f"{self.cost:.2f} | {mean(by_day):.0f} s | {slow_s:.0f} s | {nightly_s / 60:.0f} min |"


def day(seed: int = 1) -> list[Burst]:
    """Return the bursts of a working day: a nightly job, studies in office hours, and single calls in between."""
    chance = random.Random(seed)
    bursts = [Burst(2 * _HOUR_S, 1500, 30.0, _NIGHTLY)]
    at_s = 9 * _HOUR_S
    while (at_s := at_s + chance.uniform(900, 3000)) < 18 * _HOUR_S:
        bursts.append(Burst(at_s, chance.randrange(20, 200), chance.choice((5.0, 20.0, 60.0)), f"study {at_s:.0f}"))
    at_s = 8 * _HOUR_S
    while (at_s := at_s + chance.expovariate(1 / 400)) < 19 * _HOUR_S:
        bursts.append(Burst(at_s, 1, 10.0, "look"))
    return sorted(bursts, key=lambda burst: burst.at_s)


@dataclass(slots=True, eq=False)
class _TimedCall(CallState):
    submitted_s: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class TimedCalls:
    """Calls that take the time that their bursts say, on the workers of a dispatch.

    Attributes:
        now: returns the time.
        call_later: calls a function after so many seconds.
        dispatch: the dispatch.
        waits: function of each call that has begun, and the seconds that it waited until then.
    """

    now: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], object]
    dispatch: Dispatch = field(default_factory=Dispatch)
    waits: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def submit(self, burst: Burst) -> None:
        """Submit the calls of a burst."""
        now = self.now()
        calls = [
            _TimedCall(id=next(self._ids), kind=burst.function, submitted_s=now, seconds=burst.seconds)
            for _ in range(burst.calls)
        ]
        self.perform(self.dispatch.submit(calls, now))

    def perform(self, actions: Sequence[Action]) -> None:
        """Begin the calls that dispatch sends; each worker has one at a time."""
        for action in actions:
            for call in action.calls if isinstance(action, Send) else ():
                assert isinstance(call, _TimedCall)
                self.waits.append((call.kind, self.now() - call.submitted_s))
                self.call_later(call.seconds, lambda call=call: self._end(call))

    def _end(self, call: _TimedCall) -> None:
        self.perform(self.dispatch.finished([(call.id, call.seconds)], self.now()))


class _Timetable:
    """A clock that jumps to the next thing to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._due)
            do()


class _SimulatedPool:
    """Nodes that are ordered, boot, and end once they have no calls."""

    def __init__(self, time: _Timetable, machine: Machine, size: NodeRange) -> None:
        self._time, self._machine, self._size = time, machine, size
        self.calls = TimedCalls(now=lambda: time.now, call_later=time.call_later)
        self.billed_s = 0.0
        self._ordered_s: dict[int, float] = {}
        self._leaving: dict[int, float] = {}
        self._backlog = Backlog()

    def order(self, count: int) -> None:
        """Order nodes, each of the lowest rank that is free."""
        taken = self._ordered_s.keys() | self._leaving.keys()
        free = (rank for rank in itertools.count() if rank not in taken)
        for rank in list(itertools.islice(free, count)):
            self._ordered_s[rank] = self._time.now
            for worker in self._workers(rank):
                self.calls.dispatch.expect(worker)
            self._time.call_later(self._machine.boot_s, lambda rank=rank: self._up(rank))

    def look(self) -> None:
        """Change the number of nodes as the policy says."""
        now, nodes, machine = self._time.now, len(self._ordered_s), self._machine
        load = self.calls.dispatch.workload(now)
        is_refilled = self._backlog.is_refilled(load.calls, nodes * machine.workers, now, boot_s=machine.boot_s)
        target = wanted(
            load, self._size, nodes=nodes, per_node=machine.workers, boot_s=machine.boot_s, is_refilled=is_refilled
        )
        if target > nodes:
            self.order(target - nodes)
        elif target < nodes:
            others = [rank for rank in load.idle_nodes(self._size) if rank]
            busy = sorted(self._ordered_s.keys() - {0, *others}, reverse=True)
            for rank in [*others, *busy, 0][: nodes - target]:
                self._retire(rank)
        self._end_drained()
        self._time.call_later(_LOOK_S, self.look)

    def close(self) -> None:
        """End all nodes, and add up what they have cost."""
        for since_s in [*self._ordered_s.values(), *self._leaving.values()]:
            self._bill(since_s)

    def _up(self, rank: int) -> None:
        for worker in self._workers(rank):
            self.calls.perform(self.calls.dispatch.worker_up(worker, self._time.now))

    def _retire(self, rank: int) -> None:
        self._leaving[rank] = self._ordered_s.pop(rank)
        for worker in self._workers(rank):
            self.calls.dispatch.drain(worker)

    def _end_drained(self) -> None:
        dispatch = self.calls.dispatch
        for rank in [rank for rank in self._leaving if all(map(dispatch.drained, self._workers(rank)))]:
            for worker in self._workers(rank):
                self.calls.perform(dispatch.worker_gone(worker, "", self._time.now, planned=True))
            self._bill(self._leaving.pop(rank))

    def _bill(self, since_s: float) -> None:
        self.billed_s += math.ceil(self._time.now + self._machine.ending_s - since_s)

    def _workers(self, rank: int) -> list[WorkerId]:
        return [WorkerId(rank, worker) for worker in range(self._machine.workers)]


def simulate_day(bursts: Sequence[Burst], size: NodeRange, machine: Machine, *, until_s: float) -> DayResult:
    """Return what the bursts cost on a pool, and how long their calls waited.

    Args:
        bursts: the bursts.
        size: limits of the pool's size; the same number twice for a fixed one.
        machine: its machines.
        until_s: time at which the pool closes.
    """
    time = _Timetable()
    pool = _SimulatedPool(time, machine, size)
    pool.order(size.minimum)
    for burst in bursts:
        time.call_later(burst.at_s, lambda burst=burst: pool.calls.submit(burst))
    pool.look()
    time.run(until_s)
    pool.close()
    return DayResult(cost=pool.billed_s / _HOUR_S * machine.price_per_hour, waits=pool.calls.waits)


def main() -> None:
    """Print the day on fixed and on elastic pools, as the table of the documentation."""
    machine, bursts = Machine(), day()
    work_h = sum(burst.calls * burst.seconds for burst in bursts) / _HOUR_S
    sys.stdout.write(f"{sum(burst.calls for burst in bursts)} calls, {work_h:.1f} hours of one worker\n\n")
    sys.stdout.write("| `nodes=` | `idle=` | USD | wait by day, mean | one of twenty waits longer | nightly job |\n")
    sys.stdout.write("|---|---|--:|--:|--:|--:|\n")
    for minimum, maximum, idle_s in (
        (1, 1, 300),
        (2, 2, 300),
        (4, 4, 300),
        (8, 8, 300),
        (0, 8, 60),
        (0, 8, 300),
        (0, 8, 1200),
        (1, 8, 300),
    ):
        size = NodeRange(minimum=minimum, maximum=maximum, idle_s=idle_s)
        result = simulate_day(bursts, size, machine, until_s=24 * _HOUR_S)
        nodes, idle = (f"{maximum}", "") if minimum == maximum else (f"({minimum}, {maximum})", f'"{idle_s // 60}m"')
        sys.stdout.write(f"| {nodes} | {idle} | {result.row()}\n")


if __name__ == "__main__":
    main()
