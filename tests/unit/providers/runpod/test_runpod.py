"""RunPod's pods, from offers to their end, against a fake of its API."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, QuotaError, SkywardError
from skyward.machine.ssh import SSHAccess
from skyward.providers import runpod
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.registry import make_provider, provider_settings
from skyward.providers.runpod import RunPod, find_key, parse_cpus
from skyward.request.accelerators import Accelerator
from skyward.request.request import parse_request
from support.clouds.rest_service import RestFault
from support.clouds.runpod_api import API_KEY, CPUS, RunPodApi

DESCRIPTION = "runpod-rest-v2-openapi.json"
POOL = "sky-pool"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunPodApi]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with RunPodApi() as made:
        made.use(monkeypatch, RunPod, listing_s=0.2, unlisted_s=0.2, look_s=0.02, patience_s=5.0)
        yield made


def created(account: RunPodApi) -> list[Any]:
    """The bodies of all creating calls."""
    return [call.body for call in account.service.calls if call.route == "POST /v2/pods"]


@asynccontextmanager
async def opened(account: RunPodApi, **settings: Any) -> AsyncGenerator[RunPod]:
    provider = RunPod(endpoint_url=account.service.url, **settings)
    try:
        yield provider
    finally:
        await provider.close()


async def offered(provider: RunPod, **asked: Any) -> Sequence[Offer]:
    return await provider.offers(parse_request(**asked))


async def launched(provider: RunPod, *keys: str, **asked: Any) -> Sequence[Instance]:
    offers = await offered(provider, **(asked or {"accelerator": "L4"}))
    return await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=keys or ("key-0",), timeout_s=600.0))


# --- parameters and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cloud": "SECURE"}, 'cloud must be "secure" or "community"'),
        ({"data_centers": "EU-RO-1"}, "data_centers must be"),
        ({"data_centers": []}, "data_centers must be None or at least one"),
        ({"image": ""}, "image must be"),
        ({"image": "a b"}, "image must be the name of a container image"),
        ({"image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine"}, "private registry: pods get no credentials"),
        ({"container_disk_gb": 5}, "container_disk_gb must be a whole number ≥ 10"),
        ({"container_disk_gb": 15, "image": "runpod/pytorch:1.0.2"}, "container_disk_gb must be at least 20 for"),
        ({"network_volume": "a/b"}, "network_volume must be the id"),
        ({"network_volume": "agv6w2qcg7", "cloud": "community"}, 'network_volume needs cloud="secure"'),
        ({"endpoint_url": "api.runpod.io"}, "a URL such as"),
        ({"api_key": "two words"}, "api_key must be"),
        ({"reaper_key": 3}, "reaper_key must be"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunPod(**settings)


def test_it_is_recreated_from_the_ledger_without_its_keys_and_has_every_capability() -> None:
    provider = RunPod(data_centers=["EU-RO-1"], image="me/mine:1", api_key="rpa_secret", reaper_key="rpa_reaper")
    settings = provider_settings(provider)

    assert "rpa_" not in repr(settings) + repr(provider)
    assert make_provider("runpod", settings) == RunPod(data_centers=["EU-RO-1"], image="me/mine:1")
    for capability in ("check", "secret", "look_interval_s", "tagged"):
        assert provider.supports(capability)


@pytest.mark.parametrize("text", ['[default]\napi_key = "one"\n', 'apikey = "one"\n', 'apiKey = "one"\n'])
def test_the_key_is_found_in_the_file_of_either_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AuthenticationError, match=r"RUNPOD_API_KEY.*config\.toml.*api_key="):
        find_key()
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod/config.toml").write_text(text, encoding="utf-8")

    assert find_key() == "one"
    (tmp_path / ".runpod/config.toml").write_text("apikey = one", encoding="utf-8")
    with pytest.raises(AuthenticationError, match=r"config\.toml cannot be read \(.*line 1"):
        find_key()


async def test_a_wrong_key_is_refused_once_and_never_repeated_in_the_message(account: RunPodApi) -> None:
    async with opened(account, api_key="rpa_wrong_and_secret") as provider:
        with pytest.raises(AuthenticationError, match="RUNPOD_API_KEY") as raised:
            await offered(provider, accelerator="L4")
        assert [each.state for each in await provider.check()] == ["fail"]
    assert "rpa_wrong" not in repr(raised.value) + repr(raised.value.__cause__)
    assert account.service.count("GET /v2/catalog/gpus") == 1


# --- offers -------------------------------------------------------------------------------------------------------


async def test_offers_are_in_the_best_stocked_data_centers_at_the_price_of_all_gpus(account: RunPodApi) -> None:
    async with opened(account) as provider:
        found = await offered(provider, accelerator=Accelerator(name="L4", count=2), cpu=16, memory="64GB")
    assert [(each.spec.name, each.region, each.price_per_hour) for each in found] == [
        ("2x NVIDIA L4", place, 0.78) for place in ("US-KS-2", "EU-RO-1")
    ]
    spec = found[0].spec
    assert (spec.accelerator, spec.accelerator_count, spec.accelerator_memory_gib) == ("L4", 2, 24.0)
    assert (spec.cpu, spec.memory_gib) == (16, 64.0), "not in the catalogue: measured at first contact"
    assert all(each.island and not each.spot for each in found)
    (asked,) = [call.query for call in account.service.calls]
    assert asked == {"include": "AVAILABILITY", "product": "POD", "count": "2", "cloud": "SECURE"}


async def test_a_gpu_without_stock_is_not_offered(account: RunPodApi) -> None:
    account.market.stock["NVIDIA A100 80GB PCIe"] = {}
    async with opened(account) as provider:
        found = await offered(provider, accelerator="A100-80GB")
        assert {each.spec.name for each in found} == {"NVIDIA A100-SXM4-80GB"}
        account.market.stock["NVIDIA A100-SXM4-80GB"] = {}
        with pytest.raises(CapacityError, match="available now in any data center; try later"):
            await offered(provider, accelerator="A100-80GB")
        with pytest.raises(CapacityError, match='cloud="community"'):
            await offered(provider, machine="NVIDIA A100 80GB PCIe")
    async with opened(account, cloud="community") as provider:
        (first, *_) = await offered(provider, accelerator="L4")
        assert (first.region, first.price_per_hour) == ("US-KS-2", 0.28)
        with pytest.raises(ConfigurationError, match="H100"):
            await offered(provider, accelerator="H100")
        with pytest.raises(ConfigurationError, match="no pods without GPUs there: request a GPU"):
            await offered(provider, cpu=2)


def test_a_stock_without_places_is_one_anywhere() -> None:
    (anywhere,) = parse_cpus([{**CPUS[0], "vcpu": {"min": 2, "max": 2}, "availability": "LOW"}]).values()
    (nowhere,) = parse_cpus([{**CPUS[0], "vcpu": {"min": 2, "max": 2}, "availability": "NONE"}]).values()

    assert (anywhere, nowhere) == (("",), ())
    assert parse_cpus([{"id": "odd"}, CPUS[0]]) == parse_cpus(CPUS[:1])


async def test_pods_without_gpus_have_every_power_of_two_of_cores(account: RunPodApi) -> None:
    async with opened(account) as provider:
        (smallest, *_) = await offered(provider, cpu=4, memory="16GB")
        assert (smallest.spec.name, smallest.price_per_hour, smallest.spec.memory_gib) == ("4x cpu5m", 0.2, 32.0)
        named = await offered(provider, machine="8x cpu3c")
        assert {(each.spec.cpu, each.spec.memory_gib, each.region) for each in named} == {
            (8, 16.0, place) for place in ("EU-RO-1", "US-KS-2", "US-TX-3")
        }
        (gpus,) = await offered(provider, machine="8x NVIDIA H100 80GB HBM3")
        assert (gpus.spec.accelerator, gpus.spec.accelerator_count, gpus.price_per_hour) == ("H100-SXM", 8, 21.52)


async def test_more_gpus_than_on_any_machine_are_refused_with_the_largest(account: RunPodApi) -> None:
    async with opened(account, cloud="community") as provider:
        with pytest.raises(ConfigurationError, match="at most 4 L4 on a machine"):
            await offered(provider, accelerator=Accelerator(name="L4", count=8))
    async with opened(account) as provider:
        with pytest.raises(ConfigurationError, match="closest"):
            await offered(provider, machine="NVIDIA H1000")


async def test_data_centers_are_checked_and_obeyed(account: RunPodApi) -> None:
    async with opened(account, data_centers=["EU-RO-1"]) as provider:
        assert {each.region for each in await offered(provider, accelerator="L4")} == {"EU-RO-1"}
        with pytest.raises(CapacityError, match=r"now in EU-RO-1; it is in US-KS-2: name these"):
            await offered(provider, accelerator="H100")
    async with opened(account, data_centers=["US-TX-3", "EU-RO-2"]) as provider:
        with pytest.raises(ConfigurationError, match="no 'EU-RO-2'; closest: EU-RO-1"):
            await offered(provider, accelerator="L4")
    assert created(account) == []


async def test_a_network_volume_decides_the_data_center_and_is_mounted(account: RunPodApi) -> None:
    async with opened(account, network_volume="agv6w2qcg7") as provider:
        await launched(provider)
    (body,) = created(account)
    assert body["dataCenterIds"] == ["EU-RO-1"]
    assert body["mounts"] == {"network": [{"volumeId": "agv6w2qcg7", "path": "/workspace"}]}
    async with opened(account, network_volume="agv6w2qcg7", data_centers=["US-KS-2"]) as provider:
        with pytest.raises(ConfigurationError, match="is in EU-RO-1"):
            await offered(provider, accelerator="L4")
    async with opened(account, network_volume="nothing0") as provider:
        with pytest.raises(ConfigurationError, match="no volume 'nothing0'"):
            await offered(provider, accelerator="L4")


# --- pods ---------------------------------------------------------------------------------------------------------


async def test_a_pod_gets_its_boot_and_nothing_that_bills_besides(account: RunPodApi) -> None:
    async with opened(account) as provider:
        await launched(provider)
        await launched(provider, "key-1", machine="2x cpu3c")
        await launched(provider, "key-2", accelerator="MI300X")
    nvidia, plain, amd = created(account)
    assert nvidia["gpu"] == {"id": "NVIDIA L4", "count": 1, "minCudaVersion": "12.4"}
    assert (plain["cpu"], plain["disk"]) == ({"id": "cpu3c", "vcpuCount": 2}, 20)
    assert amd["gpu"] == {"id": "AMD Instinct MI300X OAM", "count": 1}
    assert (nvidia["image"][:12], plain["image"], amd["image"]) == ("nvidia/cuda:", "ubuntu:24.04", "ubuntu:24.04")
    assert nvidia["name"] == "skyward.sky-pool.key-0"
    assert nvidia.keys() == {"name", "image", "gpu", "cloud", "disk", "ports", "env", "args", "dataCenterIds"}
    assert (nvidia["ports"], nvidia["cloud"], nvidia["disk"]) == (["22/tcp"], "SECURE", 40)
    assert shlex.split(nvidia["args"]) == nvidia["args"].split()
    script = gzip.decompress(base64.b64decode(nvidia["env"]["SKYWARD_BOOT"])).decode()
    assert f'url="{account.service.url}/v2/pods/${{RUNPOD_POD_ID-}}"' in script
    assert 'headers="Authorization: Bearer ${RUNPOD_API_KEY-}"' in script
    assert API_KEY not in script


async def test_a_pod_is_running_once_its_own_port_is_published_and_moves_with_it(
    account: RunPodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        assert (made.state, made.access, made.price_per_hour) == (InstanceState.PENDING, None, 0.39)
        states = [(await provider.describe([made.id]))[0].state for _ in range(3)]
        assert account.pods[made.id].status == "RUNNING"
        assert states[0] is InstanceState.PENDING, "the proxy is no way in"
        assert states[-1] is InstanceState.RUNNING
        for port in (34446, 40001):
            monkeypatch.setattr(account.containers, "published_port", dict.fromkeys([made.id], port).__getitem__)
            (seen,) = await provider.describe([made.id])
            assert isinstance(seen.access, SSHAccess)
            target = seen.access.target
            assert (target.host, target.port, target.user) == (account.pods[made.id].address, port, "root")
            assert seen.access.bind == "127.0.0.1"
        assert seen.ends_itself
        assert (seen.power_off, seen.end_check) == (
            ("sh", "/var/lib/skyward/end"),
            ("sh", "/var/lib/skyward/may-end.sh"),
        )
        await provider.terminate([made.id])
        assert account.left() == {}


async def test_a_pod_of_the_community_is_ordered_there_at_its_price(account: RunPodApi) -> None:
    async with opened(account, cloud="community") as provider:
        (made,) = await launched(provider)
    assert created(account)[0]["cloud"] == "COMMUNITY"
    assert made.offer.price_per_hour == account.pods[made.id].price_per_hour


async def test_a_pod_tries_its_key_with_a_change_to_the_name_that_it_has(account: RunPodApi) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        script = gzip.decompress(base64.b64decode(created(account)[0]["env"]["SKYWARD_BOOT"])).decode()
        check = script.partition("call_check()")[2].partition("\n}")[0]
        assert 'method="PATCH"' in check
        assert json.loads(check.partition('body="')[2].partition('"\n')[0].replace("\\", "")) == {
            "name": account.pods[made.id].created["name"]
        }


async def test_a_private_image_is_a_pod_that_failed_with_the_reason(account: RunPodApi) -> None:
    account.bad_images.add("me/private:1")
    async with opened(account, image="me/private:1") as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
    assert (seen.state, "be private, or have no shell" in seen.reason) == (InstanceState.FAILED, True)


async def test_pods_of_others_and_of_clusters_are_left_alone(account: RunPodApi) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        (body,) = created(account)
        other = account.deploy({**body, "name": "my-pod"})
        member = account.deploy(body, cluster="c1")
        assert [each.id for each in await provider.tagged()] == [made.id]
        assert runpod._parse_pod(account._row(account.pods[member])) is None, "even where it is listed"
        await provider.terminate([made.id])
    assert list(account.alive) == [other, member]


async def test_the_reaper_key_is_delivered_and_comes_first_at_the_end(account: RunPodApi) -> None:
    async with opened(account, reaper_key="rpa_reaper_0123") as provider:
        (made,) = await launched(provider)
        secret = await provider.secret(made)
        assert secret is not None
        assert (secret.value, "rpa_reaper" in repr(secret)) == ("rpa_reaper_0123", False)
    script = gzip.decompress(base64.b64decode(created(account)[0]["env"]["SKYWARD_BOOT"])).decode()
    assert script.index("${SKYWARD_SECRET-}") < script.index("${RUNPOD_API_KEY-}")
    assert "rpa_reaper" not in script
    async with opened(account) as provider:
        assert await provider.secret(made) is None


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "detail", "error", "words"),
    [
        (400, "gpu and cpu are exclusive", ConfigurationError, "exclusive"),
        (400, "the spending limit is reached", QuotaError, "raise the spending limit"),
        (422, "Request validation failed.", ConfigurationError, "validation"),
    ],
)
async def test_a_refused_create_is_classified_and_leaves_nothing(
    account: RunPodApi, status: int, detail: str, error: type[SkywardError], words: str
) -> None:
    account.service.fail(RestFault(status=status, message=detail), route="POST /v2/pods", times=20)
    async with opened(account) as provider:
        with pytest.raises(error, match=words):
            await launched(provider)
    assert len(created(account)) == (2 if error is QuotaError else 1)
    assert account.left() == {}


async def test_stock_balance_and_permission_are_errors_of_the_offer(account: RunPodApi) -> None:
    async with opened(account) as provider:
        offers = await offered(provider, accelerator="L4")
        order = LaunchOrder(pool_id=POOL, keys=("key-0",), timeout_s=600.0)
        account.market.stock["NVIDIA L4"] = {"EU-RO-1": "LOW"}
        (made,) = await provider.launch(offers, order)
        assert account.pods[made.id].place == "EU-RO-1", "the next offer is tried"
        account.forbidden.add("NVIDIA L4")
        with pytest.raises(CapacityError, match="may not use this GPU"):
            await provider.launch(offers, order)
        account.forbidden.clear()
        account.market.stock["NVIDIA L4"] = {}
        with pytest.raises(CapacityError, match="Another GPU, cloud or data center"):
            await provider.launch(offers, order)
        account.market.stock["NVIDIA L4"] = {"EU-RO-1": "LOW", "US-KS-2": "LOW"}
        account.balance = 0.1
        with pytest.raises(QuotaError, match="Top up the balance"):
            await provider.launch(offers, order)
        await provider.terminate([made.id])
    assert account.left() == {}


@pytest.mark.parametrize(("stock", "state"), [({"EU-RO-1": "LOW"}, "ok"), ({}, "warn")])
async def test_the_check_reports_key_and_stock(account: RunPodApi, stock: dict[str, str], state: str) -> None:
    account.market.stock = dict.fromkeys(account.market.stock, stock)
    async with opened(account, data_centers=["EU-RO-1"]) as provider:
        findings = await provider.check()
    assert [(finding.what, finding.state) for finding in findings] == [("credentials", "ok"), ("stock", state)]
    assert "EU-RO-1" in findings[1].found
