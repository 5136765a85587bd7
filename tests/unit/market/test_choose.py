"""Which offers are taken, in which order, and what the user is told."""

from __future__ import annotations

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
