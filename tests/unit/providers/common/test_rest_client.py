"""Calls of a REST API against a server on the loopback interface that answers from a script."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from werkzeug import Request, Response

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)
from skyward.providers._common.refusals import Refusal, RefusalKind, is_kind, is_unsent
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.testing.loopback import drop_connection, serving
from support.clock import FakeClock

TOKEN = "secret-token-of-the-user"

KINDS = {401: RefusalKind.AUTH, 404: RefusalKind.MISSING, 422: RefusalKind.CAPACITY, 429: RefusalKind.RATE}
ERRORS: Mapping[RefusalKind, type[SkywardError]] = {
    RefusalKind.AUTH: AuthenticationError,
    RefusalKind.CAPACITY: CapacityError,
    RefusalKind.MISSING: UnreachableError,
    RefusalKind.RATE: RateLimitError,
    RefusalKind.TRANSIENT: UnreachableError,
}


@dataclass(frozen=True)
class Say:
    """One scripted answer; status 0 closes the connection without one."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    held: threading.Event | None = None


@dataclass
class Seen:
    method: str
    path: str
    body: Any
    headers: Mapping[str, str]


class Service:
    """Server with a script of answers; beyond its end it answers an empty object. A WSGI application."""

    def __init__(self) -> None:
        self.script: list[Say] = []
        self.seen: list[Seen] = []
        self.arrived = threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.method, environ["RAW_URI"], json.loads(request.data or b"null"), headers))
        said = self.script.pop(0) if self.script else Say(body={})
        self.arrived.set()
        if said.held is not None:
            said.held.wait(30)
        if said.status == 0:
            drop_connection(environ)
        data = said.body if isinstance(said.body, str) else json.dumps(said.body)
        return Response(data, said.status, said.headers)(environ, start_response)


class StandingClock(FakeClock):
    """Stands from the first pause until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """See :meth:`FakeClock.sleep`."""
        self.paused.set()
        await self.may_go_on.wait()
        await super().sleep(seconds)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with serving(service, "api") as url:
        yield url


class Client:
    """The client under test, and its credentials."""

    def __init__(self, url: str, clock: Clock, **options: Any) -> None:
        self.tokens = [TOKEN]
        self.rest = RestClient(
            vendor="cloud",
            base_url=url,
            authorize=self._authorize,
            judge=judge,
            explain=lambda found, call: ERRORS[found.kind](f"cloud {call}: {found.code}: {found.message}"),
            clock=clock,
            **options,
        )

    async def _authorize(self, *, stale: bool) -> Mapping[str, str]:
        if stale and len(self.tokens) > 1:
            self.tokens.pop(0)
        return {"Authorization": f"Bearer {self.tokens[0]}"}


def judge(answer: ApiAnswer) -> Refusal:
    kind = KINDS.get(answer.status, RefusalKind.TRANSIENT if answer.status >= 500 else RefusalKind.BAD_REQUEST)
    return Refusal(kind=kind, code=str(answer.row().get("id", answer.status)), message=str(answer.body))


@contextmanager
def closing(client: Client) -> Generator[RestClient]:
    try:
        yield client.rest
    finally:
        asyncio.run(client.rest.close())


@pytest.fixture
def client(url: str, clock: FakeClock) -> Iterator[RestClient]:
    with closing(Client(url, clock)) as rest:
        yield rest


def test_a_read_sends_its_query_and_the_credentials(client: RestClient, service: Service) -> None:
    service.script = [Say(body={"thing": 1})]

    answer = asyncio.run(client.read("/v2/things", {"name": "a b&c"}))

    assert answer == {"thing": 1}
    assert [(each.method, each.path) for each in service.seen] == [("GET", "/v2/things?name=a+b%26c")]
    assert service.seen[0].headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("fault", [Say(status=500), Say(status=0), Say(status=429), Say(body="<html>log in</html>")])
def test_interrupted_and_throttled_calls_are_repeated(client: RestClient, service: Service, fault: Say) -> None:
    service.script = [fault, fault, Say(body={"thing": 1}), fault, Say(status=204, body="")]

    assert asyncio.run(client.read("/v2/things")) == {"thing": 1}
    assert asyncio.run(client.call("DELETE", "/v2/things/7")) is None
    assert [each.method for each in service.seen] == ["GET"] * 3 + ["DELETE"] * 2


def test_a_read_answered_with_a_text_is_repeated(client: RestClient, service: Service) -> None:
    service.script = [Say(body="log in first"), Say(body={"links": {}, "things": [1]})]

    assert asyncio.run(client.pages("/v2/things", "things")) == [1]
    assert len(service.seen) == 2


def test_a_refusal_for_good_is_not_repeated(client: RestClient, service: Service) -> None:
    service.script = [Say(status=404, body={"id": "not_found"})]

    with pytest.raises(UnreachableError, match="cloud GET /v2/things/7: not_found") as caught:
        asyncio.run(client.read("/v2/things/7"))

    assert is_kind(caught.value, RefusalKind.MISSING)
    assert not is_kind(caught.value, RefusalKind.AUTH)
    assert len(service.seen) == 1


def test_a_call_that_is_refused_to_the_end_raises_the_last_refusal(
    client: RestClient, service: Service, clock: FakeClock
) -> None:
    service.script = [Say(status=500, body={"id": "broken"})] * 100

    with pytest.raises(UnreachableError, match="broken"):
        asyncio.run(client.read("/v2/things"))

    assert 60 <= clock.monotonic() < 75


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "7"},
        {"ratelimit-reset": "{in_7_s}"},
        {"RateLimit": '"minute";r=0;t=7, "hour";r=2800;t=1812, "day";r=0;t=3'},
    ],
)
def test_the_named_pause_is_obeyed_by_every_caller_of_the_route(
    url: str, service: Service, headers: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    named = {name: value.format(in_7_s=1_800_000_007) for name, value in headers.items()}
    service.script = [Say(status=429, headers=named)]
    clock = StandingClock()

    async def both(rest: RestClient) -> float:
        first = asyncio.ensure_future(rest.create("/v2/things", {}))
        await clock.paused.wait()
        await rest.read("/v2/things")  # another route
        other = clock.monotonic()
        clock.may_go_on.set()
        await asyncio.gather(first, rest.call("POST", "/v2/things", {}))
        return other

    with closing(Client(url, clock, reset_header="RateLimit-Reset")) as rest:
        assert asyncio.run(both(rest)) == 0
    assert clock.monotonic() >= 7
    assert [each.method for each in service.seen] == ["POST", "GET", "POST", "POST"]


def test_more_patience_than_there_is_is_an_error_at_once(
    client: RestClient, service: Service, clock: FakeClock
) -> None:
    service.script = [Say(status=429, headers={"Retry-After": "3000"})]

    for _ in range(2):
        with pytest.raises(RateLimitError):
            asyncio.run(client.read("/v2/things"))
    with pytest.raises(RateLimitError, match=r"accepts no GET /v2/things for another 3000 s"):
        asyncio.run(client.read("/v2/things"))

    assert len(service.seen) == 1
    assert clock.monotonic() < 5


def test_a_route_keeps_its_pace_without_regard_to_ids(url: str, service: Service, clock: FakeClock) -> None:
    async def some(rest: RestClient) -> None:
        await rest.read("/v2/keys/ab:cd:12")
        await rest.read("/v2/keys/12:ab:cd")
        await rest.read("/v2/keys")
        await rest.read("/v2/keys/0b6e5a6c-d34c-4a6e")

    with closing(Client(url, clock, pace={"GET /v2/keys/*": 6.0})) as rest:
        asyncio.run(some(rest))

    assert clock.slept_s == [6.0, 6.0]


def test_a_call_that_fails_for_seconds_is_reported_once_while_it_is_repeated(
    url: str, service: Service, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [Say(503, "down")] * 12
    with closing(Client(url, clock)) as rest:
        asyncio.run(rest.read("/v2/keys"))

    (line,) = [each.getMessage() for each in caplog.records if each.name == "skyward"]
    assert "does not answer GET /v2/keys, which is tried for" in line
    assert "down" in line
    assert sum(clock.slept_s) > 5


def test_a_call_that_is_answered_soon_is_not_reported(
    url: str, service: Service, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [Say(503, "down")] * 3
    with closing(Client(url, clock)) as rest:
        asyncio.run(rest.read("/v2/keys"))

    assert [each for each in caplog.records if each.name == "skyward"] == []


def test_a_route_is_ready_when_its_next_call_would_not_wait(url: str, service: Service, clock: FakeClock) -> None:
    async def some(rest: RestClient) -> None:
        for _ in range(2):
            await rest.ready("GET /v2/keys/*")
        await rest.read("/v2/keys/12")
        await rest.ready("GET /v2/keys/*")
        await rest.read("/v2/keys/13")

    with closing(Client(url, clock, pace={"GET /v2/keys/*": 6.0})) as rest:
        asyncio.run(some(rest))

    assert clock.slept_s == [6.0]


def test_a_route_that_is_closed_for_longer_than_the_patience_is_ready_to_refuse(
    url: str, service: Service, clock: FakeClock
) -> None:
    async def some(rest: RestClient) -> None:
        with pytest.raises(RateLimitError):
            await rest.read("/v2/keys/12")
        clock.slept_s.clear()
        await rest.ready("GET /v2/keys/*")

    service.script = [Say(status=429, headers={"Retry-After": "3000"})]
    with closing(Client(url, clock)) as rest:
        asyncio.run(some(rest))

    assert clock.slept_s == []


def test_a_caller_who_is_cancelled_before_its_turn_leaves_it_to_the_next_one(url: str, service: Service) -> None:
    clock = StandingClock()

    async def some(rest: RestClient) -> None:
        await rest.read("/v2/keys/1a")
        waiting = asyncio.ensure_future(rest.read("/v2/keys/1b"))
        await clock.paused.wait()
        waiting.cancel()
        clock.may_go_on.set()
        await rest.read("/v2/keys/1c")

    with closing(Client(url, clock, pace={"GET /v2/keys/*": 6.0})) as rest:
        asyncio.run(some(rest))

    assert clock.monotonic() == 6.0
    assert [each.path for each in service.seen] == ["/v2/keys/1a", "/v2/keys/1c"]


def test_the_wait_for_ones_own_pace_uses_up_no_patience(url: str, service: Service) -> None:
    """Forty machines are ended at once; the last one's turn comes after the patience for a call."""

    async def some(rest: RestClient) -> None:
        await asyncio.gather(*(rest.call("DELETE", f"/v2/things/{number}") for number in range(40)))

    with closing(Client(url, SYSTEM_CLOCK, pace={"DELETE /v2/things/*": 0.06}, patience_s=2.0)) as rest:
        asyncio.run(some(rest))

    assert len(service.seen) == 40


def test_a_throttled_create_has_its_patience_from_its_turn_on(url: str, service: Service, clock: FakeClock) -> None:
    async def some(rest: RestClient) -> None:
        await rest.create("/v2/things/1", {}, method="PUT")
        service.script = [Say(status=429, headers={"Retry-After": "1"})]
        await rest.create("/v2/things/2", {}, method="PUT")

    with closing(Client(url, clock, pace={"PUT /v2/things/*": 90.0})) as rest:
        asyncio.run(some(rest))

    assert len(service.seen) == 3


def test_calls_that_waited_for_the_vendors_patience_keep_their_pace(url: str, service: Service) -> None:
    clock = StandingClock()

    async def some(rest: RestClient) -> None:
        service.script = [Say(status=429, headers={"Retry-After": "20"})]
        first = asyncio.ensure_future(rest.create("/v2/things/1", {}, method="PUT"))
        await clock.paused.wait()
        first.cancel()
        clock.may_go_on.set()
        await asyncio.gather(rest.call("PUT", "/v2/things/2"), rest.call("PUT", "/v2/things/3"))

    with closing(Client(url, clock, pace={"PUT /v2/things/*": 6.0})) as rest:
        asyncio.run(some(rest))

    assert clock.monotonic() >= 26
    assert [each.method for each in service.seen] == ["PUT"] * 3


@pytest.mark.parametrize("fault", [Say(status=500), Say(status=0), Say(body="<html>")])
def test_a_create_that_may_have_had_an_effect_is_sent_once(client: RestClient, service: Service, fault: Say) -> None:
    service.script = [fault]

    with pytest.raises(UnreachableError) as caught:
        asyncio.run(client.create("/v2/things", {"name": "a"}))

    assert [each.body for each in service.seen] == [{"name": "a"}]
    assert not is_unsent(caught.value)


@pytest.mark.parametrize(
    ("faults", "sent"), [(1, 2), (3, 4), (99, 0)], ids=["once", "three times", "beyond the patience"]
)
def test_a_throttled_create_is_sent_again_within_the_patience(
    client: RestClient, service: Service, clock: FakeClock, faults: int, sent: int
) -> None:
    service.script = [Say(status=429, headers={"Retry-After": "9"})] * faults + [Say(body={"made": 1})]

    if sent:
        assert asyncio.run(client.create("/v2/things", {})) == {"made": 1}
        assert len(service.seen) == sent
    else:
        with pytest.raises(RateLimitError):
            asyncio.run(client.create("/v2/things", {}))
    assert clock.monotonic() <= 61


def test_a_create_whose_connection_is_refused_was_not_sent_and_is_tried_for_ten_seconds(clock: FakeClock) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with (
            closing(Client(f"http://127.0.0.1:{nobody.getsockname()[1]}", clock)) as rest,
            pytest.raises(UnreachableError, match="refused") as caught,
        ):
            asyncio.run(rest.create("/v2/things", {}))

    assert is_unsent(caught.value)
    assert 10 <= clock.monotonic() < 12


@pytest.mark.parametrize(
    ("status", "error"), [(422, CapacityError), (404, ConfigurationError), (401, AuthenticationError)]
)
def test_a_refused_create_raises_an_error_that_leaves_nothing(
    client: RestClient, service: Service, status: int, error: type[SkywardError]
) -> None:
    service.script = [Say(status=status)] * 2

    with pytest.raises(error) as caught:
        asyncio.run(client.create("/v2/things", {}))

    assert is_kind(caught.value, KINDS[status])


def test_a_create_refused_for_something_made_just_before_is_sent_again(client: RestClient, service: Service) -> None:
    service.script = [Say(status=404), Say(status=404), Say(body={"made": 1})]

    assert asyncio.run(client.create("/v2/things", {}, unseen_s=60.0)) == {"made": 1}


def test_refusals_that_leave_nothing_to_do_are_passed_over(client: RestClient, service: Service) -> None:
    service.script = [Say(status=404), Say(status=404), Say(status=422)]

    assert asyncio.run(client.call("DELETE", "/v2/things/1", done=(RefusalKind.MISSING,))) is None
    assert asyncio.run(client.optional("/v2/things/1")) is None
    with pytest.raises(CapacityError):
        asyncio.run(client.optional("/v2/things/1"))


@pytest.mark.parametrize("verb", ["create", "change"])
def test_a_cancelled_change_is_awaited(client: RestClient, service: Service, verb: str) -> None:
    held = threading.Event()
    service.script = [Say(held=held)]

    async def interrupted() -> bool:
        call = client.create("/v2/things", {}) if verb == "create" else client.call("PUT", "/v2/things/1", {})
        task = asyncio.create_task(call)
        await asyncio.to_thread(service.arrived.wait, 30)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.2)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return bool(done)

    assert asyncio.run(interrupted()) is False


def test_refused_credentials_are_renewed_once(url: str, service: Service, clock: FakeClock) -> None:
    service.script = [Say(status=401), Say(body={"made": 1})]
    client = Client(url, clock)
    client.tokens = ["stale-token", "fresh-token"]

    with closing(client) as rest:
        assert asyncio.run(rest.create("/v2/things", {})) == {"made": 1}

    assert [each.headers["authorization"] for each in service.seen] == ["Bearer stale-token", "Bearer fresh-token"]


@pytest.mark.parametrize("token", ["secret\nof-the-user", "secret-of-the-user-ключ"])
def test_a_token_that_cannot_be_sent_is_an_error_without_it(
    token: str, url: str, service: Service, clock: FakeClock
) -> None:
    client = Client(url, clock)
    client.tokens = [token]

    with closing(client) as rest, pytest.raises(AuthenticationError, match="line break") as caught:
        asyncio.run(rest.create("/v2/things", {}))

    assert "user" not in str(caught.value)
    assert service.seen == []


def test_every_page_is_read(client: RestClient, service: Service) -> None:
    following = {"pages": {"next": "https://elsewhere.example/v2/things?page=2&per_page=2"}}
    service.script = [Say(body={"things": [1, 2], "links": following}), Say(body={"things": [3], "links": {}})]

    assert asyncio.run(client.pages("/v2/things", "things", {"per_page": "2"})) == [1, 2, 3]
    assert [each.path for each in service.seen] == ["/v2/things?per_page=2", "/v2/things?page=2&per_page=2"]


def test_no_secret_is_repeated_in_a_message(client: RestClient, service: Service) -> None:
    private = "-----BEGIN PRIVATE KEY-----\n" + "x" * 60
    service.script = [
        Say(status=422, body={"id": "no", "message": f"{TOKEN} may not send {private}", "sent": [private]})
    ]

    with pytest.raises(CapacityError) as caught:
        asyncio.run(client.create("/v2/things", {"nested": [{"user_data": private}]}))

    shown = f"{caught.value} {caught.value.__cause__!r} {client!r}"
    assert TOKEN not in shown
    assert "x" * 60 not in shown
    assert "*** may not send ***" in shown


def test_a_lost_answer_says_why_and_nothing_of_the_query(client: RestClient, service: Service) -> None:
    service.script = [Say(status=0)] * 100

    with pytest.raises(UnreachableError) as caught:
        asyncio.run(client.read("/v2/things", {"search": "private"}))

    assert "closed connection" in str(caught.value)
    assert "private" not in str(caught.value)


def test_proxies_of_the_environment_are_used(
    url: str, service: Service, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", url.replace("http://", "http://user:pass@"))
    monkeypatch.setenv("no_proxy", "")
    service.script = [Say(body={"by": "proxy"})]

    with closing(Client("http://api.cloud.example", clock)) as rest:
        assert asyncio.run(rest.read("/v2/things")) == {"by": "proxy"}

    assert service.seen[0].path == "http://api.cloud.example/v2/things"
    assert service.seen[0].headers["proxy-authorization"].startswith("Basic ")


def test_one_client_serves_several_event_loops(client: RestClient) -> None:
    assert [asyncio.run(client.read("/v2/things")) for _ in range(2)] == [{}, {}]


def test_calls_that_are_being_repeated_are_the_clients_trouble(url: str, service: Service) -> None:
    """It is over with the call, whether that succeeds or is given up."""
    clock = StandingClock()

    async def some(rest: RestClient) -> tuple[str, str]:
        service.script = [Say(status=500, body={"id": "broken"})]
        ending = asyncio.ensure_future(rest.call("DELETE", "/v2/things/1"))
        await clock.paused.wait()
        await rest.read("/v2/things")
        during = rest.trouble
        clock.may_go_on.set()
        await ending
        service.script = [Say(status=500)] * 99
        with pytest.raises(UnreachableError):
            await rest.read("/v2/things")
        return during, rest.trouble

    with closing(Client(url, clock)) as rest:
        during, after = asyncio.run(some(rest))
    assert "broken" in during
    assert after == ""
