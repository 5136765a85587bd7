"""Lanes to workers that are slow to come up, over real sockets."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward.node.worker.lane_server
from skyward.base.waiting import wait_until
from skyward.node.worker.call_runner import ReceivedCall, SentFunction
from skyward.node.worker.lane_server import LaneServer
from skyward.scheduling.certificates import issue
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.worker_link import WorkerLink
from skyward.shipping.pickling import pack
from skyward.wire.frames import client_context, server_context
from skyward.wire.lane import Connection, Link, Session
from skyward.wire.messages import Item, Payload, SmallResults


class Owner:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.linked, self.unlinked = asyncio.Event(), asyncio.Event()

    def lane_up(self, lane: WorkerLink) -> None:
        self.events.append("up")

    def lane_linked(self, lane: WorkerLink, *, linked: bool) -> None:
        self.events.append("linked" if linked else "unlinked")
        (self.linked if linked else self.unlinked).set()

    async def lane_lost(self, lane: WorkerLink) -> None:
        self.events.append("lost")

    def lane_items(self, lane: WorkerLink, items: Sequence[Item]) -> None:
        raise AssertionError("nobody sends anything")

    def lane_failed(self, lane: WorkerLink, why: str) -> None:
        self.events.append(why)


def started(address: str, tls: ssl.SSLContext, owner: Owner) -> WorkerLink:
    node: Any = SimpleNamespace(shared_folder="")
    link = WorkerLink(WorkerId(0, 0), address, tls, owner, node)
    link.start()
    return link


@asynccontextmanager
async def linked_lane(
    folder: Path, owner: Owner | None = None, server: LaneServer | None = None
) -> AsyncIterator[tuple[WorkerLink, Owner]]:
    """A lane and its worker, in touch."""
    identity = issue()
    owner = owner or Owner()
    server = server or LaneServer(incarnation="one", blob_dirs=[folder])
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        host, port = listening.getsockname()
        serving = asyncio.ensure_future(server.serve(listening, server_context(identity)))
        lane = started(f"{host}:{port}", client_context(identity), owner)
        try:
            async with asyncio.timeout(20):
                await owner.linked.wait()
                yield lane, owner
        finally:
            await lane.close()
            serving.cancel()
            server.close()
            await asyncio.gather(serving, return_exceptions=True)


async def refuse_in_every_way(listening: socket.socket, times: int) -> None:
    """Reset connections at once, after a moment, in the middle of the handshake; or hang up in peace."""
    loop = asyncio.get_running_loop()
    for turn in range(times):
        sock, _ = await loop.sock_accept(listening)
        with sock:
            sock.settimeout(0)
            if turn % 4:
                await asyncio.sleep(random.random() * 0.003)
            if turn % 4 > 1:
                with suppress(OSError):
                    await loop.sock_recv(sock, 100)
            if turn % 4 == 3:
                with suppress(OSError):
                    await loop.sock_sendall(sock, b"\x16\x03\x03")
            if turn % 2 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("incarnations", [1, 2])
async def test_a_lane_outlasts_every_way_in_which_a_dial_can_fail(incarnations: int, tmp_path: Path) -> None:
    identity = issue()
    owner = Owner()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        listening.settimeout(0)
        host, port = listening.getsockname()
        lane = started(f"{host}:{port}", client_context(identity), owner)
        try:
            for incarnation in range(incarnations):
                refusing = asyncio.ensure_future(refuse_in_every_way(listening, 40))
                while not refusing.done():
                    lane.nudge()
                    await asyncio.sleep(0.002)
                server = LaneServer(incarnation=str(incarnation), blob_dirs=[tmp_path])
                serving = asyncio.ensure_future(server.serve(listening, server_context(identity)))
                async with asyncio.timeout(20):
                    await owner.linked.wait()
                owner.linked.clear()
                assert lane.incarnation == str(incarnation)
                serving.cancel()
                server.close()
                async with asyncio.timeout(20):
                    await owner.unlinked.wait()
                owner.unlinked.clear()
        finally:
            await lane.close()
    again = ["lost", "up", "linked", "unlinked"]
    assert owner.events == ["up", "linked", "unlinked"] + again * (incarnations - 1)


class Reader(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.results: asyncio.Queue[int] = asyncio.Queue()

    def lane_items(self, lane: WorkerLink, items: Sequence[Item]) -> None:
        for item in items:
            assert item[0] == SmallResults.CODE
            for call_id in SmallResults(*item[1:]).call_ids:
                self.results.put_nowait(call_id)


async def test_results_arrive_although_the_call_behind_them_goes_on(tmp_path: Path) -> None:
    server, owner = LaneServer(incarnation="one", blob_dirs=[tmp_path]), Reader()
    arrived = threading.Event()
    nothing = pack(((), {}), what="no arguments").data
    functions = [lambda: None] * 3 + [arrived.wait]
    async with linked_lane(tmp_path, owner, server):
        working = asyncio.ensure_future(asyncio.to_thread(server.runner.work))
        server.runner.add(
            ReceivedCall(number, SentFunction("it", Payload(), loaded=function), number, False, nothing)
            for number, function in enumerate(functions, start=1)
        )
        try:
            assert [await owner.results.get() for _ in range(3)] == [1, 2, 3]
        finally:
            arrived.set()
        assert await owner.results.get() == 4
        server.runner.close()
        await working


async def test_who_prints_waits_for_a_client_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, line, count = 1 << 20, "x" * 65_536 + "\n", 100
    monkeypatch.setattr(skyward.node.worker.lane_server, "_KEPT_LINES_BOUND", bound)
    identity, most, got = issue(), 0, 0
    server = LaneServer(incarnation="1", blob_dirs=[tmp_path])

    def call() -> None:
        nonlocal most
        with server.output.of_call(1):
            for _ in range(count):
                sink = server.output.current()
                assert sink is not None
                sink.write("stdout", line)
                server.flush()
                most = max(most, server.kept_bytes)

    def take(items: Sequence[Item]) -> None:
        nonlocal got
        got += sum(len(item[2]) for item in items)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.ensure_future(server.serve(listening, server_context(identity)))
        sock = socket.create_connection(listening.getsockname())
        sock.settimeout(0)
        client, link = Connection(sock, client_context(identity)), Link(Session(), take)
        async with asyncio.timeout(30):
            await client.handshake()
            await client.exchange(["client", 0, False])
            await client.next_message()
            calling = asyncio.ensure_future(asyncio.to_thread(call))
            await asyncio.wait([calling], timeout=2)  # time enough to write it all, if nothing held it up
            reading = asyncio.ensure_future(link.run(client))
            await calling
            while got < count:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        for task in (reading, serving):
            task.cancel()
        await asyncio.gather(reading, serving, return_exceptions=True)
        server.close()
    assert most <= 2 * bound


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def is_there() -> bool | None:
        return text in caplog.text or None

    await wait_until(is_there, deadline_s=20, interval_s=0.001, what=f"the log to say: {text}")


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    """Have every attempt of this process to open anything fail for want of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # below whatever may be closed meanwhile
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_lane_is_dialled_again_once_the_client_has_a_free_descriptor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_lane(tmp_path) as (lane, owner):
        owner.linked.clear()
        with no_descriptor_free():
            lane.cut()
            await owner.unlinked.wait()
            await logged(caplog, "cannot be dialled yet")
        await owner.linked.wait()


async def test_a_worker_accepts_again_once_it_has_a_free_descriptor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_lane(tmp_path) as (lane, owner):
        owner.linked.clear()
        address = lane._address.rpartition(":")
        with socket.socket() as early:
            early.settimeout(0)
            with no_descriptor_free():
                await asyncio.get_running_loop().sock_connect(early, (address[0], int(address[2])))
                await logged(caplog, "a connection has to wait")
        lane.cut()
        await owner.linked.wait()
