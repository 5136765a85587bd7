"""EC2's JSON: parameters of the calls that launch, tags, and records of machines (pure)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from skyward.providers.aws.boot import KeyPair, MachineImage, user_data
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.metadata import PreemptionWatch
from skyward.transport.access import SSHAccess

__all__ = [
    "HOST_KEY_TAG",
    "KEY_TAG",
    "LIVE_STATES",
    "MINIMUM_BILLED_S",
    "POOL_TAG",
    "SPOT_WATCH",
    "Candidate",
    "MachineOrder",
    "Record",
    "Subnet",
    "filters",
    "fleet_call",
    "gone",
    "machine_call",
    "machine_tags",
    "parse_record",
    "pool_tags",
    "read_tags",
    "tag_specification",
    "template_call",
]

POOL_TAG: Final = "skyward:pool"
"""On everything that was made for a pool: the pool's id."""
KEY_TAG: Final = "skyward:key"
"""On a machine: its ledger key."""
HOST_KEY_TAG: Final = "skyward:host-key"
"""On a machine: the public key that it proves itself by."""
LIVE_STATES: Final = ("pending", "running", "stopping", "stopped", "shutting-down")
"""Of machines that are not gone."""


def pool_tags(pool_id: str) -> dict[str, str]:
    """Of everything."""
    return {POOL_TAG: pool_id, "Name": f"skyward-{pool_id}"}


def machine_tags(pool_id: str, key: str, host_key: str) -> dict[str, str]:
    """Of a machine, its disk and its network interface."""
    return {**pool_tags(pool_id), KEY_TAG: key, HOST_KEY_TAG: host_key}


def tag_specification(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """``tags`` for a new resource of that kind, as calls that make one take them."""
    return {"ResourceType": kind, "Tags": [{"Key": name, "Value": value} for name, value in tags.items()]}


def read_tags(row: Mapping[str, Any]) -> dict[str, str]:
    """The tags in an answer's row."""
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}


def filters(wanted: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """What listings are narrowed by: each name must have one of its values."""
    return [{"Name": name, "Values": list(values)} for name, values in wanted.items()]


MINIMUM_BILLED_S: Final = 60.0
"""Machines are billed by the second, but for a minute at least."""

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
"""Where a spot machine is told that it will be taken back, two minutes before."""

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.FAILED,
    "terminated": InstanceState.GONE,
}
_DOOMED: Final = ("shutting-down", "terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What EC2 says of a machine.

    Attributes:
        id: ``"i-…"``.
        key: its ledger key; empty if it is not tagged.
        pool_id: likewise.
        host_key: the public key that it proves itself by; empty if it is not tagged.
        state: EC2's word.
        reason: why it is in that state, if EC2 says so.
        type: its machine type.
        cpu: its cores.
        zone: where it is.
        region: likewise.
        spot: whether it is on spot.
        public_address: None if it has none, or none yet.
        private_address: likewise.
    """

    id: str
    key: str
    pool_id: str
    host_key: str
    state: str
    reason: str
    type: str
    cpu: int
    zone: str
    region: str
    spot: bool
    public_address: str | None
    private_address: str | None

    @property
    def ending(self) -> bool:
        """Whether nobody needs to end it any more."""
        return self.state in _DOOMED

    def instance(self, offer: Offer | None, access: Callable[[Record], SSHAccess | None]) -> Instance:
        """Skyward's record; ``offer`` is what it was launched as, where that is known better."""
        spec = InstanceSpec(name=self.type, cpu=self.cpu, memory_gib=0.0)
        known = offer or Offer(
            spec=spec, region=self.region, zone=self.zone, spot=self.spot, minimum_billed_s=MINIMUM_BILLED_S
        )
        return Instance(
            id=self.id,
            key=self.key,
            state=_STATES.get(self.state, InstanceState.PENDING),
            offer=known,
            access=access(self) if self.state == "running" else None,
            watch=SPOT_WATCH if self.spot else None,
            reason=self.reason,
        )


def parse_record(row: Mapping[str, Any], region: str) -> Record:
    """One of ``DescribeInstances``' or ``RunInstances``' instances."""
    tags = read_tags(row)
    zone = str(row.get("Placement", {}).get("AvailabilityZone", ""))
    reason: Mapping[str, Any] = row.get("StateReason") or {}
    options: Mapping[str, Any] = row.get("CpuOptions") or {}
    return Record(
        id=str(row["InstanceId"]),
        key=tags.get(KEY_TAG, ""),
        pool_id=tags.get(POOL_TAG, ""),
        host_key=tags.get(HOST_KEY_TAG, ""),
        state=str(row.get("State", {}).get("Name", "pending")),
        reason=": ".join(str(reason[part]) for part in ("Code", "Message") if reason.get(part)),
        type=str(row.get("InstanceType", "")),
        cpu=int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1)),
        zone=zone,
        region=region,
        spot=row.get("InstanceLifecycle") == "spot",
        public_address=row.get("PublicIpAddress") or None,
        private_address=row.get("PrivateIpAddress") or None,
    )


def gone(instance_id: str) -> Instance:
    """A machine that EC2 does not know, or not any more."""
    nothing = Offer(spec=InstanceSpec(name="", cpu=0, memory_gib=0.0))
    return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=nothing)


_TAGGED: Final = ("instance", "volume", "network-interface")
"""By ``RunInstances``. A fleet tags the first two, and its template the rest."""
_TAGGED_BY_TEMPLATE: Final = ("network-interface", "spot-instances-request")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subnet:
    """A part of the network, in one zone.

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
    """One way to get a machine.

    Attributes:
        offer: type, and whether on spot.
        subnet: where.
        image: what it boots.
        lasts_s: how long it may live, at its price.
    """

    offer: Offer
    subnet: Subnet
    image: MachineImage
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOrder:
    """One machine, whatever it will be.

    Attributes:
        pool_id: its pool.
        key: its ledger key.
        attempt: how often it was launched before; a repeated call has the same number.
        host_key: what it will prove itself by.
        user_key: the public key that it lets in.
        group: its security group.
        time_to_live_s: the hard cap on its life.
        instance_profile: name or ARN of its role; None is none.
        public: whether it gets a public address, whatever the subnet's habit.
    """

    pool_id: str
    key: str
    attempt: int
    host_key: KeyPair
    user_key: str
    group: str
    time_to_live_s: float
    instance_profile: str | None
    public: bool

    @property
    def tags(self) -> dict[str, str]:
        """Of the machine."""
        return machine_tags(self.pool_id, self.key, self.host_key.public)

    @property
    def user_data(self) -> str:
        """What it is told at its first boot."""
        return user_data(host_key=self.host_key, user_key=self.user_key, time_to_live_s=self.time_to_live_s)

    def token(self, *what: str) -> str:
        """The same for the same call, and for no other: a call that was interrupted is repeated with it."""
        text = json.dumps([self.key, self.attempt, self.host_key.public, *what])
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def machine_call(order: MachineOrder, candidate: Candidate) -> dict[str, Any]:
    """``RunInstances`` for one machine of one type in one subnet."""
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
    """``CreateLaunchTemplate`` for a fleet whose machines are all but their type and place."""
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
    """``CreateFleet`` for one machine, whichever of the candidates is to be had; all are of one kind.

    Args:
        order: the machine.
        candidates: what it may be.
        template_id: of the launch template that says the rest.
        turn: how many fleets for it got nothing; the same one again would get the same answer.
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
    if order.instance_profile is not None:
        key = "Arn" if order.instance_profile.startswith("arn:") else "Name"
        machine["IamInstanceProfile"] = {key: order.instance_profile}
    return machine


def _interface(order: MachineOrder) -> dict[str, Any]:
    interface = {"DeviceIndex": 0, "Groups": [order.group], "DeleteOnTermination": True}
    return {**interface, "AssociatePublicIpAddress": True} if order.public else interface
