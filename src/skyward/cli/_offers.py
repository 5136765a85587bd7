"""``skyward offers``: machine types for rent, with regions and prices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from skyward.api.market import find_offers, priced
from skyward.cli._base import (
    FAILED,
    PROVIDER,
    Answer,
    Say,
    answers,
    chosen_provider,
    place_options,
    rented_providers,
    settings_of,
)
from skyward.display.words import duration
from skyward.errors import SkywardError
from skyward.providers.base import Offer
from skyward.provision.buying.sweep import attributed
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest, parse_request

__all__ = ["offers"]

_COLUMNS = ("provider", "type", "accelerators", "cores", "memory", "spot $/h", "on demand $/h", "as of", "zones")
_NOW_S = 10.0
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Machine type of a provider.

    Attributes:
        provider: the provider's name.
        region: the provider's region.
        spec: the machine's hardware, with its prices in the cheapest zone.
        zones: spot prices by zone, USD an hour.
        price_age_s: time for which the older of the prices has been cached.
        note: the provider's remark on this type.
    """

    provider: str
    region: str
    spec: InstanceSpec
    zones: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    price_age_s: float = 0.0
    note: str = ""

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key: cheapest first, unknown prices last."""
        prices = [price for price in (self.spec.price_spot, self.spec.price_on_demand) if price is not None]
        return min(prices, default=float("inf")), str(self.spec)


@click.command()
@click.option("--accelerator", metavar="NAME[:COUNT]", help="Accelerator and count: H100, A100-40GB:8.")
@click.option("--cpu", type=int, help="Minimum number of cores.")
@click.option("--memory", metavar="SIZE", help="Minimum main memory, such as 64GB.")
@click.option("--machine", help="The provider's name of a machine type.")
@click.option("--spot", is_flag=True, help="Only spot machines, which the provider may take back.")
@click.option(
    "--provider", "providers", type=PROVIDER, multiple=True, help="Query only this provider; may be repeated."
)
@place_options
@answers
def offers(
    *,
    accelerator: str | None,
    cpu: int | None,
    memory: str | None,
    machine: str | None,
    spot: bool,
    providers: Sequence[str],
    region: str | None,
    options: Sequence[str],
) -> Answer:
    """List the machine types that satisfy a request, cheapest first, with prices in USD an hour and zones.

    Without any request, list the cheapest with accelerators and without.
    """
    request = parse_request(
        accelerator=accelerator,
        cpu=cpu,
        memory=memory,
        machine=machine,
        spot="always" if spot else "if-available",
    )
    rows, errors = asyncio.run(
        _ask_all(providers or rented_providers(), settings_of(region, options), request, spot=spot)
    )
    rows = sorted(rows, key=lambda row: row.rank)
    for name, error in errors.items():
        click.echo(attributed(name, error), err=True)

    def show(say: Say) -> None:
        if rows:
            say.table(*_COLUMNS, rows=[_cells(row) for row in rows])
            for note in dict.fromkeys(row.note for row in rows if row.note):
                say.line(note)
        elif not errors:
            say.line(f"No {'spot ' if spot else ''}machine satisfies the request; other regions may have some")

    document = {"offers": [_document(row) for row in rows], "errors": errors}
    return Answer(document=document, show=show, exit_code=0 if rows else FAILED)


async def _ask_all(
    names: Sequence[str], settings: Mapping[str, str], request: PoolRequest, *, spot: bool
) -> tuple[list[_Row], dict[str, str]]:
    asked = await asyncio.gather(*(_ask(name, settings, request, spot=spot) for name in names), return_exceptions=True)
    rows: list[_Row] = []
    errors: dict[str, str] = {}
    for name, found in zip(names, asked, strict=True):
        match found:
            case SkywardError():
                errors[name] = str(found)
            case Exception():
                _logger.debug("the offers of %s failed", name, exc_info=found)
                errors[name] = f"it failed: {type(found).__name__}: {found}"
            case BaseException():
                raise found
            case _:
                rows += found
    return rows, errors


async def _ask(name: str, settings: Mapping[str, str], request: PoolRequest, *, spot: bool) -> list[_Row]:
    provider = chosen_provider(name, settings)
    try:
        found = [each for each in await find_offers(provider, request) if each.spot or not spot]
        types = list(dict.fromkeys(each.spec.name for each in found))
        zones = await provider.zones(types)
    finally:
        await provider.close()
    return [
        _row(name, [each for each in found if each.spec.name == machine], zones.get(machine, {})) for machine in types
    ]


def _row(provider: str, found: Sequence[Offer], zones: Mapping[str, float | None]) -> _Row:
    spec, notes = priced(found), dict.fromkeys(each.note for each in found if each.note)
    return _Row(
        provider=provider,
        region=found[0].region,
        spec=spec,
        zones=zones,
        price_age_s=max(each.price_age_s for each in found),
        note="; ".join(notes),
    )


def _cells(row: _Row) -> tuple[str, ...]:
    spec = row.spec
    memory = f" {spec.accelerator_memory_gib:g} GiB" if spec.accelerator_memory_gib else ""
    return (
        f"{row.provider} {row.region}".strip(),
        spec.name,
        f"{spec.accelerator_count} x {spec.accelerator}{memory}" if spec.accelerator else "",
        str(spec.cpu or "?"),  # some vendors do not state the size of machines with GPUs
        f"{spec.memory_gib:g} GiB" if spec.memory_gib else "?",
        *("?" if usd is None else f"{usd:.4f}" for usd in (spec.price_spot, spec.price_on_demand)),
        "now" if row.price_age_s < _NOW_S else f"{duration(row.price_age_s)} ago",
        " ".join(zone.removeprefix(row.region) if row.region else zone for zone in row.zones),
    )


def _document(row: _Row) -> dict[str, Any]:
    spec = row.spec
    return {
        "provider": row.provider,
        "region": row.region,
        "type": spec.name,
        "accelerator": spec.accelerator,
        "accelerators": spec.accelerator_count,
        "accelerator_memory_gib": spec.accelerator_memory_gib,
        "cores": spec.cpu,
        "memory_gib": spec.memory_gib,
        "spot_per_hour": spec.price_spot,
        "on_demand_per_hour": spec.price_on_demand,
        "price_age_s": round(row.price_age_s),
        "zones": dict(row.zones),
        "note": row.note,
    }
