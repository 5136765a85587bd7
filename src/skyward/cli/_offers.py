"""``skyward offers``: machine types for rent, with regions and prices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import click

from skyward.api.market import find_offers, priced
from skyward.cli._base import FAILED, Answer, Providers, Rows, answers, provider_options, rented_providers
from skyward.display.words import duration
from skyward.errors import SkywardError
from skyward.providers.base import Offer
from skyward.provision.buying.sweep import attributed
from skyward.request.request import PoolRequest, parse_request

_COLUMNS = ("provider", "type", "accelerators", "cores", "memory", "spot $/h", "on demand $/h", "as of", "zones")
_NOW_S = 10.0
_logger = logging.getLogger("skyward")


@click.command()
@click.option("--accelerator", metavar="NAME[:COUNT]", help="Accelerator and count: H100, A100-40GB:8.")
@click.option("--cpu", type=int, help="Minimum number of cores.")
@click.option("--memory", metavar="SIZE", help="Minimum main memory, such as 64GB.")
@click.option("--machine", help="The provider's name of a machine type.")
@click.option("--spot", is_flag=True, help="Only spot machines, which the provider may take back.")
@provider_options("Query only this provider")
@answers
def offers(*, spot: bool, providers: Providers, **wishes: Any) -> Answer:
    """List the machine types that satisfy a request, cheapest first, with prices in USD an hour and zones.

    Without any request, list the cheapest with accelerators and without.
    """
    request = parse_request(**wishes, spot="always" if spot else "if-available")
    found, errors = asyncio.run(_ask_all(providers, request, spot=spot))
    found = sorted(found, key=_rank)
    for name, error in errors.items():
        click.echo(attributed(name, error), err=True)
    text: list[str | Rows] = []
    if found:
        text.append(Rows(_COLUMNS, [_cells(offer) for offer in found]))
        text += dict.fromkeys(offer["note"] for offer in found if offer["note"])
    elif not errors:
        text.append(f"No {'spot ' if spot else ''}machine satisfies the request; other regions may have some")
    return Answer(document={"offers": found, "errors": errors}, text=text, exit_code=0 if found else FAILED)


async def _ask_all(
    providers: Providers, request: PoolRequest, *, spot: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the documents of all machine types, and the errors of providers by name."""
    names = providers.names or rented_providers()
    replies = await asyncio.gather(
        *(_ask(providers, name, request, spot=spot) for name in names), return_exceptions=True
    )
    found: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for name, reply in zip(names, replies, strict=True):
        match reply:
            case SkywardError():
                errors[name] = str(reply)
            case Exception():
                _logger.debug("the offers of %s failed", name, exc_info=reply)
                errors[name] = f"it failed: {type(reply).__name__}: {reply}"
            case BaseException():
                raise reply
            case _:
                found += reply
    return found, errors


async def _ask(providers: Providers, name: str, request: PoolRequest, *, spot: bool) -> list[dict[str, Any]]:
    provider = providers.make(name)
    try:
        found = [offer for offer in await find_offers(provider, request) if offer.spot or not spot]
        types = list(dict.fromkeys(offer.spec.name for offer in found))
        zones = await provider.zones(types)
    finally:
        await provider.close()
    return [
        _document(name, [offer for offer in found if offer.spec.name == machine], zones.get(machine, {}))
        for machine in types
    ]


def _document(provider: str, found: Sequence[Offer], zones: Mapping[str, float | None]) -> dict[str, Any]:
    """Return a machine type as JSON values; its prices are those of the cheapest zone."""
    spec = priced(found)
    return {
        "provider": provider,
        "region": found[0].region,
        "type": spec.name,
        "accelerator": spec.accelerator,
        "accelerators": spec.accelerator_count,
        "accelerator_memory_gib": spec.accelerator_memory_gib,
        "cores": spec.cpu,
        "memory_gib": spec.memory_gib,
        "spot_per_hour": spec.price_spot,
        "on_demand_per_hour": spec.price_on_demand,
        "price_age_s": round(max(offer.price_age_s for offer in found)),
        "zones": dict(zones),
        "note": "; ".join(dict.fromkeys(offer.note for offer in found if offer.note)),
    }


def _rank(offer: dict[str, Any]) -> tuple[float, str]:
    """Return the sort key: cheapest first, unknown prices last."""
    prices = [price for price in (offer["spot_per_hour"], offer["on_demand_per_hour"]) if price is not None]
    return min(prices, default=float("inf")), offer["type"]


def _cells(offer: dict[str, Any]) -> tuple[str, ...]:
    memory = f" {offer['accelerator_memory_gib']:g} GiB" if offer["accelerator_memory_gib"] else ""
    region, age_s = offer["region"], offer["price_age_s"]
    return (
        f"{offer['provider']} {region}".strip(),
        offer["type"],
        f"{offer['accelerators']} x {offer['accelerator']}{memory}" if offer["accelerator"] else "",
        str(offer["cores"] or "?"),  # some vendors do not state the size of machines with GPUs
        f"{offer['memory_gib']:g} GiB" if offer["memory_gib"] else "?",
        *("?" if usd is None else f"{usd:.4f}" for usd in (offer["spot_per_hour"], offer["on_demand_per_hour"])),
        "now" if age_s < _NOW_S else f"{duration(age_s)} ago",
        " ".join(zone.removeprefix(region) if region else zone for zone in offer["zones"]),
    )
