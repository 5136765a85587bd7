"""What is being bought counts for what else may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import UnreachableError
from skyward.events import Notice
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
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


class Noting(FakeProvider):
    """Notes for how long each machine may live."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        super().__init__(offers)
        self.caps: list[tuple[Offer, float]] = []

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        made = await super().launch(offers, order)
        self.caps += [(each.offer, order.lasts_s(each.offer)) for each in made]
        return made


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


async def test_a_machine_that_an_unanswered_create_may_have_made_counts_for_ten_minutes(tmp_path: Path) -> None:
    provider = Noting([DEAR])
    provider.fail("create", UnreachableError("no answer"))
    machines = Machines(
        provider,
        parse_request(nodes=1, spot="always", max_cost=7.0, timeout=10**6),
        pool_id="p",
        publish=lambda _: None,
        ledger=Ledger(tmp_path / "ledger.db"),
        clock=FakeClock(),
    )
    await machines.launch([0])

    assert 0 < machines.timeout_s() < (7.0 - 600 * 0.01) / 0.01
    assert provider.caps[0][1] <= (7.0 - 600 * 0.01) / 0.01
    await machines.end(machines.all)


CHEAP = Offer(spec=replace(SPEC, name="cheap"), spot=True, price_per_hour=3.6)


class Mixed(Noting):
    """Has one cheap machine, and many dear ones."""

    async def _create(self, order: LaunchOrder, offer: Offer, key: str) -> Instance:
        if any(each.offer == CHEAP for each in self.instances.values()):
            self.sold_out.add(CHEAP)
        return await super()._create(order, offer, key)


@pytest.mark.parametrize("nodes", [2, 3, 5])
async def test_the_lives_of_an_order_of_several_offers_cost_no_more_than_the_sum(tmp_path: Path, nodes: int) -> None:
    """Each is allowed as if all were bought as its own offer: no more than its share."""
    provider, notices = Mixed([CHEAP, DEAR]), list[str]()
    machines = Machines(
        provider,
        parse_request(nodes=nodes, spot="always", max_cost=10.0, timeout=10**6),
        pool_id="p",
        publish=lambda event: notices.append(event.message) if isinstance(event, Notice) else None,
        ledger=Ledger(tmp_path / "ledger.db"),
        clock=FakeClock(),
    )
    await machines.launch(range(nodes))
    await machines.end(machines.all)

    assert sorted(offer.spec.name for offer, _ in provider.caps) == [*["big"] * (nodes - 1), "cheap"]
    spent = sum((offer.price_per_hour or 0.0) * seconds / 3600 for offer, seconds in provider.caps)
    assert 8.0 < spent <= 10.0
    (notice,) = notices
    assert notice.startswith("asked for cheap on the spot market ($3.6 an hour), got big on the spot market")
    assert notice.endswith(f"for {nodes - 1} of {nodes} nodes")
