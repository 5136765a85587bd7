"""Pools on spot markets, simulated: ``python -m benchmarks.spot_markets`` prints what an hour of work costs.

Machines are bought in the order of the pool's own ``choose``. Markets are traces of how many machines they have, in the
format of those published with "Can't Be Late" (NSDI '24), which can be given as arguments:
``python -m benchmarks.spot_markets spot-traces/availability/1-node/aws-02-15-2023/*.json``.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from skyward.errors import CapacityError
from skyward.market.choose import choose
from skyward.market.interruptions import NOTHING_SEEN, Interruptions, SpotLife
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import SpotLike, parse_request

__all__ = ["Market", "Outcome", "Strategy", "Task", "least_cost", "read_trace", "simulate", "synthetic_trace"]

TICK_S = 300.0
_TICK_H = TICK_S / 3600
_FIRST_LOOK, _LAST_LOOK = 2, 12
_SPEC = InstanceSpec(name="v100", cpu=8, memory_gib=61, accelerator="V100", accelerator_count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """A spot market.

    Attributes:
        offer: what it sells.
        machines: number of machines that it has in each tick of five minutes; after the last tick they repeat.
    """

    offer: Offer
    machines: Sequence[int]

    @property
    def price_per_hour(self) -> float:
        """USD an hour of each machine."""
        return self.offer.price_per_hour or 0.0

    def machines_at(self, tick: int) -> int:
        """Return the number of machines that the market has in a tick."""
        return self.machines[tick % len(self.machines)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work for a pool of a fixed size.

    Attributes:
        nodes: number of nodes.
        work_h: hours of work, of all nodes together.
        call_h: duration of each call; a call that is interrupted begins again.
        boot_ticks: ticks from the order of a machine until it works.
    """

    nodes: int = 8
    work_h: float = 192.0
    call_h: float = 1 / 3
    boot_ticks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How machines are bought.

    Attributes:
        spot: the pool's parameter.
        markets: number of markets to use, the cheapest first.
        remembers: True if the order of offers depends on interruptions.
        returns: True if spot machines replace nodes on demand when they are available again.
    """

    spot: SpotLike
    markets: int
    remembers: bool = True
    returns: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a task took.

    Attributes:
        cost: USD.
        hours: duration.
        interruptions: number of machines that were taken back.
    """

    cost: float
    hours: float
    interruptions: int


@dataclass(slots=True)
class _Machine:
    """A machine of a node, bought at a tick; ``market`` is None on demand."""

    market: int | None
    offer: Offer
    bought: int
    worked_h: float = 0.0


@dataclass(eq=False)
class _Simulation:
    """A pool. Its last node is a spot machine that boots to replace one on demand, which meanwhile ends its call."""

    task: Task
    strategy: Strategy
    markets: Sequence[Market]
    on_demand: Offer
    nodes: list[_Machine | None] = field(default_factory=list[_Machine | None])
    past: list[tuple[Offer, int, int]] = field(default_factory=list[tuple[Offer, int, int]])
    cost: float = 0.0
    work_h: float = 0.0
    leaving: int = 0
    look_at: int = 0
    pause: int = _FIRST_LOOK

    def __post_init__(self) -> None:
        self._request = parse_request(spot=self.strategy.spot)
        self._offers = [self.on_demand, *(market.offer for market in self.markets)]

    def do_task(self, start: int) -> Outcome:
        self.nodes = [None] * (self.task.nodes + 1)
        tick = self.look_at = start
        while self.work_h < self.task.work_h:
            self._take_back(tick)
            if self.strategy.returns:
                self._move_to_spot(tick)
            for rank in range(self.task.nodes):
                self.nodes[rank] = self.nodes[rank] or self._buy(tick)
            for rank, machine in enumerate(self.nodes):
                if machine is not None:
                    self._work(machine, tick, is_spare=rank == self.task.nodes)
            tick += 1
        return Outcome(cost=self.cost, hours=(tick - start) * _TICK_H, interruptions=len(self.past))

    def _take_back(self, tick: int) -> None:
        for index, market in enumerate(self.markets):
            held = [rank for rank, machine in enumerate(self.nodes) if machine and machine.market == index]
            for rank in held[market.machines_at(tick) :]:
                machine = self.nodes[rank]
                assert machine is not None
                self.past.append((machine.offer, machine.bought, tick))
                self.nodes[rank] = None

    def _move_to_spot(self, tick: int) -> None:
        """See :meth:`skyward.fleet.fleet.Fleet._wait_for_spot`."""
        spare, former = self.nodes[-1], self.nodes[self.leaving]
        if spare is not None:
            if former is None or (tick - spare.bought >= self.task.boot_ticks and not former.worked_h):
                self.nodes[self.leaving], self.nodes[-1] = spare, None
            return
        on_demand = [rank for rank, machine in enumerate(self.nodes) if machine and machine.market is None]
        if on_demand and tick >= self.look_at:
            self.leaving, former = on_demand[-1], self.nodes[on_demand[-1]]
            self.nodes[-1] = self._buy(tick, instead_of=former.offer if former else None)
            self.pause = min(_LAST_LOOK, 2 * self.pause) if self.nodes[-1] is None else _FIRST_LOOK
            self.look_at = tick + self.pause

    def _buy(self, tick: int, instead_of: Offer | None = None) -> _Machine | None:
        seen = self._seen(tick) if self.strategy.remembers else NOTHING_SEEN
        beside = [machine.offer for machine in self.nodes if machine]
        try:
            choice = choose(
                self._request,
                self._offers,
                nodes=1,
                provider="cloud",
                beside=beside,
                seen=seen,
                instead_of=instead_of,
            )
        except CapacityError:
            return None
        for offer in choice.batches[0].offers:
            if not offer.spot:
                return _Machine(None, offer, tick)
            index = self._offers.index(offer) - 1
            held = sum(machine is not None and machine.market == index for machine in self.nodes)
            if held < self.markets[index].machines_at(tick):
                return _Machine(index, offer, tick)
        return None

    def _work(self, machine: _Machine, tick: int, *, is_spare: bool) -> None:
        self.cost += _TICK_H * (machine.offer.price_per_hour or 0.0)
        if is_spare or tick - machine.bought < self.task.boot_ticks:
            return
        machine.worked_h += _TICK_H
        if machine.worked_h > self.task.call_h - _TICK_H / 2:
            self.work_h += self.task.call_h
            machine.worked_h = 0.0

    def _seen(self, tick: int) -> Interruptions:
        ended = [
            SpotLife(offer=offer, began_h=(tick - began) * _TICK_H, ended_h=(tick - end) * _TICK_H, preempted=True)
            for offer, began, end in self.past
        ]
        running = [
            SpotLife(offer=machine.offer, began_h=(tick - machine.bought) * _TICK_H)
            for machine in self.nodes
            if machine is not None and machine.market is not None
        ]
        return Interruptions((*ended, *running))


def simulate(task: Task, strategy: Strategy, markets: Sequence[Market], on_demand: Offer, *, start: int) -> Outcome:
    """Return what a task takes that begins at the tick ``start`` of the markets."""
    return _Simulation(task, strategy, markets[: strategy.markets], on_demand).do_task(start)


def least_cost(task: Task, markets: Sequence[Market], on_demand: Offer, *, start: int) -> float:
    """Return the lowest cost of a task for a pool that knows the future and always has all of its nodes.

    Every node leaves a market when that is best, and loses no call. Over the time that the task takes on demand,
    Dinkelbach's method minimizes the ratio of cost to work; the result is that ratio times the task's work.
    """
    ticks = math.ceil(task.work_h / task.nodes / _TICK_H) + task.boot_ticks
    total_cost = total_work_h = 0.0
    rate = on_demand.price_per_hour or 0.0
    for _ in range(20):
        total_cost = total_work_h = 0.0
        for rank in range(task.nodes):
            places = [
                # Nodes of lower ranks have the first machines of each market.
                (market.price_per_hour, [market.machines_at(tick) > rank for tick in range(start, start + ticks)])
                for market in markets
            ]
            cost, work_h = _best_path([*places, (on_demand.price_per_hour or 0.0, [True] * ticks)], task, rate)
            total_cost, total_work_h = total_cost + cost, total_work_h + work_h
        if math.isclose(rate, total_cost / total_work_h, rel_tol=1e-6):
            break
        rate = total_cost / total_work_h
    return rate * task.work_h


def _best_path(places: Sequence[tuple[float, Sequence[bool]]], task: Task, rate: float) -> tuple[float, float]:
    """Return cost and hours of work of a node that minimizes cost minus ``rate`` times hours of work.

    ``places`` are prices, and whether a machine is for sale there in each tick.
    """
    ticks, boot = len(places[0][1]), task.boot_ticks
    # The best (cost - rate * work, cost, work) at the start of each tick, for a node that works in each place and for
    # one that is free to move.
    anywhere: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    working = [[(math.inf, 0.0, 0.0)] * (ticks + 1) for _ in places]
    for tick in range(ticks):
        for place, (price, sold) in enumerate(places):
            if tick >= boot and anywhere[tick - boot][0] < math.inf and all(sold[tick - boot : tick]):
                _, cost, work_h = anywhere[tick - boot]
                cost += price * boot * _TICK_H
                working[place][tick] = min(working[place][tick], (cost - rate * work_h, cost, work_h))
            value, cost, work_h = working[place][tick]
            if sold[tick] and value < math.inf:
                cost, work_h = cost + price * _TICK_H, work_h + _TICK_H
                working[place][tick + 1] = (cost - rate * work_h, cost, work_h)
        anywhere.append(min(values[tick + 1] for values in working))
    _, cost, work_h = min(values[ticks] for values in working)
    return cost, work_h


@dataclass(frozen=True, slots=True)
class _Weather:
    """A phase of a market, in which periods with machines for sale and gaps alternate.

    ``hours``, ``sold_h`` and ``gap_h`` are the mean durations of the phase, of a period and of a gap. ``sold`` and
    ``gap`` are the least and the largest share of the market's machines that it has then.
    """

    hours: float
    sold_h: float
    gap_h: float
    sold: tuple[float, float]
    gap: tuple[float, float]


_WEATHERS = (
    _Weather(36.0, 8.0, 1 / 3, sold=(1.0, 1.0), gap=(0.0, 0.25)),  # plenty
    _Weather(12.0, 1 / 2, 1 / 4, sold=(0.5, 1.0), gap=(0.0, 0.5)),  # contested
    _Weather(24.0, 1 / 2, 3.0, sold=(0.1, 1.0), gap=(0.0, 0.0)),  # scarce
)


def synthetic_trace(seed: str, *, days: int = 28, most: int = 16) -> list[int]:
    """Return a market's number of machines in each tick.

    As in the published traces, phases follow each other at random: plenty, with gaps of minutes; contested, where the
    number changes all the time; and scarce, with hours without a machine.
    """
    chance = random.Random(seed)
    machines: list[int] = []
    weather, until = chance.choice(_WEATHERS), 0.0
    while len(machines) * _TICK_H < days * 24:
        if len(machines) * _TICK_H >= until:
            weather = chance.choice([other for other in _WEATHERS if other is not weather])
            until = len(machines) * _TICK_H + chance.expovariate(1 / weather.hours)
        for mean_h, (least, largest) in ((weather.sold_h, weather.sold), (weather.gap_h, weather.gap)):
            machines += [round(most * chance.uniform(least, largest))] * _ticks(chance, mean_h)
    return machines


def _ticks(chance: random.Random, mean_h: float) -> int:
    return max(1, round(chance.expovariate(1 / mean_h) / _TICK_H))


def read_trace(path: Path) -> list[int]:
    """Return the numbers of machines of a published trace, in ticks of five minutes."""
    trace = json.loads(path.read_text())
    gap_s, data = float(trace["metadata"]["gap_seconds"]), trace["data"]
    return [int(data[int(tick * TICK_S / gap_s)]) for tick in range(int(len(data) * gap_s / TICK_S))]


_PRICE = 3.06
_ON_DEMAND = Offer(spec=_SPEC, price_per_hour=_PRICE, on_demand_price_per_hour=_PRICE)
_ALL = 99
_STRATEGIES = {
    '`"never"`': Strategy(spot="never", markets=0),
    '`"if-available"`, one market': Strategy(spot="if-available", markets=1),
    '`"if-available"`': Strategy(spot="if-available", markets=_ALL),
    "the same, by price alone": Strategy(spot="if-available", markets=_ALL, remembers=False),
    "the same, never back to spot": Strategy(spot="if-available", markets=_ALL, returns=False),
    '`"always"`, one market': Strategy(spot="always", markets=1),
    '`"always"`': Strategy(spot="always", markets=_ALL),
}


def _table(task: Task, traces: Sequence[Sequence[Sequence[int]]], shares: Sequence[float]) -> None:
    """Print the mean cost of the task by each strategy, over start times and sets of markets."""
    write: Callable[[str], object] = sys.stdout.write
    listed = ", ".join(f"{share:.0%}" for share in shares)
    write(f"\ncalls of {task.call_h * 60:.0f} minutes, spot at {listed} of the price on demand\n\n")
    write("| `spot=` | USD an hour of work | of on demand | hours | machines taken back |\n|---|--:|--:|--:|--:|\n")
    worlds = [
        [
            Market(
                offer=replace(_ON_DEMAND, region=f"market-{index}", spot=True, price_per_hour=_PRICE * share),
                machines=trace,
            )
            for index, (share, trace) in enumerate(zip(shares, set_of_traces, strict=True))
        ]
        for set_of_traces in traces
    ]
    runs = [(world, start) for world in worlds for start in range(0, len(world[0].machines) - 500, 576)]
    for name, strategy in _STRATEGIES.items():
        outcomes = [simulate(task, strategy, world, _ON_DEMAND, start=start) for world, start in runs]
        cost = mean(outcome.cost for outcome in outcomes) / task.work_h
        hours, taken = mean(run.hours for run in outcomes), mean(run.interruptions for run in outcomes)
        write(f"| {name} | {cost:.2f} | {cost / _PRICE:.0%} | {hours:.1f} | {taken:.0f} |\n")
    best = mean(least_cost(task, world, _ON_DEMAND, start=start) for world, start in runs[::2]) / task.work_h
    write(f"| with knowledge of the future | {best:.2f} | {best / _PRICE:.0%} | | |\n")


def main(arguments: Sequence[str]) -> None:
    """Print the tables of the documentation, or those of the traces in files."""
    if arguments:
        traces = [[read_trace(Path(each)) for each in arguments]]
        task = replace(Task(), nodes=min(Task().nodes, *(max(trace) for trace in traces[0])))
    else:
        traces = [[synthetic_trace(f"{seed} {market}") for market in range(3)] for seed in range(4)]
        task = Task()
    for cheapest, call_h in ((0.3, 1 / 3), (0.3, 2.0), (0.7, 1 / 3)):
        step = 0.1 / max(1, len(traces[0]) - 1)
        shares = [cheapest + step * index for index in range(len(traces[0]))]
        _table(replace(task, call_h=call_h), traces, shares)


if __name__ == "__main__":
    main(sys.argv[1:])
