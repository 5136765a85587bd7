"""Network of the machines: subnets, one security group per pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from skyward.errors import ConfigurationError, SkywardError, UnreachableError
from skyward.providers._common.refusals import RefusalKind
from skyward.providers.aws.api import Api
from skyward.providers.aws.payloads import POOL_TAG, Subnet, filters, pool_tags, tag_specification

__all__ = ["admit_client", "ensure_group", "find_subnets", "groups"]

_SSH_PORT: Final = 22
_FROM_CLIENT: Final = "SSH from the client"
_logger = logging.getLogger("skyward")


async def find_subnets(api: Api, subnet: str | None) -> tuple[Subnet, ...]:
    """Return the given subnet, or those of the default VPC, one for each zone.

    Raises:
        ConfigurationError: there is none; explains how to create one.
    """
    region = api.credentials.region
    if subnet is not None:
        wanted = {"subnet-id": [subnet]}
        missing = (
            f"subnet={subnet!r} does not exist in {region}, or in another account: "
            f"`aws ec2 describe-subnets --region {region}` lists those that do"
        )
    else:
        vpcs = await api.pages("ec2", "DescribeVpcs", "Vpcs", Filters=filters({"is-default": ["true"]}))
        if not vpcs:
            raise ConfigurationError(
                f"the account has no default VPC in {region}: name a subnet, AWS(subnet='subnet-...'), "
                f"or create one: `aws ec2 create-default-vpc --region {region}`"
            )
        wanted = {"vpc-id": [vpcs[0]["VpcId"]], "default-for-az": ["true"]}
        missing = (
            f"the default VPC of {region} has no default subnet: name one, AWS(subnet='subnet-...'), or create one: "
            f"`aws ec2 create-default-subnet --region {region} --availability-zone {region}a`"
        )
    rows = await api.pages("ec2", "DescribeSubnets", "Subnets", Filters=filters(wanted))
    if not rows:
        raise ConfigurationError(missing)
    subnets = (Subnet(id=row["SubnetId"], zone=row["AvailabilityZone"], vpc=row["VpcId"]) for row in rows)
    return tuple(sorted(subnets, key=lambda subnet: subnet.zone))


async def ensure_group(api: Api, *, pool_id: str, vpc: str, ssh_from: str | None) -> str:
    """Create the pool's security group: it admits all traffic among its machines, and SSH from the client. Idempotent.

    Args:
        api: the account.
        pool_id: the pool.
        vpc: network of the group.
        ssh_from: the client's addresses; None opens no port.

    Returns:
        The group's id.
    """
    group = await _find_group(api, pool_id) or await _make_group(api, pool_id, vpc) or await _find_group(api, pool_id)
    if not group:
        raise UnreachableError(f"the security group of pool {pool_id} was created, but EC2 does not list it: try again")
    await _authorize(api, group, {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]})
    if ssh_from is not None:
        await _authorize(api, group, _ssh_rule(ssh_from))
    return group


async def admit_client(api: Api, pool_id: str, ssh_from: str) -> bool:
    """Admit the client over SSH from its present addresses, and from none of its former ones. Idempotent.

    A former address that cannot be removed is logged, and no error.

    Args:
        api: the account.
        pool_id: the pool.
        ssh_from: the client's present addresses.

    Returns:
        True if they were not admitted before.
    """
    changed = False
    for group in await groups(api, pool_id):
        admitted = _admitted(group)
        if ssh_from not in admitted:
            await _authorize(api, group["GroupId"], _ssh_rule(ssh_from))
            changed = True
        former = [_ssh_rule(each) for each in admitted if each != ssh_from]
        try:
            if former:
                await api.call("ec2", "RevokeSecurityGroupIngress", GroupId=group["GroupId"], IpPermissions=former)
        except SkywardError as error:
            _logger.warning("aws %s: a former address stays admitted: %s", api.credentials.region, error)
    return changed


async def groups(api: Api, pool_id: str) -> Sequence[Mapping[str, Any]]:
    """Return the pool's security groups."""
    wanted = filters({f"tag:{POOL_TAG}": [pool_id]})
    return await api.pages("ec2", "DescribeSecurityGroups", "SecurityGroups", Filters=wanted)


async def _authorize(api: Api, group: str, rule: Mapping[str, Any]) -> None:
    admit, done = "AuthorizeSecurityGroupIngress", [RefusalKind.EXISTS]
    await api.call("ec2", admit, GroupId=group, IpPermissions=[rule], done=done)


def _ssh_rule(ssh_from: str) -> dict[str, Any]:
    """Return the rule that admits SSH; its description distinguishes it from rules that the user has added."""
    ranges = (
        {"Ipv6Ranges": [{"CidrIpv6": ssh_from, "Description": _FROM_CLIENT}]}
        if ":" in ssh_from
        else {"IpRanges": [{"CidrIp": ssh_from, "Description": _FROM_CLIENT}]}
    )
    return {"IpProtocol": "tcp", "FromPort": _SSH_PORT, "ToPort": _SSH_PORT, **ranges}


def _admitted(group: Mapping[str, Any]) -> Sequence[str]:
    """Return the client's addresses that a group admits."""
    ranges = [each for rule in group["IpPermissions"] for each in (*rule["IpRanges"], *rule["Ipv6Ranges"])]
    ours = [each for each in ranges if each.get("Description") == _FROM_CLIENT]
    return [str(each.get("CidrIp") or each.get("CidrIpv6")) for each in ours]


async def _find_group(api: Api, pool_id: str) -> str:
    return next((str(group["GroupId"]) for group in await groups(api, pool_id)), "")


async def _make_group(api: Api, pool_id: str, vpc: str) -> str:
    """Create the pool's security group and return its id; empty if an interrupted call has created it."""
    made = await api.call(
        "ec2",
        "CreateSecurityGroup",
        GroupName=f"skyward-{pool_id}",
        Description=f"Skyward pool {pool_id}",
        VpcId=vpc,
        TagSpecifications=[tag_specification("security-group", pool_tags(pool_id))],
        done=[RefusalKind.EXISTS],
    )
    return str(made.get("GroupId", ""))
