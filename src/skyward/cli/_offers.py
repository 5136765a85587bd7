"""``skyward offers``: machine types for rent, with regions, prices, and what the prices rest on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click

from skyward.api.offers import (
    COLUMNS,
    LIMIT_S,
    NAMED_S,
    PriceBasis,
    PricedInstance,
    PriceSource,
    price_rank,
    price_source,
    rented_providers,
    run_asking,
    survey_prices,
)
from skyward.cli._base import FAILED, Answer, Providers, Rows, answers, money, provider_options
from skyward.display.words import plural
from skyward.errors import ConfigurationError
from skyward.providers.base import Offer, Provider
from skyward.providers.registry import provider_parameters, provider_type
from skyward.request.checks import positive_number
from skyward.request.request import PoolRequest, parse_request

_FOLDED = ("provider", "type", "accelerators")
_SIZE = ("cores", "GiB")
_SHOWN_REGIONS = 12


@click.command()
@click.option(
    "--accelerator", metavar="NAME[:COUNT]", multiple=True, help="As in H100, A100-40GB:8; several for any of them."
)
@click.option("--cpu", type=int, help="Minimum number of cores.")
@click.option("--memory", metavar="SIZE", help="Minimum main memory, such as 64GB.")
@click.option("--machine", help="The provider's name of a machine type.")
@click.option("--spot", is_flag=True, help="Only spot machines, which the provider may take back.")
@click.option("--max-price", metavar="USD", type=float, help="Only machines that cost at most this much an hour.")
@provider_options("Query only this provider, and wait for it")
@answers
def offers(
    *, accelerator: Sequence[str], spot: bool, max_price: float | None, providers: Providers, **wishes: Any
) -> Answer:
    """List the machine types that satisfy a request, cheapest first, with prices in USD an hour; no account is needed.

    Without any request, list the cheapest with accelerators and without. A row rests on what the provider offers your
    account now (live), on prices that the vendor shows to anyone (public), or on a list that is shipped with Skyward
    (list, with its age).
    """
    request = parse_request(accelerator=accelerator or None, **wishes, spot="always" if spot else "if-available")
    region = providers.parameters.get("region", "")
    sources, refused = _sources(providers)
    if not sources:
        several = "no provider takes these parameters:\n" if len(refused) > 1 else ""
        click.echo(f"Error: {several}" + "\n".join(refused.values()), err=True)
        return Answer(document={"offers": [], "errors": refused}, exit_code=FAILED)
    survey = run_asking(
        survey_prices(
            sources,
            request,
            limit_s=NAMED_S if providers.names else LIMIT_S,
            accepts=_accepts(region, spot=spot, max_price=max_price),
            with_zones=bool(providers.names),
        )
    )
    text: list[str | Rows] = []
    if survey.rows:
        text.append(_table(survey.rows, request))
        text += [*dict.fromkeys(row.note for row in survey.rows if row.note), *survey.basis]
    elif survey.left_out:
        given = {"--region": region, "--spot": spot, "--max-price": max_price is not None}
        text += _none_matches(survey.left_out, [option for option, is_given in given.items() if is_given])
    silence = survey.silence if survey.rows or survey.left_out else str(survey.no_rows(request)).splitlines()
    for line in [*refused.values(), *silence]:
        click.echo(line, err=True)
    document = {
        "offers": [_document(row) for row in survey.rows],
        "errors": refused | {name: str(error) for name, error in survey.errors.items()},
    }
    return Answer(document=document, text=text, exit_code=0 if survey.rows else FAILED)


def _sources(providers: Providers) -> tuple[Sequence[PriceSource], dict[str, str]]:
    """Return the providers to ask, with the command line's parameters; the refusals of those that do not take these."""
    makers = {name: _maker(providers, name) for name in providers.names or rented_providers()}
    configured = bool(providers.parameters.keys() - {"region"})
    refused: dict[str, str] = {}
    for name, make in makers.items() if configured else ():
        try:
            make()
        except ConfigurationError as error:
            refused[name] = str(error)
    taken = {name: make for name, make in makers.items() if name not in refused}
    named = bool(providers.names)
    return [price_source(name, make, configured=configured, named=named) for name, make in taken.items()], refused


def _maker(providers: Providers, name: str) -> Callable[[], Provider]:
    """Return what makes a provider; one with many regions at once is not asked for one."""

    def make() -> Provider:
        own = dict(providers.parameters)
        if "region" in own and "region" not in provider_parameters(provider_type(name)):
            del own["region"]
        return replace(providers, parameters=own).make(name)

    return make


def _none_matches(left_out: Sequence[PricedInstance], options: Sequence[str]) -> list[str]:
    """Return lines about the machine types that the options leave out: what they are instead, and the next step."""
    found = plural(len(left_out), "machine type")
    lines = [f"{found} would do without {' and '.join(options)}:"]
    if "--region" in options:
        regions = sorted({region for row in left_out for region in row.regions})
        lines.append(f"  their regions: {', '.join(regions[:_SHOWN_REGIONS]) or 'not known'}")
    if "--spot" in options and all(row.price_spot is None for row in left_out):
        lines.append("  no price on spot is known of them")
    if "--max-price" in options:
        cheapest = min(left_out, key=price_rank)
        lines.append(f"  the cheapest: {cheapest.name} of {cheapest.provider}, for {money(cheapest.cheapest)} an hour")
    if any(row.basis is PriceBasis.LISTED for row in left_out):
        names = ", ".join(sorted({row.provider for row in left_out if row.basis is PriceBasis.LISTED}))
        lines.append(
            f"Of {names} only a list that is shipped with Skyward was read, which lacks most regions and spot prices. "
            "Credentials show them all: `skyward doctor`"
        )
    return lines


def _table(rows: Sequence[PricedInstance], request: PoolRequest) -> Rows:
    """Return the table, of 80 columns for most requests: without the size of machines unless it was asked for."""
    wish = request.wish
    sized = wish.accelerator is None or wish.cpu is not None or wish.memory_gib is not None
    kept = [name for name in COLUMNS if sized or name not in _SIZE]
    cells = [dict(zip(COLUMNS, row.cells, strict=True)) for row in rows]
    return Rows(kept, [[row[name] for name in kept] for row in cells], folded=_FOLDED)


def _accepts(region: str, *, spot: bool, max_price: float | None) -> Callable[[Offer, PriceBasis], bool]:
    limit = None if max_price is None else positive_number("--max-price", max_price)

    def accepts(offer: Offer, basis: PriceBasis) -> bool:
        price = offer.price_per_hour
        affordable = limit is None or (price is not None and price <= limit)
        anywhere = not offer.region and basis is PriceBasis.LIVE  # of a provider that was asked for the region
        return affordable and (offer.spot or not spot) and (anywhere or offer.region.lower().startswith(region.lower()))

    return accepts


def _document(row: PricedInstance) -> dict[str, Any]:
    return {
        "provider": row.provider,
        "region": row.regions[0] if row.regions else "",
        "regions": row.regions,
        "type": row.name,
        "accelerator": row.accelerator,
        "accelerators": row.accelerator_count,
        "accelerator_memory_gib": row.accelerator_memory_gib,
        "cores": row.cpu,
        "memory_gib": row.memory_gib,
        "spot_per_hour": row.price_spot,
        "on_demand_per_hour": row.price_on_demand,
        "rests_on": row.basis.value,
        "price_age_s": round(row.price_age_s),
        "zones": dict(row.zones),
        "note": row.note,
    }
