"""What a pool says that it has cost is what its provider bills, machines that were bought in vain included."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from skyward.errors import CapacityError, UnreachableError
from skyward.providers.base import InstanceState, Offer
from skyward.provision.buying.ledger import Ledger
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage

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


@pytest.fixture
def stage(tmp_path: Path) -> FleetStage:
    return FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([OFFER]))


@pytest.mark.parametrize("fates", [[name] for name in FATES] + [[*FATES]], ids=[*FATES, "all"])
async def test_the_final_cost_is_the_bill_to_the_cent(stage: FleetStage, fates: list[str]) -> None:
    stage.provider.fates.extend(FATES[name] for name in fates)
    stage.provider.fail("create", UnreachableError("no answer"), done=True)
    fleet = stage.fleet(nodes=len(fates) + 1, max_price_per_hour=5.0, timeout=7200)
    await fleet.start()
    async with asyncio.timeout(10):
        while len(fleet.unended()) > len(fates) + 1:  # noqa: ASYNC110 - those bought in vain end in the background
            await asyncio.sleep(0.001)
    stage.clock.advance(1234.5)
    await fleet.stop()

    final = fleet.cost(stage.clock.elapsed()).final()
    assert stage.provider.alive == []
    assert final.total_cost == pytest.approx(stage.provider.bill(), abs=0.01)
    assert final.total_cost > (len(fates) + 1) * 2.0 * 1234 / 3600


async def test_a_pool_that_does_not_open_has_cost_what_is_billed(stage: FleetStage) -> None:
    stage.provider.fate = FATES["smaller"]
    fleet = stage.fleet(nodes=2)
    with pytest.raises(CapacityError):
        await fleet.start()

    final = fleet.cost(stage.clock.elapsed()).final()
    assert len(stage.provider.instances) > 2
    assert final.total_cost == pytest.approx(stage.provider.bill(), abs=0.01)
