"""VastAI on loopback addresses: asks of hosts, searches with quotas, instances, bids, and containers' own keys.

Stateful, and held to the vendor's description. Its oddities are there: asks vanish between search and rental, a bid
that is too low is refused and leaves a stopped contract whose disk bills, throttled calls are answered in plain text,
an outbid instance is stopped without a word to anybody, hosts fail, and a container's key may start, stop and destroy
its own instance, and nothing else.
"""

from __future__ import annotations

import base64
import json
import operator
import secrets
import shlex
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from skyward.testing.aws import Looks
from skyward.testing.bill import Tariff
from support.clouds.container_room import ContainerOrders, ContainerRoom
from support.clouds.fake_cloud import FakeCloud, FakeMachine
from support.clouds.rest_service import Pace, RestAnswer, RestCall, RestService

__all__ = ["API_KEY", "SCOPES", "STATUSES", "VastApi", "VastInstance", "ask", "disk_price"]

API_KEY: Final = "vast-test-key-0123456789abcdef0123456789abcdef"
SCOPES: Final = frozenset({"misc", "user_read", "instance_read", "instance_write"})
STATUSES: Final = ("created", "loading", "running", "stopped", "exited", "frozen", "rebooting", "unknown", "offline")
"""Every ``actual_status`` of the vendor's pages; its description lists none."""
QUICK: Final = 0.02
"""Length of the client's intervals here, as a share of the real ones."""
_JITTER: Final = 0.5
"""The vendor's, as a share of that: here a thread may come late by more than the client's margin."""
SEARCHES_A_MINUTE: Final = 10
PORT: Final = 10022
_MONTH_H: Final = 720
_LEAST_DISK_GB: Final = 8
_PAGE: Final = 25
_STARTED: Final = 1_795_435_200.0
_PULLED_GB: Final = 1.5
"""Traffic of each instance: its image and its environment."""
_IMAGES: Final = ("ubuntu:", "nvidia/cuda:", "debian:", "vastai/base-image:")
_PACES: Final = {
    "PUT /api/v0/asks/{ask_id}/": 4.5,
    "DELETE /api/v0/instances/{instance_id}/": 3.0,
    "PUT /api/v0/instances/{instance_id}/": 1.0,
    "PUT /api/v0/instances/bid_price/{instance_id}/": 5.5,
    "GET /api/v1/instances/": 1.0,
}
_NEEDS: Final = {
    "GET /api/v0/users/current/": "user_read",
    "POST /api/v0/bundles/": "misc",
    "GET /api/v1/instances/": "instance_read",
    "GET /api/v0/instances/{instance_id}/": "instance_read",
}
"""Scope of each route; the others need ``instance_write``."""
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "in": lambda value, wanted: value in wanted,
    "notin": lambda value, wanted: value not in wanted,
}
_LISTED: Final = ("actual_status", "gpu_name", "verification", "id", "label")
"""Columns by which instances can be filtered."""
_WORDS: Final = {401: "auth_error", 403: "forbidden", 404: "no_such_instance", 410: "no_such_ask"}


def error(status: int, message: str, code: str = "", **more: Any) -> RestAnswer:
    """Return the vendor's form of an error; that of a throttled call is plain text."""
    if status == 429:
        return RestAnswer(status=status, body=f"API requests too frequent: {message}")
    body = {"success": False, "error": code or _WORDS.get(status, "invalid_args"), "msg": message}
    return RestAnswer(status=status, body=body | more)


def disk_price(disk_gb: float, row: Mapping[str, Any]) -> float:
    """Return the USD an hour of a disk."""
    return float(row["storage_cost"]) * disk_gb / _MONTH_H


def ask(
    number: int, machine: int, *, gpu: str = "", count: int = 0, place: str = "Utah, US", **other: Any
) -> dict[str, Any]:
    """Return a row of the market: ``count`` GPUs of a host, with a share of its cores and memory."""
    row = {
        "id": number,
        "ask_contract_id": number,
        "machine_id": machine,
        "host_id": 7000 + machine,
        "gpu_name": gpu,
        "num_gpus": count,
        "gpu_ram": 24564 if count else 0,
        "cpu_arch": "amd64",
        "cpu_cores": 32,
        "cpu_cores_effective": 4.0 * count or 2.0,
        "cpu_ram": 131072,
        "disk_space": 500.0,
        "dph_base": 0.03 if not count else 0.3 * count,
        "min_bid": 0.03 if not count else 0.1 * count,
        "storage_cost": 0.15,
        "inet_up_cost": 0.0,
        "inet_down_cost": 0.0,
        "inet_up": 800.0,
        "inet_down": 900.0,
        "reliability": 0.99,
        "reliability2": 0.99,
        "verification": "verified",
        "geolocation": place,
        "direct_port_count": 100,
        "cuda_max_good": 12.8,
        "duration": 1_000_000.0,
        "rentable": True,
        "rented": False,
        "external": False,
        "is_bid": False,
        "resource_type": "gpu" if count else "cpu",
        "cluster_id": None,
    }
    return row | other


def market() -> list[dict[str, Any]]:
    """Return a market: machines without GPUs on a dozen hosts, and GPUs of some kinds."""
    rows = [ask(100 + number, 10 + number) for number in range(14)]
    rows += [ask(200 + number, 30 + number // 2, gpu="RTX 4090", count=1) for number in range(8)]
    rows += [
        ask(220, 40, gpu="RTX 4090", count=2),
        ask(221, 41, gpu="RTX 4090", count=1, place="Hesse, DE", dph_base=0.28, min_bid=0.12),
        ask(230, 42, gpu="A100 SXM4", count=1, gpu_ram=81920, dph_base=0.9, min_bid=0.5),
        ask(231, 43, gpu="A100 PCIE", count=1, gpu_ram=40960, dph_base=0.6, min_bid=0.3),
        ask(
            240,
            44,
            gpu="Tesla T4",
            count=1,
            gpu_ram=15360,
            dph_base=0.12,
            min_bid=0.05,
            inet_down_cost=0.01,
            inet_up_cost=0.02,
        ),
        ask(250, 45, gpu="H100 SXM", count=1, gpu_ram=81559, dph_base=2.1, min_bid=1.2, verification="unverified"),
    ]
    return rows


@dataclass(slots=True, kw_only=True, eq=False)
class VastInstance(FakeMachine):
    """An instance; :attr:`status` is its ``actual_status``.

    Attributes:
        ask: the row that was rented.
        key: the container's own.
        price: its bid; None on demand.
        disk: USD an hour of its disk.
        stopped: True once it was outbid, stopped, or never begun: its disk bills.
        message: its ``status_msg``.
    """

    ask: dict[str, Any]
    key: str
    price: float | None = None
    disk: float = 0.0
    stopped: bool = False
    message: str = ""

    @property
    def host(self) -> str:
        return str(self.ask["machine_id"])


class VastApi(FakeCloud):
    """An account at VastAI. See :class:`~support.clouds.fake_cloud.FakeCloud`.

    Args:
        folder: folder of the containers; None for records without containers.
        looks: delays of state changes, in looks.
        **room: more settings of :class:`~support.clouds.container_room.ContainerRoom`.

    Attributes:
        keys: scopes of each of the account's keys.
        asks: rows of the market, by id; a test may change them.
        credit: USD left; without any, nothing is rented.
        searches_left: number of searches before the end of the day.
        broken: messages of hosts on which no container starts, by ``machine_id``.
    """

    def __init__(self, folder: Path | None = None, *, looks: Looks | None = None, **room: Any) -> None:
        service = RestService(
            "vast-api", errors=error, description="vast-openapi-patched.json", authorize=self._authorize
        )
        self.containers = ContainerRoom(folder, api=lambda: service.url, **room)
        super().__init__(service, self.containers, looks)
        self.instances: dict[str, VastInstance] = {}
        self.keys: dict[str, frozenset[str]] = {API_KEY: SCOPES}
        self.asks: dict[int, dict[str, Any]] = {row["id"]: row for row in market()}
        self.credit = 50.0
        self.searches_left = 500
        self.broken: dict[int, str] = {}
        # A node ends every process of this machine that carries its id: those of another test must differ.
        self._next_contract = secrets.randbelow(80_000_000) + 10_000_000
        service.paces = [Pace(calls=1, per_s=_JITTER * QUICK * each_s, route=route) for route, each_s in _PACES.items()]
        service.paces.append(Pace(calls=SEARCHES_A_MINUTE, per_s=60.0, route="POST /api/v0/bundles/"))
        routes: Mapping[str, Callable[[RestCall], RestAnswer]] = {
            "GET /api/v0/users/current/": self._user,
            "POST /api/v0/bundles/": self._search,
            "PUT /api/v0/asks/{ask_id}/": self._rent,
            "GET /api/v1/instances/": self._list,
            "GET /api/v0/instances/{instance_id}/": self._show,
            "PUT /api/v0/instances/bid_price/{instance_id}/": self._change_bid,
            "PUT /api/v0/instances/{instance_id}/": self._manage,
            "DELETE /api/v0/instances/{instance_id}/": self._destroy,
        }
        for route, handler in routes.items():
            service.route(route, handler)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"VAST_API_KEY": API_KEY}

    @property
    def secrets(self) -> Sequence[str]:
        return [*self.keys, *(each.key for each in self.instances.values())]

    def use(self, patch: pytest.MonkeyPatch, provider: type[Any], **settings: Any) -> None:
        pace = {route: QUICK * each_s for route, each_s in provider.pace.items()}
        super().use(patch, provider, **{"pace": pace, **settings})

    def left(self) -> Mapping[str, Sequence[str]]:
        self.room.settle()
        with self.service.lock:
            return {"instances": [*self.alive]} if self.alive else {}

    def end(self, machine: FakeMachine) -> None:
        """End an instance and its bill: its ask is for rent again."""
        if not machine.ended and isinstance(machine, VastInstance):
            machine.ask["rentable"] = True
            if f"{machine.id}:disk" in self.service.bill.open:
                self.service.bill.end(f"{machine.id}:disk")
        super().end(machine)

    def outbid(self, machine: str, least_bid: float = 100.0) -> None:
        """Let somebody else have an instance's GPUs: its processes are killed, it is stopped, its disk bills on."""
        with self.service.lock:
            found = self.instances[machine]
            assert found.price is not None, "an instance on demand cannot be outbid"
            found.ask["min_bid"] = least_bid
            self._stop(found)

    def lose(self, machine: str) -> None:
        """Let a host fail: its processes end, it is offline, and the vendor bills on."""
        with self.service.lock:
            self.instances[machine].status = "offline"
            self.containers.lose(machine)

    def rent_away(self, numbers: Iterable[int]) -> None:
        """Let somebody else rent asks on demand: they are gone, although a search has listed them."""
        with self.service.lock:
            for number in numbers:
                self.asks[number]["rentable"] = False

    def deploy(self, order: Mapping[str, Any], number: int) -> str:
        """Rent an ask as somebody else of the account would, and return the instance's id."""
        with self.service.lock:
            return self._make(self.asks[number], order).id

    # Access

    def _authorize(self, call: RestCall) -> RestAnswer | None:
        scopes = self.keys.get(call.token)
        if scopes is not None:
            needed = _NEEDS.get(call.route, "instance_write")
            return None if needed in scopes else error(403, f"this key lacks the scope {needed}")
        owner = next((each for each in self.instances.values() if each.key == call.token), None)
        if owner is not None and self.containers_may_end:
            own = call.parts.get("instance_id") == owner.id and call.route in (
                "DELETE /api/v0/instances/{instance_id}/",
                "PUT /api/v0/instances/{instance_id}/",
            )
            return None if own else error(403, "this key is limited to its own instance")
        if call.route == "POST /api/v0/bundles/" and not call.token:
            call.public = True  # anyone may search
            return None
        if call.route == "POST /api/v0/bundles/":
            return RestAnswer(status=404, body={"error": "auth_error", "msg": "Invalid user key"})
        return error(401, "Invalid user key")

    def _user(self, call: RestCall) -> RestAnswer:
        return RestAnswer(
            body={
                "id": 42,
                "email": "user@example.com",
                "balance": 0.0,
                "credit": self.credit,
                "ssh_key": "",
                "sid": "1",
            }
        )

    # The market

    def _search(self, call: RestCall) -> RestAnswer:
        if self.searches_left <= 0:
            body = {"error": "search_quota_exceeded", "msg": "daily search quota exceeded"}
            return RestAnswer(status=429, body=body)
        self.searches_left -= 1
        body = dict(call.body)
        disk_gb, kind = body.pop("allocated_storage", _LEAST_DISK_GB), body.pop("type", "ondemand")
        assert kind in ("ondemand", "on-demand"), "this market is searched for asks on demand, which bids are for too"
        limit, order = body.pop("limit", 64), body.pop("order", [["dph_total", "asc"], ["id", "asc"]])
        body.setdefault("verified", {"eq": True})
        rows = [self._offered(row, disk_gb) for row in self.asks.values()]
        for name, tests in body.items():
            rows = [row for row in rows if _passes(_column(row, name), tests)]
        for name, direction in reversed(order):
            rows.sort(key=operator.itemgetter(name), reverse=direction == "desc")
        return RestAnswer(body={"offers": rows[:limit]})

    def _offered(self, row: Mapping[str, Any], disk_gb: float) -> dict[str, Any]:
        return {**row, "dph_total": row["dph_base"] + disk_price(disk_gb, row)}

    def _rent(self, call: RestCall) -> RestAnswer:
        number, order = int(call.parts["ask_id"]), call.body
        row = self.asks.get(number)
        if row is None:
            return error(
                404, f"error 404/3603: no_such_ask Instance type by id {number} is not available.", ask_id=number
            )
        if self.credit <= 0:
            return error(400, "error 400/3524: Your account lacks credit; see the billing page.", ask_id=number)
        if order["disk"] < _LEAST_DISK_GB:
            return error(400, f"error 400/3500: Invalid args: disk {order['disk']}", ask_id=number)
        if not row["rentable"] or not self.take_capacity(_kind(row)):
            message = f"error 410/3907: no_such_ask Instance type {number} is no longer available."
            return error(410, message, ask_id=number)
        if (price := order.get("price")) is not None and price < row["min_bid"]:
            left = self._make(row, order, begun=False)  # the refusal makes a contract all the same
            message = f"error 400/3742: bid {price} is below {row['min_bid']}"
            return error(400, message, "invalid_price", ask_id=number, new_contract=int(left.id))
        made = self._make(row, order)
        return RestAnswer(body={"success": True, "new_contract": int(made.id), "instance_api_key": made.key})

    # Instances

    def _make(self, row: dict[str, Any], order: Mapping[str, Any], *, begun: bool = True) -> VastInstance:
        self._next_contract += 1
        price, disk = order.get("price"), disk_price(order["disk"], row)
        base = row["dph_base"] if price is None else price
        made = VastInstance(
            id=str(self._next_contract),
            status="loading",
            created=order,
            price_per_hour=round((base + disk) * self.surcharge, 6),
            ask=row,
            key=f"container-key-{uuid.uuid4().hex}",
            price=price,
            disk=disk,
        )
        self.instances[made.id] = made
        made.message = self._fault(row, order)
        if made.message or not begun:
            made.status = "created"
            self._keep(made)
        else:
            row["rentable"] = False
            self.begin(made, self._orders(made), keys=(), powered_off=_exited, minimum_s=0.0)
            self.service.bill.charge(row["inet_down_cost"] * _PULLED_GB)
        made.stopped = not begun
        return made

    def _fault(self, row: Mapping[str, Any], order: Mapping[str, Any]) -> str:
        known = any(str(order["image"]).startswith(each) for each in _IMAGES) or order.get("image_login")
        return self.broken.get(row["machine_id"], "" if known else f"pull access denied for {order['image']}")

    def _keep(self, made: VastInstance) -> None:
        """Make an instance that never runs: only its disk bills."""
        made.unseen, made.pending, made.ending = self.looks.unseen, self.looks.pending, self.looks.ending
        self.machines[made.id] = made
        made.address = "127.0.0.1"
        self.service.bill.begin(made.id, Tariff(usd_per_hour=made.disk))

    def _orders(self, made: VastInstance) -> ContainerOrders:
        order = made.created
        assert order["runtype"] == "args", "only with args the image's own command runs, and no sshd of the vendor's"
        assert order["env"].get(f"-p {PORT}:{PORT}"), "the port is not mapped"
        given = {name: value for name, value in order["env"].items() if not name.startswith("-")}
        own = {
            "CONTAINER_ID": made.id,
            "CONTAINER_API_KEY": made.key,
            "VAST_CONTAINERLABEL": f"C.{made.id}",
            "GPU_COUNT": str(made.ask["num_gpus"]),
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib",
        }
        return ContainerOrders(args=shlex.join(order["args"]), env={**given, **own}, port=PORT)

    def _stop(self, found: VastInstance) -> None:
        if not found.stopped and not found.ended:
            found.stopped, found.status = True, "exited"
            self.containers.lose(found.id)
            self.service.bill.end(found.id)
            self.service.bill.begin(f"{found.id}:disk", Tariff(usd_per_hour=found.disk))

    def _list(self, call: RestCall) -> RestAnswer:
        filters = json.loads(call.query.get("select_filters", "{}"))
        if unknown := filters.keys() - {*_LISTED}:
            message = f"Error in query parameters: {', '.join(unknown)} is not a valid search key"
            return RestAnswer(status=400, body={"error": "invalid_request", "msg": message})
        limit = int(call.query.get("limit", _PAGE))
        assert limit <= _PAGE
        rows = [self._row(each) for each in self.instances.values() if self.look(each)]
        rows = [row for row in rows if all(_passes(row[name], tests) for name, tests in filters.items())]
        after = int(base64.b64decode(call.query["after_token"])) if "after_token" in call.query else 0
        rest = [row for row in rows if row["id"] > after]
        token = base64.b64encode(str(rest[limit - 1]["id"]).encode()).decode() if len(rest) > limit else None
        body = {"success": True, "instances": rest[:limit], "instances_found": len(rest[:limit])}
        return RestAnswer(body=body | {"total_instances": len(rows), "label_counts": {}, "next_token": token})

    def _show(self, call: RestCall) -> RestAnswer:
        found = self.instances.get(call.parts["instance_id"])
        if found is None or not self.look(found):
            return error(404, "error 404: no_such_instance")
        return RestAnswer(body={"instances": {**self._row(found), "ports": [], "extra_env": []}})

    def _row(self, found: VastInstance) -> dict[str, Any]:
        if found.status == "loading" and not found.stopped and self.runs(found):
            found.status = "running"
        share = ("machine_id", "host_id", "gpu_name", "num_gpus", "gpu_ram", "cpu_arch", "cpu_cores")
        share += ("cpu_cores_effective", "cpu_ram", "geolocation", "verification", "storage_cost", "min_bid")
        state = "stopped" if found.stopped else "running"
        running = found.status == "running"
        ports = {f"{PORT}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(self.containers.published_port(found.id))}]}
        return {
            **{name: found.ask[name] for name in share},
            "id": int(found.id),
            "actual_status": found.status,
            **dict.fromkeys(("cur_state", "next_state", "intended_status"), state),
            "label": found.created.get("label"),
            "status_msg": found.message or None,
            "public_ipaddr": f"{found.address} \n" if running else "",
            "ports": ports if running else None,
            "is_bid": found.price is not None,
            "dph_base": found.price_per_hour - found.disk,
            "dph_total": found.price_per_hour,
            "disk_space": float(found.created["disk"]),
            "image_uuid": found.created["image"],
            "image_runtype": "args",
            "ssh_host": "ssh1.vast.ai",
            "ssh_port": 10000,
            "start_date": _STARTED,
            "extra_env": [[name, str(value)] for name, value in found.created.get("env", {}).items()],
        }

    def _change_bid(self, call: RestCall) -> RestAnswer:
        found = self.instances.get(call.parts["instance_id"])
        if found is None or found.ended:
            return error(404, "Instance with that ID does not exist.")
        found.price = call.body["price"]
        return RestAnswer(body={"success": True})

    def _manage(self, call: RestCall) -> RestAnswer:
        found = self.instances.get(call.parts["instance_id"])
        if found is None or found.ended:
            return error(404, "Instance not found")
        if call.body.get("state") == "stopped":
            self._stop(found)
        return RestAnswer(body={"success": True})

    def _destroy(self, call: RestCall) -> RestAnswer:
        found = self.instances.get(call.parts["instance_id"])
        if call.body != {}:
            return error(400, "error 400: the body is missing")
        if found is None or found.ended or found.unseen > 0:
            return error(404, "Instance not found")
        self.end(found)
        return RestAnswer(body={"success": True, "msg": "Instance destroyed successfully"})


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name == "verified":
        return row["verification"] == "verified"
    if name == "geolocation":
        return row[name].rpartition(", ")[2]
    return row[name]


def _kind(row: Mapping[str, Any]) -> str:
    return f"{row['num_gpus']}x {row['gpu_name']}" if row["num_gpus"] else "CPU"


def _passes(value: Any, tests: Mapping[str, Any]) -> bool:
    """Return whether a column passes every test; the vendor's own client sends numbers as text."""
    as_number = isinstance(value, int | float)
    wanted = {name: float(each) if as_number and isinstance(each, str) else each for name, each in tests.items()}
    return all(_OPERATORS[name](value, each) for name, each in wanted.items())


def _exited(machine: FakeMachine) -> None:
    """Mark an instance whose main process ended: it is billed all the same."""
    machine.status = "exited"
