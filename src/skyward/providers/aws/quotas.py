"""Quotas and permissions of an account, and the check of both for `skyward doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from skyward.errors import QuotaError, SkywardError
from skyward.providers._common.findings import failed, finding
from skyward.providers._common.machine_catalogue import MachineType
from skyward.providers._common.refusals import RefusalKind
from skyward.providers.aws.account import Account
from skyward.providers.aws.errors import refusal
from skyward.providers.aws.ssm import PLUGIN, require_plugin
from skyward.providers.base import Offer
from skyward.providers.registry import Finding

__all__ = ["Quota", "check_account", "exceeded", "quota_of", "within_quotas"]


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
    """See :meth:`skyward.providers.registry.Checkable.check`."""
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
