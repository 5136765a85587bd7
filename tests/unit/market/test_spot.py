"""Spot machines: how insistently they are asked for, what is taken instead, and what the user is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, CapacityError
from skyward.events import InstanceLaunching, Notice
from skyward.ledger.ledger import Ledger
from skyward.market.choose import choose
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import Spot, parse_request
from skyward.testing.provider import FakeProvider
from support.fleets import FleetStage, until

SPEC = InstanceSpec(name="big", cpu=2, memory_gib=4)
ON_DEMAND = Offer(spec=SPEC, price_per_hour=3.0, on_demand_price_per_hour=3.0)
ON_SPOT = Offer(spec=SPEC, spot=True, price_per_hour=1.0, on_demand_price_per_hour=3.0)
OTHER = Offer(spec=InstanceSpec(name="small", cpu=2, memory_gib=4), spot=True, price_per_hour=1.5)


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: FakeProvider = field(default_factory=lambda: FakeProvider([ON_DEMAND, ON_SPOT]))

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]

    def bought(self) -> list[Offer]:
        return [instance.offer for instance in self.provider.instances.values()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


async def test_always_asks_again_as_often_and_as_slowly_as_it_says(stage: Stage) -> None:
    stage.provider.fail("launch", CapacityError("sold out"), times=3)
    await stage.open_and_close(spot=Spot.Always(retries=3, interval=20))

    assert stage.provider.calls.count("launch") == 4
    assert stage.clock.slept_s[:3] == [20, 20, 20]
    assert stage.bought() == [ON_SPOT, ON_SPOT]
    assert sum(isinstance(event, InstanceLaunching) for event in stage.events) == 1
    assert len(stage.ledger.entries()) == 2
    assert stage.ledger.open_entries() == ()


async def test_what_always_does_not_get_in_the_end_is_an_error_that_says_how_often_it_was_tried(stage: Stage) -> None:
    stage.provider.fail("launch", CapacityError("sold out"), times=100)
    with pytest.raises(CapacityError, match=r"for 10 s, .*sold out.*if-available"):
        await stage.fleet(spot=Spot.Always(retries=2, interval=5)).start()

    assert stage.provider.calls.count("launch") == 3
    assert stage.bought() == []
    assert stage.ledger.open_entries() == ()


async def test_only_a_lack_of_machines_is_asked_about_again(stage: Stage) -> None:
    stage.provider.fail("launch", AuthenticationError("who are you?"))
    with pytest.raises(AuthenticationError):
        await stage.fleet(spot="always").start()

    assert stage.provider.calls.count("launch") == 1


async def test_on_demand_is_asked_for_once(stage: Stage) -> None:
    stage.provider.fail("launch", CapacityError("sold out"), times=100)
    with pytest.raises(CapacityError, match="another accelerator, machine, region or provider"):
        await stage.fleet(spot="never").start()

    assert stage.provider.calls.count("launch") == 1


async def test_what_falls_back_to_on_demand_says_what_it_costs_instead(stage: Stage) -> None:
    stage.provider.sold_out = {ON_SPOT}
    await stage.open_and_close(spot="if-available")

    assert stage.bought() == [ON_DEMAND, ON_DEMAND]
    expected = "asked for big on the spot market ($1 an hour), got big on demand ($3 an hour)"
    assert stage.notices() == [f"{expected}; they can cost $6.00 until timeout"]


async def test_nothing_is_said_of_machines_that_are_what_was_asked_for(stage: Stage) -> None:
    await stage.open_and_close(spot="if-available")

    assert stage.bought() == [ON_SPOT, ON_SPOT]
    assert stage.notices() == []


async def test_nothing_is_said_of_machines_that_cost_nothing(stage: Stage) -> None:
    free = [replace(offer, spot=False, price_per_hour=0.0) for offer in (OTHER, ON_DEMAND)]
    stage.provider = FakeProvider(free)
    stage.provider.sold_out = {free[0]}
    await stage.open_and_close(spot="never")

    assert stage.bought() == [free[1], free[1]]
    assert stage.notices() == []


async def test_another_type_is_told_of_with_what_there_is_to_know_of_it(stage: Stage) -> None:
    noted = Offer(spec=OTHER.spec, spot=True, note="it has no disk")
    stage.provider = FakeProvider([ON_SPOT, noted])
    stage.provider.sold_out = {ON_SPOT}
    await stage.open_and_close(nodes=1)

    got = "small on the spot market (price not known)"
    assert stage.notices() == [
        f"asked for big on the spot market ($1 an hour), got {got}",
        "it has no disk",
        f"{got} counts as nothing: the pool's real cost is not known",
    ]


async def test_a_share_is_asked_for_again_and_never_bought_on_demand(stage: Stage) -> None:
    stage.provider.sold_out = {ON_SPOT}
    with pytest.raises(CapacityError, match=r"lower the share: spot=0\.5 asks for 1 of 2 nodes"):
        await stage.fleet(spot=0.5).start()

    assert stage.provider.calls.count("launch") == 1 + 11
    assert stage.bought() == [ON_DEMAND]
    assert stage.provider.alive == []


async def test_a_note_of_an_offer_is_told_once_per_pool_and_before_it_is_bought(stage: Stage) -> None:
    stage.provider = FakeProvider([Offer(spec=SPEC, spot=True, price_per_hour=1.0, note="it comes in eights")])
    fleet = stage.fleet(nodes=1)
    await fleet.start()
    await fleet.scale(2, ())
    await fleet.stop()

    assert stage.notices() == ["it comes in eights"]
    kinds = [type(event) for event in stage.events]
    assert kinds.index(Notice) < kinds.index(InstanceLaunching)


@pytest.mark.parametrize(
    ("beside", "nodes", "on_spot"),
    [
        ([ON_DEMAND, ON_DEMAND, ON_SPOT], 1, 1),
        ([ON_DEMAND, ON_SPOT, ON_SPOT], 1, 0),
        ([ON_DEMAND, ON_DEMAND, ON_SPOT, ON_SPOT], 2, 1),
        ([ON_SPOT] * 4, 2, 0),
        ([ON_DEMAND] * 4, 2, 2),
        ([], 4, 2),
    ],
)
def test_a_share_is_one_of_the_whole_fleet(beside: list[Offer], nodes: int, on_spot: int) -> None:
    choice = choose(parse_request(spot=0.5), [ON_DEMAND, ON_SPOT], nodes=nodes, provider="cloud", beside=beside)

    assert sum(batch.nodes for batch in choice.batches if batch.offers[0].spot) == on_spot
    assert sum(batch.nodes for batch in choice.batches) == nodes


@pytest.mark.parametrize(("lost", "spot"), [(0, False), (3, True)])
async def test_a_lost_node_is_replaced_by_its_like(stage: Stage, lost: int, spot: bool) -> None:
    fleet = stage.fleet(nodes=4, spot=0.5)
    await fleet.start()
    assert [offer.spot for offer in stage.bought()] == [False, False, True, True]
    stage.lose(lost)
    await until(lambda: len(stage.bought()) > 4)
    await fleet.stop()

    assert stage.bought()[-1].spot is spot
