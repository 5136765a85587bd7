"""Five clouds at once, as tests of pools over several providers use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skyward.errors import CapacityError
from skyward.providers.base import Instance, LaunchOrder, Offer, Provider
from skyward.request.request import parse_request
from support.clouds.all_clouds import CLOUDS, NAMES, AllClouds, all_clouds

HOUR_S = 3600.0


@pytest.fixture
def clouds(tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllClouds]:
    with all_clouds(monkeypatch, tmp_path, cache=ssh_cache) as clouds:
        yield clouds
        assert clouds.left() == {}


async def cheapest(provider: Provider) -> Offer:
    offers = await provider.offers(parse_request(cpu=2, memory="2GB", spot="never"))
    on_demand = [(offer.price_per_hour, offer.spec.name, offer) for offer in offers if not offer.spot]
    return min(on_demand, key=lambda each: each[:2])[-1]


async def launch(provider: Provider, key: str) -> Instance:
    order = LaunchOrder(pool_id="sky-1", keys=(f"sky-1-0-{key}",), timeout_s=2 * HOUR_S)
    (instance,) = await provider.launch([await cheapest(provider)], order)
    return instance


async def end(providers: Sequence[Provider], machines: Sequence[Instance]) -> None:
    for provider, machine in zip(providers, machines, strict=True):
        await provider.terminate([machine.id])
        await provider.tidy("sky-1")


def test_each_sells_and_bills_its_own_machines_and_can_be_sold_out(clouds: AllClouds) -> None:
    providers = clouds.providers(*CLOUDS)

    async def scenario() -> None:
        machines = [await launch(provider, "a") for provider in providers]
        assert {name: [*ids] for name, ids in clouds.alive().items()} == {
            name: [machine.id] for name, machine in zip(CLOUDS, machines, strict=True)
        }
        clouds.pass_time(HOUR_S)
        prices = {name: each.offer.price_per_hour for name, each in zip(CLOUDS, machines, strict=True)}
        assert clouds.bills() == pytest.approx(prices, rel=0.02)
        clouds.take_back("aws", machines[0].id)
        await end(providers, machines)
        assert clouds.alive() == {}

        clouds.sell_out(*CLOUDS)
        for provider in providers:
            with pytest.raises(CapacityError):
                await launch(provider, "b")
        clouds.restock("aws", "verda")
        again = [providers[0], providers[2]]
        await end(again, [await launch(provider, "c") for provider in again])
        for provider in providers:
            await provider.close()

    asyncio.run(scenario())


def test_all_six_offer_a_small_machine_each_at_its_own_price(clouds: AllClouds) -> None:
    async def prices() -> list[float | None]:
        providers = clouds.providers()
        found = [(await cheapest(provider)).price_per_hour for provider in providers]
        for provider in providers:
            await provider.close()
        return found

    found = asyncio.run(prices())
    assert len(set(found)) == len(NAMES)
    assert found[-1] == 0.0, "the host of one's own"
