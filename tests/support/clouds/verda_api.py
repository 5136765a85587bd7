"""Verda on loopback addresses: catalogue, availability, keys, startup scripts, volumes and instances.

Stateful, and held to the vendor's description. Its oddities are there: ids come as bare text, a machine that is being
provisioned cannot be deleted, the answer to a deletion has items that may have failed, a volume that is not named
stays, one that is not deleted for good is in the trash, and machines that power off go on billing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyward.testing.aws import Looks
from support.clouds.booted_machine import MachineRoom
from support.clouds.fake_cloud import FakeCloud, FakeMachine
from support.clouds.rest_service import RestAnswer, RestCall, RestService

__all__ = ["CLIENT_ID", "CLIENT_SECRET", "TYPES", "VerdaApi"]

CLIENT_ID: Final = "verda-test-client-id"
CLIENT_SECRET: Final = "verda-test-client-secret-0123456789abcdef"
BEARER_S: Final = 3600
LEAST_BILLED_S: Final = 600.0
_CODES: Final = {
    400: "invalid_request",
    401: "unauthorized_request",
    402: "insufficient_funds",
    403: "forbidden_action",
    404: "not_found",
    429: "too_many_requests",
    503: "service_unavailable",
}


def error(status: int, message: str) -> RestAnswer:
    """Return the vendor's form of an error."""
    return RestAnswer(status=status, body={"code": _CODES.get(status, "internal_error"), "message": message})


def machine_type(
    name: str, gpu: str, count: int, *, total_gb: float, cores: int, memory_gb: float, price: str, spot: str
) -> dict[str, Any]:
    """Return a row of the catalogue; the GPUs' memory is the sum, as Verda reports it."""
    held = f"{count}x {gpu}" if count else ""
    images = ["ubuntu-22.04", "ubuntu-24.04"]
    images += ["ubuntu-22.04-cuda-12.4-docker", "ubuntu-24.04-cuda-12.8-open-docker"] if count else []
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_DNS, name)),
        "instance_type": name,
        "model": gpu.rsplit(" ", 1)[0],
        "name": gpu,
        "cpu": {"description": f"{cores} CPU", "number_of_cores": cores},
        "gpu": {"description": held, "number_of_gpus": count},
        "gpu_memory": {"description": "", "size_in_gigabytes": total_gb},
        "memory": {"description": f"{memory_gb:g}GB RAM", "size_in_gigabytes": memory_gb},
        "price_per_hour": price,
        "spot_price": spot,
        "dynamic_price": price,
        "currency": "usd",
        "manufacturer": "NVIDIA" if count else "AMD",
        "deploy_warning": None,
        "supported_os": images,
    }


TYPES = (
    machine_type("CPU.4V.16G", "CPU", 0, total_gb=0, cores=4, memory_gb=16, price="0.0279", spot="0"),
    machine_type("CPU.8V.32G", "CPU", 0, total_gb=0, cores=8, memory_gb=32, price="0.0558", spot="0.0168"),
    machine_type("1V100.6V", "Tesla V100 16GB", 1, total_gb=16, cores=6, memory_gb=23, price="0.1381", spot="0.0481"),
    machine_type("1H100.80S.30V", "H100 SXM5 80GB", 1, total_gb=80, cores=30, memory_gb=120, price="2.29", spot="0.8"),
    machine_type(
        "8H100.80S.176V", "H100 SXM5 80GB", 8, total_gb=640, cores=176, memory_gb=1480, price="18.32", spot="6.4"
    ),
    machine_type("1A100.40S.22V", "A100 SXM4 40GB", 1, total_gb=40, cores=22, memory_gb=120, price="0.72", spot="0.25"),
)


@dataclass(slots=True, kw_only=True)
class Market:
    """Machine types, and where each is available; a test may change both.

    Attributes:
        types: the catalogue.
        locations: codes of the locations.
        available: types by location, on demand.
        available_spot: types by location, on spot.
    """

    types: list[dict[str, Any]] = field(default_factory=lambda: [dict(row) for row in TYPES])
    locations: tuple[str, ...] = ("FIN-01", "FIN-02", "ICE-01")
    available: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    available_spot: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def __post_init__(self) -> None:
        names = [row["instance_type"] for row in self.types]
        self.available = {"FIN-01": names[:4], "FIN-02": names}
        self.available_spot = {"FIN-02": names, "ICE-01": names[:2]}


class VerdaApi(FakeCloud):
    """An account at Verda. See :class:`~support.clouds.fake_cloud.FakeCloud`.

    Args:
        folder: folder of the machines; None for records without machines.
        looks: delays of state changes, in looks.
        **room: more settings of :class:`~support.clouds.booted_machine.MachineRoom`.

    Attributes:
        clients: secret of each client.
        bearers: time at which each bearer expires.
        market: see :class:`Market`.
        balance: USD left; without any, nothing is created.
        tags_shown: False for records without tags.
        scripts, keys, volumes, trash: rows by id.
    """

    def __init__(self, folder: Path | None = None, *, looks: Looks | None = None, **room: Any) -> None:
        service = RestService(
            "verda-api",
            errors=error,
            description="verda-unofficial-patched.json",
            base_path="/v1",
            authorize=self._authorize,
        )
        super().__init__(service, MachineRoom(folder, **room), looks)
        self.clients = {CLIENT_ID: CLIENT_SECRET}
        self.bearers: dict[str, float] = {}
        self.market = Market()
        self.balance = 100.0
        self.tags_shown = True
        self.scripts: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.trash: dict[str, dict[str, Any]] = {}
        routes: Mapping[str, Callable[[RestCall], RestAnswer]] = {
            "POST /oauth2/token": self._sign_in,
            "GET /balance": lambda call: RestAnswer(body={"amount": self.balance, "currency": "usd"}),
            "GET /locations": self._locations,
            "GET /instance-types": lambda call: RestAnswer(body=self.market.types),
            "GET /instance-availability": self._availability,
            "GET /sshkeys": lambda call: RestAnswer(body=list(self.keys.values())),
            "POST /sshkeys": lambda call: self._added(self.keys, call.body),
            "GET /scripts": lambda call: RestAnswer(body=list(self.scripts.values())),
            "POST /scripts": lambda call: self._added(self.scripts, call.body),
            "DELETE /scripts": self._delete_scripts,
            "DELETE /scripts/{script_id}": self._delete_script,
            "GET /volumes": lambda call: RestAnswer(body=list(self.volumes.values())),
            "GET /volumes/trash": lambda call: RestAnswer(body=list(self.trash.values())),
            "DELETE /volumes/{volume_id}": self._delete_volume,
            "GET /instances": self._list,
            "GET /instances/{instance_id}": self._show,
            "POST /instances": self._deploy,
            "PUT /instances": self._act,
        }
        for route, handler in routes.items():
            service.route(route, handler)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"VERDA_CLIENT_ID": CLIENT_ID, "VERDA_CLIENT_SECRET": CLIENT_SECRET}

    @property
    def secrets(self) -> Sequence[str]:
        return [*self.clients.values(), *self.bearers]

    def left(self) -> Mapping[str, Sequence[str]]:
        """Return what is left; the user's key in the account is meant to stay."""
        self.room.settle()
        with self.service.lock:
            found = {
                "machines": [*self.alive],
                "volumes": [row["name"] for row in self.volumes.values()],
                "trash": [row["name"] for row in self.trash.values()],
                "scripts": [row["name"] for row in self.scripts.values()],
            }
        return {kind: names for kind, names in found.items() if names}

    def destroy(self, machine: str) -> None:
        """Take a machine back; a volume goes where its order says, if the machine was on spot, else away."""
        with self.service.lock:
            found = self.machines[machine]
            fate = found.created["os_volume"].get("on_spot_discontinue") if found.created.get("is_spot") else ""
            for volume in self._volumes_of(machine):
                row = self.volumes.pop(volume)
                if fate == "move_to_trash":
                    self.trash[volume] = row
                elif fate is None or fate == "keep_detached":
                    self.volumes[volume] = row | {"status": "detached", "instance_id": ""}
            found.status = "discontinued"
            self.end(found)

    def deploy(self, order: Mapping[str, Any]) -> str:
        """Create a machine as somebody else would, and return its id."""
        with self.service.lock:
            return self._make(order, self._kind(order["instance_type"])).id

    def expire_bearers(self) -> None:
        """Have every bearer so far refused."""
        with self.service.lock:
            self.bearers.clear()

    # Access

    def _authorize(self, call: RestCall) -> RestAnswer | None:
        call.public = call.route == "GET /instance-types" and not call.token
        signing_in = call.route == "POST /oauth2/token"
        valid = signing_in or call.public or self.bearers.get(call.token, 0.0) > self.service.clock()
        return None if valid else error(401, "The token is invalid or has expired")

    def _sign_in(self, call: RestCall) -> RestAnswer:
        secret = self.clients.get(call.body.get("client_id", ""))
        if secret is None or secret != call.body.get("client_secret"):
            return error(401, f"no such client: {call.body}")
        token = f"bearer-{uuid.uuid4().hex}"
        self.bearers[token] = self.service.clock() + BEARER_S
        return RestAnswer(
            body={
                "access_token": token,
                "refresh_token": f"refresh-{uuid.uuid4().hex}",
                "token_type": "Bearer",
                "scope": "cloud-api-v1",
                "expires_in": BEARER_S,
            }
        )

    # Catalogue

    def _locations(self, call: RestCall) -> RestAnswer:
        rows = [{"code": each, "name": each, "country_code": each[:2]} for each in self.market.locations]
        return RestAnswer(body=rows)

    def _availability(self, call: RestCall) -> RestAnswer:
        spot = "true" in (call.query.get("is_spot"), call.query.get("isSpot"))
        held = self.market.available_spot if spot else self.market.available
        return RestAnswer(body=[{"location_code": code, "availabilities": names} for code, names in held.items()])

    # Keys, scripts, volumes

    def _added(self, rows: dict[str, dict[str, Any]], row: Mapping[str, Any]) -> RestAnswer:
        made = str(uuid.uuid4())
        rows[made] = {"id": made, **row, "created_at": "2026-11-22T12:00:00.000Z"}
        return RestAnswer(status=201, body=made)

    def _delete_scripts(self, call: RestCall) -> RestAnswer:
        for each in call.body["scripts"]:
            self.scripts.pop(each, None)
        return RestAnswer()

    def _delete_script(self, call: RestCall) -> RestAnswer:
        found = self.scripts.pop(call.parts["script_id"], None)
        return RestAnswer() if found else error(404, "Script does not exist")

    def _delete_volume(self, call: RestCall) -> RestAnswer:
        volume = call.parts["volume_id"]
        for_good = call.query.get("is_permanent") == "true"
        row = self.volumes.get(volume)
        if row is None:
            return RestAnswer() if for_good and self.trash.pop(volume, None) else error(404, "Invalid volume id")
        owner = self.machines.get(row["instance_id"])
        if owner is not None and not owner.ended:
            return error(400, "The volume is attached")
        del self.volumes[volume]
        self.trash |= {} if for_good else {volume: row}
        return RestAnswer()

    def _volumes_of(self, machine: str) -> list[str]:
        return [volume for volume, row in self.volumes.items() if row["instance_id"] == machine]

    # Instances

    def _show(self, call: RestCall) -> RestAnswer:
        found = self.machines.get(call.parts["instance_id"])
        seen = found is not None and self.look(found)
        return RestAnswer(body=self._row(found)) if found and seen else error(404, "Invalid instance id")

    def _list(self, call: RestCall) -> RestAnswer:
        return RestAnswer(body=[self._row(each) for each in self.machines.values() if self.look(each)])

    def _row(self, machine: FakeMachine) -> Mapping[str, Any]:
        if machine.status == "provisioning" and self.runs(machine):
            machine.status = "running"
        order = machine.created
        kind = self._kind(order["instance_type"])
        volumes = self._volumes_of(machine.id)
        return {
            **{name: kind[name] for name in ("cpu", "gpu", "gpu_memory", "memory", "instance_type")},
            **{name: order[name] for name in ("hostname", "description", "image", "ssh_key_ids")},
            "contract": order.get("contract", "SPOT" if order["is_spot"] else "PAY_AS_YOU_GO"),
            "pricing": order.get("pricing", "FIXED_PRICE"),
            "id": machine.id,
            "ip": machine.address if machine.status == "running" else None,
            "status": machine.status,
            "created_at": "2026-11-22T12:00:00.000Z",
            "location": order["location_code"],
            "price_per_hour": machine.price_per_hour,
            "is_spot": order["is_spot"],
            "startup_script_id": order.get("startup_script_id"),
            "os_volume_id": volumes[0] if volumes else None,
            "volume_ids": volumes,
            "tags": order.get("tags", []) if self.tags_shown else [],
        }

    def _kind(self, name: str) -> Mapping[str, Any]:
        rows = {str(row["instance_type"]): row for row in self.market.types}
        return rows.get(name, {})

    def _deploy(self, call: RestCall) -> RestAnswer:
        order, kind = call.body, self._kind(call.body["instance_type"])
        return self._refused(order, kind) or RestAnswer(status=202, body=self._make(order, kind).id)

    def _refused(self, order: Mapping[str, Any], kind: Mapping[str, Any]) -> RestAnswer | None:
        held = self.market.available_spot if order.get("is_spot") else self.market.available
        if order["image"] not in kind.get("supported_os", ()):
            return error(400, "Invalid instance type" if not kind else f"Invalid image {order['image']}")
        if not order.get("ssh_key_ids") or not set(order["ssh_key_ids"]) <= self.keys.keys():
            return error(400, "Invalid SSH key")
        if order.get("startup_script_id") not in (None, *self.scripts):
            return error(400, "Invalid startup script")
        if self.balance <= 0:
            return error(402, "Insufficient funds")
        if order["instance_type"] not in held.get(order["location_code"], ()):
            return error(503, "No capacity available")
        return None if self.take_capacity(order["instance_type"]) else error(503, "No capacity available")

    def _make(self, order: Mapping[str, Any], kind: Mapping[str, Any]) -> FakeMachine:
        price = float(kind["spot_price" if order["is_spot"] else "price_per_hour"])
        made = FakeMachine(
            id=str(uuid.uuid4()),
            status="provisioning",
            created=order,
            price_per_hour=round(price * self.surcharge, 6),
        )
        volume, disk = str(uuid.uuid4()), order["os_volume"]
        self.volumes[volume] = {"id": volume, "name": disk["name"], "size": disk["size"], "instance_id": made.id}
        script = self.scripts[order["startup_script_id"]]["script"] if order.get("startup_script_id") else ""
        keys = [self.keys[each]["key"] for each in order["ssh_key_ids"]]
        self.begin(made, script, keys=keys, powered_off=_powered_off, minimum_s=LEAST_BILLED_S)
        return made

    def _act(self, call: RestCall) -> RestAnswer:
        ids = call.body["id"] if isinstance(call.body["id"], list) else [call.body["id"]]
        assert call.body["action"] == "delete"
        results = [self._delete(each, call.body) for each in ids]
        failed = any(each["status"] == "error" for each in results)
        return RestAnswer(status=207 if failed else 202, body=results)

    def _delete(self, machine: str, order: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self.machines.get(machine)
        failed = {"action": "delete", "instanceId": machine, "status": "error", "statusCode": 400}
        if found is None or found.unseen > 0:
            return {**failed, "error": "Invalid instance id"}
        if found.status == "discontinued":
            return {**failed, "error": "Can't discontinue a discontinued instance"}
        if found.status == "provisioning" and not self.runs(found):
            return {**failed, "error": "Can't discontinue a provisioning instance"}
        wanted = order.get("volume_ids")
        for volume in self._volumes_of(machine):
            if wanted is None or volume in wanted:
                row = self.volumes.pop(volume)
                self.trash |= {} if order.get("delete_permanently") else {volume: row}
        found.status = "deleting"
        self.end(found)
        return {"action": "delete", "instanceId": machine, "status": "success", "statusCode": 202}


def _powered_off(machine: FakeMachine) -> None:
    """Mark a machine that has switched itself off: it is billed all the same."""
    machine.status = "offline"
