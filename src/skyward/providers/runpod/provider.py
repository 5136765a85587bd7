"""Provider of RunPod's pods: containers with GPUs, or without, billed by the second from a prepaid balance."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, cast

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers._common.boot.container_boot import SECRET_FILE, ContainerBoot, EndProbe, HttpCall
from skyward.providers._common.boot.container_image import CPU_IMAGE, GPU_IMAGE, checked_image, cuda_of
from skyward.providers._common.boot.delete_script import store
from skyward.providers._common.boot.rented_containers import RentedContainers
from skyward.providers._common.findings import failed
from skyward.providers._common.machine_catalogue import closest
from skyward.providers._common.rented_machines import MachineRecord, label
from skyward.providers._common.ssh_keys import host_key, user_key
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.providers.registry import Finding, MachineSecret
from skyward.providers.runpod.pod_account import API_URL, PodAccount
from skyward.providers.runpod.pod_catalogue import (
    Stock,
    compute_of,
    make_offers,
    parse_cpus,
    parse_gpus,
    wanted_count,
)
from skyward.request.checks import refusal, secret, text, texts, web_address, whole_number
from skyward.request.option_names import explain_options
from skyward.request.request import PoolRequest

__all__ = ["RunPod"]

_CLOUDS: Final = ("secure", "community")
_DISK_GB: Final = 40
_VOLUME_PATH: Final = "/workspace"


@explain_options
@dataclass(frozen=True, kw_only=True)
class RunPod(RentedContainers):
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
        for name, checked in (
            ("network_volume", text),
            ("endpoint_url", web_address),
            ("api_key", secret),
            ("reaper_key", secret),
            ("data_centers", texts),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, value))
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
        account = PodAccount(self._url, self.api_key, patience_s=self.patience_s)
        object.__setattr__(self, "_known", account)

    @property
    def name(self) -> str:
        """``"runpod"``."""
        return "runpod"

    @property
    def api(self) -> PodAccount:
        """The account."""
        return cast("PodAccount", self.__dict__["_known"])

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the pods that are in stock and satisfy the request, cheapest first.

        Raises:
            ConfigurationError: RunPod has no such pod, data center or volume; names alternatives.
            CapacityError: no such pod is available now; names where it is.
            AuthenticationError: there is no key, or RunPod refuses it.
        """
        places = await self._places()
        return make_offers(await self._stock(request), request, data_centers=places)

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
            cpus = parse_cpus((await self.api.rest.read("/v2/catalog/cpus", query)).get("cpus") or ())
        if request.machine is None or any(each.name == request.machine for each in cpus):
            return cpus
        return {**cpus, **parse_gpus(await self._gpus(wanted_count(request)), request, cloud=self.cloud)}

    async def _gpus(self, count: int) -> Sequence[Mapping[str, Any]]:
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(count), "cloud": self.cloud.upper()}
        return (await self.api.rest.read("/v2/catalog/gpus", query)).get("gpus") or ()

    async def _places(self) -> Sequence[str] | None:
        """Return the data centers in question; None for any.

        Raises:
            ConfigurationError: one does not exist, or the volume does not, or is elsewhere.
        """
        places = self.data_centers
        if places is not None:
            rows = (await self.api.rest.read("/v2/catalog/datacenters")).get("dataCenters") or ()
            known = [str(row.get("id")) for row in rows]
            if unknown := [each for each in places if each not in known]:
                raise ConfigurationError(f"data_centers: RunPod has no {unknown[0]!r}{closest(unknown[0], known)}")
        if self.network_volume is None:
            return places
        volume = await self.api.rest.optional(f"/v2/network-volumes/{self.network_volume}")
        if volume is None:
            raise ConfigurationError(f"network_volume: RunPod has no volume {self.network_volume!r} in this account")
        home = str(volume.get("dataCenter"))
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
