"""Sizes of droplets: their accelerators, images and prices (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    fewest_accelerators,
    sold_accelerators,
    sold_as,
)
from skyward.providers._common.offer_list import cheapest_offers
from skyward.providers.base import Offer
from skyward.request.accelerators import Vendor, find_model
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

__all__ = [
    "MINIMUM_BILLED_S",
    "MINIMUM_CHARGE",
    "SPOT_SUFFIX",
    "DropletSize",
    "find_offers",
    "image_of",
    "parse_sizes",
    "parse_spec",
]

MINIMUM_BILLED_S: Final = 60.0
MINIMUM_CHARGE: Final = 0.01
SPOT_SUFFIX: Final = "-spot"
_MIB_PER_GIB: Final = 1024
_NOT_SOLD: Final = ("-contracted", "-devcloud")
"""Endings of sizes that are listed, and ordered by contract only."""
_SHARED: Final = "s-"
"""Beginning of the sizes whose processors are shared with other customers."""
_NAMES: Final[Mapping[str, str]] = {"h100": "H100-SXM"}
"""Accelerators that are sold in one form only, and not named by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropletSize:
    """Size of droplets.

    Attributes:
        type: its machine type.
        price_per_hour: USD.
        regions: regions that have it; empty for none.
    """

    type: MachineType
    price_per_hour: float
    regions: tuple[str, ...]


def parse_sizes(rows: Iterable[Mapping[str, Any]]) -> Sequence[DropletSize]:
    """Parse the sizes that can be ordered."""
    return [
        DropletSize(
            type=MachineType(spec=parse_spec(row)),
            price_per_hour=float(row["price_hourly"]),
            regions=tuple(map(str, row["regions"])) if row["available"] else (),
        )
        for row in rows
        if not str(row["slug"]).endswith(_NOT_SOLD)
    ]


def find_offers(sizes: Sequence[DropletSize], request: PoolRequest, region: str) -> Sequence[Offer]:
    """Return the offers of a region for a request.

    Raises:
        ConfigurationError: the region does not exist, or has no such droplets; names those that have.
    """
    known = sorted({each for size in sizes for each in size.regions})
    if region not in known:
        raise ConfigurationError(f"region={region!r}: digitalocean has no such region; it has {', '.join(known)}")
    here = {size.type.name: size for size in sizes if region in size.regions}
    places = {size.type: size.regions for size in sizes}
    catalogue = Catalogue(
        vendor="digitalocean",
        types=[each.type for each in here.values()],
        place=region,
        accelerators=sold_accelerators(places),
        places={each.name: regions for each, regions in places.items()},
        remedy="try DigitalOcean(region={place!r})",
    )
    prices = {size.type.name: size.price_per_hour for size in sizes}
    chosen = [here[each.name] for each in fewest_accelerators(catalogue.candidates(request))]
    return cheapest_offers(
        [_offer(each, region, prices, chosen=bool(request.machine)) for each in chosen], request, vendor="digitalocean"
    )


def _offer(size: DropletSize, region: str, prices: Mapping[str, float], *, chosen: bool) -> Offer:
    name, spot = size.type.name, size.type.name.endswith(SPOT_SUFFIX)
    return Offer(
        spec=size.type.spec,
        region=region,
        spot=spot,
        price_per_hour=size.price_per_hour,
        on_demand_price_per_hour=prices.get(name.removesuffix(SPOT_SUFFIX)) if spot else size.price_per_hour,
        minimum_billed_s=MINIMUM_BILLED_S,
        minimum_charge=MINIMUM_CHARGE,
        note=f"{name} shares its processors with other customers" if name.startswith(_SHARED) and not chosen else "",
    )


def parse_spec(row: Mapping[str, Any]) -> InstanceSpec:
    """Parse a size; the API's ``vram`` is the sum of all GPUs of a droplet."""
    gpus: Mapping[str, Any] = row.get("gpu_info") or {}
    count = int(gpus.get("count") or 0)
    model = str(gpus.get("model") or "")
    _, _, name = model.partition("_")
    vram: Mapping[str, Any] = gpus.get("vram") or {}
    total_gib = float(vram.get("amount") or 0)
    sold = sold_as(_NAMES.get(name, name) or model, reported_gib=total_gib / count) if count else None
    return InstanceSpec(
        name=str(row["slug"]),
        cpu=int(row["vcpus"]),
        memory_gib=float(row["memory"]) / _MIB_PER_GIB,
        accelerator=sold.name if sold else None,
        accelerator_count=count,
        accelerator_memory_gib=sold.memory_gib if sold else None,
    )


def image_of(spec: InstanceSpec) -> str:
    """Return the slug of the image for a size."""
    if spec.accelerator is None:
        return "ubuntu-24-04-x64"
    model = find_model(spec.accelerator)
    if model is not None and model.vendor is Vendor.AMD:
        return "gpu-amd-base"
    # Eight connected GPUs need NVIDIA's fabric manager, which is in the second image only.
    return "gpu-h100x1-base" if spec.accelerator_count == 1 else "gpu-h100x8-base"
