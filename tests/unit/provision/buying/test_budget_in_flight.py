"""What is being bought counts for what else may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.provision.buying.ledger import Ledger
from skyward.provision.fleet.machines import Machines
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider
from support.clock import FakeClock

SPEC = InstanceSpec(name="big", cpu=2, memory_gib=4)
DEAR = Offer(spec=SPEC, spot=True, price_per_hour=36.0, minimum_billed_s=60.0)


class Slow(FakeProvider):
    """Takes a while to launch."""

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        await asyncio.sleep(0.01)
        return await super().launch(offers, order)


async def test_machines_that_are_asked_for_at_the_same_time_do_not_cost_more_than_the_sum(tmp_path: Path) -> None:
    machines = Machines(
        Slow([DEAR]),
        parse_request(nodes=1, spot="always", max_cost=1.0),
        pool_id="p",
        publish=lambda _: None,
        ledger=Ledger(tmp_path / "ledger.db"),
        clock=FakeClock(),
    )
    asked = await asyncio.gather(*(machines.launch([rank]) for rank in range(4)), return_exceptions=True)
    await machines.end(machines.all)

    assert sum(isinstance(each, Exception) for each in asked) == 3
    assert len(machines.all) == 1
