"""REST service of a fake vendor: routes, authorization, faults, paces, a log of calls, and a bill of its own."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from skyward.testing.bill import Bill
from skyward.testing.loopback import Faults, drop_connection, serving

__all__ = [
    "FAULTS",
    "SPECS",
    "Pace",
    "RestAnswer",
    "RestCall",
    "RestFault",
    "RestService",
    "call_api",
    "load_json",
]

SPECS = Path(__file__).parents[4] / "shared/specs"
"""Vendors' API descriptions; exchanges are not validated where they are missing."""

_REFUSED = 400

_TOO_MANY, _NOT_FOUND = 429, 404

_IDS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8,}|[0-9]{5,}")
"""Long numbers and ids, of which descriptions say no more than their form."""

_correct: set[Hashable] = set()
"""Kinds of requests and of answers that keep to their description."""


@dataclass(slots=True, kw_only=True)
class RestCall:
    """One call of the service.

    Attributes:
        route: ``"GET /v2/droplets/{droplet_id}"``; empty where no route matches.
        path: below the base path, e.g. ``"/v2/droplets/12"``.
        parts: the path's parameters.
        query: the query's parameters; of a repeated one, the last.
        body: its JSON; None without one.
        at: the service's time.
        status: of the answer; 0 while or if there is none.
        faulty: True if a planned fault met it: its answer need not be in the description.
        public: True if it was admitted without credentials, which no description says.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any
    at: float
    route: str = ""
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    status: int = 0
    faulty: bool = False
    public: bool = False

    @property
    def token(self) -> str:
        """The bearer token; empty for none."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if kind.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAnswer:
    """Answer of a route: a text is sent as plain text, None as nothing, everything else as JSON."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Handler = Callable[[RestCall], RestAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestFault:
    """Failure of a call.

    Attributes:
        status: of the answer; 0 for a connection that ends without one.
        after: whether the call takes effect first.
        message: of the answer.
    """

    status: int = 0
    after: bool = False
    message: str = "planned fault"


FAULTS: Mapping[str, RestFault] = {
    "refused": RestFault(status=403),
    "throttled": RestFault(status=429),
    "failed before": RestFault(status=500),
    "failed after": RestFault(status=500, after=True),
    "lost before": RestFault(),
    "lost after": RestFault(after=True),
}
"""Every kind of failure, one example each: those of the sweep over all calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Limit of calls: ``calls`` within ``per_s`` seconds, of one route or of all; more are answered with 429.

    Attributes:
        route: as :attr:`RestCall.route`; empty for all together.
        headers: of the refusals, e.g. ``Retry-After``; the argument is the seconds until the next call is admitted.
    """

    calls: int
    per_s: float
    route: str = ""
    headers: Callable[[float], Mapping[str, str]] = lambda left_s: {}


class RestService:
    """A vendor's API on a loopback address. A context manager, which fails if an exchange broke the description.

    Calls take effect one at a time, under :attr:`lock`.

    Args:
        name: of its threads.
        errors: the vendor's form of an error: takes status and message.
        description: file name of its API description in ``../shared/specs``; empty for none.
        base_path: path of the API, in front of every route, e.g. ``"/v1"``.
        authorize: returns the refusal of a call, None for an admitted one.
        answer_headers: returns headers of every answer.
        clock: the service's time.

    Attributes:
        calls: every call, in order, including failed ones.
        faults: plan of failing calls, by :attr:`RestCall.route`.
        paces: limits in force; none at first.
        violations: exchanges that broke the description, with the reason. Empty it where that was meant.
        bill: see :class:`Bill`.
        around: called before and after a call takes effect, before its answer is sent, with the number of its call.
        lock: held while a call takes effect.
    """

    def __init__(
        self,
        name: str,
        *,
        errors: Callable[[int, str], RestAnswer],
        description: str = "",
        base_path: str = "",
        authorize: Callable[[RestCall], RestAnswer | None] = lambda call: None,
        answer_headers: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls: list[RestCall] = []
        self.faults = Faults[RestFault]()
        self.paces: list[Pace] = []
        self.violations: list[str] = []
        self.bill = Bill(clock)
        self.around: Callable[[int, str], None] = lambda number, moment: None
        self.lock = threading.RLock()
        self.clock = clock
        self._name = name
        self._errors = errors
        self._base_path = base_path
        self._authorize = authorize
        self._answer_headers = answer_headers
        self._spec = load_description(SPECS / description, base_path) if description else None
        self._routes: list[tuple[str, re.Pattern[str], Handler, bool]] = []
        self._stack = contextlib.ExitStack()
        self._url = ""

    def __enter__(self) -> Self:
        self._url = self._stack.enter_context(serving(self, self._name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self.violations:
            raise AssertionError(f"{self._name}: exchanges against the description:\n" + "\n".join(self.violations))

    @property
    def url(self) -> str:
        """URL of the API, base path included."""
        return self._url + self._base_path

    @property
    def routes(self) -> Sequence[str]:
        """Routes of the calls so far, in order."""
        return [call.route for call in self.calls]

    def route(self, route: str, handler: Handler, *, documented: bool = True) -> None:
        """Answer calls of a route such as ``"GET /v2/droplets/{droplet_id}"``; the first that matches is taken.

        Those that are not documented are neither validated nor authorized, nor do they count in any pace.
        """
        method, _, path = route.partition(" ")
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(path))
        self._routes.append((route, re.compile(f"{method} {pattern}"), handler, documented))

    def fail(self, fault: RestFault, *, route: str = "", nth: int = 1, times: int = 1) -> None:
        """Let calls fail: the ``nth`` from now on, of one route or of all, and ``times - 1`` after it."""
        self.faults.add(fault, action=route, nth=nth, times=times)

    def count(self, route: str) -> int:
        """Return the number of calls of a route so far."""
        return self.routes.count(route)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request: a WSGI application."""
        from werkzeug.wrappers import Request, Response

        request = Request(environ)
        call = self._read(request)
        handler, documented = self._find(call)
        with self.lock:
            self.calls.append(call)
            number = len(self.calls)
            self.around(number, "before")
            answer = self._answer(call, handler) if documented else handler(call)
            if answer is not None:
                call.status = answer.status
            self.around(number, "after")
        if answer is None:
            drop_connection(environ)
            raise AssertionError
        data, kind = _encoded(answer.body)
        response = Response(data, answer.status, {"Content-Type": kind, **answer.headers})
        if documented and not (call.faulty or call.public) and self._spec is not None:
            broken = _violation(self._spec, call.route, request, response)
            self.violations += [f"{call.method} {call.path} {call.status}: {broken}"] if broken else []
        return response(environ, start_response)

    def _read(self, request: Any) -> RestCall:
        data = request.get_data(cache=True)
        return RestCall(
            method=request.method,
            path=request.path.removeprefix(self._base_path),
            query=dict(request.args),
            headers=dict(request.headers),
            body=json.loads(data) if data else None,
            at=self.clock(),
        )

    def _find(self, call: RestCall) -> tuple[Handler, bool]:
        for route, pattern, handler, documented in self._routes:
            if found := pattern.fullmatch(f"{call.method} {call.path}"):
                call.route, call.parts = route, found.groupdict()
                return handler, documented
        return lambda call: self._errors(_NOT_FOUND, f"no route {call.method} {call.path}"), True

    def _answer(self, call: RestCall, handler: Handler) -> RestAnswer | None:
        """Answer a call; None means that its connection ends without an answer."""
        fault = self.faults.met(call.route)
        call.faulty = fault is not None
        if fault is not None and not fault.after:
            return self._errors(fault.status, fault.message) if fault.status else None
        answer = self._over_pace(call) or self._authorize(call) or handler(call)
        if fault is not None:
            return self._errors(fault.status, fault.message) if fault.status else None
        return RestAnswer(status=answer.status, body=answer.body, headers={**self._answer_headers(), **answer.headers})

    def _over_pace(self, call: RestCall) -> RestAnswer | None:
        for pace in self.paces:
            if pace.route not in ("", call.route):
                continue
            recent = [
                each.at
                for each in self.calls
                if each.at > call.at - pace.per_s and pace.route in ("", each.route) and each.route
            ]
            if len(recent) > pace.calls:
                left_s = recent[-pace.calls] + pace.per_s - call.at
                refusal = self._errors(_TOO_MANY, f"more than {pace.calls} calls in {pace.per_s:g} s")
                headers = {**refusal.headers, **pace.headers(left_s)}
                return RestAnswer(status=refusal.status, body=refusal.body, headers=headers)
        return None


def _encoded(body: Any) -> tuple[str, str]:
    if isinstance(body, str):
        return body, "text/plain; charset=utf-8"
    return ("" if body is None else json.dumps(body)), "application/json; charset=utf-8"


@cache
def load_description(path: Path, base_path: str) -> Any:
    """Return a vendor's API description for validation; None without the file, or without openapi-core."""
    try:
        from openapi_core import Config, OpenAPI
    except ImportError:
        return None
    if not path.exists():
        return None
    content = load_json(path.name)
    unchecked: Any = None  # the description itself, whose check takes a process 0.3 to 4 s
    config = Config(
        spec_validator_cls=unchecked,
        extra_media_type_deserializers={"application/problem+json": json.loads},
    )
    content = content | {"servers": [{"url": base_path or "/"}]}
    return OpenAPI.from_dict(content, config)  # pyright: ignore[reportUnknownMemberType]


@cache
def load_json(description: str) -> dict[str, Any]:
    """Return the content of a description, its slips repaired."""
    content: dict[str, Any] = _repaired(json.loads((SPECS / description).read_text(encoding="utf-8")))
    return content


def _repaired(node: Any) -> Any:
    """Undo YAML's reading of ``off`` and ``on`` as truth values; drop ``readOnly``, which path parameters have too."""
    if isinstance(node, list):
        return [_repaired(each) for each in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    read = cast("dict[str, Any]", node).items()
    content = {name: _repaired(each) for name, each in read if (name, each) != ("readOnly", True)}
    if content.get("type") == "string" and "enum" in content:
        words: Mapping[Any, str] = {False: "off", True: "on"}
        content["enum"] = [words[each] if isinstance(each, bool) else each for each in content["enum"]]
    return content


def _violation(spec: Any, route: str, request: Any, response: Any) -> str:
    """Return how an exchange breaks the description; empty if it does not.

    Clients ask the same again and again, and a check takes ten times as long as the rest of a call: what differs in ids
    only from a part that was correct is not checked again.
    """
    asked = _kind(request.method, request.full_path, request.headers, request.get_data(as_text=True))
    answered = _kind(route, response.status, response.headers, response.get_data(as_text=True))
    return _unless_known((id(spec), asked), lambda: _check_request(spec, request)) or _unless_known(
        (id(spec), request.method, answered), lambda: _check_response(spec, request, response)
    )


def _kind(call: str, result: str, headers: Any, body: str) -> str:
    text = " ".join([call, result, *(f"{name}: {value}" for name, value in headers.items()), body])
    return _IDS.sub(lambda found: re.sub("[0-9a-f]", "0", found[0]), text)


def _unless_known(kind: Hashable, check: Callable[[], None]) -> str:
    if kind in _correct:
        return ""
    if not (violation := _violation_of(check)):
        _correct.add(kind)
    return violation


def _violation_of(check: Callable[[], None]) -> str:
    from openapi_core.exceptions import OpenAPIError

    try:
        check()
    except OpenAPIError as error:
        details = [
            f"{'/'.join(map(str, each.absolute_path))}: {each.message[-200:]}"
            for each in getattr(error.__cause__, "schema_errors", ())
        ]
        return "; ".join(details) or f"{error}; {error.__cause__}"[:1000]
    return ""


def _check_request(spec: Any, request: Any) -> None:
    from openapi_core.contrib.werkzeug import WerkzeugOpenAPIRequest

    spec.validate_request(WerkzeugOpenAPIRequest(request))


def _check_response(spec: Any, request: Any, response: Any) -> None:
    from openapi_core.contrib.werkzeug import WerkzeugOpenAPIRequest, WerkzeugOpenAPIResponse
    from openapi_core.templating.responses.exceptions import ResponseNotFound

    if response.mimetype == "text/plain":  # of refusals, whatever their description
        return
    try:
        spec.validate_response(WerkzeugOpenAPIRequest(request), WerkzeugOpenAPIResponse(response))
    except ResponseNotFound:  # descriptions list few refusals
        if response.status_code < _REFUSED:
            raise


def call_api(
    url: str, call: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any, Mapping[str, str]]:
    """Make a call such as ``"GET /v2/things"`` without a client; return status, decoded JSON and headers."""
    method, _, path = call.partition(" ")
    data = None if body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url + path, data, named, method=method)
    answer: Any
    try:
        answer = urllib.request.urlopen(request, timeout=10)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read()
        return answer.status, json.loads(text) if text else None, dict(answer.headers)
