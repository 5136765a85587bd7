"""Whether an account would work: who one is there, what one may do, and how much one may have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from skyward.errors import SkywardError
from skyward.providers.aws.account import Account
from skyward.providers.aws.errors import Kind, refusal
from skyward.providers.aws.images import image_path
from skyward.providers.aws.quotas import known_quotas, quota_value
from skyward.providers.aws.session import PLUGIN, require_plugin
from skyward.providers.registry import Finding

__all__ = ["check_account"]

_SMALL: Final = "t3.medium"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    """One that launching or ending machines takes, tried as a dry run."""

    operation: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


async def check_account(account: Account, *, use_ssm: bool) -> Sequence[Finding]:
    """See :meth:`skyward.providers.registry.Checkable.check`."""
    who = await _identity(account)
    findings = [who, Finding(what="aws region", state="ok", found=account.region)]
    if who.state == "ok":
        findings.append(await _network(account))
        image = await _image(account)
        findings.append(image)
        findings += await asyncio.gather(*(_permission(account, each) for each in _actions(image)))
        findings += await asyncio.gather(_prices(account), _quotas(account))
    if use_ssm:
        findings.append(_plugin())
    return findings


async def _identity(account: Account) -> Finding:
    what = "aws credentials"
    try:
        answer = await account.api.call("sts", "GetCallerIdentity")
    except SkywardError as error:
        return _failure(what, error)
    return Finding(what=what, state="ok", found=f"account {answer['Account']}, {answer['Arn']}")


async def _network(account: Account) -> Finding:
    what = "aws network"
    try:
        subnets = await account.subnets()
    except SkywardError as error:
        return _failure(what, error)
    zones = ", ".join(sorted(subnet.zone for subnet in subnets))
    return Finding(what=what, state="ok", found=f"{subnets[0].vpc}, subnets in {zones}")


async def _image(account: Account) -> Finding:
    what = "aws image"
    try:
        image = await account.image(image_path(await account.type(_SMALL)))
    except SkywardError as error:
        return _failure(what, error)
    except KeyError:
        return Finding(what=what, state="warn", found=f"{account.region} has no {_SMALL}: not looked for")
    return Finding(what=what, state="ok", found=image.id)


def _actions(image: Finding) -> Sequence[_Action]:
    run = {"InstanceType": _SMALL, "MinCount": 1, "MaxCount": 1}
    launch = (
        [_Action(operation="RunInstances", parameters={**run, "ImageId": image.found})] if image.state == "ok" else []
    )
    named = {"GroupName": "skyward-doctor", "Description": "a dry run"}
    template = {"LaunchTemplateName": "skyward-doctor", "LaunchTemplateData": {"InstanceType": _SMALL}}
    named_template = {"LaunchTemplateName": "skyward-doctor", "Version": "$Latest"}
    fleet = {
        "Type": "instant",
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": named_template}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
    }
    # What is allowed for tagged things only cannot be asked for where there is none.
    return [
        *launch,
        _Action(operation="CreateSecurityGroup", parameters=named),
        _Action(operation="CreateLaunchTemplate", parameters=template),
        _Action(operation="CreateFleet", parameters=fleet),
        _Action(operation="DescribeInstances"),
        _Action(operation="DescribeInstanceTypeOfferings"),
        _Action(operation="DescribeSpotPriceHistory"),
        _Action(operation="DescribeSecurityGroups"),
        _Action(operation="DescribeLaunchTemplates"),
    ]


async def _permission(account: Account, action: _Action) -> Finding:
    """A dry run is refused in any case; what counts is whether for a missing permission."""
    what = f"aws may ec2:{action.operation}"
    try:
        await account.api.call("ec2", action.operation, DryRun=True, **action.parameters)
    except SkywardError as error:
        said = refusal(error)
        if said is None or said.kind in (Kind.AUTH, Kind.RATE, Kind.TRANSIENT):
            return _failure(what, error)
    return Finding(what=what, state="ok", found="yes")


async def _prices(account: Account) -> Finding:
    what = "aws may pricing:GetProducts"
    if await account.ask("pricing", "GetProducts", region="us-east-1", ServiceCode="AmazonEC2", MaxResults=1) is None:
        fix = "allow it, if you want to know prices on demand, and what spot saves"
        return Finding(what=what, state="warn", found="no, or it does not answer: prices stay unknown", fix=fix)
    return Finding(what=what, state="ok", found="yes")


async def _quotas(account: Account) -> Finding:
    what = "aws quotas"
    quotas = known_quotas()
    values = dict(zip(quotas, await asyncio.gather(*(quota_value(account, each) for each in quotas)), strict=True))
    if all(value is None for value in values.values()):
        fix = "allow servicequotas:GetServiceQuota, if you want to be told before a launch is refused"
        return Finding(what=what, state="warn", found="unknown", fix=fix)
    told = "; ".join(f"{each.name}: {value:g} cores" for each, value in values.items() if value is not None)
    none = [each for each, value in values.items() if value == 0]
    codes = ", ".join(each.code for each in none)
    ask = "`aws service-quotas request-service-quota-increase --service-code ec2 --quota-code CODE --desired-value N`"
    fix = f"for machines of those with 0 cores ask for more ({codes}): {ask}" if none else ""
    return Finding(what=what, state="warn" if none else "ok", found=told, fix=fix)


def _plugin() -> Finding:
    try:
        require_plugin()
    except SkywardError as error:
        return _failure(PLUGIN, error)
    return Finding(what=PLUGIN, state="ok", found="on the PATH")


def _failure(what: str, error: SkywardError) -> Finding:
    """Messages of the provider's errors end with what to do."""
    found, stop, fix = str(error).partition(". ")
    return Finding(what=what, state="fail", found=found, fix=fix if stop else "see docs/providers/aws.md")
