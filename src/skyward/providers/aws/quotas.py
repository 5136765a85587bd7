"""How many cores of a kind the account may have: the quotas that EC2 launches under."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from skyward.errors import QuotaError
from skyward.providers.aws.account import Account
from skyward.providers.aws.catalog import MachineType
from skyward.providers.base import Offer

__all__ = ["Quota", "exceeded", "known_quotas", "quota_of", "quota_value", "too_small", "within_quotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """One of EC2's limits, in virtual cores of running machines.

    Attributes:
        code: Service Quotas' code.
        name: Service Quotas' name.
    """

    code: str
    name: str


_STANDARD: Final = "Standard (A, C, D, H, I, M, R, T, Z)"
_ON_DEMAND: Final[Mapping[str, Quota]] = {
    "G": Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances"),
    "P": Quota(code="L-417A185B", name="Running On-Demand P instances"),
    "INF": Quota(code="L-1945791B", name="Running On-Demand Inf instances"),
    "TRN": Quota(code="L-2C3B7624", name="Running On-Demand Trn instances"),
    "DL": Quota(code="L-6E869C2A", name="Running On-Demand DL instances"),
    "STANDARD": Quota(code="L-1216C47A", name=f"Running On-Demand {_STANDARD} instances"),
}
_SPOT: Final[Mapping[str, Quota]] = {
    "G": Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests"),
    "P": Quota(code="L-7212CCBC", name="All P Spot Instance Requests"),
    "INF": Quota(code="L-B5D1601B", name="All Inf Spot Instance Requests"),
    "TRN": Quota(code="L-6B0D517C", name="All Trn Spot Instance Requests"),
    "DL": Quota(code="L-85EED4F7", name="All DL Spot Instance Requests"),
    "STANDARD": Quota(code="L-34B43A08", name=f"All {_STANDARD} Spot Instance Requests"),
}
_LETTERS: Final = re.compile(r"[a-z]+")
_CLASSES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("g", "gr", "vt"), "G"),
    "p": "P",
    "inf": "INF",
    "trn": "TRN",
    "dl": "DL",
}
_STANDARD_LETTERS: Final = frozenset("acdhimrtz")
_OWN: Final = ("mac", "hpc")
"""Families with quotas that are not needed here."""


def quota_of(machine_type: str, *, spot: bool) -> Quota | None:
    """The quota that a machine type counts against; None if it is not known here."""
    letters = _LETTERS.match(machine_type)
    family = letters[0] if letters else ""
    standard = family[:1] in _STANDARD_LETTERS and family not in _OWN
    kind = _CLASSES.get(family) or ("STANDARD" if standard else "")
    return (_SPOT if spot else _ON_DEMAND).get(kind)


async def within_quotas(account: Account, types: Sequence[MachineType], *, spot: bool) -> Sequence[MachineType]:
    """The types of which the account may have at least one; what it may not ask for counts as enough.

    Raises:
        QuotaError: there is none; names the quotas.
    """
    limits = await _limits(account, types, spot=spot)

    def most(machine: MachineType) -> float:
        quota = quota_of(machine.name, spot=spot)
        return limits.get(quota, float("inf")) if quota else float("inf")

    allowed = [each for each in types if each.spec.cpu <= most(each)]
    if types and not allowed:
        quota = quota_of(types[0].name, spot=spot)
        assert quota is not None
        raise too_small(quota, limits[quota], account.region, [each.name for each in types[:3]])
    return allowed


async def _limits(account: Account, types: Sequence[MachineType], *, spot: bool) -> Mapping[Quota, float]:
    quotas = list(dict.fromkeys(filter(None, (quota_of(each.name, spot=spot) for each in types))))
    found = await asyncio.gather(*(quota_value(account, quota) for quota in quotas))
    return {quota: value for quota, value in zip(quotas, found, strict=True) if value is not None}


def too_small(quota: Quota, cores: float, region: str, names: Iterable[str]) -> QuotaError:
    """The error for machines that need more than the account may have."""
    return QuotaError(
        f"aws {region}: the account may have {cores:g} cores of {quota.name!r} (quota {quota.code}), too few for "
        f"{', '.join(names)}. Ask for more at https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/"
        f"quotas/{quota.code}, or with `aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {quota.code} --region {region} --desired-value N`"
    )


def exceeded(offer: Offer, region: str, said: str) -> QuotaError:
    """The error for an offer that EC2 refuses for a quota."""
    quota = quota_of(offer.spec.name, spot=offer.spot)
    named = f"{quota.name!r} (quota {quota.code})" if quota else "a quota of EC2"
    page = f"/{quota.code}" if quota else ""
    return QuotaError(
        f"aws {region}: {offer.spec.name} would exceed {named}: {said}. Ask for more at "
        f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas{page}"
    )


def known_quotas() -> Sequence[Quota]:
    """Every quota that machines here can count against."""
    return (*_ON_DEMAND.values(), *_SPOT.values())


async def quota_value(account: Account, quota: Quota) -> float | None:
    """How many cores of it the account may have; None if that is not to be known."""
    answer = await account.ask("service-quotas", "GetServiceQuota", ServiceCode="ec2", QuotaCode=quota.code)
    try:
        return None if answer is None else float(answer["Quota"]["Value"])
    except (KeyError, TypeError, ValueError):
        return None
