"""Bearers by client credentials: renewed in time, never shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, RateLimitError, SkywardError, UnreachableError
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable
from skyward.providers._common.rest_client import ApiAnswer, ClientCredentials, SignedInClient, read_credentials
from support.clock import FakeClock
from support.clouds.rest_service import RestAnswer, RestCall, RestFault, RestService

SECRET = "the-secret-of-the-client"
NAMES = ("cloud_id", "cloud_secret")
TABLE = RefusalTable(rows=(RefusalRow(kind=RefusalKind.QUOTA, status=403),))


def refused(status: int, message: str) -> RestAnswer:
    return RestAnswer(status=status, body={"message": message})


@pytest.fixture
def door() -> Iterator[RestService]:
    with RestService("door", errors=refused) as service:

        def sign_in(call: RestCall) -> RestAnswer:
            if call.body["client_secret"] != SECRET:
                return refused(401, f"wrong secret {call.body['client_secret']}")
            return RestAnswer(body={"access_token": f"token-{len(service.calls)}", "expires_in": 3600})

        service.route("POST /token", sign_in)
        yield service


def judge(answer: ApiAnswer) -> Refusal:
    return Refusal(kind=RefusalKind.AUTH, code=str(answer.status), message=str(answer.body))


def explain(found: Refusal, call: str) -> SkywardError:
    return TABLE.explain(found, call)


def client(
    door: RestService, clock: FakeClock, secret: str = SECRET, judge: Callable[[ApiAnswer], Refusal] = judge
) -> SignedInClient:
    return SignedInClient(
        vendor="cloud",
        base_url=door.url,
        bearer_path="/token",
        credentials=lambda: ClientCredentials(client_id="me", client_secret=secret),
        judge=judge,
        explain=explain,
        patience_s=5.0,
        clock=clock,
    )


async def test_a_bearer_serves_until_it_is_refused_or_about_to_expire(door: RestService) -> None:
    clock = FakeClock()
    rest = client(door, clock)
    shown = [(await rest.authorize(stale=False))["Authorization"] for _ in range(2)]
    assert shown == ["Bearer token-1"] * 2
    assert (await rest.authorize(stale=True))["Authorization"] == "Bearer token-2"
    clock.suspend(3400.0)
    assert (await rest.authorize(stale=False))["Authorization"] == "Bearer token-3"
    assert await rest.new_bearer() == "token-4"
    await rest.close()


async def test_refused_credentials_are_in_no_message(door: RestService) -> None:
    rest = client(door, FakeClock(), secret="another-secret")
    with pytest.raises(AuthenticationError, match="not accepted") as raised:
        await rest.new_bearer()
    texts = [str(raised.value), repr(raised.value.__cause__), repr(ClientCredentials(client_id="", client_secret="x1"))]
    assert not [text for text in texts if "another-secret" in text or "x1" in text]
    await rest.close()


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (403, AuthenticationError, "not accepted"),
        (503, UnreachableError, "POST /token was refused: 503: no bearer was issued"),
        (429, RateLimitError, "POST /token was refused: 429: no bearer was issued"),
    ],
)
async def test_an_error_states_the_reason_for_which_there_is_no_bearer(
    door: RestService, status: int, error: type[SkywardError], words: str
) -> None:
    rest = client(door, FakeClock(), judge=lambda answer: TABLE.judge(str(answer.status), SECRET, status=answer.status))
    door.fail(RestFault(status=status), route="POST /token", times=100)

    with pytest.raises(error, match=words) as raised:
        await rest.read("/things")

    assert SECRET not in str(raised.value)
    await rest.close()


@pytest.mark.parametrize(
    ("text", "client_id"),
    [
        ("[other]\ncloud_id = 1\ncloud_secret = s\n[default]\ncloud_id = 2\ncloud_secret = 100%\n", "2"),
        ("[other]\ncloud_id = 1\ncloud_secret = s\n", "1"),
        ("[other]\ncloud_id = 1\n", ""),
        ("no section", ""),
        ("", ""),
    ],
)
def test_credentials_are_in_the_environment_else_in_a_file(
    text: str, client_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    path.write_text(text, encoding="utf-8")
    if client_id:
        assert read_credentials("cloud", NAMES, path, advice="Make some").client_id == client_id
    else:
        with pytest.raises(AuthenticationError, match=r"CLOUD_ID and CLOUD_SECRET.*Make some"):
            read_credentials("cloud", NAMES, path, advice="Make some")
    monkeypatch.setenv("CLOUD_ID", "3")
    monkeypatch.setenv("CLOUD_SECRET", "s")
    assert read_credentials("cloud", NAMES, path, advice="").client_id == "3"
