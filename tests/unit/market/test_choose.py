"""Which offers are taken, in which order, and what the user is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyward.errors import CapacityError
from skyward.market.choose import choose
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import Spot, parse_request


def offer(name: str, price: float | None, *, spot: bool = False, memory_gib: float = 8) -> Offer:
    return Offer(spec=InstanceSpec(name=name, cpu=4, memory_gib=memory_gib), spot=spot, price_per_hour=price)


MARKET = (offer("dear", 5.0), offer("cheap", 2.0), offer("dear", 1.5, spot=True), offer("cheap", 0.5, spot=True))


def batches(spot: object, *, nodes: int = 10, offers: tuple[Offer, ...] = MARKET) -> list[tuple[int, list[str]]]:
    choice = choose(parse_request(spot=spot), offers, nodes=nodes, provider="cloud")
    return [
        (batch.nodes, [f"{each.spec.name}{'*' if each.spot else ''}" for each in batch.offers])
        for batch in choice.batches
    ]


@pytest.mark.parametrize(
    ("spot", "expected"),
    [
        ("always", [(10, ["cheap*", "dear*"])]),
        ("if-available", [(10, ["cheap*", "dear*", "cheap", "dear"])]),
        ("never", [(10, ["cheap", "dear"])]),
        (0.8, [(2, ["cheap", "dear"]), (8, ["cheap*", "dear*"])]),
        (0.75, [(2, ["cheap", "dear"]), (8, ["cheap*", "dear*"])]),
        (0.1, [(9, ["cheap", "dear"]), (1, ["cheap*", "dear*"])]),
        (1.0, [(10, ["cheap*", "dear*"])]),
        (0.0, [(10, ["cheap", "dear"])]),
    ],
)
def test_the_strategy_decides_how_many_nodes_get_which_offers(
    spot: object, expected: list[tuple[int, list[str]]]
) -> None:
    assert batches(spot) == expected


def at(provider: str, price: float, *, region: str = "", island: bool = True, spot: bool = False) -> Offer:
    spec = InstanceSpec(name="m", cpu=4, memory_gib=8)
    return Offer(spec=spec, provider=provider, region=region, price_per_hour=price, island=island, spot=spot)


OWN, EAST, WEST = (
    at("ssh", 0.0),
    at("aws", 2.0, region="east", island=False),
    at("aws", 1.5, region="west", island=False),
)
VAST, VAST_SPOT, EAST_SPOT = at("vast", 1.0), at("vast", 0.4, spot=True), replace(EAST, spot=True, price_per_hour=0.6)


@pytest.mark.parametrize(
    ("request_", "offers", "order"),
    [
        ({"spot": "never"}, [EAST, VAST, WEST], [VAST, WEST, EAST]),
        ({"spot": "never", "prefer": "order"}, [EAST, WEST, VAST], [WEST, EAST, VAST]),
        ({"prefer": "order"}, [OWN, VAST_SPOT, VAST], [OWN, VAST_SPOT]),
        # Who has no spot market takes part with what he has; who has one does not.
        ({}, [OWN, WEST, VAST, VAST_SPOT], [OWN, VAST_SPOT, WEST]),
        ({}, [EAST_SPOT, EAST, VAST], [EAST_SPOT, VAST]),
        ({}, [EAST, VAST], [VAST, EAST]),
    ],
)
def test_offers_of_several_providers_are_one_list(
    request_: dict[str, Any], offers: list[Offer], order: list[Offer]
) -> None:
    (batch,) = choose(parse_request(**request_), offers, nodes=2, provider="all").batches

    assert list(batch.offers) == order
    assert batch.retries == 0


@pytest.mark.parametrize(
    ("failed", "order"),
    [
        ([], [VAST, WEST, EAST]),
        ([VAST], [WEST, EAST, VAST]),
        ([VAST, WEST], [EAST, VAST, WEST]),
        ([WEST, EAST], [VAST, WEST, EAST]),
        ([VAST, WEST, EAST], [VAST, WEST, EAST]),
    ],
)
def test_what_did_not_come_up_is_tried_last(failed: list[Offer], order: list[Offer]) -> None:
    request = parse_request(spot="never")
    (batch,) = choose(request, [EAST, VAST, WEST], nodes=1, provider="all", failed=failed).batches

    assert list(batch.offers) == order


def test_a_provider_that_is_alone_is_insisted_on() -> None:
    (batch,) = choose(parse_request(), [EAST_SPOT, EAST], nodes=1, provider="all").batches

    assert batch.retries == 10


@pytest.mark.parametrize(
    ("beside", "spread", "order"),
    [
        ([EAST], False, [EAST]),
        ([EAST], True, [VAST, WEST, EAST]),
        ([VAST], False, [VAST, WEST, EAST]),  # it reaches no other anyway
        ([EAST, VAST], False, [VAST, WEST, EAST]),
    ],
)
def test_further_nodes_stay_in_reach_of_the_others(beside: list[Offer], spread: bool, order: list[Offer]) -> None:
    request = parse_request(spot="never", spread=spread)
    (batch,) = choose(request, [EAST, VAST, WEST], nodes=1, provider="all", beside=beside).batches

    assert list(batch.offers) == order


def test_nodes_that_stay_together_say_how_they_need_not() -> None:
    with pytest.raises(CapacityError, match=r"aws east offers no machine.*spread=True lets them come from anywhere"):
        choose(parse_request(spot="never"), [VAST, WEST], nodes=1, provider="all", beside=[EAST])


def test_a_share_is_not_rounded_up_by_floating_point() -> None:
    assert batches(0.1, nodes=30)[1][0] == 3


@pytest.mark.parametrize(
    ("spot", "noted"), [("always", False), ("if-available", False), (0.5, True), (Spot.Always(retries=2), True)]
)
def test_without_a_spot_market_everything_is_on_demand_and_said_so_if_spot_was_asked_for(
    spot: object, noted: bool
) -> None:
    on_demand = tuple(each for each in MARKET if not each.spot)
    choice = choose(parse_request(spot=spot), on_demand, nodes=2, provider="cloud")

    assert sum(batch.nodes for batch in choice.batches) == 2
    assert ("cloud has no spot market" in choice.note) == noted


def test_nothing_is_said_when_the_strategy_is_kept() -> None:
    assert choose(parse_request(spot="always"), MARKET, nodes=1, provider="cloud").note == ""


def test_equal_prices_go_to_the_smaller_machine_and_unknown_prices_come_last() -> None:
    offers = (offer("unknown", None), offer("large", 1.0, memory_gib=64), offer("small", 1.0, memory_gib=4))

    assert batches("never", offers=offers) == [(10, ["small", "large", "unknown"])]


def test_a_strategy_that_nothing_satisfies_is_an_error_not_a_dearer_machine() -> None:
    with pytest.raises(CapacityError, match="cloud offers no on-demand machine"):
        batches("never", offers=tuple(each for each in MARKET if each.spot))


def test_no_offers_at_all_are_an_error() -> None:
    with pytest.raises(CapacityError, match="try another"):
        batches("always", offers=())
