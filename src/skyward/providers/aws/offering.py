"""What EC2 would launch for a request: types, prices, and what the user should know before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from skyward.errors import ConfigurationError, QuotaError
from skyward.providers.aws.account import Account
from skyward.providers.aws.catalog import MachineType, candidates, fewest_accelerators
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.prices import Prices, PriceTable
from skyward.providers.aws.quotas import within_quotas
from skyward.providers.aws.records import MINIMUM_BILLED_S
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest
from skyward.request.spot import Spot, SpotNever, SpotStrategy

__all__ = ["find_offers", "make_offers"]

_LOOKED_AT: Final = 60
"""Types whose zones are asked for, the smallest first."""
_PRICED: Final = 20
_OFFERED: Final = 10
_UNKNOWN: Final = "prices {0} are unknown: the account may not ask for them ({1}), or AWS names none"
_UNKNOWN_ON_SPOT: Final = _UNKNOWN.format("on spot", "ec2:DescribeSpotPriceHistory")
_UNKNOWN_ON_DEMAND: Final = _UNKNOWN.format("on demand", "pricing:GetProducts")


async def find_offers(account: Account, request: PoolRequest) -> Sequence[Offer]:
    """Offers for a request; see :meth:`skyward.providers.aws.provider.AWS.offers`."""
    subnets = await account.subnets()
    fitting = candidates(await account.types(), request, region=account.region)[:_LOOKED_AT]
    zones = await account.offered([each.name for each in fitting])
    here = [each for each in fitting if set(zones[each.name]) & {subnet.zone for subnet in subnets}]
    if not here:
        raise _not_here(fitting, zones, subnets, account)
    chosen = fewest_accelerators(here)[:_PRICED]
    spot, on_demand, why = await _allowed(account, chosen, request)
    prices = await Prices(account).of([each.name for each in chosen])
    return make_offers(spot, on_demand, prices, request, region=account.region, note=why)


def make_offers(
    spot: Sequence[MachineType],
    on_demand: Sequence[MachineType],
    prices: PriceTable,
    request: PoolRequest,
    *,
    region: str,
    note: str = "",
) -> Sequence[Offer]:
    """An offer of each type on spot, and of each on demand; of many types the cheapest few (pure)."""
    offers: list[Offer] = []
    for kind, types in ((True, spot), (False, on_demand)):
        ranked = sorted(types, key=lambda each, kind=kind: _rank(each, _price(each, prices, spot=kind)))
        offers += [_offer(each, prices, request, region, spot=kind, note=note) for each in ranked[:_OFFERED]]
    return offers


async def _allowed(
    account: Account, types: Sequence[MachineType], request: PoolRequest
) -> tuple[Sequence[MachineType], Sequence[MachineType], str]:
    """Types for spot, and for on demand, within the account's quotas, and what should be said of that.

    Raises:
        QuotaError: there are none for what the strategy must have.
    """
    markets = {True: [each for each in types if each.spot], False: [each for each in types if each.on_demand]}
    refused: dict[bool, QuotaError] = {}
    for spot in (True, False):
        try:
            markets[spot] = list(await within_quotas(account, markets[spot], spot=spot))
        except QuotaError as error:
            refused[spot] = error
            markets[spot] = []
    for spot, error in refused.items():
        if spot in _needed(request.spot) or not any(markets.values()):
            raise error
    return markets[True], markets[False], "; ".join(str(error) for error in refused.values())


def _needed(strategy: SpotStrategy) -> Sequence[bool]:
    """The markets that a strategy cannot do without: True is spot."""
    match strategy:
        case Spot.Always():
            return (True,)
        case Spot.Percent():
            return (True, False)
        case SpotNever():
            return (False,)
        case Spot.IfAvailable():
            return ()
        case _:
            assert_never(strategy)


def _offer(
    machine: MachineType, prices: PriceTable, request: PoolRequest, region: str, *, spot: bool, note: str
) -> Offer:
    price = _price(machine, prices, spot=spot)
    unknown = _UNKNOWN_ON_SPOT if spot else _UNKNOWN_ON_DEMAND
    notes = (_note(machine, price, request), note, unknown if price is None else "")
    return Offer(
        spec=machine.spec,
        region=region,
        spot=spot,
        price_per_hour=price,
        on_demand_price_per_hour=prices.on_demand.get(machine.name),
        minimum_billed_s=MINIMUM_BILLED_S,
        note="; ".join(filter(None, notes)),
    )


def _price(machine: MachineType, prices: PriceTable, *, spot: bool) -> float | None:
    """On spot that of the cheapest zone."""
    if not spot:
        return prices.on_demand.get(machine.name)
    return min(prices.spot.get(machine.name, {}).values(), default=None)


def _rank(machine: MachineType, price: float | None) -> tuple[float, float, float]:
    return float("inf") if price is None else price, machine.spec.cpu, machine.spec.memory_gib


def _note(machine: MachineType, price: float | None, request: PoolRequest) -> str:
    wanted, spec = request.accelerator, machine.spec
    told = "price unknown" if price is None else f"${price:,.2f}/h"
    if request.machine is None and wanted is not None and spec.accelerator_count > wanted.count:
        number = "single" if wanted.count == 1 else str(wanted.count)
        return f"no {number} {wanted.name} on EC2: {spec.name} has {spec.accelerator_count}, {told}"
    return ""


def _not_here(
    fitting: Sequence[MachineType], zones: Mapping[str, Sequence[str]], subnets: Sequence[Subnet], account: Account
) -> ConfigurationError:
    names = ", ".join(each.name for each in fitting[:3])
    elsewhere = sorted({zone for each in fitting for zone in zones[each.name]})
    if elsewhere:
        have = ", ".join(subnet.zone for subnet in subnets)
        return ConfigurationError(
            f"{names}: EC2 offers this in {', '.join(elsewhere)} of {account.region}, but the machines' subnets are in "
            f"{have}: name another subnet, AWS(subnet='subnet-...')"
        )
    return ConfigurationError(f"{names}: EC2 does not offer this in {account.region}: try AWS(region=...)")
