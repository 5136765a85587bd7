"""VastAI's instances, from offers to their end, against a fake of its API."""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    TerminationError,
)
from skyward.machine.ssh import SSHAccess
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.registry import provider_settings
from skyward.providers.vastai import AskMarket, AskOffer, AskTerms, VastAI
from skyward.request.request import parse_request
from skyward.testing.aws import Looks
from support.clouds.rest_service import RestFault
from support.clouds.vast_api import API_KEY, VastApi, ask

PROMPT = {"listing_s": 0.5, "unlisted_s": 0.5, "look_s": 0.02, "patience_s": 5.0}
POOL = "sky-pool"
RENT = "PUT /api/v0/asks/{ask_id}/"
DESTROY = "DELETE /api/v0/instances/{instance_id}/"
SEARCH = "POST /api/v0/bundles/"
GPU = "1x RTX 4090"


@pytest.fixture
def vast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VastApi]:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    with VastApi(looks=Looks(pending=0, ending=1)) as api:
        api.use(monkeypatch, VastAI, **PROMPT)
        yield api


@asynccontextmanager
async def opened(api: VastApi, **settings: Any) -> AsyncGenerator[VastAI]:
    provider = VastAI(endpoint_url=api.endpoint_url, **settings)
    try:
        yield provider
    finally:
        await provider.close()


async def offered(provider: VastAI, **asked: Any) -> Sequence[Offer]:
    return await provider.offers(parse_request(**asked))


def of_market(offers: Sequence[Offer], *, spot: bool) -> Sequence[Offer]:
    return [each for each in offers if each.spot is spot]


async def launched(
    provider: VastAI, *keys: str, spot: bool = False, avoid: Sequence[str] = (), **asked: Any
) -> Sequence[Instance]:
    offers = of_market(await offered(provider, nodes=len(keys) or 1, **(asked or {"machine": "CPU"})), spot=spot)
    order = LaunchOrder(pool_id=POOL, keys=keys or ("key-0",), timeout_s=600.0, avoid=frozenset(avoid))
    return await provider.launch(offers, order)


# --- parameters and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verified": "yes"}, "verified must be True or False"),
        ({"billed_traffic": 1}, "billed_traffic must be"),
        ({"min_reliability": 1.5}, "min_reliability must be a number from 0 to 1"),
        ({"min_reliability": -0.1}, "min_reliability must be"),
        ({"min_inet_mbps": "fast"}, "min_inet_mbps must be"),
        ({"regions": "US"}, "regions must be a list"),
        ({"regions": ["USA"]}, r"two-letter codes .*closest: .*US.*'USA'"),
        ({"regions": []}, "at least one country"),
        ({"disk_gb": 7}, "disk_gb must be a whole number ≥ 8"),
        ({"image": ""}, "image must be"),
        ({"image": "no image"}, "the name of a container image"),
        ({"image": "pytorch/pytorch:2.5.1", "disk_gb": 10}, "disk_gb must be at least 20 for the image pytorch"),
        ({"image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/own:1"}, "private registry: pass image_login"),
        ({"image_login": ""}, "image_login must be"),
        ({"bid_factor": 0.9}, "bid_factor must be a number ≥ 1.*minimum"),
        ({"endpoint_url": "console.vast.ai"}, "a URL such as"),
        ({"api_key": "two words"}, "api_key must be"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        VastAI(**settings)


def test_it_is_recreated_from_its_settings_without_secrets() -> None:
    provider = VastAI(regions=["US", "DE"], api_key=API_KEY, image_login="-u me -p secret docker.io", image="own/image")
    settings = provider_settings(provider)
    assert settings["regions"] == ["US", "DE"]
    assert VastAI(**settings) == VastAI(regions=("US", "DE"), image="own/image")
    assert "secret" not in repr(provider) + repr(settings)
    assert API_KEY not in repr(provider) + repr(settings)
    assert VastAI.ending_pace_s == VastAI.pace["DELETE /api/v0/instances/*"]
    for capability in ("check", "look_interval_s", "tagged"):
        assert provider.supports(capability)


async def test_the_key_is_that_of_the_environment_or_of_either_file(
    vast: VastApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VAST_API_KEY")
    async with opened(vast) as provider:
        with pytest.raises(AuthenticationError, match=r"VAST_API_KEY.*vastai/vast_api_key.*scopes"):
            await offered(provider)
        (tmp_path / ".vast_api_key").write_text("stale", encoding="utf-8")
        with pytest.raises(AuthenticationError, match="Invalid user key"):
            await offered(provider)
        (tmp_path / "vastai").mkdir()
        (tmp_path / "vastai/vast_api_key").write_text(f"{API_KEY}\n", encoding="utf-8")
        assert await offered(provider)
    assert {call.token for call in vast.service.calls} == {"stale", API_KEY}


async def test_the_check_shows_key_credit_and_scopes(vast: VastApi) -> None:
    async with opened(vast) as provider:
        assert [(each.what, each.state) for each in await provider.check()] == [
            ("key", "ok"),
            ("credit", "ok"),
            ("scopes", "ok"),
        ]
        vast.credit = 0.0
        vast.keys[API_KEY] = frozenset({"user_read", "misc"})
        _, credit, scopes = await provider.check()
        assert (credit.state, credit.found) == ("fail", "$0.00")
        assert (scopes.state, "instance_read" in scopes.found + scopes.fix) == ("fail", True)
        vast.keys.clear()
        (key,) = await provider.check()
        assert key.state == "fail"
    assert vast.service.count(SEARCH) == 0


# --- offers -------------------------------------------------------------------------------------------------------


async def test_offers_are_classes_of_asks_by_gpus_country_and_market_from_one_search(vast: VastApi) -> None:
    disk = 40 * 0.15 / 720
    async with opened(vast) as provider:
        found = await offered(provider, accelerator="RTX-4090")
        assert [(each.spec.name, each.region, each.spot, each.price_per_hour) for each in found] == [
            (GPU, "US", True, pytest.approx(0.125 + disk)),
            (GPU, "DE", True, pytest.approx(0.15 + disk)),
            (GPU, "DE", False, pytest.approx(0.28 + disk)),
            (GPU, "US", False, pytest.approx(0.3 + disk)),
        ]
        spec = found[0].spec
        assert (spec.accelerator, spec.accelerator_count, spec.cpu, spec.memory_gib) == ("RTX-4090", 1, 4, 16.0)
        assert all(each.island for each in found)
        assert await offered(provider, accelerator="RTX-4090") == found
        assert vast.service.count(SEARCH) == 1


async def test_a_class_costs_as_much_as_the_dearest_ask_that_the_nodes_take(vast: VastApi) -> None:
    for number, price in ((200, 0.1), (201, 0.11), (202, 0.2)):  # the first two are on one host
        vast.asks[number]["dph_base"] = price
    async with opened(vast, regions=["US"]) as provider:
        prices = {
            nodes: of_market(await offered(provider, accelerator="RTX-4090", nodes=nodes), spot=False)[0].price_per_hour
            for nodes in (1, 2, 4, 8)
        }
    disk = 40 * 0.15 / 720
    assert prices == {1: pytest.approx(0.1 + disk), 2: pytest.approx(0.2 + disk), 4: pytest.approx(0.3 + disk)} | {
        8: pytest.approx(0.3 + disk)
    }
    assert vast.service.count(SEARCH) == 1


@pytest.mark.parametrize(
    ("asked", "name", "accelerator"),
    [
        ({"accelerator": "A100-80GB"}, "1x A100 SXM4", "A100-80GB"),
        ({"accelerator": "A100-40GB"}, "1x A100 PCIE", "A100-40GB"),
        ({"accelerator": "T4"}, "1x Tesla T4", "T4"),
        ({"machine": "2x RTX 4090"}, "2x RTX 4090", "RTX-4090"),
        ({"cpu": 2, "memory": "8GB"}, "CPU", None),
    ],
)
async def test_a_request_finds_its_machines(
    vast: VastApi, asked: dict[str, Any], name: str, accelerator: str | None
) -> None:
    async with opened(vast) as provider:
        found = await offered(provider, **asked)
    assert {(each.spec.name, each.spec.accelerator) for each in found} == {(name, accelerator)}


@pytest.mark.parametrize(
    ("settings", "asked", "error", "words"),
    [
        (
            {},
            {"accelerator": "Trainium2"},
            ConfigurationError,
            "none of these .*, but GPUs of NVIDIA and AMD: use another",
        ),
        ({}, {"accelerator": "TPUv5p"}, ConfigurationError, "none of these .*: use another provider"),
        ({}, {"accelerator": "H100"}, CapacityError, "no machine with .*H100.* now .*verified.*relax"),
        ({"regions": ["FR"]}, {"accelerator": "T4"}, CapacityError, "in FR"),
        ({"min_reliability": 0.999}, {}, CapacityError, "reliability ≥ 0.999"),
        ({"min_inet_mbps": 5000}, {}, CapacityError, "5000 Mbit/s"),
        ({"disk_gb": 900}, {}, CapacityError, "900 GB of disk"),
        ({}, {"accelerator": "T4", "max_cost": 1.0}, CapacityError, "free traffic because of max_cost.*billed_traffic"),
        ({}, {"cpu": 64}, CapacityError, "64 cores"),
        ({}, {"machine": "RTX 4090"}, ConfigurationError, "machine must be 'CPU', or .*'2x RTX 4090'"),
    ],
)
async def test_a_request_that_cannot_be_met_names_the_terms(
    vast: VastApi, settings: dict[str, Any], asked: dict[str, Any], error: type[SkywardError], words: str
) -> None:
    async with opened(vast, **settings) as provider:
        with pytest.raises(error, match=words):
            await offered(provider, **asked)


async def test_unverified_hosts_are_found_where_they_are_admitted(vast: VastApi) -> None:
    async with opened(vast, verified=False) as provider:
        assert {each.spec.name for each in await offered(provider, accelerator="H100")} == {"1x H100 SXM"}


async def test_traffic_that_is_billed_is_noted_and_under_max_cost_only_taken_on_demand_of_the_user(
    vast: VastApi,
) -> None:
    async with opened(vast) as provider:
        (found, _) = await offered(provider, accelerator="T4")
        assert found.note == "traffic is billed in addition, up to $0.01 a GB in and $0.02 a GB out"
        assert (await offered(provider, accelerator="RTX-4090"))[0].note == ""
    async with opened(vast, billed_traffic=True) as provider:
        (found, _) = await offered(provider, accelerator="T4", max_cost=1.0)
        assert "max_cost does not hold for it" in found.note


async def test_a_search_beyond_the_days_quota_is_final_at_once_and_names_the_reset(vast: VastApi) -> None:
    vast.searches_left = 0
    async with opened(vast) as provider:
        with pytest.raises(QuotaError, match=r"search_quota_exceeded.*resets at 00:00 UTC, in \d+ h \d+ min"):
            await offered(provider)
    assert vast.service.count(SEARCH) == 1


# --- launching ----------------------------------------------------------------------------------------------------


async def test_an_instance_is_ordered_with_disk_port_label_and_without_the_vendors_sshd(vast: VastApi) -> None:
    async with opened(vast, disk_gb=24) as provider:
        (made,) = await launched(provider, "key-0")
        order = vast.instances[made.id].created
        assert (order["runtype"], order["disk"], order["label"]) == ("args", 24, f"skyward.{POOL}.key-0")
        assert (order["cancel_unavail"], order["image"], order["env"]["-p 10022:10022"]) == (True, "ubuntu:24.04", "1")
        assert "price" not in order
        assert made.price_per_hour == pytest.approx(0.03 + 24 * 0.15 / 720)
        (seen,) = await provider.describe([made.id])
        assert (seen.state, seen.host, seen.network) == (InstanceState.RUNNING, made.host, "")
        assert isinstance(seen.access, SSHAccess)
        assert (seen.access.target.host, seen.access.target.port, seen.access.bind) == (
            vast.instances[made.id].address,
            22022,
            "127.0.0.1",
        )
        await provider.terminate(vast.alive)
    assert vast.left() == {}


async def test_a_container_ends_at_its_deadline_with_its_own_key_and_never_stops(vast: VastApi) -> None:
    async with opened(vast) as provider:
        (made,) = await launched(provider, "key-0")
        packed = vast.instances[made.id].created["env"]["SKYWARD_BOOT"]
        script = gzip.decompress(base64.b64decode(packed)).decode()
        (ends_at,) = re.findall(r"^ends_at=(\d+)$", script, re.MULTILINE)
        assert 600 <= int(ends_at) - time.time() <= 600 + 180
        assert f"{vast.endpoint_url}/api/v0/instances/${{CONTAINER_ID-}}/" in script
        assert "Bearer ${CONTAINER_API_KEY-}" in script
        assert API_KEY not in script
        assert "stopped" not in script
        assert made.ends_itself
        assert all(made.end_check)
        assert all(made.power_off)
        await provider.terminate(vast.alive)


async def test_machines_of_an_order_are_on_different_hosts_and_creates_keep_the_vendors_pace(vast: VastApi) -> None:
    async with opened(vast) as provider:
        made = await launched(provider, "a", "b", "c", machine=GPU)
        assert len({each.host for each in made}) == 3
        assert {call.status for call in vast.service.calls if call.route == RENT} == {200}
        await provider.terminate([each.id for each in made])


async def test_hosts_to_avoid_get_no_machine(vast: VastApi) -> None:
    async with opened(vast) as provider:
        made = await launched(provider, "a", "b", machine=GPU, avoid=["30", "31", "41"])
        assert {each.host for each in made} == {"32", "33"}
        assert vast.service.count(RENT) == 2
        await provider.terminate(vast.alive)


async def test_asks_that_are_gone_are_passed_over_within_one_search(vast: VastApi) -> None:
    async with opened(vast) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=False)
        vast.rent_away([221, 200, 202])
        del vast.asks[204]
        order = LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0)
        (made,) = await provider.launch(offers, order)
        assert vast.instances[made.id].ask["id"] == 206
        await provider.terminate([made.id])
        vast.rent_away(vast.asks)
        with pytest.raises(CapacityError, match="none of its offers"):
            await provider.launch(offers, order)
    assert vast.service.count(SEARCH) == 1
    assert vast.left() == {}


async def test_an_ask_that_is_dearer_than_the_pools_limit_is_not_rented(vast: VastApi) -> None:
    vast.asks[200]["dph_base"] = 0.299
    async with opened(vast, regions=["US"]) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=False)
        vast.rent_away([200])

        class Limited(LaunchOrder):
            def lasts_s(self, offer: Offer) -> float:
                return 600.0 if (offer.price_per_hour or 0.0) < 0.308 else 0.0

        order = Limited(pool_id=POOL, keys=("a",), timeout_s=600.0)
        with pytest.raises(CapacityError, match="more than is allowed"):
            await provider.launch(offers, order)
    assert vast.service.count(RENT) == 1


async def test_an_ask_that_costs_more_than_its_offer_is_not_rented_as_that(vast: VastApi) -> None:
    vast.asks[200]["dph_base"] = 0.2  # the others cost 0.3
    async with opened(vast) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=False)
        assert [each.region for each in offers] == ["US", "DE"]
        vast.rent_away([200])
        (made,) = await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0))
        assert vast.instances[made.id].ask["id"] == 221
        (renewed,) = of_market(await offered(provider, machine=GPU), spot=False)
        (other,) = await provider.launch([renewed], LaunchOrder(pool_id=POOL, keys=("b",), timeout_s=600.0))
        assert other.price_per_hour == pytest.approx(0.3 + 40 * 0.15 / 720)
        await provider.terminate([made.id, other.id])


async def test_machines_whose_asks_are_stale_are_found_by_one_search_and_each_gets_an_ask_of_its_own() -> None:
    now, searches = 0.0, 0

    async def search(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        nonlocal searches
        searches += 1
        await asyncio.sleep(0)
        return [ask(number, number, dph_total=0.04) for number in range(8)]

    market = AskMarket(search, AskTerms(), lambda: now)
    offer = of_market(await market.offers(parse_request(machine="CPU")), spot=False)[0]
    now = 61.0
    orders = [LaunchOrder(pool_id=f"pool-{number % 2}", keys=(), timeout_s=600.0) for number in range(9)]
    taken = await asyncio.gather(*(market.take(cast("AskOffer", offer), each) for each in orders))
    assert sorted(each.id for each in taken if each is not None) == [*range(8)]
    assert searches == 2


async def test_a_rented_ask_that_is_listed_all_the_same_is_rented_again_only_once_its_machine_is_gone(
    vast: VastApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.vastai._KEPT_S", -1.0)
    async with opened(vast, regions=["DE"]) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=False)
        order = LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0)
        for _ in range(2):
            (made,) = await provider.launch(offers, order)
            vast.asks[221]["rentable"] = True
            with pytest.raises(CapacityError, match="no other"):
                await provider.launch(offers, order)
            await provider.terminate([made.id])
    assert vast.service.count(RENT) == 2


async def test_the_terms_of_a_pool_hold_for_its_offers_beside_another_pool_of_the_same_provider(vast: VastApi) -> None:
    vast.asks[241] = {**vast.asks[240], "id": 241, "inet_down_cost": 0.0, "inet_up_cost": 0.0}
    async with opened(vast) as provider:
        capped = of_market(await offered(provider, accelerator="T4", max_cost=1.0), spot=False)
        free = of_market(await offered(provider, accelerator="T4"), spot=False)
        assert (capped[0].note, free[0].note != "") == ("", True)
        (made,) = await provider.launch(capped, LaunchOrder(pool_id="a", keys=("a",), timeout_s=600.0))
        assert vast.instances[made.id].ask["id"] == 241
        with pytest.raises(CapacityError, match="no other 1x Tesla T4 in US at that price"):
            await provider.launch(capped, LaunchOrder(pool_id="a", keys=("b",), timeout_s=600.0))
        quiet = [replace(free[0], traffic=(0.01, 0.01))]  # the ask bills more than its note said
        with pytest.raises(CapacityError, match="no other"):
            await provider.launch(quiet, LaunchOrder(pool_id="b", keys=("c",), timeout_s=600.0))
        (other,) = await provider.launch(free, LaunchOrder(pool_id="b", keys=("c",), timeout_s=600.0))
        await provider.terminate([made.id, other.id])


@pytest.mark.parametrize(
    ("least", "base", "bid"),
    [
        (0.1234564, 0.2, 0.1234564),
        (0.1234564, 0.1234564, None),
        (6.0, 5.0, None),
        (0.2999999, 0.3, None),
        (0.0, 0.3, 0.001),
    ],
)
async def test_a_bid_is_not_below_the_lowest_one_and_below_the_price_on_demand_or_there_is_none(
    vast: VastApi, least: float, base: float, bid: float | None
) -> None:
    vast.asks = {230: {**vast.asks[230], "min_bid": least, "dph_base": base}}
    async with opened(vast, bid_factor=1.0) as provider:
        found = await offered(provider, machine="1x A100 SXM4")
        assert [each.spot for each in found] == ([False] if bid is None else [True, False])
        spot = [replace(found[-1], spot=True)]
        if bid is None:
            with pytest.raises(CapacityError, match="no other"):
                await provider.launch(spot, LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0))
        else:
            (made,) = await provider.launch(spot, LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0))
            assert vast.instances[made.id].created["price"] == bid
            await provider.terminate([made.id])


async def test_a_bid_is_a_multiple_of_the_lowest_one_and_its_price_is_read_back(vast: VastApi) -> None:
    vast.surcharge = 1.1
    async with opened(vast, bid_factor=1.5) as provider:
        (made,) = await launched(provider, "a", spot=True, machine="1x A100 SXM4")
        assert vast.instances[made.id].created["price"] == pytest.approx(0.75)
        assert made.price_per_hour == pytest.approx(0.75 + 40 * 0.15 / 720)
        (seen,) = await provider.describe([made.id])
        assert seen.price_per_hour == pytest.approx(1.1 * (0.75 + 40 * 0.15 / 720), rel=1e-5)
        await provider.terminate([made.id])


async def test_a_bid_that_is_too_low_by_now_leaves_no_contract_and_the_next_ask_is_taken(vast: VastApi) -> None:
    async with opened(vast, regions=["US"]) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=True)
        vast.asks[200]["min_bid"] = 0.2
        (made,) = await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0))
        assert len(vast.instances) == 2
        assert vast.alive == [made.id]
        assert made.host == "31"
        await provider.terminate([made.id])
    assert vast.left() == {}


async def test_a_contract_of_a_refusal_that_cannot_be_destroyed_is_not_forgotten(
    vast: VastApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is undone only if the contract is gone, which bears the order's label."""
    monkeypatch.setattr(VastAI, "patience_s", 2.0)
    async with opened(vast, regions=["US"]) as provider:
        offers = of_market(await offered(provider, machine=GPU), spot=True)
        vast.asks[200]["min_bid"] = 0.2
        vast.service.fail(RestFault(status=500), route=DESTROY, times=1000)
        (made,) = await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=("a",), timeout_s=600.0))
        (seen,) = await provider.describe([made.id])
        assert (seen.state, seen.preempted) == (InstanceState.FAILED, True)
        vast.service.faults.clear()
        await provider.terminate([made.id])
    assert vast.left() == {}


@pytest.mark.parametrize("message", ["OCI runtime create failed: nvidia-container-cli", "pull access denied for own"])
async def test_a_container_that_does_not_come_up_has_failed(vast: VastApi, message: str) -> None:
    vast.broken = dict.fromkeys(range(100), message)
    async with opened(vast) as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
        assert (seen.state, seen.preempted) == (InstanceState.FAILED, False)
        assert message in seen.reason
        await provider.terminate([made.id])


async def test_nothing_is_rented_without_credit(vast: VastApi) -> None:
    vast.credit = 0.0
    async with opened(vast) as provider:
        with pytest.raises(QuotaError, match=r"credit is \$0\.00.*billing"):
            await launched(provider)
    assert vast.service.count(RENT) == 0


async def test_credit_that_ends_during_an_order_is_a_quota(vast: VastApi) -> None:
    async with opened(vast) as provider:
        vast.service.around = lambda number, moment: setattr(
            vast, "credit", 0.0 if vast.service.count(RENT) else vast.credit
        )
        with pytest.raises(QuotaError, match="credit"):
            await launched(provider)
    assert vast.left() == {}


async def test_a_create_that_is_throttled_in_plain_text_is_repeated(vast: VastApi) -> None:
    vast.service.fail(RestFault(status=429), route=RENT, times=2)
    async with opened(vast) as provider:
        (made,) = await launched(provider)
        await provider.terminate([made.id])
    assert vast.service.count(RENT) == 3
    assert len(vast.instances) == 1


# --- states and ends ----------------------------------------------------------------------------------------------


async def test_an_outbid_instance_is_preempted_and_destroyed_never_stopped(vast: VastApi) -> None:
    async with opened(vast) as provider:
        (made,) = await launched(provider, spot=True, machine=GPU)
        vast.outbid(made.id)
        (seen,) = await provider.describe([made.id])
        assert (seen.state, seen.preempted) == (InstanceState.FAILED, True)
        assert "outbid" in seen.reason
        assert vast.service.bill.open == [f"{made.id}:disk"]
        await provider.terminate([made.id])
    assert vast.service.bill.open == []
    assert [call.body for call in vast.service.calls if call.method == "PUT" and call.route != RENT] == []


@pytest.mark.parametrize("spot", [True, False])
async def test_an_instance_that_was_stopped_has_failed_and_was_not_preempted(vast: VastApi, spot: bool) -> None:
    async with opened(vast) as provider:
        (made,) = await launched(provider, spot=spot, machine=GPU)
        for status in ("exited", "stopped"):
            vast.instances[made.id].status = status
            (seen,) = await provider.describe([made.id])
            assert (seen.state, seen.preempted, seen.reason) == (InstanceState.FAILED, False, status)
        await provider.terminate([made.id])


async def test_termination_is_patient_with_plain_text_and_ignores_what_is_gone(vast: VastApi) -> None:
    vast.service.fail(RestFault(status=429), route=DESTROY, times=3)
    async with opened(vast) as provider:
        made = await launched(provider, "a", "b")
        await provider.terminate([*(each.id for each in made), "12345"])
        await provider.terminate([each.id for each in made])
    assert vast.left() == {}


async def test_a_termination_that_is_refused_names_the_instance(vast: VastApi) -> None:
    async with opened(vast) as provider:
        (made,) = await launched(provider)
        vast.keys[API_KEY] = frozenset({"instance_read"})
        with pytest.raises(TerminationError, match="instance_write") as raised:
            await provider.terminate([made.id])
        assert raised.value.instance_ids == [made.id] or tuple(raised.value.instance_ids) == (made.id,)


async def test_tagged_lists_every_page_and_only_skywards(vast: VastApi) -> None:
    order = {"image": "ubuntu:24.04", "disk": 10, "runtype": "args", "args": ["sh"], "env": {"-p 10022:10022": "1"}}
    labels = [None, "somebody's", *(f"skyward.{POOL}.key-{number}" for number in range(30))]
    made = [vast.deploy({**order, "label": each}, 100) for each in labels]
    async with opened(vast) as provider:
        found = await provider.tagged()
        assert [each.id for each in found] == made[2:]
        assert {each.key for each in found} == {f"key-{number}" for number in range(30)}
    assert vast.service.count("GET /api/v1/instances/") == 2


async def test_the_key_of_a_container_ends_its_own_instance_and_no_other(vast: VastApi) -> None:
    async with opened(vast) as provider:
        one, other = await launched(provider, "a", "b")
    async with opened(vast, api_key=vast.instances[one.id].key) as contained:
        with pytest.raises(AuthenticationError, match="its own instance"):
            await contained.api.request_end(other.id)
        with pytest.raises(AuthenticationError, match="its own instance"):
            await contained.api.listed()
        await asyncio.sleep(0)
        await contained.api.request_end(one.id)
    assert vast.alive == [other.id]


async def test_of_two_instances_with_a_key_the_one_that_lives_is_found(vast: VastApi) -> None:
    """A contract that was made with a refusal is listed for seconds after its end."""
    async with opened(vast) as provider:
        old, new = [(await launched(provider, "key-0"))[0].id for _ in range(2)]
        for left, found in ((old, new), (new, old)):
            vast.machines[left].status = "exited"
            vast.machines[found].status = "running"
            assert getattr(await provider.api.find("key-0"), "id", "") == found


async def test_an_end_that_is_refused_with_a_status_of_success_is_asked_for_again(vast: VastApi) -> None:
    async with opened(vast) as provider:
        (made,) = await launched(provider)
        vast.service.fail(RestFault(status=200, message="busy"), route=DESTROY, times=2)
        async with asyncio.timeout(20):  # one that counts as accepted is repeated after 30 s
            await provider.terminate([made.id])
    assert (vast.left(), vast.service.count(DESTROY)) == ({}, 3)
