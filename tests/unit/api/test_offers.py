"""``sky.offers``: machine types and prices, from Python."""

from __future__ import annotations

import asyncio

import pytest

import skyward as sky
from skyward.api.offers import Offers
from skyward.errors import ConfigurationError
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider


def offer(name: str, price: float | None, *, spot: bool = False) -> Offer:
    return Offer(spec=InstanceSpec(name=name, cpu=4, memory_gib=16), spot=spot, price_per_hour=price)


PROVIDER = FakeProvider([offer("dear", 3.0), offer("spot", 2.5), offer("spot", 1.0, spot=True), offer("unknown", None)])


def test_types_come_once_with_both_prices_the_cheapest_first() -> None:
    found = sky.offers(PROVIDER)

    assert [(spec.name, spec.price_spot, spec.price_on_demand) for spec in found] == [
        ("spot", 1.0, 2.5),
        ("dear", None, 3.0),
        ("unknown", None, None),
    ]
    assert sky.select_instance(found, cpu=4).name == "spot"
    assert "launch" not in PROVIDER.calls


async def test_it_works_where_an_event_loop_runs() -> None:
    assert len(await asyncio.to_thread(sky.offers, PROVIDER)) == len(sky.offers(PROVIDER))


def test_a_wrong_parameter_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cpu"):
        sky.offers(PROVIDER, cpu=-1)
    with pytest.raises(ConfigurationError, match="provider must be a provider object"):
        sky.offers(FakeProvider)  # type: ignore[arg-type]


def test_offers_are_a_tuple_that_is_shown_as_a_table() -> None:
    found = sky.offers(PROVIDER)

    assert isinstance(found, tuple)
    assert repr(found).splitlines() == [
        "type     accelerators  cores  memory  spot $/h  on demand $/h",
        "spot                   4      16 GiB  1.0000    2.5000",
        "dear                   4      16 GiB  ?         3.0000",
        "unknown                4      16 GiB  ?         ?",
    ]
    assert "<td>dear</td>" in found._repr_html_()
    assert "&lt;b&gt;" in Offers((InstanceSpec(name="<b>", cpu=1, memory_gib=1),))._repr_html_()
    assert repr(Offers(())) == "no machine type satisfies the request"
