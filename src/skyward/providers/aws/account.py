"""One account in one region: its machine types, network and records of machines, in EC2's JSON."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, cast

from skyward.errors import ConfigurationError, SkywardError, UnreachableError
from skyward.providers._common.cached_answers import AnswerFile, SharedAnswers
from skyward.providers._common.logins import KeyPair, host_key
from skyward.providers._common.machine_boot import cloud_config
from skyward.providers._common.machine_catalogue import X86, Catalogue, MachineType, sold_as
from skyward.providers._common.refusals import RefusalKind
from skyward.providers._common.rented_machines import MachineApi, MachineRecord
from skyward.providers._common.rest_client import decode_state
from skyward.providers.aws.api import Api, Json
from skyward.providers.aws.machine_images import MachineImage, find_image, image_path
from skyward.providers.base import InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.wire.node_config import PreemptionWatch

_MIB_PER_GIB: Final = 1024
_GENERAL: Final = "cmrxz"
"""First letters of the families for general computing; others are for storage, bursts, or dedicated hardware."""

FIELDS: Final = """InstanceType VCpuInfo MemoryInfo ProcessorInfo SupportedUsageClasses CurrentGeneration BareMetal
    BurstablePerformanceSupported GpuInfo FpgaInfo NeuronInfo InferenceAcceleratorInfo MediaAcceleratorInfo"""
"""Members of a type that are read here: a fifth of the three megabytes."""

FAMILIES: Final[Mapping[str, str]] = {
    "T4": "g4dn",
    "T4g": "g5g",
    "A10G": "g5",
    "L4": "g6",
    "L40S": "g6e",
    "RTX-PRO-6000": "g7e",
    "V100-32GB": "p3dn",
    "A100-40GB": "p4d",
    "A100-80GB": "p4de",
    "H100-SXM": "p5",
    "H200": "p5e, p5en",
    "B200": "p6-b200",
    "B300": "p6-b300",
    "GB200-192GB": "p6e-gb200",
    "Trainium1": "trn1",
    "Trainium2": "trn2",
    "Inferentia1": "inf1",
    "Inferentia2": "inf2",
    "Radeon-Pro-V520": "g4ad",
}
"""Accelerators that EC2 offers in any region, and the families that have them."""

_NAMES: Final[Mapping[str, str]] = {
    "RTX PRO Server 6000": "RTX-PRO-6000",
    "Trainium": "Trainium1",
    "Inferentia": "Inferentia1",
    "H100": "H100-SXM",
}
"""EC2's names of accelerators that differ from the usual ones."""


def parse_types(rows: Iterable[Mapping[str, Any]]) -> tuple[MachineType, ...]:
    """Parse the members of ``DescribeInstanceTypes``; malformed ones are left out."""
    return tuple(parsed for row in rows if (parsed := _parse(row)) is not None)


def candidates(types: Sequence[MachineType], request: PoolRequest, *, region: str) -> tuple[MachineType, ...]:
    """Return the types that satisfy a request, the smallest first.

    Raises:
        ConfigurationError: there is none; names the nearest.
    """
    return Catalogue(vendor="EC2", types=types, place=region, accelerators=FAMILIES).candidates(request)


def _parse(row: Mapping[str, Any]) -> MachineType | None:
    try:
        usage = cast("Sequence[str]", row.get("SupportedUsageClasses", ("on-demand",)))
        architectures = cast("Sequence[str]", row["ProcessorInfo"]["SupportedArchitectures"])
        spec = InstanceSpec(
            name=str(row["InstanceType"]),
            cpu=int(row["VCpuInfo"]["DefaultVCpus"]),
            memory_gib=float(row["MemoryInfo"]["SizeInMiB"]) / _MIB_PER_GIB,
        )
        spec, whole = _with_accelerators(spec, row)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    steady = not row.get("BareMetal") and not row.get("BurstablePerformanceSupported")
    priced_in = "FpgaInfo" in row or "MediaAcceleratorInfo" in row
    return MachineType(
        spec=spec,
        architecture=X86 if X86 in architectures else architectures[0] if architectures else "",
        spot="spot" in usage,
        on_demand="on-demand" in usage,
        current=bool(row.get("CurrentGeneration", True)),
        whole=whole and steady,
        general=spec.name[0] in _GENERAL and not priced_in,
    )


def _with_accelerators(spec: InstanceSpec, row: Mapping[str, Any]) -> tuple[InstanceSpec, bool]:
    """Return the type with its accelerators as sold, and True if they are whole.

    EC2 lists the devices of inf1 and inf2 in two members; the first one counts. The memory that it states for those is
    not the nominal one.
    """
    gpus = row.get("GpuInfo", {}).get("Gpus", ())
    neuron = row.get("NeuronInfo", {}).get("NeuronDevices", ())
    inference = row.get("InferenceAcceleratorInfo", {}).get("Accelerators", ())
    device = next((group[0] for group in (gpus, neuron, inference) if group), None)
    if device is None:
        return spec, True
    reported_gib = float(device.get("MemoryInfo", {}).get("SizeInMiB", 0)) / _MIB_PER_GIB if gpus else 0.0
    name = str(device["Name"])
    sold = sold_as(_NAMES.get(name, name), f"{device.get('Manufacturer', '')} {name}", reported_gib=reported_gib)
    count = int(device.get("Count", 1))
    number = count or int(device.get("LogicalGpuCount", 1))
    return sold.built_into(spec, number), count > 0


LARGEST_BYTES = 16 * 1024
"""Limit of EC2 for user data, before encoding."""


def user_data(*, host_key: KeyPair, user_key: str, time_to_live_s: float) -> str:
    """Return one machine's :func:`cloud-config <skyward.providers._common.machine_boot.cloud_config>`.

    Raises:
        ConfigurationError: it is longer than EC2 admits.
    """
    text = cloud_config(host_key=host_key, user_key=user_key, time_to_live_s=time_to_live_s)
    if len(text.encode()) > LARGEST_BYTES:
        raise ConfigurationError(f"a machine's user data may have {LARGEST_BYTES} bytes, not {len(text.encode())}")
    return text


POOL_TAG: Final = "skyward:pool"
"""Tag of everything created for a pool: the pool's id."""
KEY_TAG: Final = "skyward:key"
"""Tag of a machine: its ledger key."""
LIVE_STATES: Final = ("pending", "running", "stopping", "stopped", "shutting-down")
"""EC2's states of machines that are not gone."""


_MOMENT: Final = re.compile(r"\((\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}) GMT\)")


def pool_tags(pool_id: str) -> dict[str, str]:
    """Return the tags of everything created for a pool."""
    return {POOL_TAG: pool_id, "Name": f"skyward-{pool_id}"}


def tag_specification(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """Return ``tags`` as a ``TagSpecification`` for a new resource of that kind."""
    return {"ResourceType": kind, "Tags": [{"Key": name, "Value": value} for name, value in tags.items()]}


def filters(wanted: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return ``Filters`` of a listing: each name must have one of its values."""
    return [{"Name": name, "Values": list(values)} for name, values in wanted.items()]


MINIMUM_BILLED_S: Final = 60.0
"""Machines are billed by the second, at least for a minute."""

SPOT_WATCH: Final = PreemptionWatch(
    endpoint="http://169.254.169.254",
    endpoint_env="AWS_EC2_METADATA_SERVICE_ENDPOINT",
    token_path="/latest/api/token",  # noqa: S106 - a path
    token_request_headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
    token_header="X-aws-ec2-metadata-token",  # noqa: S106 - a header's name
    notice_path="/latest/meta-data/spot/instance-action",
    notice_time_field="time",
    hint_path="/latest/meta-data/events/recommendations/rebalance",
    interval_s=5.0,
)
"""Metadata endpoint that announces preemption of a spot machine, two minutes ahead."""

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.FAILED,  # it stays, stopped, until it is terminated
    "stopped": InstanceState.FAILED,
    "terminated": InstanceState.GONE,
}
"""State of a machine, by EC2's name of it."""


def parse_record(row: Mapping[str, Any], region: str) -> MachineRecord:
    """Parse one of the instances in an answer to ``DescribeInstances`` or ``RunInstances``."""
    tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}
    reason: Mapping[str, Any] = row.get("StateReason") or {}
    options: Mapping[str, Any] = row.get("CpuOptions") or {}
    cores = int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1))
    groups = [group for interface in row.get("NetworkInterfaces") or () for group in interface.get("Groups") or ()]
    state = decode_state(_STATES, row.get("State", {}).get("Name"), f"aws {region}: ec2 DescribeInstances")
    spot = row.get("InstanceLifecycle") == "spot"
    moment = _moment_in(str(row.get("StateTransitionReason") or ""))
    return MachineRecord(
        id=str(row["InstanceId"]),
        key=tags.get(KEY_TAG, ""),
        pool_id=tags.get(POOL_TAG, ""),
        state=state,
        reason=": ".join(str(reason[part]) for part in ("Code", "Message") if reason.get(part)),
        offer=Offer(
            spec=InstanceSpec(name=str(row.get("InstanceType", "")), cpu=cores, memory_gib=0.0),
            region=region,
            zone=str(row.get("Placement", {}).get("AvailabilityZone", "")),
            spot=spot,
            minimum_billed_s=MINIMUM_BILLED_S,
        ),
        watch=SPOT_WATCH if spot else None,
        public_address=row.get("PublicIpAddress") or "",
        private_address=row.get("PrivateIpAddress") or "",
        network=str(groups[0]["GroupId"]) if groups else "",
        ended_at=moment if state is InstanceState.GONE else None,
    )


def _moment_in(reason: str) -> float | None:
    """Return the Unix time in a reason such as ``"User initiated (2026-11-23 07:00:00 GMT)"``; None without one."""
    found = _MOMENT.search(reason)
    return None if found is None else datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()


_TAGGED: Final = ("instance", "volume", "network-interface")
"""Resources tagged by ``RunInstances``. A fleet tags the first two, its template the rest."""
_TAGGED_BY_TEMPLATE: Final = ("network-interface", "spot-instances-request")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subnet:
    """Part of the network, in one zone.

    Attributes:
        id: ``"subnet-…"``.
        zone: ``"us-east-1a"``.
        vpc: the network's id.
    """

    id: str
    zone: str
    vpc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to launch a machine.

    Attributes:
        offer: machine type, market and price.
        subnet: its subnet.
        image: its image.
        lasts_s: hard cap on its life, at its price.
    """

    offer: Offer
    subnet: Subnet
    image: MachineImage
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Parameters common to every machine of an order.

    Attributes:
        user_key: the public key that they admit.
        ssh_from: the client's addresses; None opens no port, and leaves public addresses to the subnet's setting.
        instance_profile: name or ARN of their role; None for none.
        zone_prices: known USD an hour on spot, by type, then by zone.
    """

    user_key: str
    ssh_from: str | None
    instance_profile: str | None
    zone_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOrder:
    """One machine of an order, before its type and zone are chosen.

    Attributes:
        pool_id: its pool.
        key: its ledger key.
        terms: parameters common to the order's machines.
        group: its security group.
        time_to_live_s: hard cap on its life.
        attempt: random text of this launch; a retried call has the same.
    """

    pool_id: str
    key: str
    terms: Terms
    group: str
    time_to_live_s: float
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the machine, its disk and its network interface."""
        return {**pool_tags(self.pool_id), KEY_TAG: self.key}

    @property
    def user_data(self) -> str:
        """Cloud-config for its first boot."""
        own, user = host_key(self.key), self.terms.user_key
        return user_data(host_key=own, user_key=user, time_to_live_s=self.time_to_live_s)

    def token(self, *what: str) -> str:
        """Return the client token of a call: equal for retries of the same call, different for any other call."""
        text = json.dumps([self.key, self.attempt, *what])
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def machine_call(order: MachineOrder, candidate: Candidate) -> dict[str, Any]:
    """Return the parameters of ``RunInstances`` for one machine of one type in one subnet."""
    offer = candidate.offer
    kinds = (*_TAGGED, "spot-instances-request") if offer.spot else _TAGGED
    call = {
        **_machine(order, candidate.image),
        "TagSpecifications": [tag_specification(kind, order.tags) for kind in kinds],
        "InstanceType": offer.spec.name,
        "NetworkInterfaces": [{**_interface(order), "SubnetId": candidate.subnet.id}],
        "MinCount": 1,
        "MaxCount": 1,
        "UserData": order.user_data,
        "ClientToken": order.token(offer.spec.name, candidate.subnet.id, str(offer.spot)),
    }
    if offer.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        call["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return call


def template_call(order: MachineOrder, candidate: Candidate) -> dict[str, Any]:
    """Return the parameters of ``CreateLaunchTemplate``: everything about a fleet's machine except type and subnet."""
    kinds = _TAGGED_BY_TEMPLATE if candidate.offer.spot else _TAGGED_BY_TEMPLATE[:1]
    return {
        "LaunchTemplateName": f"skyward-{order.pool_id}-{order.token()[:12]}",
        "ClientToken": order.token("template"),
        "TagSpecifications": [tag_specification("launch-template", pool_tags(order.pool_id))],
        "LaunchTemplateData": {
            **_machine(order, candidate.image),
            "TagSpecifications": [tag_specification(kind, order.tags) for kind in kinds],
            "InstanceType": candidate.offer.spec.name,
            "NetworkInterfaces": [_interface(order)],
            "UserData": base64.b64encode(order.user_data.encode()).decode(),
        },
    }


def fleet_call(
    order: MachineOrder, candidates: Sequence[Candidate], template_id: str, *, turn: int = 0
) -> dict[str, Any]:
    """Return the parameters of ``CreateFleet`` for one machine, as any of the candidates, all of the same market.

    Args:
        order: the machine.
        candidates: the acceptable types and subnets.
        template_id: launch template with the other parameters.
        turn: number of fleets that were empty so far. It changes the client token: with the same token EC2 would
            return the same empty answer.
    """
    spot = candidates[0].offer.spot
    ranks = {name: rank for rank, name in enumerate(dict.fromkeys(each.offer.spec.name for each in candidates))}
    overrides: list[Mapping[str, Any]] = [
        {
            "InstanceType": each.offer.spec.name,
            "SubnetId": each.subnet.id,
            "ImageId": each.image.id,
            "Priority": float(ranks[each.offer.spec.name]),
        }
        for each in candidates
    ]
    options = (
        {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized", "InstanceInterruptionBehavior": "terminate"}}
        if spot
        else {"OnDemandOptions": {"AllocationStrategy": "prioritized"}}
    )
    template = {"LaunchTemplateId": template_id, "Version": "$Latest"}
    return {
        "Type": "instant",
        "ClientToken": order.token(template_id, str(turn)),
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": overrides}],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": 1,
            "DefaultTargetCapacityType": "spot" if spot else "on-demand",
        },
        "TagSpecifications": [
            *(tag_specification(kind, order.tags) for kind in _TAGGED[:2]),
            tag_specification("fleet", pool_tags(order.pool_id)),
        ],
        **options,
    }


def _machine(order: MachineOrder, image: MachineImage) -> dict[str, Any]:
    disk = {"VolumeSize": image.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    machine: dict[str, Any] = {
        "ImageId": image.id,
        "BlockDeviceMappings": [{"DeviceName": image.root_device, "Ebs": disk}],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "enabled",
        },
    }
    if (role := order.terms.instance_profile) is not None:
        machine["IamInstanceProfile"] = {"Arn" if role.startswith("arn:") else "Name": role}
    return machine


def _interface(order: MachineOrder) -> dict[str, Any]:
    interface = {"DeviceIndex": 0, "Groups": [order.group], "DeleteOnTermination": True}
    return {**interface, "AssociatePublicIpAddress": True} if order.terms.ssh_from else interface


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


_WEEK_S: Final = 7 * 24 * 3600.0
_MOST_VALUES: Final = 200
"""Limit of EC2 for the values of one filter; also used for the ids of one call, which may be more."""


@dataclass(slots=True, eq=False)
class Account(MachineApi):
    """One account in one region. Answers are cached for the provider's life, except records of machines.

    Attributes:
        api: its API.
        subnet: id of the subnet given by the user; None means the default ones.
        zones: zone of a pool's machines, by pool id.
    """

    api: Api
    subnet: str | None
    zones: dict[str, str] = field(default_factory=dict[str, str])
    _types: tuple[MachineType, ...] = ()
    _offered: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _subnets: tuple[Subnet, ...] = ()
    _images: dict[str, MachineImage] = field(default_factory=dict[str, MachineImage])
    _looks: SharedAnswers[Any] = field(default_factory=lambda: SharedAnswers(0.0))  # of those under way

    @property
    def region(self) -> str:
        """``"us-east-1"``."""
        return self.api.credentials.region

    async def types(self) -> tuple[MachineType, ...]:
        """Return every machine type of the region; cached on disk for a week."""
        if not self._types:
            self._types = (await self._looks.of("types", self._kept_types)).value
        return self._types

    async def _kept_types(self) -> tuple[MachineType, ...]:
        kept = await self.kept("types", _WEEK_S).completed(["types"], self._types_now)
        return parse_types(kept.get("types", ()))

    async def _types_now(self, names: Sequence[str]) -> Mapping[str, Sequence[Json]]:
        rows: list[Json] = await self.api.pages("ec2", "DescribeInstanceTypes", "InstanceTypes")
        short = [{each: row[each] for each in FIELDS.split() if each in row} for row in rows]
        return dict.fromkeys(names, short) if short else {}

    async def image(self, name: str) -> MachineImage:
        """Return the image of a machine type; raises :class:`KeyError` if the region has no such type."""
        path = image_path({machine.name: machine for machine in await self.types()}[name])
        if path not in self._images:
            self._images[path] = await find_image(self.api, path)
        return self._images[path]

    async def offered(self, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the zones that offer each of these types; an empty tuple if none does."""
        unknown = [name for name in names if name not in self._offered]
        for part in _in_parts(unknown):
            rows = await self.api.pages(
                "ec2",
                "DescribeInstanceTypeOfferings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=filters({"instance-type": part}),
            )
            for name in part:
                self._offered[name] = tuple(sorted({row["Location"] for row in rows if row["InstanceType"] == name}))
        return {name: self._offered[name] for name in names}

    async def subnets(self) -> tuple[Subnet, ...]:
        """Return the subnets that machines may be in."""
        if not self._subnets:
            self._subnets = (await self._looks.of("subnets", lambda: find_subnets(self.api, self.subnet))).value
        return self._subnets

    async def close(self) -> None:
        """Close the connections to AWS."""
        await asyncio.to_thread(self.api.close)

    async def records(self, instance_ids: Sequence[str], pool_id: str = "") -> Sequence[MachineRecord]:  # noqa: ARG002 - ids do
        """Return the machines with these ids that exist."""
        return await self.matching({"instance-id": instance_ids})

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every machine of Skyward's, or of that pool, that is not gone."""
        tags = {f"tag:{POOL_TAG}": [pool_id]} if pool_id else {"tag-key": [POOL_TAG]}
        return await self.matching({**tags, "instance-state-name": LIVE_STATES})

    async def matching(self, wanted: Mapping[str, Sequence[str]]) -> list[MachineRecord]:
        """Return the machines that match every filter by one of its values; the last filter may have many values."""
        *others, (name, values) = wanted.items()
        found: list[MachineRecord] = []
        for part in _in_parts(values):
            rows = await self.api.pages(
                "ec2", "DescribeInstances", "Reservations", Filters=filters({**dict(others), name: part})
            )
            found += [parse_record(row, self.region) for reservation in rows for row in reservation["Instances"]]
        return found

    async def request_end(self, machine: str) -> None:
        """Request the termination of a machine."""
        await self.api.call("ec2", "TerminateInstances", InstanceIds=[machine])

    async def request_ends(self, machines: Sequence[str]) -> Mapping[str, SkywardError]:
        """Request termination by batches; machine by machine where there is one, or where a batch is refused."""
        alone = list[str]()
        for part in _in_parts(machines):
            try:
                if len(part) > 1:
                    await self.api.call("ec2", "TerminateInstances", InstanceIds=part)
                    continue
            except SkywardError as error:
                _logger.debug("aws %s: refused for %s: %s", self.region, ", ".join(part), error)
            alone += part
        return await MachineApi.request_ends(self, alone)

    async def remove(self, pool_id: str) -> None:
        """Remove a pool's launch templates and security groups; refused while a machine is in one of those."""
        wanted = filters({f"tag:{POOL_TAG}": [pool_id]})
        templates = await self.api.pages("ec2", "DescribeLaunchTemplates", "LaunchTemplates", Filters=wanted)
        found = [("DeleteLaunchTemplate", {"LaunchTemplateId": row["LaunchTemplateId"]}) for row in templates]
        found += [("DeleteSecurityGroup", {"GroupId": row["GroupId"]}) for row in await groups(self.api, pool_id)]
        for operation, what in found:
            await self.api.call("ec2", operation, **what, done=[RefusalKind.MISSING])
        self.zones.pop(pool_id, None)

    def kept(self, name: str, longest_s: float) -> AnswerFile:
        """Return the file that caches answers of this region under ``name``."""
        endpoint_url = self.api.credentials.endpoint_url
        return AnswerFile(vendor="aws", name=name, place=self.region, endpoint_url=endpoint_url, longest_s=longest_s)


def _in_parts(values: Sequence[str]) -> list[list[str]]:
    """Split ``values`` into lists of the size that EC2 admits."""
    return [list(values[start : start + _MOST_VALUES]) for start in range(0, len(values), _MOST_VALUES)]
