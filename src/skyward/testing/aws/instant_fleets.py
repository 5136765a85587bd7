"""Instant fleets of the test EC2: each buys the first available of several types and subnets."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.testing.aws.api_messages import ApiResponse, AwsCall, by_number, error, xml_answer
from skyward.testing.aws.region import Region

__all__ = ["Fleets"]

_TEMPLATE = "LaunchTemplateConfigs.1.LaunchTemplateSpecification."
_OVERRIDE = "LaunchTemplateConfigs.1.Overrides"
_XML_NAMES = {"InstanceType": "instanceType", "SubnetId": "subnetId", "AvailabilityZone": "availabilityZone"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Candidate of a fleet.

    Attributes:
        type: instance type.
        zone: its zone.
        spot: True on the spot market.
        override: the override in the call.
    """

    type: str
    zone: str
    spot: bool
    override: Mapping[str, str]

    def described(self) -> Mapping[str, Any]:
        """Return the candidate as in an answer."""
        members = {_XML_NAMES[name]: value for name, value in self.override.items() if name in _XML_NAMES}
        return {"lifecycle": "spot" if self.spot else "on-demand", "launchTemplateAndOverrides": {"overrides": members}}


class Fleets:
    """Fleets, which launch one machine after another by ``RunInstances``.

    Args:
        client: returns a client of moto's EC2 in a region that bypasses faults.
    """

    def __init__(self, client: Callable[[str], Any]) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        self._instances: dict[str, list[str]] = {}

    def answer(self, call: AwsCall, region: Region) -> ApiResponse | None:
        """Answer a call about fleets; return None for other calls."""
        match call.action:
            case "CreateFleet":
                return self._create(call, region)
            case "DeleteFleets":
                return self._delete(call, region)
            case _:
                return None

    def _create(self, call: AwsCall, region: Region) -> ApiResponse:
        if call.parameters.get("Type") != "instant":
            return error(call, "InvalidParameterValue", "only fleets of the type instant are implemented", 400)
        if call.parameters.get("DryRun") == "true":
            return error(call, "DryRunOperation", "it would have succeeded", 412)
        template = self._template(call, region.name)
        got: list[Mapping[str, Any]] = []
        refused: list[Mapping[str, Any]] = []
        for spot in _wanted(call):
            bought = self._buy(_candidates(call, region, template, spot=spot), region, template, _tags(call), refused)
            got += [] if bought is None else [bought]
        number = f"fleet-{next(self._numbers):017x}"
        self._instances[number] = [each["instanceIds"][0] for each in got]
        return xml_answer(call.action, {"fleetId": number, "errorSet": refused, "fleetInstanceSet": got})

    def _delete(self, call: AwsCall, region: Region) -> ApiResponse:
        asked = call.listed("FleetId")
        if call.parameters.get("TerminateInstances", "false").lower() == "true":
            ids = [each for fleet in asked for each in self._instances.get(fleet, [])]
            region.terminate_instances(ids)
        deleted = [{"fleetId": fleet, "currentFleetState": "deleted_terminating"} for fleet in asked]
        return xml_answer(call.action, {"successfulFleetDeletionSet": deleted})

    def _template(self, call: AwsCall, region: str) -> Mapping[str, Any]:
        """Return the launch template's data as parameters of ``RunInstances``."""
        names = {name: call.parameters.get(f"{_TEMPLATE}{name}") for name in ("LaunchTemplateId", "LaunchTemplateName")}
        known = {name: value for name, value in names.items() if value}
        version = call.parameters.get(f"{_TEMPLATE}Version", "$Default")
        found = self._client(region).describe_launch_template_versions(**known, Versions=[version])
        data = dict(found["LaunchTemplateVersions"][0]["LaunchTemplateData"])
        if "UserData" in data:  # encoded in a template; a client of RunInstances encodes it itself
            data["UserData"] = base64.b64decode(data["UserData"]).decode()
        data["TagSpecifications"] = [
            each for each in data.get("TagSpecifications", []) if each["ResourceType"] != "launch-template"
        ]
        return data

    def _buy(
        self,
        candidates: Sequence[_Candidate],
        region: Region,
        template: Mapping[str, Any],
        tags: Sequence[Mapping[str, Any]],
        refused: list[Mapping[str, Any]],
    ) -> Mapping[str, Any] | None:
        """Launch the first available candidate; if there is none, append all refusals to ``refused``."""
        refusals: list[Mapping[str, Any]] = []
        for candidate in candidates:
            running = region.running()
            code = region.market.refusal(candidate.type, candidate.zone, spot=candidate.spot, running=running)
            if not code:
                instance_id = self._run(candidate, region, template, tags)
                place = {"availabilityZone": candidate.zone, "instanceType": candidate.type}
                return {**candidate.described(), "instanceIds": [instance_id], **place}
            text = f"We have no sufficient {candidate.type} capacity in {candidate.zone}."
            refusals.append({**candidate.described(), "errorCode": code, "errorMessage": text})
        refused += refusals
        return None

    def _run(
        self,
        candidate: _Candidate,
        region: Region,
        template: Mapping[str, Any],
        tags: Sequence[Mapping[str, Any]],
    ) -> str:
        arguments: dict[str, Any] = dict(template) | {
            name: value for name, value in candidate.override.items() if name in ("InstanceType", "SubnetId", "ImageId")
        }
        if "SubnetId" in candidate.override and arguments.get("NetworkInterfaces"):
            first, *others = arguments["NetworkInterfaces"]
            arguments["NetworkInterfaces"] = [dict(first) | {"SubnetId": arguments.pop("SubnetId")}, *others]
        if candidate.spot:
            arguments["InstanceMarketOptions"] = {"MarketType": "spot"}
        arguments["TagSpecifications"] = [*template["TagSpecifications"], *tags]
        if not arguments["TagSpecifications"]:
            del arguments["TagSpecifications"]
        (instance,) = self._client(region.name).run_instances(MinCount=1, MaxCount=1, **arguments)["Instances"]
        return instance["InstanceId"]


def _wanted(call: AwsCall) -> Iterator[bool]:
    """Yield one item for each machine: True on spot."""
    asked = {
        name: int(call.parameters.get(f"TargetCapacitySpecification.{name}", 0))
        for name in ("TotalTargetCapacity", "OnDemandTargetCapacity", "SpotTargetCapacity")
    }
    default = call.parameters.get("TargetCapacitySpecification.DefaultTargetCapacityType", "on-demand") == "spot"
    rest = asked["TotalTargetCapacity"] - asked["OnDemandTargetCapacity"] - asked["SpotTargetCapacity"]
    yield from itertools.repeat(False, asked["OnDemandTargetCapacity"])  # noqa: FBT003 - an element, no flag
    yield from itertools.repeat(True, asked["SpotTargetCapacity"])  # noqa: FBT003 - an element, no flag
    yield from itertools.repeat(default, rest)


def _candidates(call: AwsCall, region: Region, template: Mapping[str, Any], *, spot: bool) -> Sequence[_Candidate]:
    """Return the overrides by priority, where that is the strategy, then by price; unknown prices are last."""
    strategy = call.parameters.get(f"{'Spot' if spot else 'OnDemand'}Options.AllocationStrategy", "")
    found: list[tuple[float, float, int, _Candidate]] = []
    offered = set(region.offered())
    for number in range(1, 1 + len(by_number(call.parameters, _OVERRIDE, ".InstanceType")) or 2):
        start = f"{_OVERRIDE}.{number}."
        override = {name[len(start) :]: value for name, value in call.parameters.items() if name.startswith(start)}
        name = override.get("InstanceType") or template["InstanceType"]
        zone = override.get("AvailabilityZone") or region.zone_of(override.get("SubnetId"))
        prices = region.market.spot_price(name, zone) if spot else region.market.prices.get(name)
        if (name, zone) in offered:
            candidate = _Candidate(type=name, zone=zone, spot=spot, override=override)
            price = float("inf") if prices is None else prices
            priority = float(override.get("Priority", 0)) if "prioritized" in strategy else 0.0
            found.append((priority, price, number, candidate))
    return [candidate for *_, candidate in sorted(found, key=lambda each: each[:3])]


def _tags(call: AwsCall) -> Sequence[Mapping[str, Any]]:
    """Return the call's tag specifications, except the fleet's own."""
    found: list[Mapping[str, Any]] = []
    for number, kind in by_number(call.parameters, "TagSpecification", ".ResourceType").items():
        start = f"TagSpecification.{number}.Tag"
        keys, values = by_number(call.parameters, start, ".Key"), by_number(call.parameters, start, ".Value")
        if kind != "fleet":
            tags = [{"Key": key, "Value": values[index]} for index, key in keys.items()]
            found.append({"ResourceType": kind, "Tags": tags})
    return found
