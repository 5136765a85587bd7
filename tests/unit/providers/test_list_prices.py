"""List prices that are shipped: dated, with a source, and searched as a vendor's catalogue is."""

from __future__ import annotations

import datetime as dt

import pytest

from skyward.providers.list_prices import closest_sold, listed_offers, lists_of, most_sold, price_lists
from skyward.providers.registry import BUILT_IN
from skyward.request.accelerators import Accelerator, find_variant
from skyward.request.request import parse_request

DAY = dt.date(2027, 1, 1)


def names(provider: str, **wishes: object) -> list[str]:
    request = parse_request(**wishes, spot="if-available")  # type: ignore[arg-type]
    return [offer.spec.name for offer in listed_offers(provider, request, DAY)]


def test_every_list_has_a_provider_a_day_a_source_and_machines_with_a_price() -> None:
    for prices in price_lists():
        assert prices.provider in BUILT_IN
        assert dt.date(2026, 1, 1) < prices.as_of <= dt.datetime.now(tz=dt.UTC).date()
        assert len(prices.source) > 20
        for machine in prices.machines:
            known = [price for price in (machine.price_spot, machine.price_on_demand) if price is not None]
            assert known, machine
            assert all(0.005 < price < 500 for price in known), machine
            assert machine.accelerator is None or find_variant(machine.accelerator), machine
            assert (machine.accelerator is None) == (machine.accelerator_count == 0), machine


def test_machines_are_named_once_in_a_region() -> None:
    held = [(each.provider, each.region, machine.name) for each in price_lists() for machine in each.machines]

    assert len(held) == len(set(held))


@pytest.mark.parametrize(
    "provider,wishes,first",
    [
        ("aws", {"accelerator": "H100"}, "p5.4xlarge"),  # not the eight of another list
        ("aws", {"accelerator": "H100:4"}, "p5.48xlarge"),
        ("aws", {"accelerator": "L4", "cpu": 16}, "g6.4xlarge"),
        ("aws", {"cpu": 4, "memory": "16GB"}, "t3.xlarge"),
        ("aws", {"machine": "g6.xlarge"}, "g6.xlarge"),
        ("digitalocean", {"accelerator": "H200"}, "gpu-h200x1-141gb"),
        ("runpod", {"accelerator": "H100:4"}, "4x NVIDIA H100 PCIe"),
        ("runpod", {"accelerator": "H100-SXM:4"}, "4x NVIDIA H100 80GB HBM3"),
    ],
)
def test_the_cheapest_machine_that_suffices_comes_first(provider: str, wishes: dict[str, object], first: str) -> None:
    assert names(provider, **wishes)[0] == first


@pytest.mark.parametrize(
    "provider,wishes",
    [("aws", {"accelerator": "MI300X"}), ("aws", {"accelerator": "H100:16"}), ("nobody", {"cpu": 2}), ("vastai", {})],
)
def test_what_no_list_has_is_no_offer(provider: str, wishes: dict[str, object]) -> None:
    assert names(provider, **wishes) == []


def test_an_offer_has_the_age_the_region_and_the_markets_of_its_list() -> None:
    (spot, on_demand) = listed_offers("verda", parse_request(machine="1A6000.10V", spot="if-available"), DAY)
    (prices,) = lists_of("verda")

    assert (spot.spot, on_demand.spot) == (True, False)
    assert spot.price_per_hour is not None
    assert spot.price_per_hour < (on_demand.price_per_hour or 0.0)
    assert on_demand.price_age_s == (DAY - prices.as_of).days * 86400
    assert {offer.region for offer in listed_offers("aws", parse_request(machine="g6.xlarge"), DAY)} == {"us-east-1"}


def test_more_accelerators_than_wanted_are_remarked_on() -> None:
    (offer,) = listed_offers("aws", parse_request(accelerator="H100:4", spot="never"), DAY)

    assert offer.note.startswith("no 4 H100")


def test_what_nobody_sells_has_closest_names() -> None:
    assert most_sold(Accelerator(name="GH200")) == 0
    assert closest_sold(Accelerator(name="GH200"))[0] == "H200"
    assert most_sold(Accelerator(name="H100", count=16)) == 8
