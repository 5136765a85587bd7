"""Offers: of many the cheapest, and more accelerators than asked for are said."""

from __future__ import annotations

from skyward.providers._common.machine_catalogue import cheapest_offers
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request


def offer(price: float | None, *, spot: bool = False, count: int = 0, cpu: int = 4, note: str = "") -> Offer:
    name = "H100" if count else None
    spec = InstanceSpec(name=f"x{count}", cpu=cpu, memory_gib=8, accelerator=name, accelerator_count=count)
    return Offer(spec=spec, spot=spot, price_per_hour=price, note=note)


def test_the_ten_cheapest_of_each_market_are_offered_and_unknown_prices_come_last() -> None:
    prices = [None, *(float(price) for price in range(14, 0, -1))]
    found = cheapest_offers(
        [offer(price, spot=spot) for price in prices for spot in (False, True)], parse_request(), vendor="Cloud"
    )
    assert [(each.spot, each.price_per_hour) for each in found] == [
        (spot, float(price)) for spot in (True, False) for price in range(1, 11)
    ]

    few = cheapest_offers([offer(None), offer(2.0)], parse_request(), vendor="Cloud")
    assert [each.price_per_hour for each in few] == [2.0, None]


def test_at_the_same_price_the_smaller_machine_comes_first() -> None:
    found = cheapest_offers([offer(1.0, cpu=8), offer(1.0, cpu=4)], parse_request(), vendor="Cloud")
    assert [each.spec.cpu for each in found] == [4, 8]


def test_more_accelerators_than_asked_for_are_said_before_the_vendors_note() -> None:
    request = parse_request(accelerator="H100")
    offers = [offer(20.0, count=8, note="no stock seen"), offer(30.0, count=1), offer(None, count=8)]
    eight, one, unknown = cheapest_offers(offers, request, vendor="Cloud")
    assert eight.note == "no single H100 on Cloud: x8 has 8, $20.00/h; no stock seen"
    assert unknown.note == "no single H100 on Cloud: x8 has 8, price unknown"
    assert one.note == ""

    (named,) = cheapest_offers([offer(20.0, count=8)], parse_request(machine="x8", accelerator="H100"), vendor="Cloud")
    assert named.note == ""
