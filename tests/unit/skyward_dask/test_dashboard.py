from __future__ import annotations

import asyncio
import base64
import html
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
import psutil
import pytest
from distributed import Client, Scheduler
from distributed.core import rpc
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, websocket_connect

from skyward.scheduling.certificates import issue
from skyward.wire.frames import TlsIdentity
from skyward_dask.on_nodes import NodeScheduler
from skyward_dask.security import PoolSecurity

ADDRESS = "127.83.1.11"
PATHS = [
    "/",
    "/status",
    "/status/ws",
    "/individual-workers",
    "/info/main/workers.html",
    "/json/counts.json",
    "/health",
    "/metrics",
    "/sitemap.json",
    "/static/js/bokeh.min.js",
    "/statics/css/base.css",
    "/no-such-page",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A dashboard as its RPC describes it."""

    address: str
    token: str

    async def get(
        self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> HTTPResponse:
        """One request, whatever the answer's status; redirects are not followed."""
        request = HTTPRequest(
            f"http://{self.address}{path}",
            method=method,
            headers=dict(headers or {}),
            body=body,
            follow_redirects=False,
            allow_nonstandard_methods=True,
        )
        client = AsyncHTTPClient(force_instance=True)
        try:
            return await client.fetch(request, raise_error=False)
        finally:
            client.close()

    def basic(self, password: str | None = None, user: str = "") -> dict[str, str]:
        credentials = f"{user}:{self.token if password is None else password}"
        return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}

    async def cookie(self) -> str:
        """What a browser would send after it followed the link."""
        answer = await self.get(f"/status?token={self.token}")
        return answer.headers["Set-Cookie"].partition(";")[0]

    @asynccontextmanager
    async def websocket(
        self, *, headers: Mapping[str, str], session: str = "none"
    ) -> AsyncIterator[WebSocketClientConnection]:
        request = HTTPRequest(f"ws://{self.address}/status/ws", headers=dict(headers))
        socket = await websocket_connect(request, subprotocols=["bokeh", session])
        try:
            yield socket
        finally:
            socket.close()


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


def node_scheduler(identity: TlsIdentity) -> NodeScheduler:
    return NodeScheduler(host=ADDRESS, port=0, protocol="tls", security=PoolSecurity(identity), dashboard=False)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[None]:
    """Where the program has Dask put its temporary files: into a folder that goes with the node."""
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        yield


@pytest.fixture
async def scheduler(identity: TlsIdentity) -> AsyncIterator[NodeScheduler]:
    async with node_scheduler(identity) as running:
        yield running


async def ask(scheduler: Scheduler, identity: TlsIdentity) -> dict[str, str]:
    """Ask as a client does: over the pool's mutual TLS."""
    arguments = PoolSecurity(identity).get_connection_args("client")
    async with rpc(scheduler.address, connection_args=arguments) as remote:
        return await remote.skyward_dashboard()


@pytest.fixture
async def site(scheduler: NodeScheduler, identity: TlsIdentity) -> Site:
    return Site(**await ask(scheduler, identity))


async def test_nothing_is_served_until_it_is_asked_for(scheduler: NodeScheduler) -> None:
    assert not hasattr(scheduler, "http_server")
    assert scheduler.identity()["services"] == {}


async def test_the_same_dashboard_is_told_to_all_who_ask(scheduler: NodeScheduler, identity: TlsIdentity) -> None:
    first, *others = await asyncio.gather(*(ask(scheduler, identity) for _ in range(3)))

    assert others == [first, first]
    assert first["address"].startswith(f"{ADDRESS}:")
    assert len(first["token"]) >= 32


async def test_schedulers_have_tokens_of_their_own(site: Site, identity: TlsIdentity) -> None:
    async with node_scheduler(identity) as other:
        assert (await ask(other, identity))["token"] != site.token


async def test_the_token_is_not_told_without_the_pools_key(scheduler: NodeScheduler, identity: TlsIdentity) -> None:
    other = issue()
    stranger = TlsIdentity(ca=identity.ca, cert=other.cert, key=other.key)  # who trusts the scheduler, but is not known

    with pytest.raises(OSError, match="skyward_dashboard"):
        await ask(scheduler, stranger)

    assert set(await ask(scheduler, identity)) == {"address", "token"}


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_answers_without_the_token(site: Site, path: str) -> None:
    for headers in (
        {},
        site.basic("wrong"),
        {"Authorization": "Basic %%%"},
        {"Authorization": site.basic()["Authorization"].replace("Basic", "Digest")},
    ):
        answer = await site.get(path, headers=headers)

        assert answer.code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        assert site.token not in answer.body.decode()


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
async def test_no_method_answers_without_the_token(site: Site, method: str) -> None:
    answer = await site.get("/status", method=method, body="x" if method in {"POST", "PUT"} else None)

    assert answer.code == 401


@pytest.mark.parametrize("token", ["", "wrong", "%ff%fe", "é"])
async def test_a_wrong_token_is_refused_even_beside_the_right_cookie(site: Site, token: str) -> None:
    for headers in ({}, {"Cookie": await site.cookie()}):
        answer = await site.get(f"/status?token={token}", headers=headers)

        assert answer.code == 401
        assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/status", "Dask Diagnostic UI"),
        ("/info/main/workers.html", "<title> Workers </title>"),
        ("/json/counts.json", "workers"),
        ("/health", "ok"),
        ("/static/js/bokeh.min.js", "Bokeh"),
    ],
)
async def test_the_password_opens_every_page(site: Site, path: str, content: str) -> None:
    answer = await site.get(path, headers=site.basic(user="anybody"))

    assert answer.code == 200
    assert content in answer.body.decode()


async def test_the_link_leads_to_a_cookie_and_to_the_page_without_the_token(site: Site) -> None:
    answer = await site.get(f"/individual-workers?theme=dark&token={site.token}&x=%26")

    assert answer.code == 303
    assert answer.headers["Location"] == f"http://{site.address}/individual-workers?theme=dark&x=%26"
    name, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    landed = await site.get(urlsplit(answer.headers["Location"]).path, headers={"Cookie": f"other=1; {name}"})
    assert landed.code == 200


async def test_the_link_on_another_sites_page_leads_through_a_page_of_its_own(site: Site) -> None:
    """Redirected from the other site's link, a browser would not send the cookie."""
    answer = await site.get(f"/status?token={site.token}", headers={"Sec-Fetch-Site": "cross-site"})

    assert answer.code == 200
    assert answer.headers["Refresh"] == f"0; url=http://{site.address}/status"
    assert "SameSite=Strict" in answer.headers["Set-Cookie"]


async def test_the_link_leads_to_no_other_site(site: Site) -> None:
    answer = await site.get(f"//example.org/status?token={site.token}")

    assert urlsplit(answer.headers["Location"]).netloc == site.address


async def test_two_pools_cookies_live_side_by_side(site: Site, identity: TlsIdentity) -> None:
    async with node_scheduler(identity) as scheduler:
        other = Site(**await ask(scheduler, identity))
        both = {"Cookie": f"{await site.cookie()}; {await other.cookie()}"}

        assert [(await each.get("/health", headers=both)).code for each in (site, other)] == [200, 200]


async def test_one_pools_cookie_does_not_open_another(site: Site, identity: TlsIdentity) -> None:
    async with node_scheduler(identity) as scheduler:
        other = Site(**await ask(scheduler, identity))

        assert (await other.get("/health", headers={"Cookie": await site.cookie()})).code == 401


async def test_pages_never_hold_the_credentials(site: Site) -> None:
    from bokeh.util.token import get_token_payload

    cookie = await site.cookie()
    page = await site.get("/status", headers={"Cookie": cookie, **site.basic()})

    (session,) = session_tokens(page)
    told = get_token_payload(session)
    assert "User-Agent" in told["headers"]
    assert told["cookies"] == {}
    assert {"Authorization", "Cookie"}.isdisjoint(told["headers"])
    assert site.token not in f"{page.body.decode()} {told}"


def session_tokens(page: HTTPResponse) -> list[str]:
    """Bokeh's own tokens in a page, by which its websocket finds the page's session."""
    text = html.unescape(page.body.decode())
    return [part.partition('"')[0] for part in text.split('"token":"')[1:]]


async def test_a_websocket_needs_the_token(site: Site) -> None:
    for headers in ({}, site.basic("wrong"), {"Cookie": "skyward-dashboard=x"}):
        with pytest.raises(HTTPClientError) as refused:
            await site.websocket(headers=headers).__aenter__()

        assert refused.value.code == 401


@pytest.mark.parametrize("origin", ["http://example.org", "null", "http://", f"http://{ADDRESS}:1", "http://["])
async def test_another_sites_page_is_refused_whatever_the_browser_sends_along(site: Site, origin: str) -> None:
    headers = {"Origin": origin, "Cookie": await site.cookie(), **site.basic()}

    with pytest.raises(HTTPClientError) as refused:
        await site.websocket(headers=headers).__aenter__()
    posted = await site.get("/status", method="POST", headers=headers, body="")

    assert refused.value.code == 403
    assert posted.code == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1:4711", *(pytest.param(each, marks=pytest.mark.full) for each in ("", "localhost:4711"))]
)
async def test_a_page_comes_to_life_through_its_websocket(site: Site, host: str) -> None:
    """With a Host of its own: the browser sees the near end of a forwarded port."""
    from bokeh.protocol import Protocol

    host = host or site.address
    headers = {"Cookie": await site.cookie(), "Host": host, "Origin": f"http://{host}"}
    page = await site.get("/status", headers=headers)
    (session,) = session_tokens(page)

    async with site.websocket(headers=headers, session=session) as socket:
        assert (await next_message(socket)).msgtype == "ACK"
        await Protocol().create("PULL-DOC-REQ").send(Sender(socket))
        document = await message_of_type(socket, "PULL-DOC-REPLY")

    assert "Dask: Status" in json.dumps(document.content)


class Sender:
    """A websocket, as bokeh's messages want to be sent."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self.write_lock = self

    async def acquire(self) -> Any:
        return nullcontext()

    async def write_message(self, message: str | bytes, binary: bool = False, locked: bool = True) -> None:
        await self._socket.write_message(message, binary)


async def next_message(socket: WebSocketClientConnection) -> Any:
    from bokeh.protocol import Protocol
    from bokeh.protocol.receiver import Receiver

    receiver = Receiver(Protocol())
    while True:
        fragment = await asyncio.wait_for(socket.read_message(), 10)
        assert fragment is not None, "the server hung up"
        if message := await receiver.consume(fragment):
            return message


async def message_of_type(socket: WebSocketClientConnection, wanted: str) -> Any:
    async with asyncio.timeout(20):
        while (message := await next_message(socket)).msgtype != wanted:
            pass
        return message


async def test_the_scheduler_ends_its_pages_and_their_connections(
    identity: TlsIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = node_scheduler(identity)
    async with scheduler:
        site = Site(**await ask(scheduler, identity))
        (session,) = session_tokens(await site.get("/status", headers=site.basic()))
        async with site.websocket(headers=site.basic(), session=session) as socket:
            assert (await next_message(socket)).msgtype == "ACK"
            (pages,) = scheduler.http_application.applications
            sessions = pages.get_sessions("/status")

            await scheduler.close()

            assert [session.destroyed for session in sessions] == [True]
            async with asyncio.timeout(10):
                while await socket.read_message() is not None:
                    pass
            with pytest.raises(OSError, match="Connect call failed"):
                await asyncio.open_connection(*site.address.split(":"))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_pages_that_cannot_be_set_up_leave_nothing_behind(
    scheduler: NodeScheduler, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("distributed.dashboard.scheduler.connect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await ask(scheduler, identity)
        assert not [each for each in psutil.Process().net_connections() if is_listening(each, scheduler.http_server)]

    site = Site(**await ask(scheduler, identity))
    assert (await site.get("/status", headers=site.basic())).code == 200


def is_listening(connection: Any, server: Any) -> bool:
    return connection.status == psutil.CONN_LISTEN and connection.laddr == (ADDRESS, server.port)


async def test_who_asks_while_the_scheduler_closes_is_told_so(identity: TlsIdentity) -> None:
    async with node_scheduler(identity) as scheduler:
        pass

    answer = await scheduler.handlers["skyward_dashboard"]()

    assert "closing" in answer["error"]


async def test_without_bokeh_the_answer_says_what_to_install(
    scheduler: NodeScheduler, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("distributed.dashboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)

    answer = await ask(scheduler, identity)

    assert set(answer) == {"error"}
    assert "bokeh>=3.1" in answer["error"]
    async with Client(scheduler.address, security=PoolSecurity(identity), asynchronous=True) as client:
        assert client.scheduler_info()["workers"] == {}


async def test_the_token_is_not_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="tornado.access")

    await site.get(f"/status?token={site.token}")
    await site.get("/health", headers=site.basic())
    await site.get(f"/status?token={site.token}x")

    assert site.token not in caplog.text
