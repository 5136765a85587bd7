"""Interruptions make markets more expensive: which offers come first, for how long, and what the user is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from skyward.errors import CapacityError
from skyward.events import Notice
from skyward.ledger.ledger import Ledger
from skyward.market.choose import choose
from skyward.market.interruptions import Interruptions, SpotLife
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Preempting
from support.fleets import FleetStage, until


def offer(region: str, price: float | None, *, spot: bool = True, machine: str = "v100", provider: str = "") -> Offer:
    return Offer(
        spec=InstanceSpec(name=machine, cpu=8, memory_gib=61),
        region=region,
        spot=spot,
        price_per_hour=price,
        on_demand_price_per_hour=3.0,
        provider=provider,
    )


NORTH, SOUTH, ON_DEMAND = offer("north", 1.0), offer("south", 1.05), offer("north", 3.0, spot=False)


def lives(of: Offer, count: int, *, hours: float, hours_ago: float = 0.0, preempted: bool = True) -> list[SpotLife]:
    life = SpotLife(offer=of, began_h=hours + hours_ago, ended_h=hours_ago, preempted=preempted)
    return [life] * count


@pytest.mark.parametrize(
    ("seen", "an_hour"),
    [
        ([], 0.05),
        (lives(NORTH, 1, hours=0), 0.55),
        (lives(NORTH, 4, hours=0), 2.05),
        (lives(NORTH, 1, hours=8, preempted=False), 0.0129),
        (lives(NORTH, 1, hours=0, hours_ago=8), 0.3),
        (lives(NORTH, 1, hours=0, hours_ago=80), 0.0505),
        (lives(SOUTH, 9, hours=0), 0.05),
        (lives(offer("north", 2.0, machine="h100"), 9, hours=0), 0.05),
        (lives(offer("north", 0.7), 1, hours=0), 0.55),
        (lives(offer("north", 1.0, provider="another"), 9, hours=0), 0.05),
    ],
)
def test_a_market_is_expected_to_go_on_as_it_did_in_the_last_hours(seen: list[SpotLife], an_hour: float) -> None:
    assert Interruptions(tuple(seen)).an_hour(NORTH) == pytest.approx(an_hour, rel=0.01)


def test_no_machine_on_demand_is_expected_to_be_interrupted() -> None:
    assert Interruptions(tuple(lives(NORTH, 9, hours=0))).an_hour(ON_DEMAND) == 0


@pytest.mark.parametrize(
    ("spot", "offers", "seen", "order"),
    [
        ("always", [SOUTH, NORTH], [], [NORTH, SOUTH]),
        ("always", [SOUTH, NORTH], lives(NORTH, 1, hours=0.2), [SOUTH, NORTH]),
        ("always", [SOUTH, NORTH], lives(NORTH, 1, hours=30), [NORTH, SOUTH]),
        ("always", [SOUTH, NORTH], lives(NORTH, 4, hours=0, hours_ago=48), [NORTH, SOUTH]),
        ("always", [ON_DEMAND, NORTH], lives(NORTH, 99, hours=0), [NORTH]),
        ("if-available", [ON_DEMAND, NORTH], [], [NORTH, ON_DEMAND]),
        ("if-available", [ON_DEMAND, NORTH], lives(NORTH, 9, hours=0.2), [NORTH, ON_DEMAND]),
        ("if-available", [ON_DEMAND, NORTH], lives(NORTH, 80, hours=0.05), [ON_DEMAND, NORTH]),
        ("if-available", [ON_DEMAND, offer("north", 2.9)], [], [offer("north", 2.9), ON_DEMAND]),
        ("if-available", [ON_DEMAND, offer("north", 2.9)], lives(NORTH, 1, hours=1), [ON_DEMAND, offer("north", 2.9)]),
        ("if-available", [ON_DEMAND, offer("north", 3.2)], [], [ON_DEMAND, offer("north", 3.2)]),
        ("if-available", [ON_DEMAND, offer("north", None)], [], [ON_DEMAND, offer("north", None)]),
        ("if-available", [offer("east", None, spot=False), offer("east", None)], [], None),
    ],
)
def test_offers_are_ranked_by_the_price_of_an_hour_of_work(
    spot: str, offers: list[Offer], seen: list[SpotLife], order: list[Offer] | None
) -> None:
    choice = choose(parse_request(spot=spot), offers, nodes=1, provider="cloud", seen=Interruptions(tuple(seen)))

    assert [list(batch.offers) for batch in choice.batches] == [order or offers[::-1]]


@pytest.mark.parametrize(
    ("prefer", "seen", "chosen"),
    [
        ("price", [], ["b", "a"]),
        ("price", lives(offer("", 1.0, provider="b"), 40, hours=0), ["a"]),
        ("order", [], ["a"]),
    ],
)
def test_in_place_of_a_node_on_demand_only_spot_is_bought_that_costs_less(
    prefer: Literal["price", "order"], seen: list[SpotLife], chosen: list[str]
) -> None:
    offers = [offer("", 2.0, provider="a"), offer("", 1.0, provider="b"), offer("", 2.9, provider="a"), ON_DEMAND]
    request = parse_request(spot="if-available", prefer=prefer, spread=True)
    node = offer("", 3.0, spot=False, provider="a")
    choice = choose(request, offers, nodes=1, provider="", seen=Interruptions(tuple(seen)), instead_of=node)

    assert [each.provider for each in choice.batches[0].offers] == chosen
    with pytest.raises(CapacityError):
        choose(request, offers[2:], nodes=1, provider="", seen=Interruptions(tuple(seen)), instead_of=node)


@pytest.mark.parametrize(
    ("price", "seen", "note"),
    [
        (1.0, lives(NORTH, 1, hours=0.2), True),
        (1.0, lives(SOUTH, 1, hours=0.2), False),
        (1.2, lives(NORTH, 1, hours=0.2), False),
    ],
)
def test_the_user_is_told_why_the_cheapest_machine_comes_later(price: float, seen: list[SpotLife], note: bool) -> None:
    offers = [offer("north", price), SOUTH]
    choice = choose(parse_request(), offers, nodes=1, provider="cloud", seen=Interruptions(tuple(seen)))

    told = (
        "v100 on the spot market ($1 an hour) in north comes after v100 on the spot market ($1.05 an hour) in south: "
        "with 1 of 1 machines preempted, an hour of work there costs $1.13"
    )
    assert choice.note == (told if note else "")


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: FakeProvider = field(default_factory=lambda: FakeProvider([NORTH, SOUTH, ON_DEMAND]))

    async def preempt(self, rank: int) -> None:
        """Announce that a node's machine is taken back, and wait until another is a node."""
        before = len(self.engine.attached)
        node = next(node for node in reversed(self.nodes.opened) if node.rank == rank)
        node.hear(Preempting(seconds_left=60))
        await until(lambda: len(self.engine.attached) > before)

    def bought(self) -> list[str]:
        return [each.offer.region if each.offer.spot else "on demand" for each in self.provider.instances.values()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


async def test_replacements_and_new_nodes_come_from_the_market_that_interrupts_less(stage: Stage) -> None:
    async with stage.kept(nodes=2) as fleet:
        await stage.preempt(1)
        await fleet.scale(3, ())

        assert stage.bought() == ["north", "north", "south", "south"]
        assert sum("comes after" in event.message for event in stage.events if isinstance(event, Notice)) == 1


async def test_a_market_that_interrupted_long_ago_is_the_cheapest_again(stage: Stage) -> None:
    async with stage.kept(nodes=2, timeout=7 * 24 * 3600) as fleet:
        await stage.preempt(1)
        stage.clock.advance(24 * 3600)
        await fleet.scale(3, ())

        assert stage.bought() == ["north", "north", "south", "north"]


class TakesTheFirstBack(FakeProvider):
    """Its first machine is taken back before it runs."""

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        made = super()._make(offer, key, order)
        if len(self.instances) == 1:
            self.preempt(made.id)
        return self.instances[made.id]


async def test_a_machine_that_is_taken_back_while_it_starts_counts_too(stage: Stage) -> None:
    stage.provider = TakesTheFirstBack([NORTH, SOUTH])
    await stage.open_and_close(nodes=1)

    assert stage.bought() == ["north", "south"]


async def test_a_node_that_fails_for_another_reason_says_nothing_of_its_market(stage: Stage) -> None:
    async with stage.kept(nodes=2):
        stage.lose(1)
        await until(lambda: len(stage.engine.attached) > 2)

        assert stage.bought() == ["north"] * 3
