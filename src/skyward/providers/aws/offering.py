"""Offers for a request: machine types within the account's quotas, with their prices on demand and on spot."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import itertools
import json
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from skyward.errors import ConfigurationError, QuotaError, SkywardError
from skyward.providers._common.machine_catalogue import MachineType, cheapest_offers, fewest_accelerators
from skyward.providers._common.refusals import RefusalKind, failed, finding, is_kind
from skyward.providers.aws.account import MINIMUM_BILLED_S, Account, Subnet, candidates
from skyward.providers.aws.api import refusal
from skyward.providers.aws.ssm import PLUGIN, require_plugin
from skyward.providers.base import Finding, Offer
from skyward.request.request import PoolRequest, Spot, SpotNever


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limit of EC2, in virtual cores of running machines.

    Attributes:
        code: Service Quotas' code.
        name: Service Quotas' name.
    """

    code: str
    name: str


_STANDARD: Final = "a c d h i m r t z"
_QUOTAS: Final = {
    "g gr vt": ("L-DB2E81BA", "L-3819A6DF", "G and VT"),
    "p": ("L-417A185B", "L-7212CCBC", "P"),
    "inf": ("L-1945791B", "L-B5D1601B", "Inf"),
    "trn": ("L-2C3B7624", "L-6B0D517C", "Trn"),
    "dl": ("L-6E869C2A", "L-85EED4F7", "DL"),
    _STANDARD: ("L-1216C47A", "L-34B43A08", "Standard (A, C, D, H, I, M, R, T, Z)"),
}
"""Codes on demand and on spot, and name, by the letters that types begin with; of standard ones the first counts."""
_OWN: Final = ("mac", "hpc")
"""Families with quotas of their own that no pool uses."""


def quota_of(machine_type: str, *, spot: bool) -> Quota | None:
    """Return the quota that a machine type counts against; None if it is unknown."""
    family = "".join(itertools.takewhile(str.isalpha, machine_type))
    found = next((listed for listed in _QUOTAS if family in listed.split()), "")
    if not found and family[:1] in _STANDARD.split() and family not in _OWN:
        found = _STANDARD
    return _quota(found, spot=spot) if found else None


def _quota(listed: str, *, spot: bool) -> Quota:
    on_demand, on_spot, name = _QUOTAS[listed]
    if spot:
        return Quota(code=on_spot, name=f"All {name} Spot Instance Requests")
    return Quota(code=on_demand, name=f"Running On-Demand {name} instances")


async def within_quotas(account: Account, types: Sequence[MachineType], *, spot: bool) -> Sequence[MachineType]:
    """Return the types of which the account's quotas allow at least one machine; an unreadable quota allows any.

    Raises:
        QuotaError: there is none; names the quota.
    """
    quotas = {each: quota_of(each.name, spot=spot) for each in types}
    values = await _values(account, list(dict.fromkeys(filter(None, quotas.values()))))
    lacking = {each: quota for each, quota in quotas.items() if quota and each.spec.cpu > values.get(quota, math.inf)}
    if lacking and len(lacking) == len(types):
        quota, region = lacking[types[0]], account.region
        raise QuotaError(
            f"aws {region}: the account may have {values[quota]:g} cores of {quota.name!r} (quota {quota.code}), too "
            f"few for {', '.join(each.name for each in types[:3])}. Request more at https://{region}.console.aws.amazon"
            f".com/servicequotas/home/services/ec2/quotas/{quota.code}, or with `aws service-quotas "
            f"request-service-quota-increase --service-code ec2 --quota-code {quota.code} --region {region} "
            "--desired-value N`"
        )
    return [each for each in types if each not in lacking]


def exceeded(offer: Offer, region: str, message: str) -> QuotaError:
    """Return the error for an offer that EC2 refuses because of a quota."""
    quota = quota_of(offer.spec.name, spot=offer.spot)
    named = f"{quota.name!r} (quota {quota.code})" if quota else "a quota of EC2"
    page = f"/{quota.code}" if quota else ""
    return QuotaError(
        f"aws {region}: {offer.spec.name} would exceed {named}: {message}. Request more at "
        f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas{page}"
    )


async def _values(account: Account, quotas: Sequence[Quota]) -> Mapping[Quota, float]:
    """Return the values of quotas in cores, without those that the account may not read."""
    ask = functools.partial(account.api.ask, "service-quotas", "GetServiceQuota", ServiceCode="ec2")
    answers = await asyncio.gather(*(ask(QuotaCode=quota.code) for quota in quotas))
    values = dict[Quota, float]()
    for quota, answer in zip(quotas, answers, strict=True):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            values[quota] = float((answer or {})["Quota"]["Value"])
    return values


_SMALL: Final = "t3.medium"
_PAGE: Final = "see docs/providers/aws.md"


async def check_account(account: Account, *, use_ssm: bool) -> Sequence[Finding]:
    """See :meth:`skyward.providers.base.Provider.check`."""
    identity = await finding("aws credentials", _identity(account), fix=_PAGE)
    findings = [identity, Finding(what="aws region", state="ok", found=account.region)]
    if identity.state == "ok":
        image = await _image(account)
        findings += [await finding("aws network", _network(account), fix=_PAGE), image]
        findings += await asyncio.gather(*(_permission(account, *each) for each in _actions(image).items()))
        findings += await asyncio.gather(_prices(account), _quotas(account))
    if use_ssm:
        findings.append(await finding(PLUGIN, _plugin(), fix=_PAGE))
    return findings


async def _identity(account: Account) -> str:
    answer = await account.api.call("sts", "GetCallerIdentity")
    return f"account {answer['Account']}, {answer['Arn']}"


async def _network(account: Account) -> str:
    subnets = await account.subnets()
    return f"{subnets[0].vpc}, subnets in {', '.join(sorted(subnet.zone for subnet in subnets))}"


async def _image(account: Account) -> Finding:
    what = "aws image"
    try:
        return Finding(what=what, state="ok", found=(await account.image(_SMALL)).id)
    except SkywardError as error:
        return failed(what, error, fix=_PAGE)
    except KeyError:
        return Finding(what=what, state="warn", found=f"{account.region} has no {_SMALL}: not looked for")


async def _plugin() -> str:
    require_plugin()
    return "on the PATH"


def _actions(image: Finding) -> Mapping[str, Mapping[str, Any]]:
    """Return the actions needed to launch or terminate machines, each with the parameters of a dry run."""
    run = {"InstanceType": _SMALL, "MinCount": 1, "MaxCount": 1, "ImageId": image.found}
    name, template = "skyward-doctor", {"LaunchTemplateName": "skyward-doctor", "Version": "$Latest"}
    # Actions that the policy allows on Skyward's tagged resources only cannot be tested: there is no such resource yet.
    return {
        **({"RunInstances": run} if image.state == "ok" else {}),
        "CreateSecurityGroup": {"GroupName": name, "Description": "a dry run"},
        "CreateLaunchTemplate": {"LaunchTemplateName": name, "LaunchTemplateData": {"InstanceType": _SMALL}},
        "CreateFleet": {
            "Type": "instant",
            "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template}],
            "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
        },
        "DescribeInstances": {},
        "DescribeInstanceTypeOfferings": {},
        "DescribeSpotPriceHistory": {},
        "DescribeSecurityGroups": {},
        "DescribeLaunchTemplates": {},
    }


async def _permission(account: Account, operation: str, parameters: Mapping[str, Any]) -> Finding:
    """Test one action by a dry run, which EC2 always refuses; it fails if the reason is a missing permission."""
    what = f"aws may ec2:{operation}"
    try:
        await account.api.call("ec2", operation, DryRun=True, **parameters)
    except SkywardError as error:
        refused = refusal(error)
        if refused is None or refused.kind in (RefusalKind.AUTH, RefusalKind.RATE, RefusalKind.TRANSIENT):
            return failed(what, error, fix=_PAGE)
    return Finding(what=what, state="ok", found="yes")


async def _prices(account: Account) -> Finding:
    what = "aws may pricing:GetProducts"
    if (
        await account.api.ask("pricing", "GetProducts", region="us-east-1", ServiceCode="AmazonEC2", MaxResults=1)
        is None
    ):
        fix = "allow it to see prices on demand, and the savings on spot"
        return Finding(what=what, state="warn", found="no, or it does not answer: prices stay unknown", fix=fix)
    return Finding(what=what, state="ok", found="yes")


async def _quotas(account: Account) -> Finding:
    what = "aws quotas"
    quotas = [_quota(listed, spot=spot) for spot in (False, True) for listed in _QUOTAS]
    values = await _values(account, quotas)
    if not values:
        fix = "allow servicequotas:GetServiceQuota to see quotas before a launch is refused"
        return Finding(what=what, state="warn", found="unknown", fix=fix)
    listed = "; ".join(f"{each.name}: {value:g} cores" for each, value in values.items())
    none = [each for each, value in values.items() if value == 0]
    codes = ", ".join(each.code for each in none)
    ask = "`aws service-quotas request-service-quota-increase --service-code ec2 --quota-code CODE --desired-value N`"
    fix = f"for machines of those with 0 cores request more ({codes}): {ask}" if none else ""
    return Finding(what=what, state="warn" if none else "ok", found=listed, fix=fix)


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
