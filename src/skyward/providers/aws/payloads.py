"""EC2's JSON: parameters of the calls that launch, tags, and records of machines (pure)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from skyward.providers._common.ssh_keys import host_key
from skyward.providers.aws.boot import MachineImage, user_data
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.metadata import PreemptionWatch
from skyward.transport.access import SSHAccess

__all__ = [
    "KEY_TAG",
    "LIVE_STATES",
    "MINIMUM_BILLED_S",
    "POOL_TAG",
    "SPOT_WATCH",
    "Candidate",
    "MachineOrder",
    "Record",
    "Subnet",
    "Terms",
    "filters",
    "fleet_call",
    "machine_call",
    "new_instance",
    "parse_record",
    "pool_tags",
    "tag_specification",
    "template_call",
]

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
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.FAILED,
    "terminated": InstanceState.GONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """EC2's record of a machine.

    Attributes:
        id: ``"i-…"``.
        key: its ledger key; empty if it is not tagged.
        pool_id: its pool; empty if it is not tagged.
        state: EC2's name of its state.
        reason: EC2's reason for that state; empty for none.
        offer: type, place and market.
        public_address: None if it has none, or none yet.
        private_address: None if it has none yet.
        group: id of its security group, which admits all traffic among a pool's machines; empty for none.
        ended_at: Unix time at which it was last stopped or terminated; None if EC2 does not state it.
    """

    id: str
    key: str
    pool_id: str
    state: str
    reason: str
    offer: Offer
    public_address: str | None
    private_address: str | None
    group: str
    ended_at: float | None = None

    def instance(self, access: Callable[[Record], SSHAccess | None]) -> Instance:
        """Return Skyward's record."""
        return replace(
            new_instance(self.id, self.key, self.offer),
            state=_STATES.get(self.state, InstanceState.PENDING),
            access=access(self) if self.state == "running" else None,
            reason=self.reason,
            network=self.group,
            ended_at=self.ended_at if self.state == "terminated" else None,
        )


def new_instance(instance_id: str, key: str, offer: Offer) -> Instance:
    """Return the record of a machine that was launched just now. EC2 terminates it when it shuts down."""
    watch = SPOT_WATCH if offer.spot else None
    return Instance(id=instance_id, key=key, state=InstanceState.PENDING, offer=offer, watch=watch, ends_itself=True)


def parse_record(row: Mapping[str, Any], region: str) -> Record:
    """Parse one of the instances in an answer to ``DescribeInstances`` or ``RunInstances``."""
    tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}
    reason: Mapping[str, Any] = row.get("StateReason") or {}
    options: Mapping[str, Any] = row.get("CpuOptions") or {}
    cores = int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1))
    groups = [group for interface in row.get("NetworkInterfaces") or () for group in interface.get("Groups") or ()]
    return Record(
        id=str(row["InstanceId"]),
        key=tags.get(KEY_TAG, ""),
        pool_id=tags.get(POOL_TAG, ""),
        state=str(row.get("State", {}).get("Name", "pending")),
        reason=": ".join(str(reason[part]) for part in ("Code", "Message") if reason.get(part)),
        offer=Offer(
            spec=InstanceSpec(name=str(row.get("InstanceType", "")), cpu=cores, memory_gib=0.0),
            region=region,
            zone=str(row.get("Placement", {}).get("AvailabilityZone", "")),
            spot=row.get("InstanceLifecycle") == "spot",
            minimum_billed_s=MINIMUM_BILLED_S,
        ),
        public_address=row.get("PublicIpAddress") or None,
        private_address=row.get("PrivateIpAddress") or None,
        group=str(groups[0]["GroupId"]) if groups else "",
        ended_at=_moment_in(str(row.get("StateTransitionReason") or "")),
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
        deadline_s: limit for undoing a partial launch.
        listing_s: longest time that a new machine is missing from EC2's lists.
        zone_prices: known USD an hour on spot, by type, then by zone.
    """

    user_key: str
    ssh_from: str | None
    instance_profile: str | None
    deadline_s: float
    listing_s: float
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
