"""RunPod's catalogue: pods with their stock and prices, and the offers that satisfy a request (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
from skyward.providers.base import Offer
from skyward.request.accelerators import model_name
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

__all__ = ["Stock", "compute_of", "make_offers", "parse_cpus", "parse_gpus", "pod_name", "wanted_count"]

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


def parse_gpus(rows: Iterable[Mapping[str, Any]], request: PoolRequest, *, cloud: str) -> Stock:
    """Parse the GPUs of the catalogue; malformed rows are left out.

    Cores and memory of these pods are in no catalogue: a machine counts as having what is requested, until it is
    measured. Each GPU has the number that is requested, and the largest number that RunPod has on one machine.
    """
    found: dict[MachineType, Sequence[str]] = {}
    for row in rows:
        try:
            most, price = int(row["maxCount"][cloud]), float(row["price"][cloud])
            device, name = str(row["id"]), str(row["name"])
            sold = sold_as(name, model_name(device), reported_gib=float(row["memory"]))
        except (KeyError, TypeError, ValueError):
            continue
        if not row.get(cloud):
            continue
        for count in sorted({min(wanted_count(request), most), most} - {0}):
            spec = InstanceSpec(
                name=pod_name(device, count),
                cpu=request.wish.cpu or 0,
                memory_gib=request.wish.memory_gib or 0.0,
                accelerator=sold.name,
                accelerator_count=count,
                accelerator_memory_gib=sold.memory_gib,
                price_on_demand=round(price * count, 6) or None,
            )
            found[MachineType(spec=spec, spot=False, whole="MIG" not in device)] = _places(row)
    return found


def parse_cpus(rows: Iterable[Mapping[str, Any]]) -> Stock:
    """Parse the flavours without GPUs, each with every number of cores; malformed rows are left out."""
    found: dict[MachineType, Sequence[str]] = {}
    for row in rows:
        try:
            device, least, most = str(row["id"]), int(row["vcpu"]["min"]), int(row["vcpu"]["max"])
            memory_gib, price = float(row["ramGbPerVcpu"]), float(row["price"]["securePerVcpu"])
        except (KeyError, TypeError, ValueError):
            continue
        for count in (1 << exponent for exponent in range(1, 10)):
            if least <= count <= most:
                spec = InstanceSpec(
                    name=pod_name(device, count),
                    cpu=count,
                    memory_gib=memory_gib * count,
                    price_on_demand=round(price * count, 6) or None,
                )
                found[MachineType(spec=spec, spot=False)] = _places(row)
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


def _places(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the data centres with stock; where the catalogue has a stock without places, any."""
    places = [each for each in row.get("dataCenters") or () if each.get("availability") in _LEVELS]
    if not places:
        return ("",) if row.get("availability") in _LEVELS else ()
    return [str(each["id"]) for each in sorted(places, key=lambda each: _LEVELS.index(each["availability"]))]
