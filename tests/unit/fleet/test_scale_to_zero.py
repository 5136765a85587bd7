"""A fleet without nodes: node 0 leaves with the others, and its rank is given again once it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.ledger.ledger import Ledger
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage
from support.simulation import SimulatedClock, simulate


@pytest.fixture
def stage(tmp_path: Path) -> FleetStage:
    provider = FakeProvider()
    provider.fate = Fate(pending_s=40, ending_s=3)
    return FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider, clock=SimulatedClock())  # type: ignore[arg-type]


def test_an_elastic_pool_opens_with_its_minimum_and_buys_nothing_for_none(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with stage.kept(nodes=(0, 4)) as fleet:
            assert (fleet.wanted, stage.provider.calls) == (frozenset(), ["offers"])
            await fleet.scale(2, ())
            assert fleet.wanted == {0, 1}
        async with stage.kept(nodes=(2, 4)) as fleet:
            assert fleet.wanted == {0, 1}

    simulate(scenario)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_price_per_hour": 0.5}, "max_price_per_hour=0.5 is below every offer"),
        ({"max_cost": 0.001}, "max_cost must be at least"),
    ],
)
def test_a_pool_that_could_not_have_a_node_does_not_open(
    stage: FleetStage, limit: dict[str, float], message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match=message):
            await stage.fleet(nodes=(0, 4), **limit).start()

    simulate(scenario)


def test_at_zero_all_nodes_leave_and_every_machine_ends(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with stage.kept(nodes=(3, 4)) as fleet:
            await fleet.scale(0, ())
            stage.provider.refresh()
            assert (fleet.wanted, stage.provider.alive) == (frozenset(), [])
            assert {entry[0] for entry in stage.engine.of("detach") if entry[2]} == {0, 1, 2}

    simulate(scenario)


def test_the_next_node_0_is_launched_once_the_last_one_has_ended(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with stage.kept(nodes=(1, 4)) as fleet:
            leaving = fleet.scale(0, ())
            coming = fleet.scale(2, ())
            assert fleet.wanted == {0, 1}
            await coming
            await leaving
            old, new, other = sorted(stage.nodes.opened, key=lambda node: node.rank)
            assert (old.rank, new.rank, other.rank) == (0, 0, 1)
            assert new.usage.launched_at >= (old.usage.ended_at or 0.0) > 0
            assert (new.head_addr, other.head_addr) == (new.address, new.address)
            # Workers of rank 0 are expected again: they were not given up for good.
            assert [entry[2] for entry in stage.engine.of("detach") if entry[0] == 0] == [False]

    simulate(scenario)


def test_orders_while_node_0_leaves_do_not_add_up(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with stage.kept(nodes=(1, 4)) as fleet:
            waiting = [fleet.scale(size, ()) for size in (0, 1, 1, 0, 1, 2, 2)]
            assert fleet.wanted == {0, 1}
            await waiting.pop()
            for each in waiting:
                each.close()
            stage.provider.refresh()
            assert len(stage.provider.alive) == 2

    simulate(scenario)


def test_the_boot_of_a_node_is_measured_from_its_launch(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with stage.kept(nodes=(1, 4)) as fleet:
            assert fleet.boot_s == pytest.approx(40, abs=6)

    simulate(scenario)
