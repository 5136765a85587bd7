"""Machine types that a provider rents out, as a Python function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from html import escape
from typing import Any, cast

from skyward.api.misuse import options_by_name
from skyward.base.loop import acquire_loop
from skyward.errors import SkywardError
from skyward.providers.base import Offer, Provider, checked_provider
from skyward.request.accelerators import Accelerator, any_accelerator
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest, parse_request

__all__ = ["Offers", "offers"]

_COLUMNS = ("type", "accelerators", "cores", "memory", "spot $/h", "on demand $/h")


class Offers(tuple[InstanceSpec, ...]):
    """Machine types, cheapest first; a tuple that is shown as a table, as text and in notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no machine type satisfies the request"
        rows = [_COLUMNS, *map(spec_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{self!r}</p>"
        head, *rows = (
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
            for tag, cells in [("th", _COLUMNS), *(("td", spec_cells(spec)) for spec in self)]
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def spec_cells(spec: InstanceSpec) -> tuple[str, ...]:
    """Return the cells of a machine type: name, accelerators, cores, memory, spot price, on-demand price."""
    memory = f" {spec.accelerator_memory_gib:g} GiB" if spec.accelerator_memory_gib else ""
    return (
        spec.name,
        f"{spec.accelerator_count} x {spec.accelerator}{memory}" if spec.accelerator else "",
        str(spec.cpu or "?"),  # some vendors do not state the size of machines with GPUs
        f"{spec.memory_gib:g} GiB" if spec.memory_gib else "?",
        *("?" if usd is None else f"{usd:.4f}" for usd in (spec.price_spot, spec.price_on_demand)),
    )


@options_by_name
def offers(
    provider: Provider,
    *,
    accelerator: str | Accelerator | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    machine: str | None = None,
) -> Offers:
    """Return the machine types that satisfy a request, cheapest first; create nothing.

    Prices are in USD an hour. The result is a tuple that is shown as a table.
    :func:`~skyward.select_instance` chooses the smallest type of them::

        sky.select_instance(sky.offers(provider, accelerator="A100"), accelerator="A100", memory="128GB")

    Args:
        provider: the provider to query.
        accelerator: kind and minimum number on a machine, such as ``"A100"``.
        cpu: minimum number of cores.
        memory: minimum main memory, such as ``"64GB"``.
        machine: the provider's name of the only type to return.

    Raises:
        ConfigurationError: a parameter is wrong, or the provider has no such machine.
        AuthenticationError: the provider refuses the credentials.
    """
    request = parse_request(accelerator=accelerator, cpu=cpu, memory=memory, machine=machine, spot="if-available")
    loop = acquire_loop()
    try:
        matching = loop.call(_ask(checked_provider(provider), request))
    finally:
        loop.release()
    types = dict.fromkeys(offer.spec.name for offer in matching)
    specs = [priced([offer for offer in matching if offer.spec.name == name]) for name in types]
    return Offers(sorted(specs, key=price_rank))


async def _ask(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    # A copy: open pools may share the provider, and closing it would close their connections.
    own = cast("Provider", replace(cast("Any", provider))) if is_dataclass(provider) else provider
    try:
        return await find_offers(own, request)
    finally:
        if own is not provider:
            await own.close()


async def find_offers(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    """Return a provider's offers; where nothing is requested, of machines without accelerators and with any.

    A pool that requests nothing gets none with accelerators, and so providers leave them out.
    """
    if request.machine is not None or request.wish != InstanceWish():
        return await provider.offers(request)
    matching: list[Offer] = []
    refusals: list[SkywardError] = []
    for wish in (request, replace(request, accelerator=any_accelerator())):
        try:
            matching += await provider.offers(wish)
        except SkywardError as error:
            refusals.append(error)
    if len(refusals) > 1:
        raise refusals[0]
    return matching


def priced(offers: Sequence[Offer]) -> InstanceSpec:
    """Return the machine type of the offers ``found``, of which there is at least one, with their prices."""
    spot = [offer.price_per_hour for offer in offers if offer.spot]
    on_demand = [offer.price_per_hour for offer in offers if not offer.spot] or [offers[0].on_demand_price_per_hour]
    return replace(offers[0].spec, price_spot=spot[-1] if spot else None, price_on_demand=on_demand[-1])


def price_rank(spec: InstanceSpec) -> tuple[float, str]:
    """Return the sort key of a machine type: cheapest first, unknown prices last."""
    prices = [price for price in (spec.price_spot, spec.price_on_demand) if price is not None]
    return min(prices, default=float("inf")), spec.name
