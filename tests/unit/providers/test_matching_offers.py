"""Offers for several accelerators of which any will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, RateLimitError, SkywardError
from skyward.market.choose import choose
from skyward.providers.base import Offer, matching_offers
from skyward.request.accelerators import Accelerator
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from support.clouds.vendors import VENDORS, Vendor, opened


class Seller(FakeProvider):
    """Sells accelerators at prices, each alone; refuses the others."""

    def __init__(self, prices: Mapping[str, float | SkywardError]) -> None:
        super().__init__()
        self.asked: list[PoolRequest] = []
        self._sold = prices

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        self.asked.append(request)
        assert request.accelerator is not None
        label = request.accelerator.label
        price = self._sold.get(label, ConfigurationError(f"nobody has {label}"))
        if isinstance(price, SkywardError):
            raise price
        spec = InstanceSpec(name=f"with {label}", cpu=8, memory_gib=64, accelerator=label, accelerator_count=1)
        return [Offer(spec=spec, price_per_hour=price)]


ANY = parse_request(accelerator=["H100", "L40S", "A100-40GB"], spot="never")


async def test_the_cheapest_of_several_accelerators_is_chosen() -> None:
    seller = Seller({"H100-80GB": 3.0, "L40S": 1.0})

    offers = await matching_offers(seller, ANY)

    assert [offer.price_per_hour for offer in offers] == [3.0, 1.0]
    (batch,) = choose(ANY, offers, nodes=2, provider="seller").batches
    assert batch.offers[0].spec.name == "with L40S"
    assert [len(request.accelerators) for request in seller.asked] == [1, 1, 1]


async def test_an_offer_that_several_find_is_listed_once() -> None:
    both = parse_request(accelerator=["H100", "H100-SXM"])

    assert len(await matching_offers(FakeProvider(), both)) == 1


async def test_one_that_refuses_them_all_gives_every_reason() -> None:
    with pytest.raises(CapacityError) as caught:
        await matching_offers(Seller({"L40S": CapacityError("sold out")}), ANY)

    assert str(caught.value).splitlines() == [
        "none of 3 accelerators can be had:",
        "  1x H100-80GB: nobody has H100-80GB",
        "  1x L40S: sold out",
        "  1x A100-40GB: nobody has A100-40GB",
    ]


async def test_a_request_that_may_be_served_later_is_no_mistake() -> None:
    errors: dict[str, float | SkywardError] = {"L40S": AuthenticationError("no key")}
    with pytest.raises(AuthenticationError):
        await matching_offers(Seller(errors), ANY)
    with pytest.raises(CapacityError):
        await matching_offers(Seller({**errors, "A100-40GB": CapacityError("sold out")}), ANY)


async def test_those_that_could_not_be_asked_for_are_named_since_they_may_be_cheaper() -> None:
    throttled = Seller(
        {"H100-80GB": 3.0, "L40S": RateLimitError("too many calls"), "A100-40GB": CapacityError("sold out")}
    )

    (offer,) = await matching_offers(throttled, ANY)

    assert offer.note == "1x L40S could not be asked for: too many calls"


async def test_a_reason_that_all_have_is_given_once() -> None:
    refused = AuthenticationError("no key")

    with pytest.raises(AuthenticationError, match=r"^no key$"):
        await matching_offers(Seller(dict.fromkeys(["H100-80GB", "L40S", "A100-40GB"], refused)), ANY)


async def test_a_named_machine_is_asked_for_once() -> None:
    named = parse_request(accelerator=["H100", "L40S"], machine="x")
    seller = Seller({"H100-80GB": 3.0})

    await matching_offers(seller, named)

    assert seller.asked == [named]


def test_a_machine_has_the_accelerator_that_it_was_bought_for() -> None:
    request = parse_request(accelerator=["H100:2", "L40S:4"])
    machine = InstanceSpec(name="x", cpu=8, memory_gib=64, accelerator="L40S", accelerator_count=8)

    assert str(request.accelerator_of(machine)) == "4x L40S"
    assert str(request.accelerator_of(InstanceSpec(name="without", cpu=8, memory_gib=64))) == "2x H100-80GB"
    assert parse_request().accelerator_of(machine) is None


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
async def test_a_vendors_catalogue_is_read_once_for_many_accelerators(
    vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = parse_request(accelerator=Accelerator.any(memory=">=16GB"), spot="if-available")

    with opened(vendor, monkeypatch, tmp_path) as cloud:
        provider = vendor.provider(cloud)
        offers = await matching_offers(provider, request)
        await provider.close()

    assert offers
    assert not any(InstanceWish(accelerator=request.accelerator_of(each.spec)).shortfall(each.spec) for each in offers)
    assert max(map(cloud.service.routes.count, cloud.service.routes)) <= 2  # both markets
