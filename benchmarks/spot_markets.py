"""Pools on spot markets, simulated: ``python -m benchmarks.spot_markets`` prints what an hour of work costs.

Machines are bought in the order of the pool's own ``choose``; markets are traces of the machines that they have, of the
form of those published with "Can't Be Late" (NSDI '24), which can be given as arguments:
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
        machines: number of machines that it has in each tick of five minutes.
    """

    offer: Offer
    machines: Sequence[int]


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
        markets: number of the markets that are used, the cheapest first.
        remembers: True if interruptions are taken into account.
        returns: True if a node on demand is exchanged for one on spot once there is one.
    """

    spot: SpotLike
    markets: int
    remembers: bool = True
    returns: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Course of a task.

    Attributes:
        cost: USD.
        hours: its duration.
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
    """A pool. The last of its ``nodes`` is a machine that is prepared for another, on demand, which ends its call."""

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

    def run(self, start: int) -> Outcome:
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
        for index in range(len(self.markets)):
            held = [rank for rank, machine in enumerate(self.nodes) if machine and machine.market == index]
            for rank in held[self._sold(index, tick) :]:
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
            if held < self._sold(index, tick):
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

    def _sold(self, index: int, tick: int) -> int:
        machines = self.markets[index].machines
        return machines[tick % len(machines)]


def simulate(task: Task, strategy: Strategy, markets: Sequence[Market], on_demand: Offer, *, start: int) -> Outcome:
    """Return the course of a task that begins at the tick ``start`` of the markets; after their end they repeat."""
    return _Simulation(task, strategy, markets[: strategy.markets], on_demand).run(start)


def least_cost(task: Task, markets: Sequence[Market], on_demand: Offer, *, start: int) -> float:
    """Return the least cost of a task for a pool that knows the future and always has all of its nodes.

    Every node leaves a market when that is best, and loses no call. It is that of the time that the task takes on
    demand, by the hour of work: the ratio of cost and work is minimized by Dinkelbach's method.
    """
    ticks = math.ceil(task.work_h / task.nodes / _TICK_H) + task.boot_ticks
    total_cost = total_work_h = 0.0
    rate = on_demand.price_per_hour or 0.0
    for _ in range(20):
        total_cost = total_work_h = 0.0
        for rank in range(task.nodes):
            sold = [(market.offer.price_per_hour or 0.0, _window(market, start, ticks, rank)) for market in markets]
            cost, work_h = _best_path([*sold, (on_demand.price_per_hour or 0.0, [True] * ticks)], task, rate)
            total_cost, total_work_h = total_cost + cost, total_work_h + work_h
        if math.isclose(rate, total_cost / total_work_h, rel_tol=1e-6):
            break
        rate = total_cost / total_work_h
    return rate * task.work_h


def _window(market: Market, start: int, ticks: int, rank: int) -> list[bool]:
    """Return whether a market has a machine for the node of a rank, beside those of lower ranks, in each tick."""
    return [market.machines[tick % len(market.machines)] > rank for tick in range(start, start + ticks)]


def _best_path(places: Sequence[tuple[float, Sequence[bool]]], task: Task, rate: float) -> tuple[float, float]:
    """Return cost and hours of work of the node for which its cost, less ``rate`` for each hour of work, is least."""
    ticks, boot = len(places[0][1]), task.boot_ticks
    # Best values at the begin of each tick, as (cost - rate * work, cost, work): of a node that works in each place,
    # and of one that may go anywhere.
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
    """A time of a market: hours that it lasts, and that machines and gaps in it last, on average; and how many.

    The shares are those of its machines that the market has, at least and at most, while it has them and in a gap.
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

    Times of plenty, with gaps of minutes, contested times, in which the number changes all the time, and scarce times
    with hours without any follow each other by chance, as in the published traces.
    """
    chance = random.Random(seed)
    machines: list[int] = []
    weather, until = chance.choice(_WEATHERS), 0.0
    while len(machines) * _TICK_H < days * 24:
        if len(machines) * _TICK_H >= until:
            weather = chance.choice([each for each in _WEATHERS if each is not weather])
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


def _offer(region: str, price: float, on_demand: float) -> Offer:
    return Offer(spec=_SPEC, region=region, spot=True, price_per_hour=price, on_demand_price_per_hour=on_demand)


_ON_DEMAND = Offer(spec=_SPEC, price_per_hour=3.06, on_demand_price_per_hour=3.06)
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
    """Print what the task costs by each strategy, on average of its beginnings on each set of markets."""
    write: Callable[[str], object] = sys.stdout.write
    listed = ", ".join(f"{share:.0%}" for share in shares)
    write(f"\ncalls of {task.call_h * 60:.0f} minutes, spot at {listed} of the price on demand\n\n")
    write("| `spot=` | USD an hour of work | of on demand | hours | machines taken back |\n|---|--:|--:|--:|--:|\n")
    worlds = [
        [
            Market(offer=_offer(f"market-{index}", 3.06 * share, 3.06), machines=trace)
            for index, (share, trace) in enumerate(zip(shares, set_of_traces, strict=True))
        ]
        for set_of_traces in traces
    ]
    runs = [(world, start) for world in worlds for start in range(0, len(world[0].machines) - 500, 576)]
    price = _ON_DEMAND.price_per_hour or 0.0
    for name, strategy in _STRATEGIES.items():
        outcomes = [simulate(task, strategy, world, _ON_DEMAND, start=start) for world, start in runs]
        cost = mean(outcome.cost for outcome in outcomes) / task.work_h
        hours, taken = mean(each.hours for each in outcomes), mean(each.interruptions for each in outcomes)
        write(f"| {name} | {cost:.2f} | {cost / price:.0%} | {hours:.1f} | {taken:.0f} |\n")
    best = mean(least_cost(task, world, _ON_DEMAND, start=start) for world, start in runs[::2]) / task.work_h
    write(f"| with knowledge of the future | {best:.2f} | {best / price:.0%} | | |\n")


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
