"""Client of a provider's REST API: in threads, paced, retried where that is safe, with Skyward's errors.

Its answers are decoded into typed records at the edge: a renamed or missing field is an error, never 0 or "".
"""

from __future__ import annotations

import asyncio
import configparser
import email.utils
import json
import logging
import os
import random
import re
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec
import urllib3
from tenacity import AsyncRetrying, retry_if_exception, wait_fixed

from skyward.base.waiting import CALL_LIMIT_S, SYSTEM_CLOCK, Clock, to_its_end
from skyward.errors import AuthenticationError, ConfigurationError, RateLimitError, SkywardError, UnreachableError
from skyward.providers._common.cached_answers import SharedAnswers
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusedCall, is_kind, is_unsent
from skyward.providers.base import REFUSALS, InstanceState

T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 10.0
_READ_TIMEOUT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_GROWTH: Final = 1.5
_UNSEEN_PAUSE_S: Final = 1.0
_UNSENT_S: Final = 10.0
_SILENCE_S: Final = 5.0
"""Seconds of failing calls after which a line says that they are repeated."""
_NOT_CONNECTED: Final = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
_CONNECTIONS: Final = 16
_PUBLIC_S: Final = 60.0
_SUCCESS: Final = range(200, 300)
_UNAUTHORIZED: Final = 401
_SHORTEST_TOKEN: Final = 8
_LONGEST_TEXT: Final = 500
_LONG: Final = 40
"""Length from which a text in a request's body is removed from an answer that repeats it: it may be a key."""
_REPEATED: Final = (RefusalKind.RATE, RefusalKind.TRANSIENT)
_AN_ID: Final = re.compile(r"/(?![a-z]+\d(?:/|$))(?=[^/]*\d)[^/]+")
"""A segment of a path with a digit, other than ``v2`` and the like."""
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAnswer:
    """Answer to one request.

    Attributes:
        status: the HTTP status; 0 if no answer came.
        body: the decoded JSON; a text if it is none; None if it is empty.
        headers: the headers, by lower-case name.
        lost: reason for which no answer came, or none that can be used; empty if one did. The request may have taken
            effect.
        unsent: True if no connection came about, so that it certainly had none.
    """

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    lost: str = ""
    unsent: bool = False

    def row(self) -> Mapping[str, Any]:
        """Return the body if it is an object, else an empty one."""
        return cast("Mapping[str, Any]", self.body) if isinstance(self.body, dict) else {}


class Authorize(Protocol):
    """Source of the headers that prove the caller's identity."""

    async def __call__(self, *, stale: bool) -> Mapping[str, str]:
        """Return the headers.

        ``stale`` is True after they were refused as invalid, with status 401: if others are returned then, the call is
        made once more, a create as well. May be called from several event loops at once.
        """
        ...


def is_found(find: Callable[[], object]) -> bool:
    """Return whether ``find`` returns credentials; it raises an error if there are none."""
    try:
        find()
    except AuthenticationError:
        return False
    return True


def bearer(find_token: Callable[[], str]) -> Authorize:
    """Return the headers with a token that is looked up at each call, so that a newer one counts."""

    async def authorize(*, stale: bool) -> Mapping[str, str]:  # noqa: ARG001 - a stale token is read once more
        return {"Authorization": f"Bearer {find_token()}"}

    return authorize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Any = None
    signed: bool = True

    @property
    def route(self) -> str:
        """``"GET /v2/things/*"``: the method, and the path without ids."""
        return f"{self.method} {_AN_ID.sub('/*', self.path.removesuffix('/'))}"


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RestClient:
    """Calls of one REST API. May be used from several event loops at once; proxies of the environment are obeyed.

    Calls that are throttled wait together: until the moment named by the answer's ``Retry-After`` or reset header, else
    for a pause that grows. No message has a header, a query or a body of a request.

    Attributes:
        vendor: the provider's name, for messages.
        base_url: the API's URL, without a slash at its end.
        authorize: returns the headers that prove the caller's identity.
        judge: classifies an answer that is no success.
        explain: returns the error for a refusal of a call, given as ``"POST /v2/things"``.
        pace: least seconds between two calls of a route, by route: ``"POST /v2/things/*"``, ids as asterisks.
        reset_header: name of the header with the Unix time from which calls are accepted; empty for none.
        patience_s: throttled and interrupted calls are repeated for so long, without the time waited for ``pace``.
        clock: the time.
    """

    vendor: str
    base_url: str
    authorize: Authorize
    judge: Callable[[ApiAnswer], Refusal]
    explain: Callable[[Refusal, str], SkywardError]
    pace: Mapping[str, float] = field(default_factory=dict[str, float])
    reset_header: str = ""
    patience_s: float = 60.0
    clock: Clock = SYSTEM_CLOCK
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_at: dict[str, float] = field(default_factory=dict[str, float])
    _blocked_until: dict[str, float] = field(default_factory=dict[str, float])
    _troubles: dict[str, str] = field(default_factory=dict[str, str])
    _reported: set[str] = field(default_factory=set[str])
    _public: SharedAnswers[Any] = field(default_factory=lambda: SharedAnswers[Any](_PUBLIC_S))
    _looks: SharedAnswers[Any] = field(default_factory=lambda: SharedAnswers(0.0))
    _pool: urllib3.PoolManager | None = None

    def __post_init__(self) -> None:
        self.base_url = self.base_url.removesuffix("/")
        self.reset_header = self.reset_header.lower()

    def __repr__(self) -> str:
        return f"RestClient({self.vendor!r}, {self.base_url!r})"

    @property
    def trouble(self) -> str:
        """Errors of the calls that are being repeated at present; empty for none."""
        return "; ".join(self._troubles.values())

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the answer to ``GET path``; throttled and interrupted calls are repeated."""
        return await self.call("GET", path, query=query)

    async def read_public(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None
    ) -> Any:
        """Return the answer to a call that sends no credentials. It is made once, for all who ask within a minute.

        Raises:
            UnreachableError: there is no answer, or it is no success.
        """
        request = _Request(method=method, path=path, query=query or {}, body=body, signed=False)

        async def ask() -> Any:
            answer = await asyncio.to_thread(self._send, request, {})
            if not answer.lost and answer.status in _SUCCESS:
                return answer.body
            raise UnreachableError(f"no public prices now: {answer.lost or f'status {answer.status}'}")

        return (await self._public.of(json.dumps([method, path, query, body], sort_keys=True), ask)).value

    async def share(self, name: str, look: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of ``look``, or of one of that name under way: several wishes read a catalogue once."""
        return cast("T", (await self._looks.of(name, look)).value)

    async def optional(self, path: str) -> Any:
        """Return the answer to ``GET path``; None if there is no such thing."""
        return await self.call("GET", path, done=(RefusalKind.MISSING,))

    async def pages(
        self,
        path: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        following: Callable[[Mapping[str, Any]], Mapping[str, str] | None] | None = None,
    ) -> list[Any]:
        """Return the items named ``key`` of every page.

        Args:
            path: the path.
            key: name of the items in a page.
            query: query of the first page.
            following: returns the additional query of the page after the given one, None at the last one. Without it a
                page names the next one in ``links.pages.next``.
        """
        found: list[Any] = []
        page = dict(query or {})
        while True:
            answer = await self.call("GET", path, query=page)
            found += decode_list(answer, key, f"{self.vendor}: GET {path}")
            more = _next_page(answer) if following is None else following(answer)
            after = None if more is None else dict(more) if following is None else {**page, **more}
            if after is None or after == page:
                return found
            page = after

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        *,
        done: Sequence[RefusalKind] = (),
        signed: bool = True,
    ) -> Any:
        """Make an idempotent call, and return the answer; throttled and interrupted calls are repeated.

        A call under way that changes something is awaited even if the caller is cancelled. A refusal of the kinds
        ``done`` shows that there is nothing left to do: None is returned. One that is not ``signed`` has no proof of
        the caller's identity.
        """
        request = _Request(method=method, path=path, query=query or {}, body=body, signed=signed)
        if signed:
            await self._headers()  # with a patience of its own: an error of it is not lost in the wait below
        refused: SkywardError | None = None
        pauses = 0
        began = self.clock.monotonic()
        deadline = began + self.patience_s
        try:
            while True:
                deadline = await self._turn(request.route, deadline, refused)
                try:  # the last attempt has as long as the first pause
                    async with asyncio.timeout(max(deadline - self.clock.monotonic(), _FIRST_PAUSE_S)):
                        attempt = self._attempt(request, pauses)
                        return await (attempt if method == "GET" else to_its_end(attempt))
                except TimeoutError:
                    self._give_up(request.route, refused)
                except SkywardError as error:
                    if is_kind(error, *done):
                        return None
                    if not is_kind(error, *_REPEATED):
                        raise
                    refused = error
                    self._report(request.route, error, began)
                if (left_s := deadline - self.clock.monotonic()) <= 0:
                    self._give_up(request.route, refused)
                await self.clock.sleep(min(_FIRST_PAUSE_S * _GROWTH**pauses, _LONGEST_PAUSE_S, left_s))
                pauses += 1
        finally:
            self._troubles.pop(request.route, None)

    async def create(self, path: str, body: Any, *, method: str = "POST", unseen_s: float = 0.0) -> Any:
        """Send a creating call, when nobody waits for the provider's patience, and return the answer.

        It is awaited even if the caller is cancelled. It is repeated only where it certainly had no effect: within the
        client's patience if it was throttled, and for ten seconds if no connection came about.

        Raises one of :data:`~skyward.providers.base.REFUSALS` if the provider refused it, and
        :class:`~skyward.errors.UnreachableError` if it may have taken effect, or was never sent
        (:func:`~skyward.providers._common.refusals.is_unsent`).

        Args:
            path: the path.
            body: the body.
            method: the HTTP method.
            unseen_s: time for which the refusal of something that was created just before, as missing, is no answer:
                then another call is sent.
        """
        began = self.clock.monotonic()

        async def attempt(request: _Request) -> Any:
            nonlocal began
            began = await self._turn(request.route, began + self.patience_s) - self.patience_s
            return await to_its_end(self._attempt(request, pauses=0))

        def had_no_effect(error: BaseException) -> bool:
            limits = (
                unseen_s * is_kind(error, RefusalKind.MISSING),
                self.patience_s * is_kind(error, RefusalKind.RATE),
                _UNSENT_S * is_unsent(error),
            )
            return self.clock.monotonic() - began < max(limits)

        retrying = AsyncRetrying(
            retry=retry_if_exception(had_no_effect),
            wait=wait_fixed(_UNSEEN_PAUSE_S),
            sleep=self.clock.sleep,
            reraise=True,
        )
        try:
            return await retrying(attempt, _Request(method=method, path=path, body=body))
        except REFUSALS:
            raise
        except SkywardError as error:
            if isinstance(error.__cause__, RefusedCall) and not is_kind(error, RefusalKind.TRANSIENT):
                raise ConfigurationError(str(error)) from error.__cause__
            raise

    async def close(self) -> None:
        """Close the connections. Later calls open others."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(_close, pool)

    def _report(self, route: str, error: SkywardError, began: float) -> None:
        """Store the error of a call that is repeated; log it once if such calls have failed for some seconds."""
        if self.clock.monotonic() - began >= _SILENCE_S and route not in self._reported:
            self._reported.add(route)
            limit_s = self.patience_s
            _logger.warning("%s does not answer %s, which is tried for %.0f s: %s", self.vendor, route, limit_s, error)
        self._troubles[route] = str(error)

    def _give_up(self, route: str, refused: SkywardError | None) -> NoReturn:
        if refused is not None:
            raise refused from refused.__cause__
        raise UnreachableError(f"waited {self.patience_s:g} s for {self.vendor} to answer {route}: no answer")

    async def ready(self, route: str) -> None:
        """Return when a call of the route may be made, or is not accepted within the client's patience. Takes no turn.

        A route is that of ``pace``: ``"POST /v2/things/*"``.
        """
        deadline = self.clock.monotonic() + self.patience_s
        while True:
            with self._lock:
                now = self.clock.monotonic()
                blocked_until = self._blocked_until.get(route, now)
                at = max(self._next_at.get(route, now), blocked_until)
            if at <= now or blocked_until > deadline:
                return
            await self.clock.sleep(at - now)

    async def _turn(self, route: str, deadline: float, refused: SkywardError | None = None) -> float:
        """Return when a call of the route may be made, with the deadline: later by the time waited for one's own pace.

        A turn is taken when it has come, not before, so that a caller who is cancelled until then leaves no gap.

        Raises:
            RateLimitError: the provider asks for more patience than there is.
        """
        while True:
            with self._lock:
                now = self.clock.monotonic()
                blocked_until = max(now, self._blocked_until.get(route, now))
                at = max(self._next_at.get(route, now), blocked_until)
                if at <= now:
                    self._next_at[route] = now + self.pace.get(route, 0.0)
                    return deadline
            if blocked_until > max(now, deadline):
                if refused is not None:
                    raise refused from refused.__cause__
                raise RateLimitError(
                    f"{self.vendor} accepts no {route} for another {blocked_until - now:.0f} s: try again later, or "
                    "run fewer pools at once"
                )
            await self.clock.sleep(at - now)
            deadline += at - blocked_until

    async def _attempt(self, request: _Request, pauses: int) -> Any:
        """Make one attempt, and one more if the credentials were refused and there are others."""
        headers = await self._headers() if request.signed else dict[str, str]()
        answer = await asyncio.to_thread(self._send, request, headers)
        if answer.status == _UNAUTHORIZED and request.signed:
            newer = await self._headers(stale=True)
            if newer != headers:
                answer = await asyncio.to_thread(self._send, request, newer)
                headers = newer
        if not answer.lost and answer.status in _SUCCESS:
            return answer.body
        raise self._refused(request, _without_secrets(answer, request, headers), pauses)

    async def _headers(self, *, stale: bool = False) -> Mapping[str, str]:
        """Return the headers that prove the caller's identity.

        Raises:
            AuthenticationError: one cannot be sent; its value is not in the message.
        """
        headers = await self.authorize(stale=stale)
        if all(value.isascii() and value.isprintable() for value in headers.values()):
            return headers
        raise AuthenticationError(
            f"{self.vendor}: the token holds a line break, or another character that no token has: copy it again"
        )

    def _refused(self, request: _Request, answer: ApiAnswer, pauses: int) -> SkywardError:
        """Return the error for an answer that is no success; after a throttled call block the route for all callers."""
        if answer.lost:
            lost = answer.lost
            refusal = Refusal(kind=RefusalKind.TRANSIENT, code="no answer", message=lost, unsent=answer.unsent)
        else:
            refusal = self.judge(answer) if request.signed else _of_credentials(self.judge(answer))
        if refusal.kind is RefusalKind.RATE:
            asked_s = _asked_pause_s(answer.headers, self.reset_header)
            pause_s = min(_FIRST_PAUSE_S * 2**pauses, _LONGEST_PAUSE_S) if asked_s is None else asked_s
            until = self.clock.monotonic() + pause_s + random.uniform(0, _FIRST_PAUSE_S)
            with self._lock:
                self._blocked_until[request.route] = max(until, self._blocked_until.get(request.route, until))
        error = self.explain(refusal, f"{request.method} {request.path}")
        error.__cause__ = RefusedCall(refusal)
        return error

    def _send(self, request: _Request, headers: Mapping[str, str]) -> ApiAnswer:
        """Send one request, in a thread; errors of the connection are answers too."""
        url = self.base_url + quote(request.path)
        if request.query:
            url += f"?{urlencode(request.query)}"
        content = {} if request.body is None else {"Content-Type": "application/json"}
        limit_s = CALL_LIMIT_S.get()
        try:
            answer = self._connections().request(
                request.method,
                url,
                body=None if request.body is None else json.dumps(request.body).encode(),
                headers={"Accept": "application/json", "User-Agent": "skyward", **content, **headers},
                timeout=urllib3.Timeout(connect=min(_CONNECT_TIMEOUT_S, limit_s), read=min(_READ_TIMEOUT_S, limit_s)),
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return ApiAnswer(
                status=0, lost=f"{type(error).__name__}: {_reason(error)}", unsent=isinstance(error, _NOT_CONNECTED)
            )
        named = {name.lower(): value for name, value in answer.headers.items()}
        return _parsed(request.method, answer.status, answer.data, named)

    def _connections(self) -> urllib3.PoolManager:
        with self._lock:
            if self._pool is None:
                self._pool = _new_pool(self.base_url)
            return self._pool


def _new_pool(base_url: str) -> urllib3.PoolManager:
    """Return a pool of connections to an API, through the proxy that the environment names for it."""
    parts = urlsplit(base_url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return urllib3.PoolManager(maxsize=_CONNECTIONS)
    login = urlsplit(proxy)
    headers = None
    if login.username:
        headers = urllib3.make_headers(proxy_basic_auth=f"{unquote(login.username)}:{unquote(login.password or '')}")
    return urllib3.ProxyManager(proxy, maxsize=_CONNECTIONS, proxy_headers=headers)


def _close(pool: urllib3.PoolManager) -> None:
    """Close every connection; :meth:`urllib3.PoolManager.clear` leaves that to the garbage collector."""
    for key in pool.pools.keys():  # noqa: SIM118 - its iterator is refused, since threads share it
        pool.pools[key].close()


def _parsed(method: str, status: int, data: bytes, headers: Mapping[str, str]) -> ApiAnswer:
    text = data.decode("utf-8", errors="replace").strip()
    if status in _SUCCESS and text.startswith("<"):
        return ApiAnswer(status=status, lost="an answer in HTML, of a proxy or a gateway on the way")
    if status in _SUCCESS and method == "GET" and not text.startswith(("{", "[", "null")):
        return ApiAnswer(status=status, lost="an answer that is no JSON object, of a proxy or a gateway on the way")
    try:
        return ApiAnswer(status=status, body=json.loads(text) if text else None, headers=headers)
    except ValueError:
        return ApiAnswer(status=status, body=text, headers=headers)


def _next_page(answer: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the query of the page after this one; None at the last one."""
    links: Mapping[str, Any] = answer.get("links") or {}
    pages: Mapping[str, str] = links.get("pages") or {}
    following = pages.get("next")
    return dict(parse_qsl(urlsplit(following).query)) if following else None


def _asked_pause_s(headers: Mapping[str, str], reset_header: str) -> float | None:
    """Return the seconds for which an answer asks for patience; None if it names none."""
    try:
        if after := headers.get("retry-after", ""):
            if after.strip().isdigit():
                return float(after)
            return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
        if spent := re.findall(r"\br=0;t=(\d+)", headers.get("ratelimit", "")):  # IETF's draft: windows without a rest
            return float(max(map(int, spent)))
        if reset := headers.get(reset_header, ""):
            return max(0.0, float(reset) - time.time())
    except ValueError:
        return None
    return None


def _reason(error: BaseException) -> str:
    """Return the text of the error below urllib3's own, which repeat the URL and its query."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return str(error) or type(error).__name__


def _without_secrets(answer: ApiAnswer, request: _Request, headers: Mapping[str, str]) -> ApiAnswer:
    """Return an answer in which no header and no long text of the request is repeated, and no text is long."""
    hidden = {part for value in headers.values() for part in value.split() if len(part) >= _SHORTEST_TOKEN}
    hidden |= {text for text in _texts(request.body) if len(text) >= _LONG}

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            for secret in hidden:
                value = value.replace(secret, "***").replace(json.dumps(secret)[1:-1], "***")
            return value[:_LONGEST_TEXT]
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in cast("dict[str, Any]", value).items()}
        return [cleaned(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value

    return replace(answer, body=cleaned(answer.body))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        for each in parts:
            yield from _texts(each)


_MARGIN_S: Final = 300.0
"""Least time that a bearer must still be valid for a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """Credentials of a client.

    Attributes:
        client_id: the id.
        client_secret: the secret.
    """

    client_id: str
    client_secret: str = field(repr=False)


def read_credentials(vendor: str, names: Sequence[str], path: Path, *, advice: str) -> ClientCredentials:
    """Return the credentials in the environment, else those in a file of sections such as ``[default]``.

    Args:
        vendor: the provider's name, for messages.
        names: names of id and secret in the file; in capitals in the environment.
        path: the file. Its section ``default`` counts, else its first one.
        advice: next step where there are none.

    Raises:
        AuthenticationError: there are none.
    """
    if all(found := [os.environ.get(name.upper(), "") for name in names]):
        return ClientCredentials(client_id=found[0], client_secret=found[1])
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(path, encoding="utf-8")
        section = file["default" if "default" in file or not file.sections() else file.sections()[0]]
        return ClientCredentials(client_id=section[names[0]], client_secret=section[names[1]])
    except (KeyError, OSError, ValueError, configparser.Error) as error:
        cause = None if isinstance(error, KeyError) else error
        places = f"{' and '.join(name.upper() for name in names)} of the environment, nor in {path}"
        raise AuthenticationError(f"no credentials for {vendor} in {places}. {advice}") from cause


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class SignedInClient(RestClient):
    """Client of an API that issues bearers for credentials.

    Refused credentials are reported without the vendor's text, which may repeat them.

    Attributes:
        bearer_path: path of the token endpoint.
        credentials: returns the credentials, or raises :class:`~skyward.errors.AuthenticationError`; runs in a thread.
    """

    authorize: Authorize = field(init=False)
    bearer_path: str
    credentials: Callable[[], ClientCredentials]
    _token: str = ""
    _expires_at: float = 0.0

    def __post_init__(self) -> None:
        RestClient.__post_init__(self)
        self.authorize = self._bear

    async def new_bearer(self) -> str:
        """Return a new bearer, valid for its whole lifetime.

        Raises:
            AuthenticationError: there are no credentials, or they are refused.
        """
        found = await asyncio.to_thread(self.credentials)
        began = self.clock.elapsed()
        body = {"grant_type": "client_credentials", "client_id": found.client_id, "client_secret": found.client_secret}
        answer = await self.call("POST", self.bearer_path, body, signed=False)
        self._token = str(answer["access_token"])
        self._expires_at = began + float(answer.get("expires_in") or 0.0)
        return self._token

    async def _bear(self, *, stale: bool) -> Mapping[str, str]:
        """Return the header with a bearer that is still valid for some minutes; a new one if that was refused."""
        left_s = self._expires_at - self.clock.elapsed()
        token = await self.new_bearer() if stale or left_s < _MARGIN_S else self._token
        return {"Authorization": f"Bearer {token}"}


def _of_credentials(found: Refusal) -> Refusal:
    """Return a refusal without the vendor's text. Any that is definite concerns the credentials, also status 403."""
    if found.kind in (RefusalKind.RATE, RefusalKind.TRANSIENT):
        return replace(found, message="no bearer was issued")
    return replace(found, kind=RefusalKind.AUTH, message="the credentials are not accepted", advice="")


class VendorPayload(msgspec.Struct):
    """Base of a payload's type. A field without a default is required; other fields of the vendor are ignored."""


def decode(kind: type[T], payload: object, where: str) -> T:
    """Return a payload as ``kind``; numbers may be text. ``where`` is vendor and call: ``"Cloud: GET /v2/things"``.

    Raises:
        UnreachableError: it has another form.
    """
    try:
        return msgspec.convert(payload, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(
            f"{where} was answered in a form that this version of Skyward cannot read: {error}. Install a newer "
            "version, or report this"
        ) from error


def decode_list(payload: object, name: str, where: str) -> list[Any]:
    """Return the list that a payload has as ``name``, empty for null; raises as :func:`decode` if it has none."""
    return getattr(decode(_listing(name), payload, where), name) or []


@cache
def _listing(name: str) -> type[msgspec.Struct]:
    return msgspec.defstruct("Listing", [(name, list[Any] | None)])


def decode_rows(kind: type[T], rows: Iterable[object], where: str) -> list[T]:
    """Return the rows of a catalogue as ``kind``. A malformed one is left out; raises as :func:`decode` if all are."""
    found: list[T] = []
    malformed: UnreachableError | None = None
    for row in rows:
        try:
            found.append(decode(kind, row, where))
        except UnreachableError as error:
            _logger.debug("%s", error)
            malformed = malformed or error
    if malformed is not None and not found:
        raise malformed
    return found


def decode_state(states: Mapping[Any, InstanceState], word: str | None, where: str) -> InstanceState:
    """Return the state of a machine by the vendor's word for it; one with an unknown word is not ready, with a warning.

    ``where`` is that of :func:`decode`.
    """
    if word not in states:
        _warn_of_state(word, where)
    return states.get(word, InstanceState.PENDING)


@cache
def _warn_of_state(word: str | None, where: str) -> None:
    _logger.warning(
        "%s: this version of Skyward does not know the state %r: the machine counts as pending", where, word
    )
