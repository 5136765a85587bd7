"""DigitalOcean on loopback addresses: account, keys, sizes, regions, networks, firewalls, tags and droplets.

Stateful, and held to the vendor's own description. Its oddities are there: GPU droplets are hidden from lists unless
they are asked for, droplets that power off go on billing, a 429 names its end in ``ratelimit-reset``.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from skyward.testing.aws import Looks
from support.clouds.booted_machine import MachineRoom
from support.clouds.fake_cloud import FakeCloud, FakeMachine
from support.clouds.rest_service import Pace, RestAnswer, RestCall, RestService

__all__ = ["SIZES", "TOKEN", "DigitalOceanApi", "Size"]

TOKEN: Final = "dop_v1_whole_account"
LEAST_BILLED_S: Final = 60.0
LEAST_BILLED_USD: Final = 0.01
_USER_DATA_BYTES: Final = 64 << 10
_IDS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    422: "unprocessable_entity",
    429: "too_many_requests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A droplet's size.

    Attributes:
        vram_gib: memory of all its GPUs together.
    """

    slug: str
    vcpus: int
    memory_mb: int
    usd: float
    regions: tuple[str, ...]
    gpus: int = 0
    model: str = ""
    vram_gib: int = 0
    available: bool = True

    @property
    def gpu_info(self) -> Mapping[str, Any]:
        vram = {"amount": self.vram_gib, "unit": "gib"}
        return {"gpu_info": {"count": self.gpus, "model": self.model, "vram": vram}} if self.gpus else {}

    def record(self, surcharge: float = 1.0) -> Mapping[str, Any]:
        """Return it as the API does."""
        price = round(self.usd * surcharge, 6)
        return {
            "slug": self.slug,
            "memory": self.memory_mb,
            "vcpus": self.vcpus,
            "disk": 25,
            "transfer": 1.0,
            "price_hourly": price,
            "price_monthly": round(price * 672, 2),
            "regions": list(self.regions),
            "available": self.available,
            "description": "GPU" if self.gpus else "Basic",
            **self.gpu_info,
        }


_CPU_REGIONS = ("ams3", "fra1", "nyc1", "nyc3", "sfo3", "tor1")
_H100 = ("nyc2", "tor1", "atl1")

SIZES: Sequence[Size] = (
    Size(slug="s-1vcpu-1gb", vcpus=1, memory_mb=1024, usd=0.00893, regions=_CPU_REGIONS),
    Size(slug="s-2vcpu-4gb", vcpus=2, memory_mb=4096, usd=0.03571, regions=_CPU_REGIONS),
    Size(slug="c-4", vcpus=4, memory_mb=8192, usd=0.125, regions=_CPU_REGIONS),
    Size(slug="g-8vcpu-32gb", vcpus=8, memory_mb=32768, usd=0.375, regions=("ams3", "nyc1", "sfo3")),
    Size(
        slug="gpu-l40sx1-48gb",
        vcpus=8,
        memory_mb=65536,
        usd=1.57,
        regions=("tor1",),
        gpus=1,
        model="nvidia_l40s",
        vram_gib=48,
    ),
    Size(
        slug="gpu-4000adax1-20gb",
        vcpus=8,
        memory_mb=32768,
        usd=0.76,
        regions=("tor1", "nyc1"),
        gpus=1,
        model="nvidia_rtx4000_ada",
        vram_gib=20,
    ),
    Size(
        slug="gpu-h100x1-80gb",
        vcpus=20,
        memory_mb=245760,
        usd=3.39,
        regions=_H100,
        gpus=1,
        model="nvidia_h100",
        vram_gib=80,
    ),
    Size(
        slug="gpu-h100x8-640gb",
        vcpus=160,
        memory_mb=1966080,
        usd=23.92,
        regions=_H100,
        gpus=8,
        model="nvidia_h100",
        vram_gib=640,
    ),
    Size(
        slug="gpu-mi300x1-192gb",
        vcpus=20,
        memory_mb=245760,
        usd=1.99,
        regions=(),
        gpus=1,
        model="amd_mi300x",
        vram_gib=192,
    ),
    Size(
        slug="gpu-mi350x1-288gb-spot",
        vcpus=24,
        memory_mb=262144,
        usd=1.25,
        regions=("ric1",),
        gpus=1,
        model="amd_mi350x",
        vram_gib=288,
    ),
    Size(
        slug="gpu-mi350x1-288gb",
        vcpus=24,
        memory_mb=262144,
        usd=3.1,
        regions=("ric1",),
        gpus=1,
        model="amd_mi350x",
        vram_gib=288,
    ),
)

IMAGES: Final = (
    "ubuntu-22-04-x64",
    "ubuntu-24-04-x64",
    "gpu-h100x1-base",
    "gpu-h100x8-base",
    "gpu-amd-base",
)
_REGIONS: Final = ("ams3", "atl1", "fra1", "mem1", "nyc1", "nyc2", "nyc3", "ric1", "sfo3", "tor1")


def error(status: int, message: str) -> RestAnswer:
    """Return the vendor's form of an error."""
    name = _IDS.get(status, "server_error" if status >= 500 else "bad_request")
    return RestAnswer(status=status, body={"id": name, "message": message, "request_id": str(uuid.uuid4())})


def fingerprint(public_key: str) -> str:
    """Return the MD5 fingerprint by which the API knows a key."""
    digest = hashlib.md5(base64.b64decode(public_key.split()[1]), usedforsecurity=False).hexdigest()
    return ":".join(digest[i : i + 2] for i in range(0, 32, 2))


class DigitalOceanApi(FakeCloud):
    """An account at DigitalOcean. See :class:`~support.clouds.fake_cloud.FakeCloud`.

    Args:
        folder: folder of the machines; None for records without machines.
        looks: delays of state changes, in looks.
        **room: more settings of :class:`~support.clouds.booted_machine.MachineRoom`.

    Attributes:
        token: that of :attr:`environment`, which no other account has.
        tokens: scopes of each token; None means all.
        sizes: what is sold; may be changed.
        droplet_limit: of the account.
        status: of the account: ``active``, ``warning`` or ``locked``.
        gpus_approved: False for an account that may not have GPUs yet.
        keys: the account's keys, by fingerprint.
        fresh_keys_refused: number of creations for which a key made just before is unknown yet.
        locked_deletions: number of deletions refused because something else happens to the droplet.
        firewalls: firewalls by id.
        tags: names of tags.
    """

    def __init__(self, folder: Path | None = None, *, looks: Looks | None = None, **room: Any) -> None:
        service = RestService(
            "digitalocean-api",
            errors=error,
            description="digitalocean-compute-openapi.json",
            authorize=self._authorize,
            answer_headers=self._limits,
        )
        super().__init__(service, MachineRoom(folder, **room), looks)
        self.token = f"{TOKEN}_{uuid.uuid4().hex}"
        self.tokens: dict[str, frozenset[str] | None] = {TOKEN: None, self.token: None}
        self.sizes = {size.slug: size for size in SIZES}
        self.droplet_limit = 25
        self.status = "active"
        self.gpus_approved = True
        self.keys: dict[str, dict[str, Any]] = {}
        self.fresh_keys_refused = 0
        self.locked_deletions = 0
        self.firewalls: dict[str, dict[str, Any]] = {}
        self.tags: set[str] = set()
        self._vpcs = [_vpc(region) for region in _REGIONS]
        # Of its own: a node ends every process on its machine with its id, and the machines of all tests are this one.
        self._ids = itertools.count(secrets.randbelow(800_000_000) + 100_000_000)
        self._scopes: dict[str, str] = {}
        service.paces += [
            Pace(calls=250, per_s=60.0, headers=lambda left_s: {"Retry-After": str(max(1, round(left_s)))}),
            Pace(calls=5000, per_s=3600.0, headers=_reset),
            Pace(calls=10, per_s=60.0, route="GET /v2/account/keys", headers=_reset),
        ]
        for route, scope, handler in self._routes():
            self._scopes[route] = scope
            service.route(route, handler)
        service.route("GET /checkip", lambda call: RestAnswer(body="203.0.113.7\n"), documented=False)

    def _routes(self) -> Iterable[tuple[str, str, Callable[[RestCall], RestAnswer]]]:
        return (
            ("GET /v2/account", "account:read", self._account),
            ("GET /v2/account/keys", "ssh_key:read", lambda call: _page(call, "ssh_keys", self.keys.values())),
            ("POST /v2/account/keys", "ssh_key:create", self._add_key),
            ("GET /v2/account/keys/{key}", "ssh_key:read", self._key),
            ("DELETE /v2/account/keys/{key}", "ssh_key:delete", self._remove_key),
            ("GET /v2/sizes", "sizes:read", self._list_sizes),
            ("GET /v2/regions", "regions:read", self._list_regions),
            ("GET /v2/vpcs", "vpc:read", lambda call: _page(call, "vpcs", self._vpcs)),
            ("GET /v2/firewalls", "firewall:read", lambda call: _page(call, "firewalls", self.firewalls.values())),
            ("POST /v2/firewalls", "firewall:create", self._add_firewall),
            ("GET /v2/firewalls/{id}", "firewall:read", self._firewall),
            ("PUT /v2/firewalls/{id}", "firewall:update", self._change_firewall),
            ("POST /v2/firewalls/{id}/rules", "firewall:update", self._add_rules),
            ("DELETE /v2/firewalls/{id}/rules", "firewall:update", self._remove_rules),
            ("DELETE /v2/firewalls/{id}", "firewall:delete", self._remove_firewall),
            ("GET /v2/tags", "tag:read", lambda call: _page(call, "tags", [self._tag(each) for each in self.tags])),
            ("POST /v2/tags", "tag:create", self._add_tag),
            ("GET /v2/tags/{tag}", "tag:read", self._show_tag),
            ("DELETE /v2/tags/{tag}", "tag:delete", self._remove_tag),
            ("GET /v2/droplets", "droplet:read", self._list_droplets),
            ("POST /v2/droplets", "droplet:create", self._create),
            ("DELETE /v2/droplets", "droplet:delete", self._delete_tagged),
            ("GET /v2/droplets/{id}", "droplet:read", self._show),
            ("DELETE /v2/droplets/{id}", "droplet:delete", self._delete),
        )

    @property
    def environment(self) -> Mapping[str, str]:
        return {"DIGITALOCEAN_TOKEN": self.token}

    @property
    def secrets(self) -> Sequence[str]:
        return [self.token]

    def left(self) -> Mapping[str, Sequence[str]]:
        """Return what is left; the user's key in the account is meant to stay."""
        self.room.settle()
        with self.service.lock:
            found = {
                "droplets": [*self.alive],
                "firewalls": [str(each["name"]) for each in self.firewalls.values()],
                "tags": sorted(self.tags),
            }
        return {kind: names for kind, names in found.items() if names}

    def forget_user(self) -> None:
        self.keys.clear()

    def reaches(self, one: str, other: str) -> bool:
        """Return whether both are in one network, and a firewall of the other admits everything from the first."""
        here, there = (self.machines[each] for each in (one, other))
        if self._record(here)["vpc_uuid"] != self._record(there)["vpc_uuid"]:
            return False
        walls = [wall for wall in self.firewalls.values() if {*(wall["tags"] or ())} & {*self._tags_of(there)}]
        rules = [rule for wall in walls for rule in wall["inbound_rules"] or ()]
        return any(
            rule["ports"] in ("0", "all") and {*(rule["sources"].get("tags") or ())} & {*self._tags_of(here)}
            for rule in rules
        )

    # Access

    def _authorize(self, call: RestCall) -> RestAnswer | None:
        if call.token not in self.tokens:
            return error(401, "Unable to authenticate you")
        scopes, needed = self.tokens[call.token], self._scopes.get(call.route, "")
        if scopes is not None and needed not in scopes:
            return error(403, f"You are missing the required permission {needed}.")
        return None

    def _limits(self) -> Mapping[str, str]:
        left = max(0, 5000 - len(self.service.calls))
        return {"ratelimit-limit": "5000", "ratelimit-remaining": str(left), **_reset(3600.0)}

    def _account(self, call: RestCall) -> RestAnswer:
        account = {
            "droplet_limit": self.droplet_limit,
            "floating_ip_limit": 3,
            "email": "someone@example.com",
            "uuid": "b6fr89dbf6d9156cace5f3c78dc9851d957381ef",
            "email_verified": True,
            "status": self.status,
            "status_message": "",
        }
        return RestAnswer(body={"account": account})

    # Keys

    def _find_key(self, name: object) -> dict[str, Any] | None:
        return next((key for mark, key in self.keys.items() if str(name) in (mark, str(key["id"]))), None)

    def _key(self, call: RestCall) -> RestAnswer:
        found = self._find_key(call.parts["key"])
        return RestAnswer(body={"ssh_key": found}) if found else _not_found()

    def _add_key(self, call: RestCall) -> RestAnswer:
        mark = fingerprint(call.body["public_key"])
        if mark in self.keys:
            return error(422, "SSH Key is already in use on your account")
        self.keys[mark] = {"id": next(self._ids), "fingerprint": mark, **call.body}
        return RestAnswer(status=201, body={"ssh_key": self.keys[mark]})

    def _remove_key(self, call: RestCall) -> RestAnswer:
        found = self._find_key(call.parts["key"])
        if found is None:
            return _not_found()
        del self.keys[found["fingerprint"]]
        return RestAnswer(status=204)

    # Catalogue

    def _list_sizes(self, call: RestCall) -> RestAnswer:
        return _page(call, "sizes", [each.record() for each in self.sizes.values()])

    def _list_regions(self, call: RestCall) -> RestAnswer:
        return _page(call, "regions", [self._region(each) for each in _REGIONS])

    def _region(self, slug: str) -> Mapping[str, Any]:
        sizes = [each.slug for each in self.sizes.values() if slug in each.regions]
        return {"slug": slug, "name": slug, "features": ["metadata"], "available": True, "sizes": sizes}

    # Firewalls and tags

    def _unknown_tag(self, body: Mapping[str, Any]) -> RestAnswer | None:
        rules = [*(body.get("inbound_rules") or ()), *(body.get("outbound_rules") or ())]
        ends: list[Mapping[str, Any]] = [rule.get("sources") or rule.get("destinations") or {} for rule in rules]
        unknown = sorted({str(tag) for each in (body, *ends) for tag in each.get("tags") or ()} - self.tags)
        return error(422, f"tag {unknown[0]} does not exist") if unknown else None

    def _add_firewall(self, call: RestCall) -> RestAnswer:
        if refused := self._unknown_tag(call.body):
            return refused
        if any(each["name"] == call.body["name"] for each in self.firewalls.values()):
            return error(409, "duplicate name")
        made: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "status": "succeeded",
            "created_at": _now(),
            "pending_changes": [],
            "droplet_ids": [],
            "tags": [],
            "inbound_rules": [],
            "outbound_rules": [],
            **call.body,
        }
        self.firewalls[made["id"]] = made
        return RestAnswer(status=202, body={"firewall": made})

    def _firewall(self, call: RestCall) -> RestAnswer:
        found = self.firewalls.get(call.parts["id"])
        return RestAnswer(body={"firewall": found}) if found else _not_found()

    def _change_firewall(self, call: RestCall) -> RestAnswer:
        found = self.firewalls.get(call.parts["id"])
        if found is None:
            return _not_found()
        if refused := self._unknown_tag(call.body):
            return refused
        found |= {"droplet_ids": [], "tags": [], "inbound_rules": [], "outbound_rules": [], **call.body}
        return RestAnswer(body={"firewall": found})

    def _add_rules(self, call: RestCall) -> RestAnswer:
        found = self.firewalls.get(call.parts["id"])
        if found is None:
            return _not_found()
        for kind in ("inbound_rules", "outbound_rules"):
            found[kind] = [*found[kind], *(rule for rule in call.body.get(kind) or () if rule not in found[kind])]
        return RestAnswer(status=204)

    def _remove_rules(self, call: RestCall) -> RestAnswer:
        found = self.firewalls.get(call.parts["id"])
        if found is None:
            return _not_found()
        for kind in ("inbound_rules", "outbound_rules"):
            found[kind] = [rule for rule in found[kind] if rule not in (call.body.get(kind) or ())]
        return RestAnswer(status=204)

    def _remove_firewall(self, call: RestCall) -> RestAnswer:
        return RestAnswer(status=204) if self.firewalls.pop(call.parts["id"], None) else _not_found()

    def _tag(self, name: str) -> Mapping[str, Any]:
        count = sum(name in self._tags_of(each) for each in self.machines.values() if not each.ended)
        return {"name": name, "resources": {"count": count, "droplets": {"count": count}}}

    def _add_tag(self, call: RestCall) -> RestAnswer:
        self.tags.add(call.body["name"])
        return RestAnswer(status=201, body={"tag": self._tag(call.body["name"])})

    def _show_tag(self, call: RestCall) -> RestAnswer:
        name = call.parts["tag"]
        return RestAnswer(body={"tag": self._tag(name)}) if name in self.tags else _not_found()

    def _remove_tag(self, call: RestCall) -> RestAnswer:
        if call.parts["tag"] not in self.tags:
            return _not_found()
        self.tags.remove(call.parts["tag"])
        for each in self.firewalls.values():
            each["tags"] = [tag for tag in each["tags"] or () if tag != call.parts["tag"]]
        return RestAnswer(status=204)

    # Droplets

    def _create(self, call: RestCall) -> RestAnswer:
        body = call.body
        names = body.get("names") or [body["name"]]
        size = self.sizes.get(body["size"])
        if self.status == "locked":
            return error(403, "Your account is locked.")
        if size is None or (size.gpus and not self.gpus_approved):
            return error(422, "You specified an invalid size for Droplet creation.")
        if refused := self._refusal(body, size, len(names)):
            return error(422, refused)
        self.tags |= set(body.get("tags") or ())
        keys = [key["public_key"] for each in body.get("ssh_keys") or () if (key := self._find_key(each))]
        made = [self._begin(body, name, size, keys) for name in names]
        records = [self._record(each) for each in made]
        actions = [
            {"id": next(self._ids), "rel": "create", "href": f"{self.endpoint_url}/v2/actions/{each.id}"}
            for each in made
        ]
        held = {"droplets": records} if "names" in body else {"droplet": records[0]}
        return RestAnswer(status=202, body={**held, "links": {"actions": actions}})

    def _refusal(self, body: Mapping[str, Any], size: Size, count: int) -> str:
        """Return the reason for refusing a creation; empty for none."""
        if body.get("region") not in size.regions:
            return "Size is not available in this region."
        if body["image"] not in IMAGES:
            return "You specified an invalid image for Droplet creation."
        keys = [str(each) for each in body.get("ssh_keys") or ()]
        fresh = bool(keys) and self.fresh_keys_refused > 0
        self.fresh_keys_refused -= fresh
        if unknown := [each for each in keys if fresh or not self._find_key(each)]:
            return f"{', '.join(unknown)} are invalid key identifiers for Droplet creation."
        if len(body.get("user_data") or "") > _USER_DATA_BYTES:
            return "User data must not exceed 64 KiB."
        if len(self.alive) + count > self.droplet_limit:
            return "creating this/these droplet(s) will exceed your droplet limit."
        if not all(self.take_capacity(size.slug) for _ in range(count)):
            return "This size is currently unavailable in this region."
        return ""

    def _begin(self, body: Mapping[str, Any], name: str, size: Size, keys: Sequence[str]) -> FakeMachine:
        made = FakeMachine(
            id=str(next(self._ids)),
            status="new",
            created={**body, "name": name, "created_at": _now()},
            price_per_hour=round(size.usd * self.surcharge, 6),
        )
        orders = body.get("user_data") or ""
        self.begin(made, orders, keys=keys, powered_off=_off, minimum_s=LEAST_BILLED_S, minimum_usd=LEAST_BILLED_USD)
        return made

    def _tags_of(self, machine: FakeMachine) -> Sequence[str]:
        return machine.created.get("tags") or ()

    def _record(self, machine: FakeMachine) -> Mapping[str, Any]:
        body = machine.created
        size = self.sizes[body["size"]]
        places = [
            {"ip_address": machine.address, "netmask": "255.0.0.0", "gateway": "127.0.0.1", "type": kind}
            for kind in ("private", "public")
            if machine.status != "new"
        ]
        vpc = body.get("vpc_uuid") or next(each["id"] for each in self._vpcs if each["region"] == body["region"])
        return {
            "id": int(machine.id),
            "name": body["name"],
            "memory": size.memory_mb,
            "vcpus": size.vcpus,
            "disk": 25,
            "locked": machine.status == "new",
            "status": machine.status,
            "created_at": body["created_at"],
            "features": ["private_networking"],
            "backup_ids": [],
            "next_backup_window": None,
            "snapshot_ids": [],
            "volume_ids": [],
            "image": _image(body["image"]),
            "size": size.record(self.surcharge),
            "size_slug": size.slug,
            "networks": {"v4": places, "v6": []},
            "region": self._region(body["region"]),
            "tags": list(self._tags_of(machine)),
            "vpc_uuid": vpc,
            **size.gpu_info,
        }

    def _seen(self, machine: FakeMachine) -> Mapping[str, Any] | None:
        """Return the record of a machine that is looked at; None if it is not listed."""
        if not self.look(machine):
            return None
        if machine.status == "new" and not machine.ended and self.runs(machine):
            machine.status = "active"
        return self._record(machine)

    def _list_droplets(self, call: RestCall) -> RestAnswer:
        query = call.query
        if "tag_name" in query and ("type" in query or "name" in query):
            return error(400, "tag_name cannot be combined with type or name")
        gpus = query.get("type") == "gpus"
        asked = [
            each
            for each in self.machines.values()
            if bool(self.sizes[each.created["size"]].gpus) == gpus
            and query.get("name", each.created["name"]).lower() == each.created["name"].lower()
            and ("tag_name" not in query or query["tag_name"] in self._tags_of(each))
        ]
        return _page(call, "droplets", [record for each in asked if (record := self._seen(each)) is not None])

    def _show(self, call: RestCall) -> RestAnswer:
        found = self.machines.get(call.parts["id"])
        record = self._seen(found) if found is not None else None
        return RestAnswer(body={"droplet": record}) if record is not None else _not_found()

    def _delete(self, call: RestCall) -> RestAnswer:
        found = self.machines.get(call.parts["id"])
        if found is None or found.ended:
            return _not_found()
        if self.locked_deletions:
            self.locked_deletions -= 1
            return error(422, "Droplet already has a pending event.")
        self.end(found)
        return RestAnswer(status=204)

    def _delete_tagged(self, call: RestCall) -> RestAnswer:
        """Delete what has the tag: neither droplets that no list has yet, nor those to which something happens."""
        scopes = self.tokens[call.token]
        if scopes is not None and "tag:read" not in scopes:
            return error(403, "You are missing the required permission tag:read.")
        if call.query["tag_name"] not in self.tags:
            return _not_found()
        tagged = [each for each in self.machines.values() if call.query["tag_name"] in self._tags_of(each)]
        free = [each for each in tagged if not each.ended and each.unseen <= 0]
        locked, self.locked_deletions = self.locked_deletions, 0
        for each in free[locked:]:
            self.end(each)
        return RestAnswer(status=204)


def _off(machine: FakeMachine) -> None:
    """Switch a droplet off: its bill goes on."""
    machine.status = "off"


def _not_found() -> RestAnswer:
    return error(404, "The resource you were accessing could not be found.")


def _reset(left_s: float) -> Mapping[str, str]:
    return {"ratelimit-reset": str(round(time.time() + left_s))}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _vpc(region: str) -> Mapping[str, Any]:
    name = str(uuid.uuid5(uuid.NAMESPACE_DNS, region))
    return {
        "id": name,
        "urn": f"do:vpc:{name}",
        "name": f"default-{region}",
        "description": "",
        "region": region,
        "ip_range": "10.10.0.0/20",
        "default": True,
        "created_at": "2026-01-01T00:00:00Z",
    }


def _image(slug: str) -> Mapping[str, Any]:
    return {
        "id": 1 + IMAGES.index(slug),
        "name": slug,
        "type": "base",
        "distribution": "Ubuntu",
        "slug": slug,
        "public": True,
        "regions": [],
        "created_at": "2026-01-01T00:00:00Z",
        "min_disk_size": 10,
        "size_gigabytes": 2.5,
        "description": "",
        "tags": [],
        "status": "available",
    }


def _page(call: RestCall, key: str, rows: Iterable[Mapping[str, Any]]) -> RestAnswer:
    """Return a page of a list, with links to the others."""
    found = list(rows)
    size, page = int(call.query.get("per_page", "20")), int(call.query.get("page", "1"))
    last = max(1, -(-len(found) // size))
    near = {"first": 1, "prev": page - 1} if page > 1 else {}
    near |= {"next": page + 1, "last": last} if page < last else {}
    host = call.headers.get("Host", "")
    query = "".join(f"&{name}={value}" for name, value in call.query.items() if name not in ("page", "per_page"))
    pages = {name: f"http://{host}{call.path}?page={number}&per_page={size}{query}" for name, number in near.items()}
    rows = found[(page - 1) * size : page * size]
    return RestAnswer(body={key: rows, "links": {"pages": pages}, "meta": {"total": len(found)}})
