"""Offers for a request: machine types with their prices on demand and on spot."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from skyward.errors import ConfigurationError, QuotaError, SkywardError
from skyward.providers._common.machine_catalogue import MachineType, fewest_accelerators
from skyward.providers._common.offer_list import cheapest_offers
from skyward.providers._common.refusals import RefusalKind, is_kind
from skyward.providers.aws.account import Account
from skyward.providers.aws.machine_types import candidates
from skyward.providers.aws.payloads import MINIMUM_BILLED_S, Subnet
from skyward.providers.aws.quotas import within_quotas
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest
from skyward.request.spot import Spot, SpotNever

__all__ = ["PriceTable", "Prices", "find_offers", "make_offers", "parse_product", "parse_spot_prices"]

_LOOKED_AT: Final = 60
"""Number of types whose zones are requested, the smallest first."""
_PRICED: Final = 20
_UNKNOWN: Final = "prices {0} are unknown: the account may not query them ({1}), or AWS lists none"
_UNKNOWN_ON_SPOT: Final = _UNKNOWN.format("on spot", "ec2:DescribeSpotPriceHistory")
_UNKNOWN_ON_DEMAND: Final = _UNKNOWN.format("on demand", "pricing:GetProducts")


async def find_offers(account: Account, request: PoolRequest) -> Sequence[Offer]:
    """Return the offers for a request; see :meth:`skyward.providers.aws.provider.AWS.offers`."""
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
    """Return offers of the ten cheapest types on spot, and of the ten cheapest on demand (pure)."""
    markets = [(each, True) for each in spot] + [(each, False) for each in on_demand]
    offers = [_offer(each, prices, region, spot=kind, note=note) for each, kind in markets]
    return cheapest_offers(offers, request, vendor="EC2")


async def _allowed(
    account: Account, types: Sequence[MachineType], request: PoolRequest
) -> tuple[Sequence[MachineType], Sequence[MachineType], str]:
    """Return the types within the account's quotas, on spot and on demand, and a note on the others.

    Raises:
        QuotaError: there are none on a market that the strategy requires.
    """
    markets = {True: [each for each in types if each.spot], False: [each for each in types if each.on_demand]}
    refused: dict[bool, QuotaError] = {}
    for spot in (True, False):
        try:
            markets[spot] = list(await within_quotas(account, markets[spot], spot=spot))
        except QuotaError as error:
            refused[spot] = error
            markets[spot] = []
    needed = {True: Spot.Always | Spot.Percent, False: Spot.Percent | SpotNever}
    for spot, error in refused.items():
        if isinstance(request.spot, needed[spot]) or not any(markets.values()):
            raise error
    return markets[True], markets[False], "; ".join(str(error) for error in refused.values())


def _offer(machine: MachineType, prices: PriceTable, region: str, *, spot: bool, note: str) -> Offer:
    """Return the offer of a type; its price on spot is that of the cheapest zone."""
    on_demand = prices.on_demand.get(machine.name)
    price = min(prices.spot.get(machine.name, {}).values(), default=None) if spot else on_demand
    unknown = _UNKNOWN_ON_SPOT if spot else _UNKNOWN_ON_DEMAND
    return Offer(
        spec=machine.spec,
        region=region,
        spot=spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
        price_age_s=prices.ages_s[spot].get(machine.name, 0.0),
        minimum_billed_s=MINIMUM_BILLED_S,
        note="; ".join(filter(None, (note, unknown if price is None else ""))),
    )


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


_DAY_S: Final = 24 * 3600.0
_SPOT_S: Final = 600.0
_LIST_REGION: Final = "us-east-1"
_PRODUCT: Final = "Linux/UNIX"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices in USD an hour; missing entries are unknown.

    Attributes:
        on_demand: by machine type.
        spot: by machine type, then by zone.
        ages_s: time for which each has been cached, by machine type, on demand and on spot.
    """

    on_demand: Mapping[str, float] = field(default_factory=dict[str, float])
    spot: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    ages_s: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})


class Prices:
    """Prices of machine types, cached on disk: on demand for a day, on spot for ten minutes.

    Prices that the account may not query are unknown, which is no error.

    Args:
        account: the account.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._list = account.kept("on-demand", _DAY_S)
        self._market = account.kept("spot", _SPOT_S)

    async def of(self, names: Sequence[str]) -> PriceTable:
        """Return the prices of these machine types."""
        on_demand, spot = await asyncio.gather(self._list.completed(names, self._list_now), self.by_zone(names))
        ages_s = (await asyncio.to_thread(self._list.ages_s), await asyncio.to_thread(self._market.ages_s))
        return PriceTable(on_demand=on_demand, spot=spot, ages_s=ages_s)

    async def by_zone(self, names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        """Return the prices on spot by machine type, then by zone."""
        return await self._market.completed(names, self._market_now)

    async def _list_now(self, names: Sequence[str]) -> Mapping[str, float]:
        first = await self._listed(
            names[0]
        )  # alone: an account without the permission makes one call, not one per type
        found = [first, *await asyncio.gather(*(self._listed(name) for name in names[1:]))]
        return {name: price for name, price in zip(names, found, strict=True) if price is not None}

    async def _listed(self, name: str) -> float | None:
        wanted = {
            "instanceType": name,
            "regionCode": self._account.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        answer = await self._account.api.ask(
            "pricing",
            "GetProducts",
            region=_LIST_REGION,
            ServiceCode="AmazonEC2",
            Filters=[{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()],
        )
        products = () if answer is None else answer.get("PriceList", ())
        return next((price for text in products if (price := parse_product(text))), None)

    async def _market_now(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        now = dt.datetime.now(dt.UTC)
        try:
            rows = await self._account.api.pages(
                "ec2",
                "DescribeSpotPriceHistory",
                "SpotPriceHistory",
                InstanceTypes=list(names),
                ProductDescriptions=[_PRODUCT],
                StartTime=now,
                EndTime=now,
            )
        except SkywardError as error:
            if is_kind(error, RefusalKind.AUTH, RefusalKind.RATE, RefusalKind.TRANSIENT):
                return {}
            raise
        return parse_spot_prices(rows)


def parse_product(text: str) -> float | None:
    """Return USD an hour on demand from one product of the price list; None if it has none."""
    try:
        terms = cast("Mapping[str, Any]", json.loads(text))["terms"]["OnDemand"]
        dimensions = [each for term in terms.values() for each in term["priceDimensions"].values()]
        prices = [float(each["pricePerUnit"]["USD"]) for each in dimensions if each["unit"] == "Hrs"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((price for price in prices if price > 0), None)


def parse_spot_prices(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return USD an hour by machine type and zone: the latest of each."""
    found = defaultdict[str, dict[str, float]](dict)
    for row in sorted((row for row in rows if "Timestamp" in row), key=operator.itemgetter("Timestamp")):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found[str(row["InstanceType"])][str(row["AvailabilityZone"])] = float(row["SpotPrice"])
    return dict(found)
