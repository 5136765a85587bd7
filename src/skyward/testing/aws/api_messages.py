"""Requests and responses of AWS's APIs, in the parts that :mod:`skyward.testing.aws` reads and writes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import parse_qs
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

__all__ = [
    "ApiResponse",
    "AwsCall",
    "by_number",
    "error",
    "json_answer",
    "read_call",
    "without_instances",
    "xml_answer",
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    """HTTP response to a call."""

    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


def by_number(parameters: Mapping[str, Any], name: str, member: str = "") -> Mapping[int, Any]:
    """Return the values of ``name.1member``, ``name.2member`` … by their numbers, in order."""
    found: dict[int, Any] = {}
    while (value := parameters.get(f"{name}.{len(found) + 1}{member}")) is not None:
        found[len(found) + 1] = value
    return found


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


def error(call: AwsCall, code: str, message: str, status: int) -> ApiResponse:
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
    return ApiResponse(status=status, body=f'<?xml version="1.0"?>{text}'.encode(), content_type="text/xml")


def json_answer(content: object, *, status: int = 200) -> ApiResponse:
    """Return a response of a service with a JSON API."""
    return ApiResponse(status=status, body=json.dumps(content).encode(), content_type="application/x-amz-json-1.1")


def xml_answer(action: str, content: Mapping[str, Any]) -> ApiResponse:
    """Return a response of EC2's: a mapping becomes nested elements, a sequence ``item`` elements."""
    text = (
        f'<{action}Response xmlns="{_EC2_NAMESPACE}"><requestId>skyward</requestId>{_xml(content)}</{action}Response>'
    )
    return ApiResponse(status=200, body=f'<?xml version="1.0"?>{text}'.encode(), content_type="text/xml")


def without_instances(answer: ApiResponse, hidden: Collection[str]) -> ApiResponse:
    """Remove the ``hidden`` instances from an answer to ``DescribeInstances``."""
    if not hidden or answer.status >= 300:  # noqa: PLR2004 - redirects and errors of HTTP
        return answer
    tree = ET.fromstring(answer.body)  # noqa: S314 - moto wrote it
    for parent in reversed(list(tree.iter())):  # instances before their reservations
        for child in list(parent):
            instances = child.find("{*}instancesSet")
            empty = instances is not None and not len(instances)
            if empty or child.findtext("{*}instanceId") in hidden:
                parent.remove(child)
    return replace(answer, body=ET.tostring(tree))


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
