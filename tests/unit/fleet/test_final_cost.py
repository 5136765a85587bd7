"""What a pool says that it has cost is what its provider bills, machines that were bought in vain included."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError, CapacityError, TerminationError, UnreachableError
from skyward.events import CostFinal
from skyward.ledger.ledger import Ledger
from skyward.providers.base import InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import Spot
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage
from support.pools import simulated_time
from support.simulation import SimulatedClock, simulate

OFFER = Offer(
    spec=InstanceSpec(name="big", cpu=4, memory_gib=8), price_per_hour=2.0, minimum_billed_s=60.0, ready_within_s=300.0
)
TINY = InstanceSpec(name="big", cpu=1, memory_gib=8)

FATES = {
    "never up": Fate(pending_s=math.inf),
    "smaller": Fate(hardware=TINY),
    "dearer": Fate(price_per_hour=3.0),
    "too dear": Fate(price_per_hour=50.0),
    "vanishes": Fate(pending_s=5.0, becomes=InstanceState.GONE),
    "fails": Fate(pending_s=5.0, becomes=InstanceState.FAILED),
    "comes late": Fate(pending_s=200.0),
}


class Stage(FleetStage):
    """In simulated time."""

    async def live(self, *, seconds: float, **request: Any) -> CostFinal:
        """Open a pool, close it after some time, and return its final cost."""
        fleet = self.fleet(timeout=7200, **request)
        try:
            await fleet.start()
            await self.clock.sleep(seconds)
        finally:
            await fleet.stop()
        assert self.provider.alive == []
        return fleet.cost(self.clock.elapsed()).final()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with simulated_time():
        clock: Any = SimulatedClock()
        yield Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([OFFER]), clock=clock)


@pytest.mark.parametrize("fates", [[name] for name in FATES] + [[*FATES]], ids=[*FATES, "all"])
def test_the_final_cost_is_the_bill_to_the_cent(stage: Stage, fates: list[str]) -> None:
    stage.provider.fates.extend(FATES[name] for name in fates)
    stage.provider.fail("create", UnreachableError("no answer"), done=True)
    final = simulate(lambda: stage.live(seconds=1234.5, nodes=len(fates) + 1, max_price_per_hour=5.0))

    assert final.total_cost == pytest.approx(stage.provider.bill(), abs=0.01)
    assert final.total_cost > (len(fates) + 1) * 2.0 * 1234 / 3600


def test_a_pool_that_does_not_open_has_cost_what_is_billed(stage: Stage) -> None:
    stage.provider.fate = FATES["smaller"]
    fleet = stage.fleet(nodes=2)
    with pytest.raises(CapacityError):
        simulate(fleet.start)

    assert len(stage.provider.instances) > 2
    assert fleet.cost(0.0).final().total_cost == pytest.approx(stage.provider.bill(), abs=0.01)


def test_machines_of_an_order_that_was_undone_count_too(stage: Stage) -> None:
    stage.provider = FakeProvider([replace(OFFER, spot=True)])
    stage.provider.fail("create", CapacityError("sold out"))
    final = simulate(lambda: stage.live(seconds=0.0, nodes=3, spot=Spot.Always(retries=1, interval=5)))

    assert len(stage.provider.instances) == 2 + 3
    assert final.total_cost == pytest.approx(stage.provider.bill()) == pytest.approx(5 * 60 / 3600 * 2.0)


def test_a_machine_of_an_order_that_could_not_be_undone_is_ended_with_the_pool_and_counts(stage: Stage) -> None:
    stage.provider.fail("create", AuthenticationError("expired"))
    stage.provider.fail("destroy", UnreachableError("no answer"), times=10_000)
    fleet = stage.fleet(nodes=2)
    with pytest.raises(TerminationError, match="fake-0 does not end"):
        simulate(fleet.start)

    assert stage.provider.alive == []
    assert "fake-0" not in {entry.instance_id for entry in stage.ledger.open_entries()}
    assert fleet.cost(0.0).final().total_cost == pytest.approx(stage.provider.bill(), abs=0.01)
    assert stage.provider.bill() > 0
