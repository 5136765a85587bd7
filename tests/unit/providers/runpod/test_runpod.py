"""RunPod's pods, from offers to their end, against a small service that is held to the vendor's description."""

from __future__ import annotations

import base64
import gzip
import shlex
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, QuotaError, SkywardError
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.registry import Checkable, Entrusts, Paced, Sweepable, make_provider, provider_settings
from skyward.providers.runpod.pod_account import STATES, find_key
from skyward.providers.runpod.provider import RunPod
from skyward.request.accelerators import Accelerator
from skyward.request.request import parse_request
from skyward.transport.access import SSHAccess
from support.clouds.rest_service import SPECS, RestAnswer, RestCall, RestFault, RestService, load_json

DESCRIPTION = "runpod-rest-v2-openapi.json"
KEY = "rpa_0123456789ABCDEF"
POOL = "sky-pool"
SOLD_OUT = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


def problem(status: int, detail: str) -> RestAnswer:
    body = {"title": "Problem", "status": status, "detail": detail}
    return RestAnswer(status=status, body=body, headers={"Content-Type": "application/problem+json"})


def gpu(device: str, name: str, memory: int, usd: float, most: int = 8, **places: str) -> dict[str, Any]:
    listed = [{"id": place.replace("_", "-"), "name": place, "availability": stock} for place, stock in places.items()]
    return {
        "id": device,
        "name": name,
        "pool": None,
        "manufacturer": "AMD" if device.startswith("AMD") else "NVIDIA",
        "memory": memory,
        "secure": True,
        "community": most < 8,
        "price": {"secure": usd, "community": usd / 2},
        "maxCount": {"secure": most, "community": most},
        "availability": "HIGH" if listed else "NONE",
        **({"dataCenters": listed} if listed else {}),
    }


def cpu(device: str, ram: float, usd: float, **places: str) -> dict[str, Any]:
    listed = [{"id": place.replace("_", "-"), "name": place, "availability": stock} for place, stock in places.items()]
    price = {"securePerVcpu": usd, "serverlessPerVcpu": usd}
    size = {"vcpu": {"min": 2, "max": 32}, "ramGbPerVcpu": ram, "price": price}
    return {"id": device, "name": device, "group": "5", **size, "availability": "HIGH", "dataCenters": listed}


class Account:
    """One account: a catalogue, pods, a volume."""

    def __init__(self) -> None:
        self.gpus = [
            gpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.69, US_KS_2="LOW", EU_RO_1="HIGH", AP_JP_1="NONE"),
            gpu("NVIDIA H100 PCIe", "H100 PCIe", 80, 1.99),
            gpu("NVIDIA L4", "L4", 24, 0.39, 4, EU_RO_1="MEDIUM", US_KS_2="HIGH", EU_SE_1="LOW", CA_MTL_1="LOW"),
            gpu("AMD Instinct MI300X OAM", "MI300X", 192, 2.5, US_KS_2="HIGH"),
        ]
        self.cpus = [cpu("cpu5c", 2.0, 0.03, EU_RO_1="HIGH"), cpu("cpu3g", 4.0, 0.04, EU_RO_1="HIGH")]
        self.pods: dict[str, dict[str, Any]] = {}
        self.service = RestService("runpod", errors=problem, description=DESCRIPTION, authorize=self.authorize)
        self.service.route("GET /v2/catalog/gpus", lambda call: RestAnswer(body={"gpus": self.gpus}))
        self.service.route("GET /v2/catalog/cpus", lambda call: RestAnswer(body={"cpus": self.cpus}))
        self.service.route("GET /v2/catalog/datacenters", self.places)
        self.service.route("GET /v2/network-volumes/{id}", self.volume)
        self.service.route("GET /v2/pods", lambda call: RestAnswer(body={"pods": list(self.pods.values())}))
        self.service.route("POST /v2/pods", self.create)
        self.service.route("DELETE /v2/pods/{id}", self.delete)

    def authorize(self, call: RestCall) -> RestAnswer | None:
        return None if call.token == KEY else problem(401, "invalid bearer token")

    def places(self, call: RestCall) -> RestAnswer:
        rest: dict[str, Any] = {"region": "EUROPE", "networkVolumeTypes": [], "compliance": [], "globalNetwork": False}
        rows = [{"id": each, "name": each, **rest} for each in ("EU-RO-1", "EU-SE-1", "US-KS-2", "CA-MTL-1")]
        return RestAnswer(body={"dataCenters": rows})

    def volume(self, call: RestCall) -> RestAnswer:
        if call.parts["id"] != "agv6w2qcg7":
            return problem(404, "resource not found")
        row = {"id": "agv6w2qcg7", "name": "data", "size": 50, "dataCenter": "EU-RO-1", "type": "STANDARD"}
        return RestAnswer(body=row)

    def create(self, call: RestCall) -> RestAnswer:
        made = self.pod(f"pod{len(self.pods)}", call.body)
        self.pods[made["id"]] = made
        return RestAnswer(status=201, body=made)

    def delete(self, call: RestCall) -> RestAnswer:
        found = self.pods.pop(call.parts["id"], None)
        return RestAnswer(status=204) if found else problem(404, "pod not found")

    def pod(self, machine: str, body: dict[str, Any], **changed: Any) -> dict[str, Any]:
        compute = {name: body[name] for name in ("gpu", "cpu") if name in body}
        if "cpu" in compute:
            compute["cpu"] = {**compute["cpu"], "memory": 8}
        asked = {name: body[name] for name in ("name", "image", "args", "disk", "ports", "env", "cloud")}
        fixed: dict[str, Any] = {
            "actions": ["terminate"],
            "registry": None,
            "cudaVersion": None,
            "template": None,
            "locked": False,
        }
        times = {"createdAt": "2026-11-23T04:00:00Z", "startedAt": None, "runtime": None}
        state = {"id": machine, "status": "PROVISIONING", "cost": 0.5, "globalNetworking": {"enabled": False}}
        place = {"dataCenterId": (body.get("dataCenterIds") or ["US-KS-2"])[0], "ssh": {"proxy": None, "direct": None}}
        return {**asked, **compute, **fixed, **times, **state, **place, "mounts": body.get("mounts", {}), **changed}

    def run(self, machine: str, port: int = 34446) -> None:
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": "x", "command": "ssh x@ssh.runpod.io"}
        direct = {"host": "195.0.2.3", "port": port, "username": "root", "command": "ssh root@195.0.2.3"}
        self.pods[machine] |= {"status": "RUNNING", "ssh": {"proxy": proxy, "direct": direct}}

    @property
    def created(self) -> list[dict[str, Any]]:
        return [call.body for call in self.service.calls if call.route == "POST /v2/pods"]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    for name, value in {"listing_s": 0.2, "unlisted_s": 0.2, "look_s": 0.02, "patience_s": 5.0}.items():
        monkeypatch.setattr(RunPod, name, value)
    made = Account()
    with made.service:
        yield made


@asynccontextmanager
async def opened(account: Account, **settings: Any) -> AsyncGenerator[RunPod]:
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
    for capability in (Checkable, Entrusts, Paced, Sweepable):
        assert isinstance(provider, capability)


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


async def test_a_wrong_key_is_refused_once_and_never_repeated_in_the_message(account: Account) -> None:
    async with opened(account, api_key="rpa_wrong_and_secret") as provider:
        with pytest.raises(AuthenticationError, match="RUNPOD_API_KEY") as raised:
            await offered(provider, accelerator="L4")
        assert [each.state for each in await provider.check()] == ["fail"]
    assert "rpa_wrong" not in repr(raised.value) + repr(raised.value.__cause__)
    assert account.service.count("GET /v2/catalog/gpus") == 1


async def test_the_check_reports_key_and_stock(account: Account) -> None:
    async with opened(account, data_centers=["EU-RO-1"]) as provider:
        found = await provider.check()
    assert [(each.what, each.state) for each in found] == [("credentials", "ok"), ("stock", "ok")]
    assert "EU-RO-1" in found[1].found


# --- offers -------------------------------------------------------------------------------------------------------


async def test_offers_are_in_the_best_stocked_data_centers_at_the_price_of_all_gpus(account: Account) -> None:
    async with opened(account) as provider:
        found = await offered(provider, accelerator=Accelerator(name="L4", count=2), cpu=16, memory="64GB")
    assert [(each.spec.name, each.region, each.price_per_hour) for each in found] == [
        ("2x NVIDIA L4", place, 0.78) for place in ("US-KS-2", "EU-RO-1", "EU-SE-1")
    ]
    spec = found[0].spec
    assert (spec.accelerator, spec.accelerator_count, spec.accelerator_memory_gib) == ("L4", 2, 24.0)
    assert (spec.cpu, spec.memory_gib) == (16, 64.0), "not in the catalogue: measured at first contact"
    assert all(each.island and not each.spot for each in found)
    (asked,) = [call.query for call in account.service.calls]
    assert asked == {"include": "AVAILABILITY", "product": "POD", "count": "2", "cloud": "SECURE"}


async def test_a_gpu_without_stock_is_not_offered_and_one_without_places_is_offered_anywhere(account: Account) -> None:
    async with opened(account) as provider:
        found = await offered(provider, accelerator="H100")
        assert {(each.spec.accelerator, each.region) for each in found} == {
            ("H100-SXM", "EU-RO-1"),
            ("H100-SXM", "US-KS-2"),
        }
        with pytest.raises(CapacityError, match="no NVIDIA H100 PCIe available now in any data center; try later"):
            await offered(provider, accelerator="H100-PCIe")
    account.gpus[2]["dataCenters"] = []
    async with opened(account, cloud="community") as provider:
        (any_place,) = await offered(provider, accelerator="L4")
        assert (any_place.region, any_place.price_per_hour) == ("", 0.195)
        with pytest.raises(ConfigurationError, match="H100"):
            await offered(provider, accelerator="H100")
        with pytest.raises(ConfigurationError, match="no pods without GPUs there: request a GPU"):
            await offered(provider, cpu=2)


async def test_pods_without_gpus_have_every_power_of_two_of_cores(account: Account) -> None:
    async with opened(account) as provider:
        (smallest, *_) = await offered(provider, cpu=4, memory="16GB")
        assert (smallest.spec.name, smallest.price_per_hour, smallest.spec.memory_gib) == ("4x cpu3g", 0.16, 16.0)
        (named,) = await offered(provider, machine="8x cpu5c")
        assert (named.spec.cpu, named.region) == (8, "EU-RO-1")
        (gpus, *_) = await offered(provider, machine="8x NVIDIA H100 80GB HBM3")
        assert (gpus.spec.accelerator_count, gpus.price_per_hour) == (8, 21.52)


async def test_more_gpus_than_on_any_machine_are_refused_with_the_largest(account: Account) -> None:
    async with opened(account) as provider:
        with pytest.raises(ConfigurationError, match="at most 4 L4 on a machine"):
            await offered(provider, accelerator=Accelerator(name="L4", count=8))
        with pytest.raises(ConfigurationError, match="closest"):
            await offered(provider, machine="NVIDIA H1000")


async def test_data_centers_are_checked_and_obeyed(account: Account) -> None:
    async with opened(account, data_centers=["EU-RO-1"]) as provider:
        assert {each.region for each in await offered(provider, accelerator="L4")} == {"EU-RO-1"}
    async with opened(account, data_centers=["CA-MTL-1", "EU-RO-2"]) as provider:
        with pytest.raises(ConfigurationError, match="no 'EU-RO-2'; closest: EU-RO-1"):
            await offered(provider, accelerator="L4")
    async with opened(account, data_centers=["EU-SE-1"]) as provider:
        with pytest.raises(CapacityError, match=r"now in EU-SE-1; it is in EU-RO-1, US-KS-2: name these"):
            await offered(provider, accelerator="H100")
    assert account.created == []


async def test_a_network_volume_decides_the_data_center_and_is_mounted(account: Account) -> None:
    async with opened(account, network_volume="agv6w2qcg7") as provider:
        await launched(provider)
    (body,) = account.created
    assert body["dataCenterIds"] == ["EU-RO-1"]
    assert body["mounts"] == {"network": [{"volumeId": "agv6w2qcg7", "path": "/workspace"}]}
    async with opened(account, network_volume="agv6w2qcg7", data_centers=["US-KS-2"]) as provider:
        with pytest.raises(ConfigurationError, match="is in EU-RO-1"):
            await offered(provider, accelerator="L4")
    async with opened(account, network_volume="nothing0") as provider:
        with pytest.raises(ConfigurationError, match="no volume 'nothing0'"):
            await offered(provider, accelerator="L4")


# --- pods ---------------------------------------------------------------------------------------------------------


async def test_a_pod_gets_its_boot_and_nothing_that_bills_besides(account: Account) -> None:
    async with opened(account) as provider:
        await launched(provider)
        await launched(provider, "key-1", machine="2x cpu5c")
        await launched(provider, "key-2", accelerator="MI300X")
    nvidia, plain, amd = account.created
    assert nvidia["gpu"] == {"id": "NVIDIA L4", "count": 1, "minCudaVersion": "12.4"}
    assert (plain["cpu"], plain["disk"]) == ({"id": "cpu5c", "vcpuCount": 2}, 20)
    assert amd["gpu"] == {"id": "AMD Instinct MI300X OAM", "count": 1}
    assert (nvidia["image"][:12], plain["image"], amd["image"]) == ("nvidia/cuda:", "ubuntu:24.04", "ubuntu:24.04")
    assert nvidia["name"] == "skyward.sky-pool.key-0"
    assert nvidia.keys() == {"name", "image", "gpu", "cloud", "disk", "ports", "env", "args", "dataCenterIds"}
    assert (nvidia["ports"], nvidia["cloud"], nvidia["disk"]) == (["22/tcp"], "SECURE", 40)
    assert shlex.split(nvidia["args"]) == nvidia["args"].split()
    script = gzip.decompress(base64.b64decode(nvidia["env"]["SKYWARD_BOOT"])).decode()
    assert f'url="{account.service.url}/v2/pods/${{RUNPOD_POD_ID-}}"' in script
    assert 'headers="Authorization: Bearer ${RUNPOD_API_KEY-}"' in script
    assert KEY not in script


async def test_a_pod_is_running_once_its_own_port_is_published_and_moves_with_it(account: Account) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        assert (made.state, made.access, made.price_per_hour) == (InstanceState.PENDING, None, 0.5)
        account.pods[made.id]["status"] = "RUNNING"
        assert (await provider.describe([made.id]))[0].state is InstanceState.PENDING, "the proxy is no way in"
        for port in (34446, 40001):
            account.run(made.id, port)
            (seen,) = await provider.describe([made.id])
            assert isinstance(seen.access, SSHAccess)
            target = seen.access.target
            assert (seen.state, target.host, target.port, target.user) == (
                InstanceState.RUNNING,
                "195.0.2.3",
                port,
                "root",
            )
            assert seen.access.bind == "127.0.0.1"
        assert seen.ends_itself
        assert (seen.power_off, seen.end_check) == (
            ("sh", "/var/lib/skyward/end"),
            ("sh", "/var/lib/skyward/may-end.sh"),
        )
        await provider.terminate([made.id])
        assert account.pods == {}


@pytest.mark.parametrize("status", ["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED", "NEWWORD"])
async def test_every_state_is_mapped_and_an_unknown_one_is_pending(account: Account, status: str) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        account.pods[made.id] |= {"status": status, "cost": 0.0}
        (seen,) = await provider.describe([made.id])
        expected = STATES.get(status, InstanceState.PENDING)
        assert seen.state is (InstanceState.PENDING if expected is InstanceState.RUNNING else expected)
        assert bool(seen.reason) is (expected in (InstanceState.FAILED, InstanceState.GONE))
    account.service.violations.clear()


def test_every_documented_state_is_in_the_table() -> None:
    if not (SPECS / DESCRIPTION).exists():
        return
    assert set(load_json(DESCRIPTION)["components"]["schemas"]["PodStatus"]["enum"]) == STATES.keys()


async def test_pods_of_others_and_of_clusters_are_left_alone(account: Account) -> None:
    async with opened(account) as provider:
        (made,) = await launched(provider)
        body = account.created[0]
        account.pods["other"] = account.pod("other", body, name="my-pod")
        account.pods["member"] = account.pod("member", body, cluster={"id": "c1", "rank": 0})
        assert [each.id for each in await provider.tagged()] == [made.id]
        await provider.terminate([made.id])
    assert account.pods.keys() == {"other", "member"}


async def test_the_reaper_key_is_delivered_and_comes_first_at_the_end(account: Account) -> None:
    async with opened(account, reaper_key="rpa_reaper_0123") as provider:
        (made,) = await launched(provider)
        secret = await provider.secret(made)
        assert secret is not None
        assert (secret.value, "rpa_reaper" in repr(secret)) == ("rpa_reaper_0123", False)
    script = gzip.decompress(base64.b64decode(account.created[0]["env"]["SKYWARD_BOOT"])).decode()
    assert script.index("${SKYWARD_SECRET-}") < script.index("${RUNPOD_API_KEY-}")
    assert "rpa_reaper" not in script
    async with opened(account) as provider:
        assert await provider.secret(made) is None


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "detail", "error", "words"),
    [
        (400, SOLD_OUT, CapacityError, "Another GPU, cloud or data center"),
        (402, "insufficient balance", QuotaError, "Top up the balance"),
        (403, "access denied", CapacityError, "may not use this GPU"),
        (400, "gpu and cpu are exclusive", ConfigurationError, "exclusive"),
        (422, "Request validation failed.", ConfigurationError, "validation"),
    ],
)
async def test_a_refused_create_is_classified_and_leaves_nothing(
    account: Account, status: int, detail: str, error: type[SkywardError], words: str
) -> None:
    account.service.fail(RestFault(status=status, message=detail), route="POST /v2/pods", times=20)
    async with opened(account) as provider:
        with pytest.raises(error, match=words):
            await launched(provider)
    assert len(account.created) == (3 if error in (CapacityError, QuotaError) else 1)
    assert account.pods == {}


async def test_a_create_whose_answer_is_lost_is_adopted(account: Account) -> None:
    account.service.fail(RestFault(after=True), route="POST /v2/pods")
    async with opened(account) as provider:
        (made,) = await launched(provider)
    assert [made.id] == list(account.pods)
    assert len(account.created) == 1
