"""Verda's JSON: machine types and offers, records of machines, and the body of the creating call (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from skyward.errors import CapacityError
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    fewest_accelerators,
    sold_accelerators,
    sold_as,
)
from skyward.providers._common.offer_list import cheapest_offers
from skyward.providers._common.rented_machines import MachineRecord, label, labels_of
from skyward.providers.base import InstanceState, Offer
from skyward.request.accelerators import model_name
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

__all__ = [
    "STATES",
    "Stock",
    "choose_image",
    "create_body",
    "make_offers",
    "parse_images",
    "parse_record",
    "parse_types",
]

Stock = Mapping[bool, Mapping[str, Sequence[str]]]
"""Machine types that are available now, by market (True is spot), then by the code of their location."""

STATES: Final[Mapping[str, InstanceState]] = {
    **dict.fromkeys(("new", "ordered", "provisioning", "validating", "pending", "unknown"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    "deleting": InstanceState.STOPPING,
    "discontinued": InstanceState.GONE,
    "notfound": InstanceState.GONE,
    "offline": InstanceState.FAILED,  # switched off, and billed all the same
    **dict.fromkeys(("error", "installation_failed", "no_capacity"), InstanceState.FAILED),
}
"""State of a machine, by Verda's word for it; any other word is a machine that is not ready."""

_MINIMUM_BILLED_S: Final = 600.0
"""Shortest time billed, by an old text of the vendor's: no present document states one."""
_POOL_TAG: Final = "skyward-pool"
_KEY_TAG: Final = "skyward-key"
_IMAGE: Final = re.compile(r"ubuntu-(\d+\.\d+)(?:-cuda-(\d+)\.(\d+))?", re.ASCII)
_NEWEST_TRIED: Final = "24.04"
_GPU_DISK_GB: Final = 100
_DISK_GB: Final = 50


def _labels_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the pool and the ledger key of a machine; empty for a machine of somebody else.

    They are its tags, else in its description: Verda's tags are new.
    """
    tags = {tag.get("key"): str(tag.get("value")) for tag in row.get("tags") or ()}
    if _KEY_TAG in tags and _POOL_TAG in tags:
        return tags[_POOL_TAG], tags[_KEY_TAG]
    return labels_of(row.get("description"))


def parse_record(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse one machine of an answer; None for a machine of somebody else."""
    if not (labels := _labels_of(row)):
        return None
    status, spot = str(row.get("status", "")), row.get("is_spot") is True
    state = STATES.get(status, InstanceState.PENDING)
    spec = InstanceSpec(name=str(row.get("instance_type", "")), cpu=0, memory_gib=0.0)
    return MachineRecord(
        id=str(row["id"]),
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=_offer(spec, str(row.get("location", "")), spot=spot, price=_number(row.get("price_per_hour"))),
        public_address=str(row.get("ip") or ""),
        reason=status if state in (InstanceState.FAILED, InstanceState.GONE) else "",
        preempted=spot and status == "discontinued",
    )


def create_body(offer: Offer, pool_id: str, key: str, *, image: str, key_id: str, script_id: str) -> dict[str, Any]:
    """Return the body of the call that creates a machine, its volume and its tags."""
    name = label(pool_id, key)
    disk_gb = _GPU_DISK_GB if offer.spec.accelerator else _DISK_GB
    return {
        "instance_type": offer.spec.name,
        "image": image,
        "hostname": key,
        "description": name,
        "location_code": offer.region,
        "ssh_key_ids": [key_id],
        "startup_script_id": script_id,
        "is_spot": offer.spot,
        "contract": "SPOT" if offer.spot else "PAY_AS_YOU_GO",
        "pricing": "FIXED_PRICE",
        "os_volume": {"name": name, "size": disk_gb, "on_spot_discontinue": "delete_permanently"},
        "tags": [{"key": _POOL_TAG, "value": pool_id}, {"key": _KEY_TAG, "value": key}],
    }


def choose_image(supported: Sequence[str], *, gpu: bool) -> str | None:
    """Return the image for a machine type: Ubuntu 24.04 if there is one, with the newest CUDA for a GPU.

    Images differ by type: older GPUs lack the newer ones. None if no image is Ubuntu's.
    """

    def rank(name: str) -> tuple[Any, ...]:
        version, *cuda = cast("re.Match[str]", _IMAGE.match(name)).groups()
        numbers = tuple(int(each) for each in cuda if each)
        return bool(numbers) is gpu, version == _NEWEST_TRIED, version, numbers, "kubernetes" not in name, -len(name)

    return max(filter(_IMAGE.match, supported), key=rank, default=None)


def parse_types(rows: Iterable[Mapping[str, Any]]) -> tuple[MachineType, ...]:
    """Parse the catalogue; malformed rows are left out."""
    return tuple(each for row in rows if (each := _parse_type(row)) is not None)


def parse_images(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the image for each machine type of the catalogue that has one."""
    images = {str(row["instance_type"]): choose_image(row["supported_os"], gpu=_gpus(row) > 0) for row in rows}
    return {name: image for name, image in images.items() if image is not None}


def make_offers(
    types: Sequence[MachineType], stock: Stock, request: PoolRequest, *, region: str | None
) -> Sequence[Offer]:
    """Return the offers that satisfy a request, in the region or in any, the cheapest of each market first.

    A larger machine than requested is not offered because the smallest one is sold out.

    Raises:
        ConfigurationError: there is no such machine type; names the nearest.
        CapacityError: it is not available now; names the locations in which it is, and the larger machines.
    """
    places = {each: sorted({place for spot in stock for place in _places(each, stock, spot=spot)}) for each in types}
    catalogue = Catalogue(vendor="Verda", types=types, kind="location", accelerators=sold_accelerators(places))
    fitting = catalogue.candidates(request)
    chosen = fewest_accelerators(fitting)
    offers = [
        _offer(each.spec, place, spot=spot, price=each.spec.price_spot if spot else each.spec.price_on_demand)
        for each in chosen
        for spot in stock
        for place in _places(each, stock, spot=spot)
        if region in (None, place)
    ]
    if offers:
        return cheapest_offers(offers, request, vendor="Verda")
    elsewhere = sorted({place for each in chosen for place in places[each]})
    larger = [f"{each.name} in {', '.join(places[each])}" for each in fitting if places[each] and each not in chosen]
    advice = f"it is in {', '.join(elsewhere)}: leave region out, or name one of these" if elsewhere else "try later"
    more = f", or request a larger machine by machine=: {'; '.join(larger[:3])}" if larger else ""
    names = ", ".join(each.name for each in chosen[:3])
    raise CapacityError(f"Verda has no {names} available now in {region or 'any location'}; {advice}{more}")


def _places(machine: MachineType, stock: Stock, *, spot: bool) -> Sequence[str]:
    if spot and not machine.spot:
        return ()
    return sorted(code for code, names in stock[spot].items() if machine.name in names)


def _offer(spec: InstanceSpec, location: str, *, spot: bool, price: float | None) -> Offer:
    return Offer(
        spec=spec,
        region=location,
        spot=spot,
        price_per_hour=price,
        on_demand_price_per_hour=spec.price_on_demand,
        minimum_billed_s=_MINIMUM_BILLED_S,
        island=True,
    )


def _parse_type(row: Mapping[str, Any]) -> MachineType | None:
    try:
        count, total_gb = _gpus(row), float(row["gpu_memory"]["size_in_gigabytes"])
        image = choose_image(row["supported_os"], gpu=count > 0)
        spec = InstanceSpec(
            name=str(row["instance_type"]),
            cpu=int(row["cpu"]["number_of_cores"]),
            memory_gib=float(row["memory"]["size_in_gigabytes"]),
            price_on_demand=_number(row.get("price_per_hour")),
            price_spot=_number(row.get("spot_price")) or None,
        )
        if count:  # Verda states the memory of all GPUs together: "8x H100 SXM5 80GB" has 640
            name = re.sub(r"^\d+x\s+|\s+\d+\s*GB$", "", str(row["gpu"]["description"]))
            sold = sold_as(re.sub(r"SXM\d", "SXM", name), name, model_name(name), reported_gib=total_gb / count)
            held = {"accelerator": sold.name, "accelerator_memory_gib": sold.memory_gib}
            spec = replace(spec, accelerator_count=count, **held)
    except (KeyError, TypeError, ValueError):
        return None
    return MachineType(spec=spec, spot=spec.price_spot is not None, whole=image is not None)


def _gpus(row: Mapping[str, Any]) -> int:
    return int(row["gpu"]["number_of_gpus"])


def _number(value: object) -> float | None:
    """Return a price, which Verda writes as a number or as text; None for anything else."""
    try:
        return float(cast("Any", value))
    except (TypeError, ValueError):
        return None
