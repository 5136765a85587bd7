"""API of the test EC2: moto behind planned faults, with client tokens and with answers that moto lacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from skyward.errors import ConfigurationError
from skyward.testing.aws.api_messages import ApiResponse, AwsCall, error, read_call, without_instances
from skyward.testing.aws.ec2_market import Market
from skyward.testing.aws.instant_fleets import Fleets
from skyward.testing.aws.region import Region
from skyward.testing.loopback import Faults, drop_connection

__all__ = ["ApiServer", "AwsFault"]

_CAPACITY_CODES: Final = (b"<Code>InsufficientInstanceCapacity<", b"<Code>InsufficientCapacity<")
_OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_CATALOGUE: Final = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsFault:
    """Failure of a call.

    Attributes:
        code: AWS's error code; the call has no effect then. Empty for a dropped connection.
        status: HTTP status of the error.
        message: text of the error; empty for a default.
        dropped: the connection ends without an answer, before or after the call takes effect.
    """

    code: str = ""
    status: int = 400
    message: str = ""
    dropped: Literal["", "before", "after"] = ""

    def __post_init__(self) -> None:
        if bool(self.code) == bool(self.dropped):
            raise ConfigurationError("a fault has either a code or a dropped connection")


class ApiServer:
    """WSGI application of the API. Calls take effect one at a time.

    Args:
        faults: plan of failing calls.
        market: answers calls about prices, quotas and parameters.
        fleets: answers calls about fleets.
        region: returns the region of that name.
        client_address: public address of every client, as answered at ``/checkip``.

    Attributes:
        calls: every call, in order, including failed ones.
        lock: held while a call takes effect.
        moto: moto's application; None while closed.
    """

    _catalogues: ClassVar[dict[str, ApiResponse]] = {}

    def __init__(
        self,
        faults: Faults[AwsFault],
        market: Market,
        fleets: Fleets,
        region: Callable[[str], Region],
        *,
        client_address: str,
    ) -> None:
        self.calls: list[AwsCall] = []
        self.lock = threading.RLock()
        self.moto: Any = None
        self._faults = faults
        self._market = market
        self._fleets = fleets
        self._region = region
        self._client_address = client_address
        self._tokens: dict[tuple[str, str], tuple[Mapping[str, Any], ApiResponse]] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        if environ["PATH_INFO"] == "/checkip":
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [f"{self._client_address}\n".encode()]
        call = read_call(environ)
        with self.lock:
            self.calls.append(call)
            fault = self._faults.met(call.action)
            if fault is not None and fault.dropped == "before":
                drop_connection(environ)
            if fault is not None and fault.code:
                answer = error(call, fault.code, fault.message or "planned fault", fault.status)
            else:
                answer = self._once(call, environ)
        if fault is not None and fault.dropped == "after":
            drop_connection(environ)
        headers = [("Content-Type", answer.content_type), *answer.headers]
        if environ["REQUEST_METHOD"] != "HEAD":  # a response to HEAD keeps moto's Content-Length
            headers = [each for each in headers if each[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(answer.body))))
        start_response(f"{answer.status} {answer.status}", headers)
        return [answer.body]

    def _once(self, call: AwsCall, environ: dict[str, Any]) -> ApiResponse:
        """Answer a call; calls with the same client token take effect once."""
        token = call.parameters.get("ClientToken") if call.service == "ec2" else None
        if not token:
            return self._answer(call, environ)
        known = self._tokens.get((call.action, token))
        if known is None:
            answer = self._answer(call, environ)
            if answer.status == _OK:
                self._tokens[call.action, token] = (call.parameters, answer)
            return answer
        parameters, answer = known
        if parameters != call.parameters:
            text = f"client token {token} was used with other parameters"
            return error(call, "IdempotentParameterMismatch", text, _BAD_REQUEST)
        return answer

    def _answer(self, call: AwsCall, environ: dict[str, Any]) -> ApiResponse:
        if not call.region or call.service not in {"ec2", "pricing", "servicequotas", "ssm"}:
            return self._ask_moto(environ)
        region = self._region(call.region)
        if call.action in _CATALOGUE:
            return self._ask_catalogue(call, environ)
        hidden: Sequence[str] = ()
        if call.action in {"DescribeInstances", "DescribeInstanceStatus"}:
            asked = call.listed("InstanceId")
            hidden = region.look(asked)
            if missing := set(hidden) & set(asked):
                text = f"The instance IDs '{', '.join(sorted(missing))}' do not exist"
                return error(call, "InvalidInstanceID.NotFound", text, _BAD_REQUEST)
        answer = self._market.answer(call, region.offered() if "Spot" in call.action else ())
        answer = answer or (self._fleets.answer(call, region) if call.service == "ec2" else None)
        return answer or without_instances(self._ask_moto(environ), hidden)

    def _ask_catalogue(self, call: AwsCall, environ: dict[str, Any]) -> ApiResponse:
        """Return the answer about machine types, the same in every account: it takes moto 20 to 60 ms."""
        asked = repr((call.action, call.region, sorted(call.parameters.items()), sorted(self._market.prices)))
        if asked not in self._catalogues:
            self._catalogues[asked] = self._ask_moto(environ)
        return self._catalogues[asked]

    def _ask_moto(self, environ: dict[str, Any]) -> ApiResponse:
        from werkzeug.test import run_wsgi_app

        parts, status, headers = run_wsgi_app(self.moto, environ, buffered=True)
        body = b"".join(parts)
        code = int(status.split()[0])
        if code == _BAD_REQUEST and any(each in body for each in _CAPACITY_CODES):
            code = _SERVER_ERROR  # EC2 answers these with 500, moto with 400
        others = [(name, value) for name, value in headers if name.lower() != "content-type"]
        content_type = headers.get("Content-Type", "text/xml")
        return ApiResponse(status=code, body=body, content_type=content_type, headers=tuple(others))
