"""RunPod on loopback addresses: catalogue with stock, data centers, network volumes, and pods, which are containers.

Stateful, and held to the vendor's description. Its oddities are there: no capacity, broken rules and wrong places are
all a 400, a running pod has no SSH port yet for some looks, a pod that was reset has another one and an empty disk,
main processes that end are started again, pods of clusters are hidden, and a pod's own key reaches that pod only.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

import pytest

from skyward.testing.aws import Looks
from support.clouds.container_room import ContainerOrders, ContainerRoom
from support.clouds.fake_cloud import FakeCloud, FakeMachine
from support.clouds.rest_service import Pace, RestAnswer, RestCall, RestService

__all__ = ["API_KEY", "Pod", "RunPodApi"]

API_KEY: Final = "rpa_TEST0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CALLS_A_MINUTE: Final = 60
_LEAST_VCPU: Final = 2
_MOST_VARIABLES: Final = 50
_CRASHES: Final = 3
_CREATED: Final = "2026-11-23T12:00:00Z"
_ACTIONS: Final[Mapping[str, Sequence[str]]] = {
    "RUNNING": ("stop", "restart", "terminate"),
    "EXITED": ("start", "terminate"),
    "TERMINATED": (),
}


def error(status: int, message: str) -> RestAnswer:
    """Return the vendor's form of an error: a problem of RFC 9457."""
    body = {"title": HTTPStatus(status).phrase, "status": status, "detail": message}
    return RestAnswer(status=status, body=body, headers={"Content-Type": "application/problem+json"})


def gpu_type(
    device: str, name: str, *, memory: int, secure: float, community: float, most: int = 8, maker: str = "NVIDIA"
) -> dict[str, Any]:
    """Return a row of the catalogue; without a price it is not in that cloud."""
    return {
        "id": device,
        "name": name,
        "pool": None,
        "manufacturer": maker,
        "memory": memory,
        "secure": secure > 0,
        "community": community > 0,
        "price": {"secure": secure, "community": community},
        "maxCount": {"secure": most if secure else 0, "community": most // 2 if community else 0},
    }


def cpu_type(device: str, name: str, *, memory_per_cpu: float, price: float) -> dict[str, Any]:
    """Return a flavour without GPUs."""
    return {
        "id": device,
        "name": name,
        "group": "Gen 5",
        "vcpu": {"min": 2, "max": 32},
        "ramGbPerVcpu": memory_per_cpu,
        "price": {"securePerVcpu": price, "serverlessPerVcpu": price},
    }


GPUS: Final = (
    gpu_type("NVIDIA L4", "L4", memory=24, secure=0.39, community=0.28),
    gpu_type("NVIDIA GeForce RTX 4090", "RTX 4090", memory=24, secure=0.69, community=0.34),
    gpu_type("NVIDIA A100 80GB PCIe", "A100 PCIe", memory=80, secure=1.39, community=1.19),
    gpu_type("NVIDIA A100-SXM4-80GB", "A100 SXM", memory=80, secure=1.49, community=0.0),
    gpu_type("NVIDIA H100 80GB HBM3", "H100 SXM", memory=80, secure=2.69, community=0.0),
    gpu_type("AMD Instinct MI300X OAM", "MI300X", memory=192, secure=2.49, community=0.0, maker="AMD"),
)
CPUS: Final = (
    cpu_type("cpu3c", "Compute-Optimized", memory_per_cpu=2.0, price=0.03),
    cpu_type("cpu5m", "Memory-Optimized", memory_per_cpu=8.0, price=0.05),
)
PLACES: Final = {"EU-RO-1": "EUROPE", "US-KS-2": "NORTH_AMERICA", "US-TX-3": "NORTH_AMERICA"}


@dataclass(slots=True, kw_only=True)
class PodMarket:
    """Kinds of pods, and the stock of each; a test may change them.

    Attributes:
        gpus: the catalogue's GPUs.
        cpus: the catalogue's flavours without GPUs.
        stock: level of each kind's stock, by its id, then by data center.
    """

    gpus: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in GPUS])
    cpus: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in CPUS])
    stock: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def __post_init__(self) -> None:
        self.stock = {row["id"]: dict.fromkeys(PLACES, "HIGH") for row in [*self.gpus, *self.cpus]}
        self.stock["NVIDIA H100 80GB HBM3"] = {"US-KS-2": "LOW"}
        self.stock["NVIDIA L4"] = {"EU-RO-1": "MEDIUM", "US-KS-2": "HIGH", "US-TX-3": "NONE"}


@dataclass(slots=True, kw_only=True, eq=False)
class Pod(FakeMachine):
    """A pod.

    Attributes:
        place: its data center.
        key: its own API key.
        unmapped: looks at which it runs and has no public port yet.
        cluster: its cluster; empty for none.
    """

    place: str
    key: str
    unmapped: int = 0
    cluster: str = ""


class RunPodApi(FakeCloud):
    """An account at RunPod. See :class:`~support.clouds.fake_cloud.FakeCloud`.

    Args:
        folder: folder of the pods; None for records without containers.
        looks: delays of state changes, in looks.
        **room: more settings of :class:`~support.clouds.container_room.ContainerRoom`.

    Attributes:
        keys: the account's keys.
        containers_may_end: False for pods whose own keys are refused.
        market: see :class:`PodMarket`.
        forbidden: ids of GPUs that the account may not use.
        bad_images: images that do not exist, or are private.
        balance: USD left; a pod needs an hour of its price.
        volumes: data center of each network volume, by id.
        unmapped: looks at which a pod runs and has no public port yet.
    """

    def __init__(self, folder: Path | None = None, *, looks: Looks | None = None, **room: Any) -> None:
        service = RestService(
            "runpod-api",
            errors=error,
            description="runpod-rest-v2-openapi.json",
            authorize=self._authorize,
            answer_headers=self._quota,
        )
        self.containers = ContainerRoom(folder, api=lambda: service.url, **room)
        super().__init__(service, self.containers, looks)
        self.pods: dict[str, Pod] = {}
        self.keys = [API_KEY]
        self.containers_may_end = True
        self.market = PodMarket()
        self.forbidden: set[str] = set()
        self.bad_images: set[str] = set()
        self.balance = 100.0
        self.volumes: dict[str, str] = {"agv6w2qcg7": "EU-RO-1"}
        self.unmapped = 1
        service.paces.append(
            Pace(calls=CALLS_A_MINUTE, per_s=60.0, headers=lambda left_s: {"Retry-After": str(int(left_s) + 1)})
        )
        routes: Mapping[str, Callable[[RestCall], RestAnswer]] = {
            "GET /v2/catalog/gpus": self._gpus,
            "GET /v2/catalog/cpus": self._cpus,
            "GET /v2/catalog/datacenters": lambda call: RestAnswer(body={"dataCenters": list(map(_place, PLACES))}),
            "GET /v2/network-volumes": lambda call: RestAnswer(body={"networkVolumes": self._volumes()}),
            "GET /v2/network-volumes/{volume_id}": self._volume,
            "GET /v2/pods": self._list,
            "POST /v2/pods": self._create,
            "GET /v2/pods/{pod_id}": self._show,
            "PATCH /v2/pods/{pod_id}": self._update,
            "DELETE /v2/pods/{pod_id}": self._delete,
            "POST /v2/pods/{pod_id}/action": self._act,
        }
        for route, handler in routes.items():
            service.route(route, handler)
        service.route("POST /graphql", self._public_gpus, documented=False)  # the older API, which asks for no key

    @property
    def environment(self) -> Mapping[str, str]:
        return {"RUNPOD_API_KEY": API_KEY}

    @property
    def secrets(self) -> Sequence[str]:
        return [*self.keys, *(each.key for each in self.pods.values())]

    def use(self, patch: pytest.MonkeyPatch, provider: type[Any], **settings: Any) -> None:
        super().use(patch, provider, **settings)
        if "look_interval_s" in settings:  # the limit of calls is one of clients with their own intervals
            self.service.paces.clear()

    def left(self) -> Mapping[str, Sequence[str]]:
        self.room.settle()
        with self.service.lock:
            return {"pods": [*self.alive]} if self.alive else {}

    def end(self, machine: FakeMachine) -> None:
        super().end(machine)
        machine.status = "TERMINATED"

    def reset(self, machine: str, *, wiped: bool = True) -> None:
        """Reset a pod: its processes end, its disk is empty, its port is another one."""
        with self.service.lock:
            self._again(self.pods[machine])
            self.containers.restart(machine, wiped=wiped)

    def move_port(self, machine: str) -> None:
        """Publish another port of a running pod, whose processes stay."""
        self.containers.machine(machine).move_port()

    def lose(self, machine: str) -> None:
        """Stop a pod, as RunPod does when its host fails, or the balance is empty."""
        with self.service.lock:
            self._stop(self.pods[machine])

    def deploy(self, order: Mapping[str, Any], *, cluster: str = "") -> str:
        """Create a pod as somebody else of the account would, alone or in a cluster, and return its id."""
        with self.service.lock:
            made = self._make(order)
            made.cluster = cluster
            return made.id

    # Access

    def _quota(self) -> Mapping[str, str]:
        return {"RateLimit": '"minute";r=59;t=60', "RateLimit-Policy": f'"minute";q={CALLS_A_MINUTE};w=60'}

    def _authorize(self, call: RestCall) -> RestAnswer | None:
        if call.token in self.keys:
            return None
        owner = next((each for each in self.pods.values() if each.key == call.token), None)
        if owner is None:
            return error(401, "invalid bearer token" if call.token else "missing bearer token")
        if self.containers_may_end and call.parts.get("pod_id") == owner.id:
            return None
        return error(403, "access denied")

    # Catalogue

    def _gpus(self, call: RestCall) -> RestAnswer:
        cloud = call.query.get("cloud", "SECURE").lower()
        if ("include" in call.query) != ("product" in call.query):
            return error(400, "include and product go together")
        count = int(call.query.get("count", "1"))
        rows = [self._stocked(row, call, held=count <= row["maxCount"][cloud]) for row in self.market.gpus]
        return RestAnswer(body={"gpus": rows})

    def _public_gpus(self, call: RestCall) -> RestAnswer:
        if "gpuTypes" not in call.body["query"] or call.token:
            return RestAnswer(body={"data": None, "errors": [{"message": "Something went wrong."}]})
        rows = [
            {
                "id": row["id"],
                "displayName": row["name"],
                "memoryInGb": row["memory"],
                **{f"{cloud}Cloud": row[cloud] for cloud in ("secure", "community")},
                **{f"{cloud}Price": row["price"][cloud] or None for cloud in ("secure", "community")},
                **{f"maxGpuCount{cloud.title()}Cloud": row["maxCount"][cloud] for cloud in ("secure", "community")},
            }
            for row in self.market.gpus
        ]
        unknown = {"id": "unknown", "displayName": "unknown", "memoryInGb": 0}
        return RestAnswer(body={"data": {"gpuTypes": [*rows, unknown]}})

    def _cpus(self, call: RestCall) -> RestAnswer:
        if ("include" in call.query) != ("product" in call.query):
            return error(400, "include and product go together")
        return RestAnswer(body={"cpus": [self._stocked(row, call, held=True) for row in self.market.cpus]})

    def _stocked(self, row: Mapping[str, Any], call: RestCall, *, held: bool) -> Mapping[str, Any]:
        if "include" not in call.query:
            return row
        found = self.market.stock[row["id"]] if held else {}
        levels = [level for level in ("HIGH", "MEDIUM", "LOW") if level in found.values()]
        places = [{"id": place, "name": place, "availability": level} for place, level in found.items()]
        return {**row, "availability": (levels or ["NONE"])[0], **({"dataCenters": places} if levels else {})}

    def _volumes(self) -> list[Mapping[str, Any]]:
        return [
            {"id": volume, "name": "data", "size": 50, "dataCenter": place, "type": "STANDARD"}
            for volume, place in self.volumes.items()
        ]

    def _volume(self, call: RestCall) -> RestAnswer:
        rows = [row for row in self._volumes() if row["id"] == call.parts["volume_id"]]
        return RestAnswer(body=rows[0]) if rows else error(404, "network volume not found")

    # Pods

    def _create(self, call: RestCall) -> RestAnswer:
        order = call.body
        if refused := self._refused(order):
            return refused
        made = self._make(order)
        made.pending += 1  # this answer is no look
        return RestAnswer(status=201, body={**self._row(made), "status": "PROVISIONING"})

    def _refused(self, order: Mapping[str, Any]) -> RestAnswer | None:
        if ("gpu" in order) == ("cpu" in order) or not order.get("image"):
            return error(400, "exactly one of gpu and cpu, and an image or a template, must be set")
        if len(order.get("env", {})) > _MOST_VARIABLES:
            return error(400, f"more than {_MOST_VARIABLES} environment variables")
        if order.get("cpu") and ("persistent" in order.get("mounts", {}) or order.get("cloud") == "COMMUNITY"):
            return error(400, "CPU pods have no persistent mounts, and are in the secure cloud only")
        for mount in order.get("mounts", {}).get("network", ()):
            if mount["volumeId"] not in self.volumes:
                return error(404, "network volume not found")
        device = (order.get("gpu") or order["cpu"])["id"]
        if device in self.forbidden:
            return error(403, f"your account cannot access {device}")
        if self._price(order) > self.balance:
            return error(402, "Insufficient balance: a pod needs an hour of its price")
        if not self._free(order) or not self.take_capacity(device):
            return error(400, "There are no longer any instances available with the requested specifications.")
        return None

    def _free(self, order: Mapping[str, Any]) -> list[str]:
        """Return the data centers that can place a pod."""
        device = (order.get("gpu") or order["cpu"])["id"]
        held = self.market.stock.get(device, {})
        places = [place for place, level in held.items() if level != "NONE"]
        return [place for place in places if place in (order.get("dataCenterIds") or places)]

    def _price(self, order: Mapping[str, Any]) -> float:
        cloud = str(order.get("cloud", "SECURE")).lower()
        if wanted := order.get("gpu"):
            (row,) = [row for row in self.market.gpus if row["id"] == wanted["id"]]
            return float(row["price"][cloud]) * int(wanted.get("count", 1))
        (row,) = [row for row in self.market.cpus if row["id"] == order["cpu"]["id"]]
        return float(row["price"]["securePerVcpu"]) * int(order["cpu"]["vcpuCount"])

    def _make(self, order: Mapping[str, Any]) -> Pod:
        made = Pod(
            id=uuid.uuid4().hex[:14],
            status="PROVISIONING",
            created=order,
            price_per_hour=round(self._price(order) * self.surcharge, 6),
            place=self._free(order)[0],
            key=f"rpa_POD{uuid.uuid4().hex}",
            unmapped=self.unmapped,
        )
        self.pods[made.id] = made
        published = [int(port.partition("/")[0]) for port in order.get("ports", ()) if port.endswith("/tcp")]
        own = {
            "RUNPOD_POD_ID": made.id,
            "RUNPOD_API_KEY": made.key,
            "RUNPOD_DC_ID": made.place,
            "RUNPOD_GPU_COUNT": str(order.get("gpu", {}).get("count", 0)),
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64",
        }
        orders = ContainerOrders(
            args=order.get("args", ""), env={**order.get("env", {}), **own}, port=(published or [0])[0]
        )
        self.begin(made, orders, keys=(), powered_off=self._exited, minimum_s=0.0)
        return made

    def _exited(self, machine: FakeMachine) -> None:
        """Start a main process that has ended again, unless it does so all the time."""
        pod = cast("Pod", machine)
        if len(self.containers.machine(pod.id).exits) > _CRASHES:
            self._stop(pod)
        else:
            self._again(pod)
            self.containers.restart(pod.id, wiped=False)

    def _again(self, pod: Pod) -> None:
        pod.status, pod.pending, pod.unmapped = "STARTING", self.looks.pending, self.unmapped

    def _stop(self, pod: Pod) -> None:
        if not pod.ended and pod.status != "EXITED":
            pod.status = "EXITED"
            self.containers.lose(pod.id)
            self.service.bill.end(pod.id)

    def _list(self, call: RestCall) -> RestAnswer:
        clusters = call.query.get("includeClusterPods") == "true"
        seen = [pod for pod in self.pods.values() if (clusters or not pod.cluster) and self.look(pod)]
        return RestAnswer(body={"pods": [self._row(pod) for pod in seen]})

    def _show(self, call: RestCall) -> RestAnswer:
        pod = self.pods.get(call.parts["pod_id"])
        return RestAnswer(body=self._row(pod)) if pod and self.look(pod) else error(404, "pod not found")

    def _row(self, pod: Pod) -> Mapping[str, Any]:
        order = pod.created
        if order["image"] in self.bad_images and not pod.ended:
            pod.status = "ERROR"
        if pod.status in ("PROVISIONING", "STARTING"):
            pod.status = "RUNNING" if self.runs(pod) else "STARTING"
            mapped = False
        else:
            pod.unmapped -= 1
            mapped = pod.status == "RUNNING" and pod.unmapped < 0
        cpu = order.get("cpu")
        return {
            **{name: order[name] for name in ("name", "image")},
            "args": order.get("args", ""),
            "disk": order.get("disk", 50),
            "mounts": order.get("mounts", {}),
            **({"cpu": {**cpu, "memory": int(cpu["vcpuCount"]) * 2}} if cpu else {}),
            **({"gpu": {"id": order["gpu"]["id"], "count": order["gpu"].get("count", 1)}} if "gpu" in order else {}),
            **({"cluster": {"id": pod.cluster, "rank": 0}} if pod.cluster else {}),
            "id": pod.id,
            "status": pod.status,
            "actions": list(_ACTIONS.get(pod.status, ("terminate",))),
            "ports": order.get("ports", []),
            "env": order.get("env", {}),
            "registry": None,
            "cloud": order.get("cloud", "SECURE"),
            "dataCenterId": pod.place,
            "cudaVersion": None if cpu else "12.8",
            "ssh": {"proxy": _proxy(pod), "direct": self._direct(pod) if mapped else None},
            "template": None,
            "cost": 0.0 if pod.status in ("EXITED", "TERMINATED") else pod.price_per_hour,
            "locked": False,
            "runtime": {"uptime": 1} if pod.status == "RUNNING" else None,
            "createdAt": _CREATED,
            "startedAt": _CREATED if pod.status == "RUNNING" else None,
            "globalNetworking": {"enabled": False},
        }

    def _direct(self, pod: Pod) -> Mapping[str, Any] | None:
        if "22/tcp" not in pod.created.get("ports", ()):
            return None
        port = self.containers.published_port(pod.id)
        command = f"ssh root@{pod.address} -p {port}"
        return {"host": pod.address, "port": port, "username": "root", "command": command}

    def _update(self, call: RestCall) -> RestAnswer:
        pod = self.pods.get(call.parts["pod_id"])
        if pod is None or pod.ended:
            return error(404, "pod not found")
        pod.created = {**pod.created, **call.body}
        return RestAnswer(body=self._row(pod))

    def _delete(self, call: RestCall) -> RestAnswer:
        pod = self.pods.get(call.parts["pod_id"])
        if pod is None or pod.ended or pod.unseen > 0:
            return error(404, "pod not found")
        if pod.cluster:
            return error(409, "the pod belongs to a cluster")
        self.end(pod)
        return RestAnswer(status=204)

    def _act(self, call: RestCall) -> RestAnswer:
        pod, action = self.pods.get(call.parts["pod_id"]), call.body["action"]
        if pod is None or pod.ended:
            return error(404, "pod not found")
        if action == "terminate":
            return self._delete(call)
        if action not in _ACTIONS.get(pod.status, ()):
            return error(409, f"a pod that is {pod.status} cannot {action}")
        if action == "stop":
            self._stop(pod)
        else:
            self.reset(pod.id)
        return RestAnswer(body=self._row(pod))


def _place(place: str) -> Mapping[str, Any]:
    own = {"name": place, "region": PLACES[place], "networkVolumeTypes": ["STANDARD"], "compliance": []}
    return {"id": place, **own, "globalNetwork": True}


def _proxy(pod: Pod) -> Mapping[str, Any]:
    name = f"{pod.id}-64411eb2"
    return {"host": "ssh.runpod.io", "port": 22, "username": name, "command": f"ssh {name}@ssh.runpod.io"}
