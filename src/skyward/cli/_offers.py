"""``skyward offers``: machine types for rent, with regions and prices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import click

from skyward.api.offers import find_offers, price_rank, priced, spec_cells
from skyward.cli._base import FAILED, Answer, Providers, Rows, answers, provider_options, rented_providers
from skyward.display.words import duration
from skyward.errors import SkywardError
from skyward.ledger.sweep import attributed
from skyward.providers.base import Offer
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
    types, errors = asyncio.run(_ask_all(providers, request, spot=spot))
    types = sorted(types, key=lambda offered: price_rank(offered.spec))
    for name, error in errors.items():
        click.echo(attributed(name, error), err=True)
    text: list[str | Rows] = []
    if types:
        text.append(Rows(_COLUMNS, [offered.cells() for offered in types]))
        text += dict.fromkeys(offered.note for offered in types if offered.note)
    elif not errors:
        text.append(f"No {'spot ' if spot else ''}machine satisfies the request; other regions may have some")
    document = {"offers": [offered.document() for offered in types], "errors": errors}
    return Answer(document=document, text=text, exit_code=0 if types else FAILED)


async def _ask_all(
    providers: Providers, request: PoolRequest, *, spot: bool
) -> tuple[list[_OfferedType], dict[str, str]]:
    names = providers.names or rented_providers()
    replies = await asyncio.gather(
        *(_ask(providers, name, request, spot=spot) for name in names), return_exceptions=True
    )
    types: list[_OfferedType] = []
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
                types += reply
    return types, errors


async def _ask(providers: Providers, name: str, request: PoolRequest, *, spot: bool) -> list[_OfferedType]:
    provider = providers.make(name)
    try:
        matching = [offer for offer in await find_offers(provider, request) if offer.spot or not spot]
        types = list(dict.fromkeys(offer.spec.name for offer in matching))
        zones = await provider.zones(types)
    finally:
        await provider.close()
    return [
        _OfferedType(name, [offer for offer in matching if offer.spec.name == machine], zones.get(machine, {}))
        for machine in types
    ]


class _OfferedType:
    """Machine type of a provider; its prices are those of the cheapest zone.

    Args:
        provider: the provider's name.
        offers: its offers of this type.
        zones: spot prices by zone, USD an hour.
    """

    def __init__(self, provider: str, offers: Sequence[Offer], zones: Mapping[str, float | None]) -> None:
        self.spec = priced(offers)
        self.note = "; ".join(dict.fromkeys(offer.note for offer in offers if offer.note))
        self._provider = provider
        self._region = offers[0].region
        self._zones = zones
        self._age_s = max(offer.price_age_s for offer in offers)

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self._provider} {self._region}".strip(),
            *spec_cells(self.spec),
            "now" if self._age_s < _NOW_S else f"{duration(self._age_s)} ago",
            " ".join(zone.removeprefix(self._region) if self._region else zone for zone in self._zones),
        )

    def document(self) -> dict[str, Any]:
        return {
            "provider": self._provider,
            "region": self._region,
            "type": self.spec.name,
            "accelerator": self.spec.accelerator,
            "accelerators": self.spec.accelerator_count,
            "accelerator_memory_gib": self.spec.accelerator_memory_gib,
            "cores": self.spec.cpu,
            "memory_gib": self.spec.memory_gib,
            "spot_per_hour": self.spec.price_spot,
            "on_demand_per_hour": self.spec.price_on_demand,
            "price_age_s": round(self._age_s),
            "zones": dict(self._zones),
            "note": self.note,
        }
