"""What EC2 is told to launch: parameters of its calls (pure)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.keys import KeyPair
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.tags import machine_tags, pool_tags, tag_specification
from skyward.providers.aws.userdata import user_data
from skyward.providers.base import Offer

__all__ = ["Candidate", "MachineOrder", "fleet_call", "machine_call", "template_call"]

_TAGGED: Final = ("instance", "volume", "network-interface")
"""By ``RunInstances``. A fleet tags the first two, and its template the rest."""
_TAGGED_BY_TEMPLATE: Final = ("network-interface", "spot-instances-request")


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
