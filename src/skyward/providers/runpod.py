"""Provider of RunPod's pods: containers with GPUs, or without, billed by the second from a prepaid balance."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, SkywardError, UnreachableError
from skyward.providers._common.logins import host_key, user_key
from skyward.providers._common.machine_boot import (
    CPU_IMAGE,
    GPU_IMAGE,
    SECRET_FILE,
    ContainerBoot,
    EndProbe,
    HttpCall,
    checked_image,
    cuda_of,
    store,
)
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    cheapest_offers,
    fewest_accelerators,
    sold_accelerators,
    sold_as,
)
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall, failed
from skyward.providers._common.rented_machines import MachineApi, MachineRecord, RentedContainers, label, labels_of
from skyward.providers._common.rest_client import (
    ApiAnswer,
    RestClient,
    VendorPayload,
    bearer,
    decode,
    decode_list,
    decode_rows,
    decode_state,
    is_found,
)
from skyward.providers.base import Finding, Instance, InstanceState, LaunchOrder, MachineSecret, Offer, check_settings
from skyward.request.accelerators import model_name
from skyward.request.checks import closest, explain_options, refusal, secret, text, texts, web_address, whole_number
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

Stock = Mapping[MachineType, Sequence[str]]
"""Data centres that have a kind of pod now, the best stocked first; an empty name stands for any."""

_LEVELS: Final = ("HIGH", "MEDIUM", "LOW")
"""Stock, best first; ``NONE`` is none."""
_PLACES: Final = 3
"""Data centres offered for each kind of pod: the best stocked."""
_NAME: Final = re.compile(r"(?:([1-9]\d*)x )?(.+)", re.ASCII)


def pod_name(device: str, count: int) -> str:
    """Return the name of a kind of pod: ``"NVIDIA L4"``, ``"2x NVIDIA L4"``, ``"4x cpu5c"``."""
    return device if count == 1 else f"{count}x {device}"


def wanted_count(request: PoolRequest) -> int:
    """Return the number of GPUs that a request has on each machine; 1 if it names a pod without GPUs."""
    if request.machine is not None:
        return int(cast("re.Match[str]", _NAME.fullmatch(request.machine))[1] or 1)
    return request.accelerator.count if request.accelerator is not None else 1


def compute_of(spec: InstanceSpec) -> Mapping[str, Any]:
    """Return the part of a creating call's body that orders the GPUs, or the cores."""
    count, device = cast("re.Match[str]", _NAME.fullmatch(spec.name)).groups()
    if spec.accelerator is None:
        return {"cpu": {"id": device, "vcpuCount": int(count or 1)}}
    return {"gpu": {"id": device, "count": int(count or 1)}}


class _DataCenterPayload(VendorPayload, rename="camel"):
    id: str
    availability: str | None = None


class _VolumePayload(VendorPayload, rename="camel"):
    data_center: str


class _StockPayload(VendorPayload, rename="camel"):
    id: str
    availability: str | None = None
    data_centers: tuple[_DataCenterPayload, ...] | None = None

    @property
    def places(self) -> Sequence[str]:
        """Data centres with stock; where the catalogue has a stock without places, any."""
        places = [place for place in self.data_centers or () if place.availability in _LEVELS]
        if not places:
            return ("",) if self.availability in _LEVELS else ()
        return [place.id for place in sorted(places, key=lambda place: _LEVELS.index(place.availability or ""))]


class _CatalogueGpuPayload(_StockPayload, rename="camel", kw_only=True):
    name: str
    memory: float
    secure: bool
    community: bool
    max_count: Mapping[str, int | None]
    price: Mapping[str, float | None]


_PUBLIC_QUERY: Final = (
    "query { gpuTypes { id displayName memoryInGb secureCloud communityCloud securePrice communityPrice "
    "maxGpuCountSecureCloud maxGpuCountCommunityCloud } }"
)


class _PublicGpuPayload(VendorPayload, rename="camel"):
    id: str
    display_name: str
    memory_in_gb: float
    secure_cloud: bool
    community_cloud: bool
    secure_price: float | None
    community_price: float | None
    max_gpu_count_secure_cloud: int | None
    max_gpu_count_community_cloud: int | None

    @property
    def row(self) -> Mapping[str, Any]:
        """The same facts as a row of the catalogue."""
        return {
            "id": self.id,
            "name": self.display_name,
            "memory": self.memory_in_gb,
            "secure": self.secure_cloud,
            "community": self.community_cloud,
            "maxCount": {
                "secure": self.max_gpu_count_secure_cloud,
                "community": self.max_gpu_count_community_cloud,
            },
            "price": {"secure": self.secure_price, "community": self.community_price},
        }


class _PublicGpusPayload(VendorPayload, rename="camel"):
    gpu_types: tuple[Any, ...]


class _PublicPayload(VendorPayload):
    data: _PublicGpusPayload | None


class _RangePayload(VendorPayload):
    min: int
    max: int


class _CpuPricePayload(VendorPayload, rename="camel"):
    secure_per_vcpu: float


class _CpuPayload(_StockPayload, rename="camel", kw_only=True):
    vcpu: _RangePayload
    ram_gb_per_vcpu: float
    price: _CpuPricePayload


def parse_gpus(rows: Iterable[Mapping[str, Any]], request: PoolRequest, *, cloud: str) -> Stock:
    """Parse the GPUs of the catalogue.

    Cores and memory of these pods are in no catalogue: a machine counts as having what is requested, until it is
    measured. Each GPU has the number that is requested, and the largest number that RunPod has on one machine.
    """
    found: dict[MachineType, Sequence[str]] = {}
    for gpu in decode_rows(_CatalogueGpuPayload, rows, "RunPod: GET /v2/catalog/gpus"):
        most, price = gpu.max_count.get(cloud), gpu.price.get(cloud)
        if not (gpu.secure if cloud == "secure" else gpu.community) or most is None or price is None:
            continue
        sold = sold_as(gpu.name, model_name(gpu.id), reported_gib=gpu.memory)
        for count in sorted({min(wanted_count(request), most), most} - {0}):
            spec = InstanceSpec(
                name=pod_name(gpu.id, count),
                cpu=request.wish.cpu or 0,
                memory_gib=request.wish.memory_gib or 0.0,
                accelerator=sold.name,
                accelerator_count=count,
                accelerator_memory_gib=sold.memory_gib,
                price_on_demand=round(price * count, 6) or None,
            )
            found[MachineType(spec=spec, spot=False, whole="MIG" not in gpu.id)] = gpu.places
    return found


def parse_cpus(rows: Iterable[Mapping[str, Any]]) -> Stock:
    """Parse the flavours without GPUs, each with every number of cores."""
    found: dict[MachineType, Sequence[str]] = {}
    for flavour in decode_rows(_CpuPayload, rows, "RunPod: GET /v2/catalog/cpus"):
        for count in (1 << exponent for exponent in range(1, 10)):
            if flavour.vcpu.min <= count <= flavour.vcpu.max:
                spec = InstanceSpec(
                    name=pod_name(flavour.id, count),
                    cpu=count,
                    memory_gib=flavour.ram_gb_per_vcpu * count,
                    price_on_demand=round(flavour.price.secure_per_vcpu * count, 6) or None,
                )
                found[MachineType(spec=spec, spot=False)] = flavour.places
    return found


def make_offers(stock: Stock, request: PoolRequest, *, data_centers: Sequence[str] | None) -> Sequence[Offer]:
    """Return the offers that satisfy a request, in these data centres or in any, the cheapest first.

    Raises:
        ConfigurationError: there is no such pod; names the nearest.
        CapacityError: it is not available now; names the data centres in which it is.
    """
    catalogue = Catalogue(vendor="RunPod", types=list(stock), kind="data center", accelerators=sold_accelerators(stock))
    chosen = fewest_accelerators(catalogue.candidates(request))
    offers = [
        _offer(each.spec, place)
        for each in chosen
        for place in [place for place in stock[each] if data_centers is None or place in data_centers][:_PLACES]
    ]
    if offers:
        return cheapest_offers(offers, request, vendor="RunPod")
    names = ", ".join(each.name for each in chosen[:3])
    elsewhere = sorted({place for each in chosen for place in stock[each] if place})
    where = ", ".join(data_centers or ()) or "any data center"
    advice = f"it is in {', '.join(elsewhere)}: name these, or leave data_centers out" if elsewhere else "try later"
    raise CapacityError(f'RunPod has no {names} available now in {where}; {advice}, or try cloud="community"')


def _offer(spec: InstanceSpec, place: str) -> Offer:
    price = spec.price_on_demand
    return Offer(spec=spec, region=place, price_per_hour=price, on_demand_price_per_hour=price, island=True)


API_URL: Final = "https://api.runpod.io"
_KEYS_URL: Final = "https://console.runpod.io/user/settings"
_READING: Final = "RunPod: reading a pod"
_BILLING_URL: Final = "https://console.runpod.io/user/billing"

STATES: Final[Mapping[str, InstanceState]] = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.FAILED,  # stopped, by an empty balance for example; its disk is billed
    "ERROR": InstanceState.FAILED,
    "TERMINATED": InstanceState.GONE,
}
"""State of a pod, by RunPod's word for it."""

_REASONS: Final[Mapping[str, str]] = {
    "EXITED": "RunPod stopped the pod",
    "ERROR": "its container does not start: the image may not exist, be private, or have no shell",
    "TERMINATED": "the pod was terminated",
}

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.QUOTA, status=402),
        RefusalRow(kind=RefusalKind.QUOTA, status=400, words=r"balance|insufficient funds|spend(?:ing)? limit"),
        RefusalRow(kind=RefusalKind.CAPACITY, status=400, words=r"instances? (?:\w+ )?available|capacity|out of stock"),
        RefusalRow(kind=RefusalKind.AUTH, status=403, advice=f"The key lacks a right: {_KEYS_URL}"),
    ),
    advice={
        RefusalKind.AUTH: f"Put a key of {_KEYS_URL} in RUNPOD_API_KEY, or run `runpodctl config`",
        RefusalKind.QUOTA: f"Top up the balance, or raise the spending limit: {_BILLING_URL}",
        RefusalKind.CAPACITY: "Another GPU, cloud or data center may have some: see `skyward offers`",
    },
)
"""RunPod's errors. They have no codes: the status and words have to do."""


def find_key() -> str:
    """Return the API key of the environment, else that of RunPod's own tools.

    Raises:
        AuthenticationError: there is none, or the file cannot be read; names the places.
    """
    if found := os.environ.get("RUNPOD_API_KEY", "").strip():
        return found
    path = Path.home() / ".runpod" / "config.toml"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        settings = dict[str, Any]()
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"RunPod: {path} cannot be read ({error}): correct it, run `runpodctl config` again, or put a key in "
            "RUNPOD_API_KEY"
        ) from error
    default = settings.get("default")  # of its Python library; its command line writes at the top
    tables = [settings, *([cast("dict[str, Any]", default)] if isinstance(default, dict) else [])]
    for table in tables:
        for name, value in table.items():
            if name.lower().replace("_", "") == "apikey" and isinstance(value, str) and value.strip():
                return value.strip()
    raise AuthenticationError(
        f"RunPod: no API key: put one of {_KEYS_URL} in RUNPOD_API_KEY, run `runpodctl config` ({path}), or pass "
        "RunPod(api_key=...)"
    )


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    parts = [str(row.get("detail") or ""), *(str(each) for each in row.get("errors") or ())]
    text = "; ".join(filter(None, parts)) or (answer.body if isinstance(answer.body, str) else "") or "no message"
    return TABLE.judge(f"{answer.status} {row.get('title') or ''}".strip(), text, status=answer.status)


class PodAccount(MachineApi):
    """Pods of one account. Each bears its pool and its ledger key in its name; those of clusters are left alone.

    Args:
        url: URL of the API.
        api_key: the key; None is looked up at each call, so that a newer one counts.
        patience_s: time for which throttled and interrupted calls are repeated.

    Attributes:
        rest: the API.
    """

    def __init__(self, url: str, api_key: str | None, *, patience_s: float) -> None:
        self.rest = RestClient(
            vendor="RunPod",
            base_url=url,
            authorize=bearer(lambda: api_key or find_key()),
            judge=_judge,
            explain=lambda refused, call: TABLE.explain(refused, f"RunPod: {call}"),
            patience_s=patience_s,
        )

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return every pod of Skyward's in the account: one call lists them all."""
        del instance_ids, pool_id
        rows = await self.list_items("/v2/pods", "pods")
        return [pod for row in rows if (pod := _parse_pod(row)) is not None]

    async def list_items(self, path: str, name: str, query: Mapping[str, str] | None = None) -> Sequence[Any]:
        """Return the items ``name`` in the answer to ``GET path``."""
        return decode_list(await self.rest.read(path, query), name, f"RunPod: GET {path}")

    async def public_gpus(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the catalogue of GPUs from the older API, which asks for no key."""
        where = "RunPod: POST /graphql"
        answer = await self.rest.read_public("POST", "/graphql", {"query": _PUBLIC_QUERY})
        found = decode(_PublicPayload, answer, where).data
        if found is None:  # errors have the status of success
            raise UnreachableError(f"{where} was refused: {str(answer)[:200]}")
        return [each.row for each in decode_rows(_PublicGpuPayload, found.gpu_types, where)]

    async def create(self, body: Mapping[str, Any]) -> MachineRecord:
        """Create a pod, by one call. Raises one of :data:`~skyward.providers.base.REFUSALS` if none was made."""
        try:
            made = _parse_pod(await self.rest.create("/v2/pods", body))
        except AuthenticationError as error:
            if isinstance(error.__cause__, RefusedCall) and error.__cause__.refusal.code.startswith("403"):
                raise CapacityError(f"{error}; or the account may not use this GPU") from error.__cause__
            raise
        if made is None:
            raise UnreachableError("RunPod answered a creating call with success, and without a pod")
        return made

    async def request_end(self, machine: str) -> None:
        """Request the termination of a pod; raises the refusal."""
        await self.rest.call("DELETE", f"/v2/pods/{machine}")


class _PodGpuPayload(VendorPayload):
    id: str
    count: int = 1


class _PodCpuPayload(VendorPayload, rename="camel"):
    id: str
    vcpu_count: int


class _DirectPayload(VendorPayload):
    host: str
    port: int


class _WaysPayload(VendorPayload):
    direct: _DirectPayload | None


class _NamedPayload(VendorPayload):
    name: str | None


class _PodPayload(VendorPayload, rename="camel"):
    id: str
    status: str
    cost: float | None
    ssh: _WaysPayload | None
    data_center_id: str | None
    gpu: _PodGpuPayload | None = None
    cpu: _PodCpuPayload | None = None
    cluster: Any = None

    def __post_init__(self) -> None:
        if self.gpu is None and self.cpu is None:
            raise ValueError("Object missing required field `gpu` or `cpu`")


def _parse_pod(row: object) -> MachineRecord | None:
    """Parse one pod of an answer; None for a pod of somebody else, or of a cluster."""
    if not (labels := labels_of(decode(_NamedPayload, row, _READING).name)):
        return None
    pod = decode(_PodPayload, row, _READING)
    if pod.cluster:
        return None
    state = decode_state(STATES, pod.status, _READING)
    if pod.gpu is not None:
        kind = pod_name(pod.gpu.id, pod.gpu.count)
    else:
        kind = pod_name(pod.cpu.id, pod.cpu.vcpu_count) if pod.cpu is not None else ""
    billed = state in (InstanceState.PENDING, InstanceState.RUNNING)
    direct = pod.ssh.direct if pod.ssh is not None else None
    return MachineRecord(
        id=pod.id,
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=Offer(
            spec=InstanceSpec(name=kind, cpu=0, memory_gib=0.0),
            region=pod.data_center_id or "",
            price_per_hour=(pod.cost or None) if billed else None,
            island=True,
        ),
        public_address=direct.host if direct else "",
        public_port=direct.port if direct else 0,
        reason=_REASONS.get(pod.status, ""),
    )


_CLOUDS: Final = ("secure", "community")
_DISK_GB: Final = 40
_VOLUME_PATH: Final = "/workspace"


@explain_options
@dataclass(frozen=True, kw_only=True)
class RunPod(RentedContainers[PodAccount]):
    """Pods of RunPod, with and without GPUs, reached over SSH as root, billed by the second from a prepaid balance.

    The key is that of the environment, ``RUNPOD_API_KEY``, else the one in ``~/.runpod/config.toml``. Pods are islands.
    There is no spot market. A pod terminates itself with the key that RunPod gives it, once its client is dead or its
    time is over; each pod is asked at first contact whether that key may.

    Args:
        cloud: ``"secure"``, RunPod's own data centers; or ``"community"``, other people's hardware.
        data_centers: ids of data centers, such as ``["EU-RO-1"]``; None means any that has the request in stock.
        image: image of the containers; None is a small one of Ubuntu. It has to run as root, and needs a shell, and
            sshd or a package manager.
        container_disk_gb: size of the disk, which holds image, environment and files, and ends with the pod. None means
            40, and without GPUs at most 10 for each core.
        network_volume: id of a network volume, mounted at ``/workspace``; pods are in its data center then.
        endpoint_url: URL of the API used instead of RunPod's; for tests and private gateways.
        api_key: the API's key, in place of the environment's. It is not recorded: ``skyward sweep`` needs it in the
            environment.
        reaper_key: key by which pods terminate themselves, where the one that RunPod gives them may not. It is sent
            over SSH. Calls run as root and can read it; it can terminate every pod of its account.

    Raises:
        ConfigurationError: a value is wrong.
    """

    cloud: str = "secure"
    data_centers: Sequence[str] | None = None
    image: str | None = None
    container_disk_gb: int | None = None
    network_volume: str | None = None
    endpoint_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    reaper_key: str | None = field(default=None, repr=False)

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    look_interval_s: ClassVar[float] = 5.0
    """Least number of seconds between two lists of pods: an account may make 60 calls a minute."""
    look_s: ClassVar[float] = 5.0
    """Pause between two looks at pods that end."""

    def __post_init__(self) -> None:
        disk_gb = _DISK_GB
        if self.container_disk_gb is not None:
            disk_gb = whole_number("container_disk_gb", self.container_disk_gb, minimum=10)
        check_settings(self, network_volume=text, endpoint_url=web_address, api_key=secret, reaper_key=secret)
        check_settings(self, data_centers=texts)
        if self.cloud not in _CLOUDS:
            raise refusal("cloud", '"secure" or "community"', self.cloud)
        if self.data_centers == ():
            raise refusal("data_centers", "None or at least one id such as 'EU-RO-1'", ())
        if self.network_volume is not None and self.cloud != "secure":
            raise ConfigurationError('network_volume needs cloud="secure": no other hardware has network volumes')
        if self.image is not None:
            remedy = "pods get no credentials for it; push the image to a public one"
            checked_image(self.image, disk="container_disk_gb", disk_gb=disk_gb, remedy=remedy)
        if not re.fullmatch(r"[\w-]{4,64}", self.network_volume or "none", re.ASCII):
            raise refusal("network_volume", "the id of a network volume, such as 'agv6w2qcg7'", self.network_volume)
        self.use_api(PodAccount(self._url, self.api_key, patience_s=self.patience_s))

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether a key is here."""
        return is_found(find_key)

    @property
    def name(self) -> str:
        """``"runpod"``."""
        return "runpod"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the pods that are in stock and satisfy the request, cheapest first.

        Raises:
            ConfigurationError: RunPod has no such pod, data center or volume; names alternatives.
            CapacityError: no such pod is available now; names where it is.
            AuthenticationError: there is no key, or RunPod refuses it.
        """
        places = await self.api.rest.share("places", self._places)
        return make_offers(await self._stock(request), request, data_centers=places)

    async def public_offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the pods with GPUs that satisfy a request, in stock or not: RunPod shows their prices to anyone."""
        if request.accelerator is None and request.machine is None:
            return ()
        rows = await self.api.public_gpus()
        stock = dict.fromkeys(parse_gpus(rows, request, cloud=self.cloud), ("",))
        return make_offers(stock, request, data_centers=None)

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a pod, whose first process is the container's loop."""
        name = label(order.pool_id, key)
        boot = await asyncio.to_thread(self._boot, key, name, order.lasts_s(offer))
        compute = compute_of(offer.spec)
        device: str = compute.get("gpu", {}).get("id", "")
        nvidia = bool(device) and not device.startswith("AMD")
        image = self.image or (GPU_IMAGE if nvidia else CPU_IMAGE)
        if nvidia and (cuda := cuda_of(image)):  # hosts with an older driver refuse to start it
            compute = {"gpu": {**compute["gpu"], "minCudaVersion": f"{cuda:.1f}"}}
        body = {
            "name": name,
            "image": image,
            **compute,
            "cloud": self.cloud.upper(),
            "disk": self.container_disk_gb or (_DISK_GB if device else min(_DISK_GB, 10 * offer.spec.cpu)),
            "ports": [f"{self.port}/tcp"],
            "env": boot.variable,
            "args": boot.command,
        }
        if offer.region:
            body["dataCenterIds"] = [offer.region]
        if self.network_volume is not None:
            body["mounts"] = {"network": [{"volumeId": self.network_volume, "path": _VOLUME_PATH}]}
        return await self.api.create(body)

    async def secret(self, instance: Instance) -> MachineSecret | None:
        """Return the reaper key for a pod; None without one."""
        del instance
        if self.reaper_key is None:
            return None
        return MachineSecret(command=("sh", "-c", store(SECRET_FILE)), value=self.reaper_key)

    async def check(self) -> Sequence[Finding]:
        """Check the key, the data centers and the stock; creates nothing."""
        found: list[Finding] = []
        try:
            await self.api.listed()
            found.append(Finding(what="credentials", state="ok", found="RunPod accepts the key"))
            places = await self._places()
            rows = await self._gpus(1)
        except SkywardError as error:
            what = "stock" if found else "credentials"
            return [*found, failed(what, error, fix="see docs/providers/runpod.md")]
        where = ", ".join(places) if places else "any data center"
        held = sum(row.get("availability") not in (None, "NONE") for row in rows)
        stock = Finding(what="stock", state="ok" if held else "warn", found=f"{held} kinds of GPU; asked for {where}")
        return [*found, stock]

    @property
    def _url(self) -> str:
        return (self.endpoint_url or API_URL).rstrip("/")

    async def _stock(self, request: PoolRequest) -> Stock:
        if request.accelerator is not None:
            return parse_gpus(await self._gpus(wanted_count(request)), request, cloud=self.cloud)
        if request.machine is None and self.cloud != "secure":
            raise ConfigurationError(
                f'cloud="{self.cloud}": RunPod has no pods without GPUs there: request a GPU, or cloud="secure"'
            )
        query = {"include": "AVAILABILITY", "product": "POD"}
        cpus: Stock = {}
        if self.cloud == "secure":
            cpus = parse_cpus(await self.api.list_items("/v2/catalog/cpus", "cpus", query))
        if request.machine is None or any(each.name == request.machine for each in cpus):
            return cpus
        return {**cpus, **parse_gpus(await self._gpus(wanted_count(request)), request, cloud=self.cloud)}

    async def _gpus(self, count: int) -> Sequence[Mapping[str, Any]]:
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(count), "cloud": self.cloud.upper()}
        rest, path = self.api.rest, "/v2/catalog/gpus"
        return await rest.share(f"{path} {count}", lambda: self.api.list_items(path, "gpus", query))

    async def _places(self) -> Sequence[str] | None:
        """Return the data centers in question; None for any.

        Raises:
            ConfigurationError: one does not exist, or the volume does not, or is elsewhere.
        """
        places = self.data_centers
        if places is not None:
            path = "/v2/catalog/datacenters"
            rows = await self.api.list_items(path, "dataCenters")
            known = [center.id for center in decode_rows(_DataCenterPayload, rows, f"RunPod: GET {path}")]
            if unknown := [each for each in places if each not in known]:
                raise ConfigurationError(f"data_centers: RunPod has no {unknown[0]!r}{closest(unknown[0], known)}")
        if self.network_volume is None:
            return places
        volume = await self.api.rest.optional(f"/v2/network-volumes/{self.network_volume}")
        if volume is None:
            raise ConfigurationError(f"network_volume: RunPod has no volume {self.network_volume!r} in this account")
        home = decode(_VolumePayload, volume, "RunPod: GET /v2/network-volumes").data_center
        if home not in (places or [home]):
            raise ConfigurationError(f"network_volume {self.network_volume!r} is in {home}: name it in data_centers")
        return [home]

    def _boot(self, key: str, name: str, lasts_s: float) -> ContainerBoot:
        _, user = user_key()
        now = time.time()
        pod = f"{self._url}/v2/pods/${{RUNPOD_POD_ID}}"
        keys = ["RUNPOD_API_KEY"] if self.reaper_key is None else ["SKYWARD_SECRET", "RUNPOD_API_KEY"]
        signed = [(f"Authorization: Bearer ${{{each}}}",) for each in keys]
        terminate = [
            call
            for headers in signed
            for call in (
                HttpCall(method="DELETE", url=pod, headers=headers),
                HttpCall(method="POST", url=f"{pod}/action", headers=headers, body='{"action": "terminate"}'),
            )
        ]
        # A key that reads a pod may be refused every change. This one changes nothing: the pod has that name.
        check = HttpCall(method="PATCH", url=pod, headers=signed[0], body=json.dumps({"name": name}))
        probe = EndProbe(
            absent_check=replace(check, url=f"{pod}-none"),
            absent_end=replace(terminate[0], url=f"{pod}-none"),
            read=HttpCall(method="GET", url=pod, headers=signed[0]),
        )
        return ContainerBoot(
            host_key=host_key(key),
            user_key=user.public,
            port=cast("int", self.port),
            made_at=int(now),
            ends_at=int(now + lasts_s),
            end=terminate,
            check=check,
            probe=probe,
        )
