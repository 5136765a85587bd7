"""List prices for those without an account: ``list_prices.toml``, made by ``tools/list-prices``, read at its first use.

Vendors that show their prices to customers only are in it, and the others for machines without a network. A price in it
says what a vendor asked on a day; it does not say whether the machine is in stock, or what it costs today.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    cheapest_offers,
    fewest_accelerators,
    has_kind,
    nearest_accelerators,
    sold_as,
)
from skyward.providers.base import Offer
from skyward.request.accelerators import Accelerator
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Machines of a vendor, with the prices that one source gave.

    Attributes:
        provider: the provider's name.
        region: the region of these prices; empty where they hold in all.
        as_of: the day of the source.
        source: what the prices rest on.
        machines: the machine types; their prices are in USD an hour.
    """

    provider: str
    region: str
    as_of: dt.date
    source: str
    machines: tuple[InstanceSpec, ...]


@cache
def price_lists() -> tuple[PriceList, ...]:
    """Return every list."""
    text = files("skyward.providers").joinpath("list_prices.toml").read_text(encoding="utf-8")
    return tuple(map(_parse_list, tomllib.loads(text)["lists"]))


def lists_of(provider: str) -> tuple[PriceList, ...]:
    """Return the lists of a provider, by its name; empty for one without."""
    return tuple(each for each in price_lists() if each.provider == provider)


def listed_offers(provider: str, request: PoolRequest, today: dt.date | None = None) -> Sequence[Offer]:
    """Return the offers of a provider's lists that satisfy a request, the cheapest of each market first.

    Empty if there are none: a list may lack what the vendor has.
    """
    held = [(_machine_type(machine), prices) for prices in lists_of(provider) for machine in prices.machines]
    catalogue = Catalogue(vendor=provider, types=[machine for machine, _ in held])
    try:
        chosen = set(fewest_accelerators(catalogue.candidates(request)))
    except ConfigurationError:
        return ()
    day = today or dt.datetime.now(tz=dt.UTC).date()
    offers = [offer for machine, prices in held if machine in chosen for offer in _offers(machine.spec, prices, day)]
    return cheapest_offers(offers, request, vendor=provider)


def closest_sold(wanted: Accelerator) -> Sequence[str]:
    """Return the listed accelerators that are nearest to ``wanted`` by name and memory, at most three."""
    machines = [machine for prices in price_lists() for machine in prices.machines]
    return nearest_accelerators(wanted, dict.fromkeys(each.accelerator for each in machines if each.accelerator))


def most_sold(wanted: Accelerator) -> int:
    """Return the largest number of such accelerators on a listed machine; 0 if there is none."""
    machines = [machine for prices in price_lists() for machine in prices.machines]
    return max((each.accelerator_count for each in machines if has_kind(each, wanted)), default=0)


def _parse_list(row: dict[str, Any]) -> PriceList:
    return PriceList(
        provider=row["provider"],
        region=row["region"],
        as_of=row["as_of"],
        source=row["source"],
        machines=tuple(map(_parse_machine, row["machines"])),
    )


def _parse_machine(row: Sequence[Any]) -> InstanceSpec:
    name, cpu, memory_gib, accelerator, count, spot, on_demand = row
    spec = InstanceSpec(
        name=name,
        cpu=cpu,
        memory_gib=memory_gib,
        price_spot=spot or None,
        price_on_demand=on_demand or None,
    )
    return sold_as(accelerator, reported_gib=0.0).built_into(spec, count) if count else spec


def _machine_type(spec: InstanceSpec) -> MachineType:
    return MachineType(spec=spec, spot=spec.price_spot is not None, on_demand=spec.price_on_demand is not None)


def _offers(spec: InstanceSpec, prices: PriceList, day: dt.date) -> list[Offer]:
    return [
        Offer(
            spec=spec,
            region=prices.region,
            spot=spot,
            price_per_hour=price,
            on_demand_price_per_hour=spec.price_on_demand,
            price_age_s=(day - prices.as_of).total_seconds(),
        )
        for spot, price in ((True, spec.price_spot), (False, spec.price_on_demand))
        if price is not None
    ]
