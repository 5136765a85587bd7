"""What machines cost: EC2's price list and the spot market's present prices, as far as they are to be known."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from skyward.errors import SkywardError
from skyward.providers.aws.account import Account
from skyward.providers.aws.errors import Kind, is_kind

__all__ = ["PriceTable", "Prices", "parse_product", "parse_spot_prices"]

_DAY_S: Final = 24 * 3600.0
_SPOT_S: Final = 600.0
_LIST_REGION: Final = "us-east-1"
_PRODUCT: Final = "Linux/UNIX"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """USD an hour; what is not in it is unknown.

    Attributes:
        on_demand: by machine type.
        spot: by machine type, then by zone.
    """

    on_demand: Mapping[str, float] = field(default_factory=dict[str, float])
    spot: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


class Prices:
    """Asks for prices, and keeps them on disk: those of the list for a day, those of the market for ten minutes.

    An account that may not ask has prices that are unknown, which is no error.

    Args:
        account: whose.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._list = account.kept("on-demand", _DAY_S)
        self._market = account.kept("spot", _SPOT_S)

    async def of(self, names: Sequence[str]) -> PriceTable:
        """The prices of these machine types."""
        on_demand, spot = await asyncio.gather(self._on_demand(names), self._spot(names))
        return PriceTable(on_demand=on_demand, spot=spot)

    async def by_zone(self, names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        """The prices of the spot market by machine type, then by zone."""
        return await self._spot(names)

    async def _on_demand(self, names: Sequence[str]) -> Mapping[str, float]:
        kept = await asyncio.to_thread(self._list.read)
        missing = [name for name in names if name not in kept]
        first = [await self._listed(name) for name in missing[:1]]  # whether the account may ask at all
        found = [*first, *await asyncio.gather(*(self._listed(name) for name in missing[1:]))]
        new = {name: price for name, price in zip(missing, found, strict=True) if price is not None}
        if new:
            await asyncio.to_thread(self._list.add, new)
        return {name: price for name, price in {**kept, **new}.items() if name in names}

    async def _spot(self, names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        kept = await asyncio.to_thread(self._market.read)
        missing = [name for name in names if name not in kept]
        if missing:
            new = await self._market_now(missing)
            if new:
                await asyncio.to_thread(self._market.add, dict(new))
            kept |= new
        return {name: zones for name, zones in kept.items() if name in names}

    async def _listed(self, name: str) -> float | None:
        wanted = {
            "instanceType": name,
            "regionCode": self._account.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        answer = await self._account.ask(
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
            if is_kind(error, Kind.AUTH, Kind.RATE, Kind.TRANSIENT):
                return {}
            raise
        return parse_spot_prices(rows)


def parse_product(text: str) -> float | None:
    """USD an hour on demand in one product of the price list; None if there is none."""
    try:
        terms = cast("Mapping[str, Any]", json.loads(text))["terms"]["OnDemand"]
        dimensions = [each for term in terms.values() for each in term["priceDimensions"].values()]
        prices = [float(each["pricePerUnit"]["USD"]) for each in dimensions if each["unit"] == "Hrs"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return next((price for price in prices if price > 0), None)


def parse_spot_prices(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """USD an hour by machine type and zone: the latest of each."""
    latest: dict[str, dict[str, tuple[Any, float]]] = {}
    for row in rows:
        try:
            name, zone, price = str(row["InstanceType"]), str(row["AvailabilityZone"]), float(row["SpotPrice"])
            at = row["Timestamp"]
        except (KeyError, TypeError, ValueError):
            continue
        zones = latest.setdefault(name, {})
        if zone not in zones or zones[zone][0] < at:
            zones[zone] = (at, price)
    return {name: {zone: price for zone, (_, price) in zones.items()} for name, zones in latest.items()}
