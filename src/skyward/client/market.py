"""Machine types that a provider rents out, as a Python function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast

from skyward._concurrency.loop import acquire_loop
from skyward.providers.base import Offer, Provider, checked_provider
from skyward.request.accelerators import Accelerator
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest, parse_request

__all__ = ["offers", "priced"]


def offers(
    provider: Provider,
    *,
    accelerator: str | Accelerator | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    machine: str | None = None,
) -> tuple[InstanceSpec, ...]:
    """Return the machine types that satisfy a request, cheapest first; create nothing.

    Prices are in USD an hour. :func:`~skyward.select_instance` chooses the smallest type of them::

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
        found = loop.call(_ask(checked_provider(provider), request))
    finally:
        loop.release()
    types = dict.fromkeys(offer.spec.name for offer in found)
    specs = [priced([offer for offer in found if offer.spec.name == name]) for name in types]
    return tuple(sorted(specs, key=_price))


async def _ask(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    # A copy: open pools may share the provider, and closing it would close their connections.
    own = cast("Provider", replace(cast("Any", provider))) if is_dataclass(provider) else provider
    try:
        return await own.offers(request)
    finally:
        if own is not provider:
            await own.close()


def priced(found: Sequence[Offer]) -> InstanceSpec:
    """Return the machine type of the offers ``found``, of which there is at least one, with their prices."""
    spot = [each.price_per_hour for each in found if each.spot]
    on_demand = [each.price_per_hour for each in found if not each.spot] or [found[0].on_demand_price_per_hour]
    return replace(found[0].spec, price_spot=spot[-1] if spot else None, price_on_demand=on_demand[-1])


def _price(spec: InstanceSpec) -> tuple[float, str]:
    prices = [price for price in (spec.price_spot, spec.price_on_demand) if price is not None]
    return min(prices, default=float("inf")), spec.name
