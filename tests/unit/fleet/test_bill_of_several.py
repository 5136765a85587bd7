"""What a pool over several providers says that it has cost is what each of them bills."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from skyward.base.waiting import Clock
from skyward.errors import AuthenticationError, CapacityError, TerminationError, UnreachableError
from skyward.events import CostFinal
from skyward.fleet.fleet import Fleet
from skyward.ledger.ledger import Ledger
from skyward.market.spending import Spending
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.several import Several
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider, Fate
from skyward.wire.control import Ending
from skyward.wire.frames import TlsIdentity
from support.fleets import FakeEngine
from support.nodes import FakeNodes
from support.pools import simulated_time
from support.simulation import SimulatedClock, simulate

SPEC = InstanceSpec(name="big", cpu=4, memory_gib=8)
PRICES: Mapping[str, float] = {"east": 2.0, "west": 3.0, "north": 4.0, "own": 0.0}
FATES = (
    Fate(pending_s=math.inf),
    Fate(hardware=InstanceSpec(name="big", cpu=1, memory_gib=8)),
    Fate(price_per_hour=4.5),
    Fate(price_per_hour=9.0),
    Fate(pending_s=5.0, becomes=InstanceState.GONE),
    Fate(pending_s=5.0, becomes=InstanceState.FAILED),
    Fate(pending_s=200.0),
)
FAULTS = (
    (UnreachableError("no answer"), True),
    (UnreachableError("status 500"), False),
    (CapacityError("sold out"), False),
    (AuthenticationError("expired"), False),
)
FAILING = ("east", "west")
NODES = 6
TLS = TlsIdentity(ca="ca", cert="cert", key="key")


class Scarce(FakeProvider):
    """Sells no more than so many machines at a time."""

    most = 2
    coming = 0

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        if len(self.alive) + self.coming + len(order.keys) > self.most:
            raise CapacityError(f"{self.name} has no more")
        self.coming += len(order.keys)
        try:
            return await super().launch(offers, order)
        finally:
            self.coming -= len(order.keys)


class Stage:
    """Providers with machines of every fate, whose creates fail in every way, in simulated time."""

    def __init__(self, ledger: Ledger, seed: int = 0) -> None:
        self.ledger = ledger
        self.clock: Clock = SimulatedClock()  # type: ignore[assignment]  # it has no loop of its own
        self.luck = random.Random(seed)
        self.fakes = {name: self._provider(name, usd) for name, usd in PRICES.items()}
        self.engine = FakeEngine()
        self.nodes = FakeNodes()

    def _provider(self, name: str, usd: float) -> Scarce:
        offer = Offer(spec=SPEC, price_per_hour=usd, minimum_billed_s=60.0, ready_within_s=300.0, island=True)
        made = Scarce([offer], name=name, fates=self.luck.sample(FATES, 2), clock=self.clock)
        if name in FAILING:
            error, done = self.luck.choice(FAULTS)
            made.fail("create", error, done=done)
        return made

    def fleet(self, keeping: Any = None, **request: Any) -> Fleet:
        self.nodes.hardware = lambda instance: self.fakes[instance.id.partition("-")[0]].hardware(instance.id)
        return Fleet(
            Several(tuple(self.fakes.values())),
            parse_request(nodes=NODES, spread=True, wait_for_capacity="10m", timeout=14400, **request),
            pool_id="pool",
            tls=TLS,
            publish=lambda event: None,
            ledger=self.ledger,
            clock=self.clock,
            make_node=self.nodes,
            keeping=keeping,
        )

    def take_back(self, provider: FakeProvider) -> None:
        """Have a provider take back the first of its machines that is a node, if one is."""
        for node in [node for node in self.nodes.opened if node.instance.id in provider.alive][:1]:
            provider.preempt(node.instance.id)
            node.hear(Ending(reason="taken back"))

    def bills(self) -> Mapping[str, float]:
        return {name: provider.bill() for name, provider in self.fakes.items()}


@pytest.fixture
def simulated() -> Iterator[None]:
    with simulated_time():
        yield


async def live(stage: Stage, *, seconds: float, **request: Any) -> CostFinal:
    """Open a fleet, have a machine of each provider taken back, close it; return its final cost."""
    fleet = stage.fleet(**request)
    try:
        await fleet.start(stage.engine)
        for provider in stage.fakes.values():
            await stage.clock.sleep(seconds / 5)
            stage.take_back(provider)
        await stage.clock.sleep(seconds / 5)
    finally:
        await fleet.stop()
    return fleet.cost(stage.clock.elapsed()).final()


@pytest.mark.parametrize("seed", range(6))
def test_the_share_of_each_provider_is_its_bill_to_the_cent(simulated: None, tmp_path: Path, seed: int) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"), seed)
    final = simulate(lambda: live(stage, seconds=5000.0))

    bills = {name: usd for name, usd in stage.bills().items() if stage.fakes[name].instances}
    assert len(bills) >= len(PRICES) - 1
    assert final.cost_by_provider == pytest.approx(bills, abs=0.01)
    assert final.total_cost == pytest.approx(sum(bills.values()), abs=0.01)
    assert [machine for provider in stage.fakes.values() for machine in provider.alive] == []


async def live_until_spent(stage: Stage, max_cost: float) -> None:
    """Open a fleet, and close it when its limit is near."""
    fleet, is_spent = stage.fleet(max_cost=max_cost), asyncio.Event()
    watching = Spending(
        fleet.cost,
        max_cost=max_cost,
        publish=lambda event: None,
        on_spent=lambda error: is_spent.set(),
        clock=stage.clock,
    )
    try:
        watching.watch()
        await fleet.start(stage.engine)
        await is_spent.wait()
    finally:
        watching.close()
        await fleet.stop()


@pytest.mark.parametrize("seed", range(3))
def test_max_cost_is_a_limit_on_all_bills_together(simulated: None, tmp_path: Path, seed: int) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"), seed)
    simulate(lambda: live_until_spent(stage, max_cost=12.0))

    assert 9.0 < sum(stage.bills().values()) <= 12.0


class Record:
    """Writes down what a kept fleet has cost so far, and keeps no node."""

    spent: Mapping[str, float] = MappingProxyType({})

    def follow(self, nodes: Sequence[object], *, spent: Mapping[str, float]) -> None:
        self.spent = spent

    async def leave(self, nodes: Sequence[object], *, spent: Mapping[str, float]) -> bool:
        self.spent = spent
        return True

    async def settle(self) -> None: ...


async def leave_in_the_middle(stage: Stage) -> tuple[float, float]:
    """Leave a kept fleet while lost nodes are replaced; return what its record has, and what all but its nodes cost."""
    record: Any = Record()
    fleet = stage.fleet(record)
    await fleet.start(stage.engine)
    await stage.clock.sleep(1000.0)
    for provider in stage.fakes.values():
        provider.fates.append(Fate(pending_s=math.inf))
        stage.take_back(provider)
    await stage.clock.sleep(100.0)
    kept = await fleet.leave()
    assert 0 < len(kept) < NODES
    of_nodes = sum(node.usage.cost(stage.clock.elapsed()) for node in kept)
    return sum(record.spent.values()), sum(stage.bills().values()) - of_nodes


@pytest.mark.parametrize("seed", range(4))
def test_machines_that_end_when_a_client_leaves_count_for_the_next_one(
    simulated: None, tmp_path: Path, seed: int
) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"), seed)
    recorded, cost = simulate(lambda: leave_in_the_middle(stage))

    assert recorded == pytest.approx(cost, abs=0.01)


async def live_with_two_clients(stage: Stage) -> CostFinal:
    """Open a kept fleet, lose machines, leave it; return its cost as its next client, who finds no node, has it."""
    record: Any = Record()
    first = stage.fleet(record)
    await first.start(stage.engine)
    for provider in stage.fakes.values():
        await stage.clock.sleep(1000.0)
        stage.take_back(provider)
    await stage.clock.sleep(1000.0)
    assert 0 < sum(record.spent.values()) < first.cost(stage.clock.elapsed()).total, "what is gone counts there"
    await first.stop()
    gone = first.cost(stage.clock.elapsed()).by_provider

    second = stage.fleet()
    found: Any = SimpleNamespace(name="llm", spent=gone, nodes=(), restarting=False)
    await second.resume(stage.engine, found)
    await second.stop()
    return second.cost(stage.clock.elapsed()).final()


def test_the_next_client_of_a_kept_fleet_goes_on_with_the_shares(simulated: None, tmp_path: Path) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"))
    final = simulate(lambda: live_with_two_clients(stage))

    assert final.cost_by_provider == pytest.approx({name: usd for name, usd in stage.bills().items() if usd}, abs=0.01)


def test_what_one_provider_charges_above_the_limit_is_bought_from_the_others(simulated: None, tmp_path: Path) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"))
    for provider in stage.fakes.values():
        provider.fates.clear()
    stage.fakes["own"].prices["big"] = 50.0
    nodes: list[str] = []

    async def scenario() -> None:
        fleet = stage.fleet(max_price_per_hour=5.0)
        try:
            await fleet.start(stage.engine)
            nodes.extend(node.instance.offer.provider for node in fleet.nodes)
        finally:
            await fleet.stop()

    simulate(scenario)
    assert sorted(nodes) == ["east", "east", "north", "north", "west", "west"]
    assert 0 < stage.fakes["own"].bill() < 50 * 2 * 0.1, "they were ended at once"


def test_a_provider_whose_api_is_down_keeps_no_other_machine_from_its_end(simulated: None, tmp_path: Path) -> None:
    stage = Stage(Ledger(tmp_path / "ledger.db"))

    async def scenario() -> None:
        fleet = stage.fleet()
        await fleet.start(stage.engine)
        stage.fakes["north"].fail("terminate", UnreachableError("status 503"), times=1000)
        await fleet.stop()

    with pytest.raises(TerminationError) as failed:
        simulate(scenario)

    north = stage.fakes.pop("north")
    assert {*failed.value.instance_ids} == {*north.alive} != set()
    assert [machine for provider in stage.fakes.values() for machine in provider.alive] == []
    assert {entry.instance_id for entry in stage.ledger.open_entries()} == {*north.alive}
    assert {entry.purchase.provider for entry in stage.ledger.open_entries()} == {"north"}
