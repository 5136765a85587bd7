"""Prices of single machines: the limit before and after the purchase, and costs at the price that is charged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import CapacityError, ConfigurationError
from skyward.events import Notice
from skyward.ledger.ledger import Ledger
from skyward.market.budget import PriceLimit, charged_price, notes_on_bill
from skyward.market.choose import Batch
from skyward.market.cost import Usage
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider
from support.fleets import FleetStage


def offer(name: str, price: float | None, **fields: Any) -> Offer:
    spec = InstanceSpec(name=name, cpu=2, memory_gib=4)
    return Offer(spec=spec, price_per_hour=price, on_demand_price_per_hour=price, **fields)


CHEAP, DEAR, UNKNOWN = offer("cheap", 1.0, region="here"), offer("dear", 3.0), offer("unknown", None)


def bought(as_offer: Offer, charged: float | None = None, **fields: Any) -> Instance:
    return Instance(
        id="i", key="k", state=InstanceState.RUNNING, offer=as_offer, price_per_hour=charged, ends_itself=True, **fields
    )


# --- the limit (pure) -------------------------------------------------------------------------------------------------


def among(limit: float, *offers: Offer, bought: Sequence[Instance] = ()) -> Sequence[Offer]:
    price_limit = PriceLimit(max_price_per_hour=limit)
    (batch,) = price_limit.among([Batch(nodes=1, offers=offers)], bought, provider="cloud")
    return batch.offers


@pytest.mark.parametrize(
    ("limit", "left"),
    [(1.0, (CHEAP,)), (2.9, (CHEAP,)), (3.0, (CHEAP, DEAR)), (float("inf"), (CHEAP, DEAR, UNKNOWN))],
)
def test_offers_up_to_the_limit_are_left(limit: float, left: Sequence[Offer]) -> None:
    assert among(limit, CHEAP, DEAR, UNKNOWN) == left


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ((CHEAP, DEAR), r"max_price_per_hour=0\.5 is below every .* is cheap on demand \(\$1 an hour\) in here"),
        ((DEAR, replace(CHEAP, spot=True), UNKNOWN), r"is cheap on the spot market \(\$1 an hour\) in here: raise"),
        ((UNKNOWN,), "max_price_per_hour needs a known price, and cloud gives none for unknown; leave"),
        ((replace(UNKNOWN, note="you may not ask"),), r"gives none for unknown \(you may not ask\); leave"),
    ],
)
def test_below_every_offer_the_error_names_the_cheapest(offers: Sequence[Offer], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        among(0.5, *offers)


def test_each_market_of_a_share_has_to_have_an_offer() -> None:
    batches = [Batch(nodes=1, offers=(DEAR,)), Batch(nodes=1, offers=(CHEAP,))]
    with pytest.raises(ConfigurationError, match="cheapest is dear on demand"):
        PriceLimit(max_price_per_hour=2).among(batches, (), provider="cloud")


@pytest.mark.parametrize(
    ("instance", "left"),
    [
        pytest.param(bought(CHEAP, 2.5), (DEAR,), id="the-offer-lies"),
        pytest.param(bought(replace(CHEAP, price_per_hour=0.9), 2.5), (DEAR,), id="offered-at-another-price"),
        pytest.param(bought(CHEAP, 2.5, host="7"), (DEAR,), id="others-come-first"),
        pytest.param(bought(CHEAP, 1.9), (CHEAP, DEAR), id="dearer-and-within-the-limit"),
        pytest.param(bought(CHEAP), (CHEAP, DEAR), id="nothing-read-back"),
    ],
)
def test_an_offer_that_turned_out_dearer_is_not_taken_again(instance: Instance, left: Sequence[Offer]) -> None:
    assert among(2.0, CHEAP, replace(DEAR, price_per_hour=1.9), bought=[instance]) == tuple(
        replace(each, price_per_hour=1.9) if each is DEAR else each for each in left
    )


def test_it_is_taken_again_where_there_is_no_other_and_its_host_is_avoided() -> None:
    assert among(2.0, CHEAP, bought=[bought(CHEAP, 2.5, host="7")]) == (CHEAP,)
    with pytest.raises(ConfigurationError, match=r"the cheapest is cheap on demand \(\$2\.5 an hour\) in here"):
        among(2.0, CHEAP, bought=[bought(CHEAP, 2.5, host="7"), bought(CHEAP, 2.5)])


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (bought(CHEAP), ""),
        (bought(CHEAP, 2.0), ""),
        (bought(CHEAP, 2.5), "costs $2.5 an hour, more than max_price_per_hour=2"),
        (bought(DEAR, 1.5), ""),
        (bought(UNKNOWN), ""),
    ],
)
def test_a_machine_has_to_end_that_is_charged_more_than_the_limit(instance: Instance, reason: str) -> None:
    assert PriceLimit(max_price_per_hour=2).excess(instance) == reason
    assert PriceLimit().excess(instance) == ""


@pytest.mark.parametrize(
    ("instance", "notes"),
    [
        (bought(CHEAP), 0),
        (bought(CHEAP, 1.0099), 0),
        (bought(CHEAP, 0.5), 0),
        (bought(CHEAP, 1.02), 1),
        (bought(UNKNOWN, 1.02), 0),
        (replace(bought(CHEAP), ends_itself=False), 1),
        (replace(bought(CHEAP, 1.02), ends_itself=False), 2),
        (replace(bought(offer("free", 0.0)), ends_itself=False), 0),
        (replace(bought(UNKNOWN), ends_itself=False), 1),
    ],
)
def test_remarks_on_a_bill(instance: Instance, notes: int) -> None:
    assert len(notes_on_bill("cloud", [instance, instance])) == notes


def test_machines_of_ones_own_need_no_remark_on_their_bill() -> None:
    assert notes_on_bill("ssh", [replace(bought(UNKNOWN), ends_itself=True)]) == []


def test_both_prices_and_the_remedies_are_named() -> None:
    dearer, endless = notes_on_bill("cloud", [replace(bought(CHEAP, 1.5), ends_itself=False)])

    assert "charges $1.5 an hour for cheap, offered at $1 an hour" in dearer
    assert "`skyward sweep`" in endless
    assert "next pool that opens with cloud" in endless


def test_a_price_that_is_read_back_counts_from_the_launch_and_saves_nothing_on_demand() -> None:
    usage = Usage.of(CHEAP, 0.0)

    assert usage.charged(None) is usage
    assert usage.charged(2.0).cost(3600) == 2.0
    assert usage.charged(2.0).savings(3600) == 0.0
    assert replace(usage, spot=True).charged(0.25).savings(3600) == 0.75


# --- the fleet --------------------------------------------------------------------------------------------------------


class Noting(FakeProvider):
    """Notes what it is asked to launch."""

    def __init__(self, offers: Sequence[Offer], **options: Any) -> None:
        super().__init__(offers, **options)
        self.orders: list[LaunchOrder] = []

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        self.orders.append(order)
        return await super().launch(offers, order)


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: FakeProvider = field(default_factory=lambda: Noting([CHEAP, DEAR]))

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


async def test_nothing_is_bought_below_every_offer(stage: Stage) -> None:
    with pytest.raises(ConfigurationError, match=r"the cheapest is cheap on demand \(\$1 an hour\) in here"):
        await stage.fleet(max_price_per_hour=0.99, spot="never").start()

    assert "launch" not in stage.provider.calls
    assert stage.ledger.entries() == ()


async def test_machines_that_cost_nothing_are_within_every_limit(stage: Stage) -> None:
    stage.provider = FakeProvider([offer("mine", 0.0)])
    await stage.open_and_close(max_price_per_hour=0.01)

    assert len(stage.provider.instances) == 2
    assert stage.notices() == []


async def test_a_provider_that_places_an_offer_at_another_price_may_not_exceed_the_limit(stage: Stage) -> None:
    await stage.open_and_close(max_price_per_hour=2.0, spot="never", timeout=60)

    assert isinstance(stage.provider, Noting)
    (order,) = stage.provider.orders
    zones = [replace(CHEAP, zone="a", price_per_hour=price) for price in (1.5, 2.5, None)]
    assert [order.lasts_s(zone) for zone in zones] == [60, 0, 0]


@pytest.mark.parametrize("pending_looks", [0, 1])
async def test_costs_and_the_ledger_have_the_price_that_is_charged_from_the_launch(
    stage: Stage, pending_looks: int
) -> None:
    stage.provider = FakeProvider([CHEAP], pending_looks=pending_looks)
    stage.provider.prices["cheap"] = 1.5
    fleet = stage.fleet(spot="never")
    await fleet.start()
    prices = [entry.purchase.price_per_hour for entry in stage.ledger.open_entries()]
    stage.clock.advance(3600 - stage.clock.elapsed())
    cost = fleet.cost(stage.clock.elapsed())
    await fleet.stop()

    assert prices == [1.5, 1.5]
    assert (cost.total, cost.update().hourly_rate) == (3.0, 3.0)
    assert stage.notices() == [
        "fake charges $1.5 an hour for cheap, offered at $1 an hour: that counts in costs and limits"
    ]


async def test_max_cost_counts_at_the_price_that_is_charged(stage: Stage) -> None:
    stage.provider = FakeProvider([CHEAP])
    stage.provider.prices["cheap"] = 2.0
    await stage.open_and_close(nodes=1, spot="never", max_cost=1.0)

    (node,) = stage.nodes.opened
    assert node.config is not None
    assert node.config.timeout_s == 1800 - 30  # half an hour at that price, less the time to end alone


async def test_a_machine_that_is_charged_more_than_the_limit_does_not_stay(stage: Stage) -> None:
    stage.provider.prices["cheap"] = 2.5
    with pytest.raises((CapacityError, ConfigurationError), match=r"2\.5 an hour"):
        await stage.fleet(nodes=1, spot="never", max_price_per_hour=2.0).start()

    assert stage.provider.alive == []
    assert stage.ledger.open_entries() == ()


@pytest.mark.parametrize("pending_looks", [0, 1])
async def test_the_next_offer_is_taken_instead_of_a_machine_that_turned_out_dearer(
    stage: Stage, pending_looks: int
) -> None:
    stage.provider = FakeProvider([CHEAP, replace(DEAR, price_per_hour=1.9)], pending_looks=pending_looks)
    stage.provider.prices["cheap"] = 2.5
    fleet = stage.fleet(spot="never", max_price_per_hour=2.0)
    await fleet.start()
    async with asyncio.timeout(10):
        while len(stage.provider.alive) > 2:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)
    kept = [stage.provider.instances[each].offer.spec.name for each in stage.provider.alive]
    await fleet.stop()

    assert kept == ["dear", "dear"]
    assert sorted(each.offer.spec.name for each in stage.provider.instances.values()) == ["cheap"] * 2 + ["dear"] * 2
    assert sum("more than max_price_per_hour=2" in told for told in stage.notices()) == 2
    assert stage.ledger.open_entries() == ()


# --- machines that cannot end their own bill ------------------------------------------------------------------------


async def test_one_notice_a_pool_says_that_machines_cannot_end_their_bill(stage: Stage) -> None:
    stage.provider.ends_itself = False
    fleet = stage.fleet(spot="never")
    await fleet.start()
    await fleet.scale(3, ())
    listed = stage.ledger.billed_entries("fake")
    await fleet.stop()

    (told,) = stage.notices()
    assert "cannot end their own bill" in told
    assert [entry.node for entry in listed] == [0, 1, 2]


async def test_machines_that_end_themselves_are_not_listed_for_a_sweep(stage: Stage) -> None:
    fleet = stage.fleet(spot="never")
    await fleet.start()
    listed = stage.ledger.billed_entries("fake")
    await fleet.stop()

    assert (listed, stage.notices()) == ((), [])


async def test_a_crash_during_the_create_call_leaves_an_entry_for_the_next_sweep(stage: Stage) -> None:
    seen: list[int] = []

    class Crashing(FakeProvider):
        async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
            seen.append(len(stage.ledger.billed_entries("fake")))
            return await super().launch(offers, order)

    stage.provider = Crashing([CHEAP])
    await stage.open_and_close(spot="never")

    assert seen == [2]


# --- the timeout ------------------------------------------------------------------------------------------------------


class Late(FakeProvider):
    """Whose machines take a while to launch."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__([CHEAP])
        self._stage = stage
        self._name = name
        self.own_machines = name != "cloud"

    @property
    def name(self) -> Any:
        return self._name

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        self._stage.clock.advance(5)  # before the launch: it does not count
        return await super().offers(request)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        self._stage.clock.advance(100)
        return await super().launch(offers, order)


@pytest.mark.parametrize(("name", "left_s"), [("cloud", 900), ("ssh", 1000), ("local", 1000)])
async def test_the_timeout_counts_from_the_launch_of_what_is_rented(stage: Stage, name: str, left_s: float) -> None:
    stage.provider = Late(stage, name)
    await stage.open_and_close(nodes=1, spot="never", timeout=1000)

    (node,) = stage.nodes.opened
    assert node.config is not None
    assert node.config.timeout_s == left_s
    assert (node.config.bought_cpu, node.config.bought_memory_bytes) == ((2, 4 << 30) if name == "cloud" else (0, 0))


def test_the_price_is_the_charged_one_else_the_offered_one() -> None:
    assert [charged_price(each) for each in (bought(CHEAP), bought(CHEAP, 2.0), bought(UNKNOWN))] == [1.0, 2.0, None]
