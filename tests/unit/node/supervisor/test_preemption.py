"""A metadata service is asked whether the machine is taken back; whatever it answers, or not, the node lives on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from skyward.node.supervisor import preemption_watcher as preemption
from skyward.node.supervisor.preemption_watcher import PreemptionWatcher
from skyward.wire.control import Preempting, PreemptionLikely
from skyward.wire.node_config import PreemptionWatch
from support.clock import FakeClock

ADDRESS = "127.73.1.1"
NOW = datetime(2026, 11, 22, 1, 0, 0, tzinfo=UTC)
IN_TWO_MINUTES = json.dumps({"action": "terminate", "time": "2026-11-22T01:02:00Z"})
Answer = tuple[int, str]


@dataclass
class Service:
    """A metadata service on this machine.

    Attributes:
        answers: what it answers to which path; 404 to others.
        tokens: those it takes; none are needed while it is None.
        asked: paths it was asked for, in order.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    tokens: list[str] | None = None
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""
    issued: int = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> Answer:
        self.asked.append(handler.path)
        if handler.command == "PUT":
            if handler.path != "/token" or handler.headers["ttl"] != "60" or self.tokens is None:
                return 400, "no"
            self.issued += 1
            self.tokens.append(f"token-{self.issued}")
            return 200, self.tokens[-1]
        if self.tokens is not None and handler.headers["token"] not in self.tokens:
            return 401, "no"
        return self.answers.get(handler.path, (404, "not found"))

    def watch(self) -> PreemptionWatch:
        watch = PreemptionWatch(
            endpoint=self.endpoint, notice_path="/notice", notice_time_field="time", hint_path="/hint", interval_s=5.0
        )
        if self.tokens is None:
            return watch
        return replace(watch, token_path="/token", token_request_headers={"ttl": "60"}, token_header="token")


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = service.answer(self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815 - the server's name for it

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer((ADDRESS, 0), Handler) as server:
        service.endpoint = f"http://{ADDRESS}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Listener:
    clock: FakeClock = field(default_factory=FakeClock)
    heard: list[Preempting | PreemptionLikely] = field(default_factory=list)
    now_s: float = NOW.timestamp()

    @asynccontextmanager
    async def watching(self, watch: PreemptionWatch, **environ: str) -> AsyncGenerator[PreemptionWatcher]:
        tell, now = self.heard.append, lambda: self.now_s
        watcher = PreemptionWatcher(watch, tell=tell, environ=environ, clock=self.clock, now=now)
        running = asyncio.ensure_future(watcher.run())
        try:
            yield watcher
            assert not running.done(), "it never ends by itself"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def hear(self) -> None:
        async with asyncio.timeout(10):
            while not self.heard:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.001)

    async def looks(self, count: int) -> None:
        """Wait until there were so many more."""
        count += len(self.clock.slept_s)
        async with asyncio.timeout(10):
            while len(self.clock.slept_s) < count:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.001)


@pytest.fixture
def listener() -> Listener:
    return Listener()


async def test_a_notice_is_told_once_with_the_time_that_is_left(service: Service, listener: Listener) -> None:
    async with listener.watching(service.watch()) as watcher:
        await listener.looks(2)
        assert listener.heard == []
        assert watcher.news() == []
        service.answers["/notice"] = (200, IN_TWO_MINUTES)
        await listener.hear()
        await listener.looks(2)

    assert listener.heard == [Preempting(seconds_left=120)]
    assert set(listener.clock.slept_s) == {5.0}
    assert service.asked.count("/notice") < len(listener.clock.slept_s), "there is nothing more to learn"


async def test_who_comes_later_hears_what_is_left_by_then(service: Service, listener: Listener) -> None:
    service.answers["/notice"] = (200, IN_TWO_MINUTES)
    async with listener.watching(service.watch()) as watcher:
        await listener.hear()
        listener.now_s += 50
        assert watcher.news() == [Preempting(seconds_left=70)]
        listener.now_s += 100
        assert watcher.news() == [Preempting(seconds_left=0.0)]


@pytest.mark.parametrize(
    ("said", "left_s"),
    [
        ({"time": "2026-11-22T01:02:00Z"}, 120),
        ({"time": "2026-11-22T03:02:00+02:00"}, 120),
        ({"time": "2026-11-22T01:02:00"}, 120),
        ({"time": "2026-11-22T00:59:00Z"}, 0),
        ({"time": "soon"}, 120),
        ({"time": 17}, 120),
        ({"time": None}, 120),
        ({}, 120),
    ],
)
async def test_a_notice_counts_whatever_time_it_says(
    service: Service, listener: Listener, said: object, left_s: float
) -> None:
    service.answers["/notice"] = (200, json.dumps(said))
    async with listener.watching(service.watch()):
        await listener.hear()

    assert listener.heard == [Preempting(seconds_left=left_s)]


@pytest.mark.parametrize(
    "answer", [(200, ""), (200, "<html>"), (200, '"terminate"'), (200, "[1]"), (500, "{}"), (403, "{}"), (200, "\xff")]
)
async def test_what_is_no_answer_of_such_a_service_is_no_notice(
    service: Service, listener: Listener, answer: Answer
) -> None:
    service.answers = {"/notice": answer, "/hint": (200, "{}")}
    async with listener.watching(service.watch()):
        await listener.looks(3)
        assert listener.heard == []
        service.answers["/notice"] = (200, IN_TWO_MINUTES)
        await listener.hear()

    assert isinstance(listener.heard[0], Preempting)


async def test_a_hint_is_told_once_and_the_notice_after_it(service: Service, listener: Listener) -> None:
    service.answers["/hint"] = (200, '{"noticeTime": "2026-11-22T01:00:00Z"}')
    async with listener.watching(service.watch()) as watcher:
        await listener.hear()
        await listener.looks(3)
        assert listener.heard == watcher.news() == [PreemptionLikely()]
        assert service.asked.count("/hint") == 1
        listener.heard.clear()
        service.answers["/notice"] = (200, IN_TWO_MINUTES)
        await listener.hear()

    assert isinstance(listener.heard[0], Preempting)


async def test_a_token_is_asked_for_once_and_again_when_it_is_too_old(service: Service, listener: Listener) -> None:
    service.tokens = []
    async with listener.watching(service.watch()):
        await listener.looks(3)
        assert service.issued == 1
        service.tokens.clear()
        await listener.looks(2)
        assert service.issued == 2
        service.answers["/notice"] = (200, IN_TWO_MINUTES)
        await listener.hear()


async def test_a_service_that_is_not_there_is_asked_until_it_is(service: Service, listener: Listener) -> None:
    watch = replace(service.watch(), endpoint=f"http://{ADDRESS}:1", token_path="/token", endpoint_env="WHERE")
    async with listener.watching(watch):
        await listener.looks(3)
        assert listener.heard == []


async def test_a_service_that_hangs_is_asked_again(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    monkeypatch.setattr(preemption, "_TIMEOUT_S", 0.02)
    with socket.create_server((ADDRESS, 0)) as silent:
        endpoint = f"http://{ADDRESS}:{silent.getsockname()[1]}"
        async with listener.watching(replace(service.watch(), endpoint=endpoint)):
            await listener.looks(2)
            assert listener.heard == []


@pytest.mark.parametrize("endpoint", ["", "nonsense", "http://", "http://host:port"])
async def test_an_address_that_is_none_does_not_end_the_node(
    service: Service, listener: Listener, endpoint: str
) -> None:
    async with listener.watching(replace(service.watch(), endpoint=endpoint)):
        await listener.looks(2)
        assert listener.heard == []


async def test_the_machines_environment_may_name_another_address(service: Service, listener: Listener) -> None:
    service.answers["/notice"] = (200, IN_TWO_MINUTES)
    elsewhere = replace(service.watch(), endpoint=f"http://{ADDRESS}:1", endpoint_env="WHERE")
    async with listener.watching(elsewhere, WHERE=service.endpoint + "/"):
        await listener.hear()
