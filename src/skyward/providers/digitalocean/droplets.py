"""Droplets, the account's key, and the firewall of a pool, in the API's words."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from skyward.providers._common.refusals import RefusalKind
from skyward.providers._common.rented_machines import MachineRecord
from skyward.providers._common.rest_client import RestClient
from skyward.providers.base import InstanceState, Offer
from skyward.providers.digitalocean.droplet_sizes import (
    MINIMUM_BILLED_S,
    MINIMUM_CHARGE,
    SPOT_SUFFIX,
    image_of,
    parse_spec,
)

__all__ = ["Droplets", "droplet_order", "fingerprint_of", "parse_droplet"]

_NAME: Final = "skyward-"
_POOL_TAG: Final = "skyward:pool:"
_DROPLETS, _KEYS, _FIREWALLS = "/v2/droplets", "/v2/account/keys", "/v2/firewalls"
_PAGE: Final = {"per_page": "200"}
_FRESH_S: Final = 60.0
"""Time after its creation for which a key may not be accepted."""
_STATES: Final[Mapping[Any, InstanceState]] = {
    "new": InstanceState.PENDING,
    "active": InstanceState.RUNNING,
    "off": InstanceState.FAILED,
    "archive": InstanceState.FAILED,
}
"""States; an unknown one counts as pending. A droplet that is off bills as before, and must be ended."""
_PROTOCOLS: Final = ("tcp", "udp", "icmp")
_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")


class Droplets:
    """Calls of the API that concern droplets and what belongs to them.

    Args:
        rest: the API.
        region: region of the droplets.
    """

    def __init__(self, rest: RestClient, region: str) -> None:
        self.rest = rest
        self._region = region

    async def ensure_key(self, public: str) -> None:
        """Register the user's public key with the account, unless it is there."""
        fingerprint = fingerprint_of(public)
        if await self.rest.optional(f"{_KEYS}/{fingerprint}") is None:
            body = {"name": f"skyward {fingerprint[:8]}", "public_key": public}
            # Repeated even if the answer was lost: the same key is not added twice.
            await self.rest.change("POST", _KEYS, body, done=(RefusalKind.EXISTS,))

    async def create(self, order: Mapping[str, Any]) -> MachineRecord:
        """Create a droplet, with one call that is accepted."""
        answer = await self.rest.create(_DROPLETS, order, unseen_s=_FRESH_S)
        record = parse_droplet(answer["droplet"])
        assert record is not None, "the answer to a creation is of another droplet"
        return record

    async def find(self, key: str) -> MachineRecord | None:
        """Return the droplet with that ledger key; None if none is listed."""
        found = await self._list({"name": _NAME + key})
        return next((each for each in found if each.key == key), None)

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return Skyward's droplets in the region, or at least those of that pool."""
        return await self._list({"tag_name": _POOL_TAG + pool_id} if pool_id else {})

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return droplets, those with these ids among them: from two lists, and a call for each that they miss."""
        found = {each.id: each for each in await self.listed(pool_id)}
        missing = [each for each in instance_ids if each not in found and each.isdecimal()]
        answers = await asyncio.gather(*(self.rest.optional(f"{_DROPLETS}/{each}") for each in missing))
        rows = (parse_droplet(answer["droplet"]) for answer in answers if answer is not None)
        return [*found.values(), *(each for each in rows if each is not None)]

    async def request_end(self, machine: str) -> None:
        """Request the end of a droplet."""
        if machine.isdecimal():
            await self.rest.change("DELETE", f"{_DROPLETS}/{machine}")

    async def ensure_firewall(self, pool_id: str, client: str) -> None:
        """Create the pool's firewall: it admits all traffic among its droplets, and SSH from ``client``. Idempotent."""
        if await self._firewall(pool_id) is None:
            await self.rest.change("POST", "/v2/tags", {"name": _POOL_TAG + pool_id}, done=(RefusalKind.EXISTS,))
            # As for the key: a name is not taken twice.
            await self.rest.change("POST", _FIREWALLS, _rules(pool_id, client), done=(RefusalKind.EXISTS,))
        else:
            await self.admit(pool_id, client)

    async def admit(self, pool_id: str, client: str) -> bool:
        """Admit the client over SSH from its present address only; return True if it was not admitted before."""
        found = await self._firewall(pool_id)
        if found is None or _admitted(found) == [client]:
            return False
        await self.rest.change("PUT", f"{_FIREWALLS}/{found['id']}", _rules(pool_id, client))
        return True

    async def remove(self, pool_id: str) -> None:
        """Remove the pool's firewall and tag. Idempotent."""
        if (found := await self._firewall(pool_id)) is not None:
            await self.rest.change("DELETE", f"{_FIREWALLS}/{found['id']}", done=(RefusalKind.MISSING,))
        await self.rest.change("DELETE", f"/v2/tags/{_POOL_TAG}{pool_id}", done=(RefusalKind.MISSING,))

    async def _firewall(self, pool_id: str) -> Mapping[str, Any] | None:
        rows = await self.rest.pages(_FIREWALLS, "firewalls", _PAGE)
        return next((row for row in rows if row["name"] == _NAME + pool_id), None)

    async def _list(self, query: Mapping[str, str]) -> Sequence[MachineRecord]:
        """Return Skyward's droplets of a list without GPUs, and of one with GPUs only: no list has both."""
        with_gpus = {name: value for name, value in query.items() if name != "tag_name"} | {"type": "gpus"}
        answers = await asyncio.gather(
            *(self.rest.pages(_DROPLETS, "droplets", {**_PAGE, **each}) for each in (query, with_gpus))
        )
        found = (parse_droplet(row) for rows in answers for row in rows)
        return [*{each.id: each for each in found if each is not None and each.offer.region == self._region}.values()]


def fingerprint_of(public: str) -> str:
    """Return the name of a public key in the API."""
    return hashlib.md5(base64.b64decode(public.split()[1]), usedforsecurity=False).digest().hex(":")


def parse_droplet(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse a droplet of an answer; None if it is not one of Skyward's."""
    name = str(row["name"])
    pools = [str(tag) for tag in row.get("tags") or () if str(tag).startswith(_POOL_TAG)]
    if not pools or not name.startswith(_NAME):
        return None
    networks: Mapping[str, Any] = row.get("networks") or {}
    addresses = {str(each["type"]): str(each["ip_address"]) for each in networks.get("v4") or ()}
    size: Mapping[str, Any] = row.get("size") or {}
    slug, state = str(row["size_slug"]), _STATES.get(row["status"], InstanceState.PENDING)
    return MachineRecord(
        id=str(row["id"]),
        key=name.removeprefix(_NAME),
        pool_id=pools[0].removeprefix(_POOL_TAG),
        state=state,
        offer=Offer(
            spec=parse_spec({**row, **size, "slug": slug}),
            region=str(row["region"]["slug"]),
            spot=slug.endswith(SPOT_SUFFIX),
            price_per_hour=None if (price := size.get("price_hourly")) is None else float(price),
            minimum_billed_s=MINIMUM_BILLED_S,
            minimum_charge=MINIMUM_CHARGE,
        ),
        public_address=addresses.get("public", ""),
        private_address=addresses.get("private", ""),
        network=str(row.get("vpc_uuid") or ""),
        reason=f"its status is {row['status']!r}, and it bills" if state is InstanceState.FAILED else "",
    )


def droplet_order(offer: Offer, key: str, pool_id: str, *, ssh_key: str, user_data: str) -> Mapping[str, Any]:
    """Return the body of the call that creates a droplet.

    Without an account key (``ssh_key``, a fingerprint) DigitalOcean would mail a password for root, who must change it
    at the first login.
    """
    return {
        "name": _NAME + key,
        "region": offer.region,
        "size": offer.spec.name,
        "image": image_of(offer.spec),
        "ssh_keys": [ssh_key],
        "tags": [_POOL_TAG + pool_id],
        "user_data": user_data,
        "with_droplet_agent": False,
    }


def _admitted(firewall: Mapping[str, Any]) -> Sequence[str]:
    ssh = [rule for rule in firewall.get("inbound_rules") or () if rule["ports"] == "22"]
    return [str(each) for rule in ssh for each in rule["sources"].get("addresses") or ()]


def _rules(pool_id: str, client: str) -> Mapping[str, Any]:
    tag = _POOL_TAG + pool_id
    among = [{"protocol": each, "ports": "0", "sources": {"tags": [tag]}} for each in _PROTOCOLS]
    ssh = {"protocol": "tcp", "ports": "22", "sources": {"addresses": [client]}}
    out = [{"protocol": each, "ports": "0", "destinations": {"addresses": [*_EVERYWHERE]}} for each in _PROTOCOLS]
    return {"name": _NAME + pool_id, "tags": [tag], "inbound_rules": [ssh, *among], "outbound_rules": out}
