"""Types, prices and capacity of an emulated EC2, and the formats of its requests and responses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qs
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from werkzeug import Response

_SCOPE = re.compile(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/")
_EC2_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsCall:
    """One call of an API.

    Attributes:
        service: service in the signature, such as ``"ec2"``; empty for an unsigned call.
        action: such as ``"RunInstances"``; with REST services the HTTP method and path.
        region: region in the signature.
        parameters: its parameters as sent: flat names (``"Tag.1.Key"``) with EC2, members of the JSON document with
            others.
    """

    service: str
    action: str
    region: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def listed(self, name: str) -> tuple[str, ...]:
        """Return the values of ``Name.1``, ``Name.2`` and so on."""
        return tuple(str(value) for value in by_number(self.parameters, name).values())

    def filters(self) -> Mapping[str, tuple[str, ...]]:
        """Return the accepted values of each of EC2's filters."""
        numbers = by_number(self.parameters, "Filter", ".Name")
        return {name: self.listed(f"Filter.{number}.Value") for number, name in numbers.items()}


def by_number(parameters: Mapping[str, Any], name: str, member: str = "") -> Mapping[int, Any]:
    """Return the values of ``name.1member``, ``name.2member`` … by their numbers, in order."""
    found: dict[int, Any] = {}
    while (value := parameters.get(f"{name}.{len(found) + 1}{member}")) is not None:
        found[len(found) + 1] = value
    return found


def nested(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return EC2's flat parameters as a tree: ``{"Tag.1.Key": "a"}`` is ``{"Tag": {"1": {"Key": "a"}}}``."""
    tree: dict[str, Any] = {}
    for name, value in parameters.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def read_call(environ: dict[str, Any]) -> AwsCall:
    """Parse the call of a WSGI request; its body can be read again afterwards."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length) if length else b""
    environ["wsgi.input"] = io.BytesIO(body)
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    region, service = scope.groups() if scope else ("", "")
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target:
        parameters = cast("dict[str, Any]", json.loads(body or b"{}"))
        return AwsCall(service=service, action=target.rpartition(".")[2], region=region, parameters=parameters)
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        parameters = {name: values[0] for name, values in parse_qs(body.decode(), keep_blank_values=True).items()}
        return AwsCall(service=service, action=parameters.pop("Action", ""), region=region, parameters=parameters)
    action = f"{environ.get('REQUEST_METHOD', '')} {environ.get('PATH_INFO', '')}"
    return AwsCall(service=service, action=action, region=region)


def error(call: AwsCall, code: str, message: str, status: int) -> Response:
    """Return a refusal in the format of the service that was called."""
    if call.service in {"ssm", "pricing", "servicequotas", "service-quotas"}:
        return json_answer({"__type": code, "message": message}, status=status)
    xml = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if call.service == "ec2":
        text = f"<Response><Errors><Error>{xml}</Error></Errors><RequestID>skyward</RequestID></Response>"
    elif call.service == "s3":
        text = f"<Error>{xml}<RequestId>skyward</RequestId></Error>"
    else:
        text = f"<ErrorResponse><Error><Type>Sender</Type>{xml}</Error><RequestId>skyward</RequestId></ErrorResponse>"
    return Response(f'<?xml version="1.0"?>{text}', status, content_type="text/xml")


def json_answer(content: object, *, status: int = 200) -> Response:
    """Return a response of a service with a JSON API."""
    return Response(json.dumps(content), status, content_type="application/x-amz-json-1.1")


def xml_answer(action: str, content: Mapping[str, Any]) -> Response:
    """Return a response of EC2's: a mapping becomes nested elements, a sequence ``item`` elements."""
    text = (
        f'<{action}Response xmlns="{_EC2_NAMESPACE}"><requestId>skyward</requestId>{_xml(content)}</{action}Response>'
    )
    return Response(f'<?xml version="1.0"?>{text}', content_type="text/xml")


def without_instances(answer: Response, hidden: Collection[str]) -> Response:
    """Remove the ``hidden`` instances from an answer to ``DescribeInstances``."""
    if not hidden or answer.status_code >= 300:  # noqa: PLR2004 - redirects and errors of HTTP
        return answer
    tree = ET.fromstring(answer.data)  # noqa: S314 - moto wrote it
    for parent in reversed(list(tree.iter())):  # instances before their reservations
        for child in list(parent):
            instances = child.find("{*}instancesSet")
            empty = instances is not None and not len(instances)
            if empty or child.findtext("{*}instanceId") in hidden:
                parent.remove(child)
    answer.data = ET.tostring(tree)
    return answer


def _xml(content: Any) -> str:
    match content:
        case Mapping():
            members = cast("Mapping[str, Any]", content)
            return "".join(f"<{name}>{_xml(value)}</{name}>" for name, value in members.items())
        case str():
            return escape(content)
        case Sequence():
            return "".join(f"<item>{_xml(value)}</item>" for value in cast("Sequence[Any]", content))
        case bool():
            return str(content).lower()
        case _:
            return escape(str(content))


DEFAULT_PRICES: Final[Mapping[str, float]] = {
    "c7i.large": 0.08925,
    "g4dn.12xlarge": 3.912,
    "g4dn.xlarge": 0.526,
    "g5.xlarge": 1.006,
    "g6.xlarge": 0.805,
    "inf2.xlarge": 0.758,
    "m7i.large": 0.1008,
    "m7i.xlarge": 0.2016,
    "p4de.24xlarge": 40.966,
    "p5.48xlarge": 98.32,
    "t3.large": 0.0832,
    "t3.medium": 0.0416,
    "trn1.2xlarge": 1.344,
}
"""USD an hour on demand of the types that a region has by default."""

_SPOT_SHARE: Final = 0.35
_PLENTY: Final = 10_000.0


class PublicImage(NamedTuple):
    """Image published by AWS or Canonical, and the name that parameters of Systems Manager give to it."""

    id: str
    name: str
    owner: str
    architecture: str
    parameter: str
    volume_gib: int


_UBUNTU: Final = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{}-server-20260901"
_UBUNTU_AT: Final = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{}/hvm/ebs-gp3/ami-id"
_NVIDIA: Final = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260901"
_NVIDIA_AT: Final = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_NEURON: Final = "Deep Learning Base AMI with Neuron (Ubuntu 24.04) 20260901"
_NEURON_AT: Final = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
_CANONICAL, _AMAZON = "099720109477", "898082745236"
IMAGES: Final = (
    PublicImage("ami-0ca0000000000024a", _UBUNTU.format("amd64"), _CANONICAL, "x86_64", _UBUNTU_AT.format("amd64"), 8),
    PublicImage("ami-0ca0000000000024b", _UBUNTU.format("arm64"), _CANONICAL, "arm64", _UBUNTU_AT.format("arm64"), 8),
    PublicImage("ami-0de000000000024aa", _NVIDIA, _AMAZON, "x86_64", _NVIDIA_AT.format("x86_64"), 65),
    PublicImage("ami-0de000000000024bb", _NVIDIA, _AMAZON, "arm64", _NVIDIA_AT.format("arm64"), 65),
    PublicImage("ami-0ee000000000024aa", _NEURON, _AMAZON, "x86_64", _NEURON_AT, 100),
)
"""Images that can be launched, the same in every region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limit on machines that run at the same time. None in a field matches any machine.

    Attributes:
        count: largest number of matching machines.
        type: the instance type.
        zone: the availability zone.
        spot: True for spot machines, False for those on demand.
        code: error code of the refusal.
    """

    count: int = 0
    type: str | None = None
    zone: str | None = None
    spot: bool | None = None
    code: str = "InsufficientInstanceCapacity"

    def covers(self, instance_type: str, zone: str, *, spot: bool) -> bool:
        """Return True if the limit is for this ``instance_type``, ``zone`` and market; ``spot`` is True on spot."""
        return self.type in (None, instance_type) and self.zone in (None, zone) and self.spot in (None, spot)


@dataclass(slots=True, kw_only=True)
class Market:
    """Prices and limits, which a test may change at any time.

    Attributes:
        prices: USD an hour on demand by type; its keys are the available types.
        spot_prices: USD an hour by type, for all zones or by zone; by default a fixed share of the price on demand. A
            type without either has no known price.
        limits: limits on machines that run at the same time.
        quotas: cores by quota code; 10,000 by default.
    """

    prices: dict[str, float | None] = field(default_factory=lambda: dict(DEFAULT_PRICES))
    spot_prices: dict[str, float | Mapping[str, float]] = field(default_factory=dict[str, float | Mapping[str, float]])
    limits: list[Capacity] = field(default_factory=list[Capacity])
    quotas: dict[str, float] = field(default_factory=dict[str, float])

    def spot_price(self, instance_type: str, zone: str) -> float | None:
        """Return the spot price of ``instance_type`` in ``zone``, in USD an hour; None is unknown."""
        known = self.spot_prices.get(instance_type)
        if isinstance(known, Mapping):
            return known.get(zone)
        on_demand = self.prices.get(instance_type)
        return known if known is not None or on_demand is None else round(_SPOT_SHARE * on_demand, 4)

    def refusal(self, instance_type: str, zone: str, *, spot: bool, running: Sequence[tuple[str, str, bool]]) -> str:
        """Return the error code for one more machine of ``instance_type`` in ``zone``; empty if available.

        ``running`` lists type, zone and market (True is spot) of the present machines.
        """
        for limit in self.limits:
            if limit.covers(instance_type, zone, spot=spot):
                taken = sum(limit.covers(other, place, spot=kind) for other, place, kind in running)
                if taken >= limit.count:
                    return limit.code
        return ""

    def answer(self, call: AwsCall, offered: Sequence[tuple[str, str]]) -> Response | None:
        """Answer a call about prices, quotas or parameters, else return None. ``offered`` lists type and zone."""
        match call.service, call.action:
            case "pricing", "GetProducts":
                return json_answer({"FormatVersion": "aws_v1", "PriceList": self._products(call)})
            case "servicequotas", "GetServiceQuota":
                return json_answer({"Quota": self._quota(call.parameters["QuotaCode"])})
            case "ssm", _:
                return _parameters(call)
            case "ec2", "DescribeSpotPriceHistory":
                return xml_answer(call.action, {"spotPriceHistorySet": self._spot_history(call, offered)})
            case _:
                return None

    def _quota(self, code: str) -> Mapping[str, object]:
        value = self.quotas.get(code, _PLENTY)
        return {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": f"quota {code}", "Value": value, "Unit": "None"}

    def _products(self, call: AwsCall) -> list[str]:
        asked = {each["Field"]: each["Value"] for each in call.parameters.get("Filters", [])}
        return [
            json.dumps(_product(name, price, asked.get("regionCode", "")))
            for name, price in self.prices.items()
            if price is not None and name == asked.get("instanceType", name)
        ]

    def _spot_history(self, call: AwsCall, offered: Sequence[tuple[str, str]]) -> list[Mapping[str, str]]:
        wanted = call.listed("InstanceType") or call.filters().get("instance-type", ())
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return [
            {
                "instanceType": name,
                "productDescription": "Linux/UNIX",
                "spotPrice": f"{price:.6f}",
                "timestamp": now,
                "availabilityZone": zone,
            }
            for name, zone in offered
            if (not wanted or name in wanted) and (price := self.spot_price(name, zone)) is not None
        ]


def _product(name: str, price: float, region: str) -> Mapping[str, Any]:
    """Return a product of the price list, where the price is nested under two ids."""
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}, "description": f"${price} per {name} hour"}
    attributes = {
        "instanceType": name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    sku = f"SKU{name.replace('.', '').upper()}"
    return {
        "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": sku},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.JRTC": {"sku": sku, "priceDimensions": {f"{sku}.JRTC.6YS6": dimension}}}},
    }


def _parameters(call: AwsCall) -> Response | None:
    """Answer a call about the public images' parameters; return None for other names."""
    row = {"Type": "String", "Version": 1, "DataType": "text"}
    known = {image.parameter: {**row, "Name": image.parameter, "Value": image.id} for image in IMAGES}
    match call.action:
        case "GetParameter" if (name := call.parameters["Name"]) in known:
            return json_answer({"Parameter": known[name]})
        case "GetParametersByPath":
            below = call.parameters["Path"].rstrip("/") + "/"
            rows = [row for name, row in known.items() if name.startswith(below)]
            return json_answer({"Parameters": rows}) if rows else None
        case _:
            return None
