"""Droplets, without machines behind them: records of a fake account that is held to the vendor's description."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)
from skyward.providers._common import rented_machines
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE, host_key, user_key
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.digitalocean import (
    REFUSED,
    DigitalOcean,
    find_offers,
    find_token,
    image_of,
    parse_droplet,
    parse_sizes,
)
from skyward.providers.registry import provider_settings
from skyward.request.request import parse_request
from skyward.testing.aws import Looks
from support.clouds.digital_ocean_api import SIZES, TOKEN, DigitalOceanApi
from support.clouds.rest_service import RestFault

CREATE, LIST = "POST /v2/droplets", "GET /v2/droplets"
REAPER = "dop_v1_reaper"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[DigitalOceanApi]:
    with DigitalOceanApi() as cloud:
        cloud.use(monkeypatch, DigitalOcean, listing_s=0.0, look_s=0.01, patience_s=2.0)
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
        yield cloud


def run(work: Callable[[DigitalOcean], Awaitable[Any]], cloud: DigitalOceanApi, **settings: Any) -> Any:
    """Do something with a provider, in an event loop of its own."""

    async def scenario() -> Any:
        provider = DigitalOcean(endpoint_url=cloud.endpoint_url, **settings)
        try:
            return await work(provider)
        finally:
            await provider.close()

    return asyncio.run(scenario())


async def launch(provider: DigitalOcean, keys: Sequence[str] = ("key-0",), **wish: Any) -> Sequence[Instance]:
    offers = await provider.offers(parse_request(**wish))
    return await provider.launch(offers, LaunchOrder(pool_id="sky-1", keys=tuple(keys), timeout_s=600.0))


def offered(cloud: DigitalOceanApi, region: str, **wish: Any) -> Sequence[Offer]:
    return run(lambda provider: provider.offers(parse_request(**wish)), cloud, region=region)


# --- offers -----------------------------------------------------------------------------------------------------------


def rows() -> list[Any]:
    return [size.record() for size in SIZES]


def test_the_memory_of_a_gpu_is_the_total_divided_by_their_number() -> None:
    specs = {each.type.name: each.type.spec for each in parse_sizes(rows())}

    eight = specs["gpu-h100x8-640gb"]
    assert (eight.accelerator, eight.accelerator_count, eight.accelerator_memory_gib) == ("H100-SXM", 8, 80.0)
    assert {name: (spec.accelerator, spec.accelerator_memory_gib) for name, spec in specs.items()} == {
        "s-1vcpu-1gb": (None, None),
        "s-2vcpu-4gb": (None, None),
        "c-4": (None, None),
        "g-8vcpu-32gb": (None, None),
        "gpu-l40sx1-48gb": ("L40S", 48.0),
        "gpu-4000adax1-20gb": ("RTX-4000-Ada", 20.0),
        "gpu-h100x1-80gb": ("H100-SXM", 80.0),
        "gpu-h100x8-640gb": ("H100-SXM", 80.0),
        "gpu-mi300x1-192gb": ("MI300X", 192.0),
        "gpu-mi350x1-288gb-spot": ("MI350X", 288.0),
        "gpu-mi350x1-288gb": ("MI350X", 288.0),
    }


@pytest.mark.parametrize(("model", "name", "each_gib"), [("nvidia_h200", "H200", 141.0), ("new_x1", "x1", 80.0)])
def test_eight_gpus_share_the_total_also_where_the_catalogue_names_no_form(
    model: str, name: str, each_gib: float
) -> None:
    gpus = {"count": 8, "model": model, "vram": {"amount": int(8 * each_gib), "unit": "gib"}}
    (size,) = parse_sizes([{**rows()[0], "slug": "gpu-x8", "gpu_info": gpus}])
    spec = size.type.spec

    assert (spec.accelerator, spec.accelerator_count, spec.accelerator_memory_gib) == (name, 8, each_gib)


def test_each_kind_of_droplet_has_its_image() -> None:
    specs = {each.type.name: each.type.spec for each in parse_sizes(rows())}

    assert {name: image_of(specs[name]) for name in ("c-4", "gpu-h100x1-80gb", "gpu-h100x8-640gb")} == {
        "c-4": "ubuntu-24-04-x64",
        "gpu-h100x1-80gb": "gpu-h100x1-base",
        "gpu-h100x8-640gb": "gpu-h100x8-base",
    }
    assert image_of(specs["gpu-mi300x1-192gb"]) == "gpu-amd-base"


def test_spot_sizes_are_offers_on_spot_next_to_those_on_demand(cloud: DigitalOceanApi) -> None:
    spot, on_demand = offered(cloud, "ric1", accelerator="MI350X")

    assert (spot.spec.name, spot.spot, spot.price_per_hour) == ("gpu-mi350x1-288gb-spot", True, 1.25)
    assert spot.on_demand_price_per_hour == on_demand.price_per_hour == 3.1
    assert not on_demand.spot


def test_prices_are_those_of_the_moment(cloud: DigitalOceanApi) -> None:
    before = offered(cloud, "nyc1", cpu=4)[0].price_per_hour
    cloud.sizes = {size.slug: size for size in SIZES if size.slug != "c-4"}

    assert (before, offered(cloud, "nyc1", cpu=4)[0].price_per_hour) == (0.125, 0.375)


def test_sizes_that_need_a_contract_are_not_offered() -> None:
    assert parse_sizes([{**rows()[0], "slug": "gpu-h100x8-640gb-contracted"}]) == []


def test_shared_processors_are_noted() -> None:
    cheapest = find_offers(parse_sizes(rows()), parse_request(), "nyc1")[0]

    assert cheapest.note == "s-2vcpu-4gb shares its processors with other customers"


def test_one_gpu_is_not_sold_as_eight(cloud: DigitalOceanApi) -> None:
    assert [each.spec.name for each in offered(cloud, "tor1", accelerator="H100")] == ["gpu-h100x1-80gb"]


@pytest.mark.parametrize(
    ("region", "wish", "message"),
    [
        (
            "nyc1",
            {"accelerator": "H100"},
            r"H100-SXM \(gpu-h100x1-80gb in nyc2, tor1, atl1\).*not in nyc1: try Digital",
        ),
        ("nyc1", {"machine": "gpu-l40sx1-48gb"}, r"has it in tor1, but not in nyc1: try DigitalOcean\(region='tor1'\)"),
        ("tor1", {"accelerator": "MI300X"}, r"MI300X"),
        ("tor1", {"accelerator": "H100", "machine": None, "cpu": 999}, r"the largest is gpu-h100x8-640gb"),
        ("nyc9", {}, r"region='nyc9': digitalocean has no such region; it has ams3, atl1, fra1, nyc1"),
    ],
)
def test_what_a_region_lacks_is_an_error_that_says_where_it_is(
    cloud: DigitalOceanApi, region: str, wish: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        offered(cloud, region, **wish)


# --- launch -----------------------------------------------------------------------------------------------------------


def test_a_droplet_is_ordered_with_keys_tag_firewall_and_its_end(cloud: DigitalOceanApi) -> None:
    (made,) = run(launch, cloud)

    _, user = user_key()
    (firewall,) = cloud.firewalls.values()
    body = cloud.machines[made.id].created
    assert (body["name"], body["tags"], body["region"]) == ("skyward-key-0", ["skyward:pool:sky-1"], "nyc1")
    assert [cloud.keys[each]["public_key"] for each in body["ssh_keys"]] == [user.public]
    assert body["user_data"].startswith("#cloud-config\n")
    assert host_key("key-0").private.splitlines()[1] in body["user_data"]
    assert "--on-active" in body["user_data"]
    assert firewall["tags"] == body["tags"]
    assert [(rule["protocol"], rule["ports"], *rule["sources"].values()) for rule in firewall["inbound_rules"]] == [
        ("tcp", "22", ["203.0.113.7/32"]),
        *((each, "0", body["tags"]) for each in ("tcp", "udp", "icmp")),
    ]


def test_the_account_gets_one_key_of_the_user_and_again_where_it_was_deleted(cloud: DigitalOceanApi) -> None:
    for added in (1, 1, 2):
        if added == 2:
            cloud.keys.clear()
        run(lambda provider: launch(provider, ["key-0", "key-1"]), cloud)
        assert (cloud.service.count("POST /v2/account/keys"), len(cloud.keys)) == (added, 1)


def test_a_key_that_is_not_accepted_yet_is_waited_for(cloud: DigitalOceanApi) -> None:
    cloud.fresh_keys_refused = 1

    assert len(run(launch, cloud)) == 1
    assert len(cloud.machines) == 1


def test_a_lost_answer_to_a_creation_is_adopted_with_a_gpu_or_without(cloud: DigitalOceanApi) -> None:
    for wish, region in (({}, "nyc1"), ({"accelerator": "L40S"}, "tor1")):
        cloud.service.fail(RestFault(after=True), route=CREATE)
        made = run(lambda provider, wish=wish, key=region: launch(provider, [key], **wish), cloud, region=region)
        assert [each.id for each in made] == [*cloud.alive][-1:]

    assert cloud.service.count(CREATE) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda cloud: cloud.capacity.update({size.slug: 0 for size in SIZES}), CapacityError, "none of its offers"),
        (lambda cloud: setattr(cloud, "droplet_limit", 0), QuotaError, "exceed your droplet limit"),
        (lambda cloud: setattr(cloud, "status", "locked"), AuthenticationError, "account is locked"),
        (
            lambda cloud: cloud.tokens.update(
                {cloud.token: frozenset({"sizes:read", "firewall:read", "droplet:read"})}
            ),
            AuthenticationError,
            "lacks the scope tag:create",
        ),
        (
            lambda cloud: cloud.service.fail(RestFault(status=402, message="Payment required"), route=CREATE, times=99),
            QuotaError,
            "Payment required.*settle the bill",
        ),
    ],
)
def test_a_refused_launch_names_the_next_step_and_leaves_nothing(
    cloud: DigitalOceanApi, change: Callable[[DigitalOceanApi], None], error: type[SkywardError], message: str
) -> None:
    change(cloud)

    with pytest.raises(error, match=message):
        run(launch, cloud)

    assert cloud.left() == {}


def test_a_size_that_sold_out_since_it_was_offered_gives_way_to_the_next(cloud: DigitalOceanApi) -> None:
    cloud.capacity["s-2vcpu-4gb"] = 0

    (made,) = run(launch, cloud)

    assert made.offer.spec.name == "c-4"


# --- life -------------------------------------------------------------------------------------------------------------


def test_a_running_droplet_is_reached_as_root_by_its_own_host_key(cloud: DigitalOceanApi) -> None:
    cloud.looks = Looks(unseen=1, pending=1, ending=2)

    async def states(provider: DigitalOcean) -> list[Instance]:
        found = [*await launch(provider)]
        while found[-1].state is InstanceState.PENDING:
            found += await provider.describe([found[0].id])
        await provider.terminate([found[0].id])
        return [*found, *await provider.describe([found[0].id, "never-was", "12"])]

    *found, running, gone, never, other = run(states, cloud)

    assert len(found) > 1
    assert running.state is InstanceState.RUNNING
    assert running.access.target.host_keys == (host_key("key-0").public,)
    assert running.access.address == cloud.machines[running.id].address
    assert running.network
    assert (running.ends_itself, running.power_off) == (False, ())
    assert {each.state for each in (gone, never, other)} == {InstanceState.GONE}
    assert cloud.left() == {}


def test_strangers_are_no_droplets_of_ours() -> None:
    assert parse_droplet({"id": 1, "name": "skyward-key-0", "tags": []}) is None
    assert parse_droplet({"id": 1, "name": "web-1", "tags": ["skyward:pool:sky-1"]}) is None


def test_a_spot_droplet_that_vanishes_was_preempted_and_one_we_ended_was_not(
    cloud: DigitalOceanApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(provider: DigitalOcean) -> list[bool]:
        first, second = await launch(provider, ["key-0", "key-1"], accelerator="MI350X")
        await provider.terminate([second.id])
        cloud.destroy(first.id)
        monkeypatch.setattr(DigitalOcean, "unlisted_s", 0.0)
        return [each.preempted for each in await provider.describe([first.id, second.id])]

    assert run(lost, cloud, region="ric1") == [True, False]


def test_tagged_lists_droplets_with_gpus_and_without_of_this_region_only(cloud: DigitalOceanApi) -> None:
    plain = run(launch, cloud, region="tor1")
    with_gpu = run(lambda provider: launch(provider, ["key-1"], accelerator="L40S"), cloud, region="tor1")
    run(lambda provider: launch(provider, ["key-2"]), cloud, region="nyc1")

    tagged = run(lambda provider: provider.tagged(), cloud, region="tor1")

    assert {(each.id, each.key) for each in tagged} == {(each.id, each.key) for each in (*plain, *with_gpu)}


def test_a_droplet_that_no_list_has_is_looked_up_by_its_id_before_it_counts_as_gone(cloud: DigitalOceanApi) -> None:
    (made,) = run(launch, cloud)
    (seen,) = run(lambda provider: provider.describe([made.id]), cloud, region="tor1")

    assert seen.state is InstanceState.RUNNING


def test_a_droplet_that_is_locked_is_deleted_once_it_is_free(cloud: DigitalOceanApi) -> None:
    async def ended(provider: DigitalOcean) -> None:
        (made,) = await launch(provider)
        cloud.locked_deletions = 1
        await provider.terminate([made.id])

    run(ended, cloud)

    assert cloud.left() == {}


@pytest.mark.parametrize(
    ("case", "by_tag", "by_id"),
    [
        ("a whole pool", 1, 0),
        ("one is locked", 1, 1),
        ("one is gone", 1, 0),
        ("one stays", 0, 10),
        ("another droplet has the tag", 0, 11),
        ("too new for the list of a tag", 0, 11),
        ("the token may not read tags", 0, 11),
    ],
)
def test_many_droplets_are_deleted_by_their_tag_if_no_other_has_it(
    cloud: DigitalOceanApi, monkeypatch: pytest.MonkeyPatch, case: str, by_tag: int, by_id: int
) -> None:
    monkeypatch.setattr(DigitalOcean, "unlisted_s", 60.0 if case.startswith("too new") else 0.0)
    for pause in ("_AGAIN_S", "_POOL_S"):
        monkeypatch.setattr(rented_machines, pause, 0.0)

    async def ended(provider: DigitalOcean) -> Sequence[Instance]:
        ids = [each.id for each in await launch(provider, [f"key-{number}" for number in range(11)])]
        await provider.describe(ids)
        match case:
            case "one is locked":
                cloud.locked_deletions = 1
            case "one is gone":
                cloud.destroy(ids[0])
            case "one stays":
                ids.pop()
            case "another droplet has the tag":
                other = {**cloud.machines[ids[0]].created, "name": "web-1"}
                await provider.api.rest.create("/v2/droplets", other)
            case "the token may not read tags":
                verbs = ("droplet:read", "droplet:delete", "firewall:read", "firewall:delete", "tag:delete")
                cloud.tokens[cloud.token] = frozenset(verbs)
            case _:
                pass
        cloud.service.calls.clear()
        await provider.terminate(ids)
        return await provider.describe(ids)

    assert {each.state for each in run(ended, cloud)} == {InstanceState.GONE}
    accepted = [call.route for call in cloud.service.calls if call.status == 204]
    assert (accepted.count("DELETE /v2/droplets"), accepted.count("DELETE /v2/droplets/{id}")) == (by_tag, by_id)
    assert cloud.service.routes.count("GET /v2/droplets/{id}") <= 3 * (case == "one is gone")
    assert len(cloud.alive) == (case in ("one stays", "another droplet has the tag"))


def test_the_firewall_stays_while_the_pool_has_a_droplet(cloud: DigitalOceanApi) -> None:
    async def one_left(provider: DigitalOcean) -> None:
        first, _ = await launch(provider, ["key-0", "key-1"])
        await provider.terminate([first.id])
        await provider.tidy("sky-1")

    run(one_left, cloud)

    assert len(cloud.firewalls) == 1


def test_the_firewall_and_the_tag_stay_for_a_droplet_that_is_not_listed_yet(cloud: DigitalOceanApi) -> None:
    async def replaced(provider: DigitalOcean) -> None:
        (first,) = await launch(provider)
        cloud.looks = Looks(pending=0, ending=0, unseen=10**6)
        (second,) = await launch(provider, ["key-1"])
        await provider.terminate([first.id])
        assert (len(cloud.firewalls), len(cloud.tags)) == (1, 1)
        cloud.machines[second.id].unseen = 0
        await provider.terminate([second.id])

    run(replaced, cloud)

    assert cloud.left() == {}


def test_a_client_that_moved_is_admitted_at_its_new_address_only(
    cloud: DigitalOceanApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def moved(provider: DigitalOcean) -> list[str]:
        await launch(provider)
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "198.51.100.4")
        return [await provider.admit("sky-1"), await provider.admit("sky-1")]

    assert run(moved, cloud) == ["198.51.100.4/32", ""]
    (firewall,) = cloud.firewalls.values()
    assert firewall["inbound_rules"][0]["sources"] == {"addresses": ["198.51.100.4/32"]}


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_reaper_token_is_sent_over_ssh_and_is_nowhere_else(cloud: DigitalOceanApi) -> None:
    async def reaped(provider: DigitalOcean) -> Any:
        (made,) = await launch(provider)
        return provider, made, await provider.secret(made)

    provider, made, secret = run(reaped, cloud, reaper_token=REAPER)

    assert made.ends_itself
    assert REAPER in secret.value
    assert f"{cloud.endpoint_url}/v2/droplets/{made.id}" in secret.value
    path = f"{DigitalOcean.home}/.skyward/end-key-0"
    assert (path in made.power_off[-1], path in secret.command[-1]) == (True, True)
    sent = str([call.body for call in cloud.service.calls])
    assert path in sent
    shown = f"{provider!r} {provider_settings(provider)} {made!r} {secret!r} {sent}"
    assert (REAPER in shown, TOKEN in shown) == (False, False)
    assert asyncio.run(DigitalOcean(token=TOKEN).secret(made)) is None


@pytest.mark.parametrize(
    ("environment", "file", "token"),
    [
        ({"DIGITALOCEAN_TOKEN": "one", "DIGITALOCEAN_ACCESS_TOKEN": "two"}, "access-token: three", "one"),
        ({"DIGITALOCEAN_ACCESS_TOKEN": "two"}, "access-token: three", "two"),
        ({}, "access-token: three\ncontext: default\n", "three"),
        ({}, 'access-token: ""\nauth-contexts:\n  work: four # mine\ncontext: work\n', "four"),
    ],
)
def test_the_token_is_found_where_the_vendors_tools_look(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], file: str, token: str
) -> None:
    for name in ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN"):
        monkeypatch.setenv(name, environment.get(name, ""))
    write_doctl(file)

    assert find_token() == token


def write_doctl(text: str) -> Path:
    path = platformdirs.user_config_path("doctl") / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_no_token_is_an_error_that_names_the_places(cloud: DigitalOceanApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    write_doctl("").unlink()

    with pytest.raises(AuthenticationError, match=r"set DIGITALOCEAN_TOKEN .*doctl auth init.*DigitalOcean\(token="):
        offered(cloud, "nyc1")


def test_a_wrong_token_is_an_error_that_does_not_repeat_it(cloud: DigitalOceanApi) -> None:
    with pytest.raises(AuthenticationError, match="GET /v2/sizes was refused: unauthorized") as caught:
        run(lambda provider: provider.offers(parse_request()), cloud, token="dop_v1_wrong")

    assert "dop_v1_wrong" not in str(caught.value)


# --- parameters, refusals, check --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": "New York"}, "region must be a region's slug such as 'nyc1'"),
        ({"region": 1}, "region must be"),
        ({"token": ""}, "token must be"),
        ({"reaper_token": 7}, "reaper_token must be"),
        ({"endpoint_url": "ftp://x"}, "endpoint_url must be a URL"),
    ],
)
def test_a_wrong_parameter_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DigitalOcean(**settings)


@pytest.mark.parametrize("token", [b"dop_v1_mine", "dop_v1_mine more", "dop_v1_mineё"])
@pytest.mark.parametrize("name", ["token", "reaper_token"])
def test_a_token_of_the_wrong_form_is_not_repeated(name: str, token: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be text of printable ASCII") as caught:
        DigitalOcean(**{name: token})

    assert "mine" not in str(caught.value)


def test_a_token_read_from_a_file_ends_before_its_line_break(cloud: DigitalOceanApi) -> None:
    assert run(lambda provider: provider.offers(parse_request()), cloud, token=f"{TOKEN}\n")


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (401, "Unable to authenticate you", AuthenticationError),
        (402, "payment required", QuotaError),
        (403, "You are missing the required permission droplet:create.", AuthenticationError),
        (404, "The resource you were accessing could not be found.", UnreachableError),
        (422, "creating this/these droplet(s) will exceed your droplet limit.", QuotaError),
        (422, "Size is not available in this region.", CapacityError),
        (422, "This size is currently unavailable in this region.", CapacityError),
        (422, "You specified an invalid size for Droplet creation.", QuotaError),
        (422, "Droplet already has a pending event.", UnreachableError),
        (422, "You specified an invalid image for Droplet creation.", ConfigurationError),
        (429, "API Rate limit exceeded.", RateLimitError),
        (500, "Server was unable to give you a response.", UnreachableError),
    ],
)
def test_refusals_are_told_apart_by_their_words(status: int, text: str, error: type[SkywardError]) -> None:
    found = REFUSED.judge("unprocessable_entity", text, status=status)

    assert type(REFUSED.explain(found, "digitalocean nyc1: POST /v2/droplets", scope="droplet:create")) is error


def test_check_names_what_is_wrong(cloud: DigitalOceanApi) -> None:
    def found() -> dict[str, str]:
        checked = run(lambda provider: provider.check(), cloud)
        return {each.what.removeprefix("digitalocean "): f"{each.state}: {each.found}" for each in checked}

    assert found() == {
        "token": "ok: someone@example.com",
        "account": "ok: active, 25 droplets at a time",
        "may droplet:read": "ok: yes",
        "may firewall:read": "ok: yes",
        "may ssh_key:read": "ok: yes",
        "region": "ok: nyc1, with GPUs",
    }
    cloud.status = "warning"
    assert found()["account"] == "warn: warning"
    cloud.tokens[cloud.token] = frozenset({"account:read", "sizes:read", "ssh_key:read", "droplet:read"})
    (failed,) = run(lambda provider: provider.check(), cloud)
    assert (failed.state, "firewall:read" in failed.fix) == ("fail", True)
