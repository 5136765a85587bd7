"""Nodes that were bought on demand because spot was sold out: when spot machines take their places, and when not."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import BootstrapError
from skyward.events import Error, InstanceLaunching, InstancePreempted, Notice, WorkerLost
from skyward.fleet.fleet import Fleet
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider, Fate
from skyward.wire.control import Ending
from support.fleets import FakeEngine, FleetStage, until
from support.pools import Call, SimulatedPool, simulated_time
from support.simulation import simulate

SPEC = InstanceSpec(name="big", cpu=2, memory_gib=4)
ON_DEMAND = Offer(spec=SPEC, price_per_hour=3.0, on_demand_price_per_hour=3.0)
ON_SPOT = Offer(spec=SPEC, spot=True, price_per_hour=1.0, on_demand_price_per_hour=3.0)


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: FakeProvider = field(default_factory=lambda: FakeProvider([ON_DEMAND, ON_SPOT]))

    def launches(self) -> int:
        return sum(isinstance(event, InstanceLaunching) for event in self.events)

    async def pass_time(self, hours: float) -> None:
        """Wait until so much time has passed, which it does by itself while the fleet looks for spot machines."""
        until_s = self.clock.elapsed() + hours * 3600
        await until(lambda: self.clock.elapsed() >= until_s)


class Longer(FakeEngine):
    """Its calls take longer than it expects."""

    def busy_for_s(self, rank: int) -> float:
        return 0.0


def markets(fleet: Fleet) -> dict[int, bool]:
    """Whether each node is on spot, by rank."""
    return {node.rank: node.instance.offer.spot for node in fleet.ready_nodes() if node.rank in fleet.wanted}


def told(stage: Stage, what: str) -> list[str]:
    """The notices with these words."""
    return [event.message for event in stage.events if isinstance(event, Notice) and what in event.message]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(ledger=Ledger(tmp_path / "ledger.db"))
    made.provider.sold_out = {ON_SPOT}
    return made


async def test_spot_machines_take_the_places_of_machines_on_demand(stage: Stage) -> None:
    async with stage.kept(nodes=3, spot="if-available") as fleet:
        assert markets(fleet) == {0: False, 1: False, 2: False}
        stage.provider.sold_out.clear()
        await until(lambda: sum(markets(fleet).values()) == 3 and len(stage.provider.alive) == 3)

        assert markets(fleet) == {0: True, 1: True, 2: True}
        steps = [entry[0] for entry in stage.engine.log if entry[1] == 1 and entry[0] != "expect"]
        assert steps == ["attach", "retire", "drain", "detach", "attach"]
        told = [event.message for event in stage.events if isinstance(event, Notice) and "to spot" in event.message]
        assert "node 1 moves to spot: an hour of work costs less there; another takes its place" in told
        assert not [event for event in stage.events if isinstance(event, InstancePreempted | Error)]


async def test_spot_is_asked_for_ever_more_rarely_and_no_failure_is_published(stage: Stage) -> None:
    async with stage.kept(nodes=2, spot="if-available", timeout=30 * 24 * 3600):
        opened = stage.launches()
        await stage.pass_time(12)
        assert 5 <= stage.launches() - opened <= 20
        notices = [event for event in stage.events if isinstance(event, Notice)]
        assert [event.message.split(",")[0] for event in notices] == ["asked for big on the spot market ($1 an hour)"]


@pytest.mark.parametrize(
    ("price", "busy"),
    [pytest.param(2.8, False, id="spot costs hardly less"), pytest.param(1.0, True, id="its calls may go on for long")],
)
async def test_a_node_on_demand_stays_where_a_move_is_not_worth_it(stage: Stage, price: float, busy: bool) -> None:
    on_spot = replace(ON_SPOT, price_per_hour=price)
    stage.provider = FakeProvider([ON_DEMAND, on_spot])
    stage.provider.sold_out = {on_spot}
    if busy:
        stage.engine.busy.update({0: asyncio.Event(), 1: asyncio.Event()})
    async with stage.kept(nodes=2, spot="if-available") as fleet:
        stage.provider.sold_out.clear()
        await stage.pass_time(12)

        assert markets(fleet) == {0: False, 1: False}
        assert len(stage.provider.instances) == 2
        for event in stage.engine.busy.values():
            event.set()


@pytest.mark.parametrize(
    ("offers", "request_"),
    [
        pytest.param([replace(ON_DEMAND, price_per_hour=0.0), ON_SPOT], {}, id="a machine that costs nothing"),
        pytest.param([ON_DEMAND, ON_SPOT], {"spot": "never"}, id="a pool without spot"),
        pytest.param([ON_DEMAND, ON_SPOT], {"nodes": (2, 3), "timeout": 60}, id="nodes that leave when they are idle"),
    ],
)
async def test_nothing_is_looked_for_in_the_place_of(
    stage: Stage, offers: list[Offer], request_: dict[str, Any]
) -> None:
    stage.provider = FakeProvider(offers)
    stage.provider.sold_out = {ON_SPOT}
    async with stage.kept(**{"nodes": 2, "spot": "if-available"} | request_):
        asked = stage.provider.calls.count("offers")
        for _ in range(20):
            await asyncio.sleep(0)

        assert 600.0 not in stage.clock.slept_s
        assert stage.provider.calls.count("offers") == asked


async def test_a_pool_that_is_scaled_meanwhile_has_the_size_that_was_asked_for(stage: Stage) -> None:
    stage.engine.busy[0] = asyncio.Event()
    async with stage.kept(nodes=2, spot="if-available") as fleet:
        stage.nodes.hang(1, "prepare")
        stage.provider.sold_out.clear()
        await asyncio.wait_for(stage.nodes.hanging.wait(), 5)
        await fleet.scale(1, ())
        await until(lambda: len(stage.provider.alive) == 1)

        assert markets(fleet) == {0: False}
        stage.engine.busy[0].set()


async def test_a_spot_machine_that_does_not_come_up_changes_nothing(stage: Stage) -> None:
    stage.engine.busy[0] = asyncio.Event()
    async with stage.kept(nodes=2, spot="if-available") as fleet:
        stage.provider.fates.append(Fate(pending_s=math.inf))
        stage.provider.sold_out.clear()
        await until(lambda: markets(fleet) == {0: False, 1: True} and len(stage.provider.alive) == 2)
        stage.engine.busy[0].set()
        assert len(stage.provider.instances) == 4
        (why,) = told(stage, "the spot machine for node 1 did not come up: ")
        assert why.endswith("; another is tried later")


@pytest.mark.parametrize("unfit", [pytest.param(True, id="never runs"), pytest.param(False, id="cannot be prepared")])
async def test_nodes_on_demand_stay_after_two_spot_machines_that_do_not_come_up(stage: Stage, *, unfit: bool) -> None:
    async with stage.kept(nodes=1, spot="if-available", timeout=30 * 24 * 3600) as fleet:
        if unfit:
            stage.provider.fate = Fate(pending_s=math.inf)
        else:
            stage.nodes.fail(0, "prepare", BootstrapError("no disk", node=0, step="deps"))
        stage.provider.sold_out.clear()
        await until(lambda: bool(told(stage, "nodes on demand stay as they are")))
        stage.clock.advance(24 * 3600)
        for _ in range(50):
            await asyncio.sleep(0)

        assert markets(fleet) == {0: False}
        assert len(stage.provider.instances) == 3
        assert len(told(stage, "did not come up")) == 2


async def test_a_node_that_is_lost_before_its_calls_end_gets_the_spot_machine(stage: Stage) -> None:
    stage.engine = Longer(busy={0: asyncio.Event()})
    async with stage.kept(nodes=1, spot="if-available") as fleet:
        stage.provider.sold_out.clear()
        await until(lambda: ("drain", 0) in stage.engine.log)
        stage.nodes.opened[0].hear(Ending(reason="struck by lightning", timed_out=False))
        await until(lambda: markets(fleet) == {0: True} and len(stage.provider.alive) == 1)

        assert len(stage.provider.instances) == 2


@pytest.mark.parametrize("seconds", [20.0, 600.0])
def test_no_call_is_interrupted_by_a_move(tmp_path: Path, seconds: float) -> None:
    async def life() -> None:
        pool = SimulatedPool(
            Ledger(tmp_path / "ledger.db"), nodes=3, workers=2, offers=(ON_DEMAND, ON_SPOT), spot="if-available"
        )
        pool.provider.sold_out = {ON_SPOT}
        try:
            await pool.open()
            for _ in range(int(6 * 7200 / seconds)):
                pool.submit(Call(seconds=seconds, retries=0))
            await asyncio.sleep(1000)
            pool.provider.sold_out.clear()
            while not all(ticket.future.done() for ticket in pool.tickets):  # noqa: ASYNC110 - in simulated time
                await asyncio.sleep(10)

            assert [ticket.future.exception() for ticket in pool.tickets if ticket.future.exception()] == []
            assert {len(ticket.ran_on) for ticket in pool.tickets} == {1}
            assert markets(pool.fleet) == {0: True, 1: True, 2: True}
            assert [event for event in pool.events if isinstance(event, Error | WorkerLost)] == []
            await pool.close()
        finally:
            await pool.destroy()

    with simulated_time():
        simulate(life)
