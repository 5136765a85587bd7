from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import get_args

import pytest

from skyward.base.waiting import wait_until
from skyward.errors import AuthenticationError, UnreachableError
from skyward.events import GpuMetrics, Progress
from skyward.fleet.control_client import ControlClient
from skyward.node.supervisor.control_server import ControlServer
from skyward.scheduling.certificates import issue
from skyward.wire.control import (
    Command,
    Ending,
    Fetch,
    Fetched,
    JobRunning,
    Keep,
    Kill,
    Message,
    NodeMetrics,
    Ping,
    Pong,
    Preempting,
    PreemptionLikely,
    Report,
    RunService,
    ServiceExit,
    ServiceRunning,
    Start,
    Stop,
    SupervisorTrouble,
    TimeoutWarning,
    UnfinishedJobs,
    VolumeTrouble,
    WorkerExit,
    WorkerRunning,
    from_frame,
    to_frame,
)
from skyward.wire.frames import MAX_FRAME_BYTES, FrameError, TlsIdentity, client_context, read_frame, write_frame

ADDRESS = "127.83.1.9"
RUNNING = WorkerRunning(worker=0, incarnation="a", pid=7)
MESSAGES: list[Message] = [
    Start(head_addr="127.0.0.1", total_nodes=2),
    RunService(name="dask", module="skyward_dask.on_nodes", address="127.0.0.1:1"),
    Ping(n=3),
    Kill(worker=1, incarnation="a"),
    Keep(seconds=1200.0),
    Stop(),
    Fetch(blob_id="ab", nbytes=5, path="/memory/ab", sources=("10.0.0.1:1", "10.0.0.2:1")),
    Pong(n=3),
    RUNNING,
    JobRunning(worker=0, incarnation="a", job="train/3"),
    WorkerExit(worker=0, incarnation="a", exit_code=None, signal=9, reason="killed", memory_limit_bytes=None),
    Fetched(blob_id="ab", path="/memory/ab", error="no space left", errno=28, unreached=("10.0.0.1:1",)),
    ServiceRunning(name="dask", address="127.0.0.1:1"),
    ServiceExit(name="dask", reason="exited with status 1"),
    NodeMetrics(
        cpu_percent=1.5,
        memory_used_mb=2.0,
        memory_total_mb=4.0,
        gpus=(GpuMetrics(0, "H100", 90.0, 1.0, 2.0), GpuMetrics(1, "H100", None, 1.0, 2.0)),
    ),
    Progress(label="inc", done=1, total=5, failed=1, running=2, cancelled=1),
    TimeoutWarning(seconds_left=3.5),
    UnfinishedJobs(count=2),
    VolumeTrouble(reason="no space left: \ud800"),
    SupervisorTrouble(reason="the metrics failed and were started again"),
    Preempting(seconds_left=119.5),
    PreemptionLikely(),
    Ending(reason="asked"),
]


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


class FakeNode:
    """A node's side: a real control server, nothing behind it."""

    def __init__(self) -> None:
        self.server = ControlServer(self)
        self.heard: asyncio.Queue[Command] = asyncio.Queue()
        self.clients = 0
        self.reports: list[Report] = [RUNNING]
        self.mute = False

    def joined(self) -> None:
        self.clients += 1

    def left(self) -> None:
        self.clients -= 1

    def state(self) -> list[Report]:
        return self.reports

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        self.heard.put_nowait(command)
        if isinstance(command, Ping) and not self.mute:
            reply(Pong(n=command.n))


class Ears:
    """What a client's callbacks heard."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.losses: asyncio.Queue[None] = asyncio.Queue()

    def lost(self) -> None:
        self.losses.put_nowait(None)


@asynccontextmanager
async def serving(node: FakeNode, identity: TlsIdentity) -> AsyncIterator[str]:
    port = await node.server.listen(ADDRESS, identity)
    try:
        yield f"{ADDRESS}:{port}"
    finally:
        await node.server.close()


@asynccontextmanager
async def client_of(
    address: str, identity: TlsIdentity, ears: Ears, ping_s: float = 5.0
) -> AsyncIterator[ControlClient]:
    client = ControlClient(address, identity, on_message=ears.messages.put_nowait, on_lost=ears.lost, ping_s=ping_s)
    await client.connect(5)
    try:
        yield client
    finally:
        await client.close()


def nobody_at(node: FakeNode) -> Callable[[], Awaitable[bool | None]]:
    async def probe() -> bool | None:
        return True if node.clients == 0 else None

    return probe


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


async def test_message_survives_its_frame(subtests: pytest.Subtests) -> None:
    for message in MESSAGES:
        with subtests.test(message=message):
            reader = asyncio.StreamReader()
            write_frame(SimpleNamespace(write=reader.feed_data), to_frame(message))
            assert from_frame(await read_frame(reader)) == message


@pytest.mark.parametrize(
    "frame", [{}, {"kind": "Dance"}, {"kind": "Ping"}, {"kind": "Stop", "x": 1}, {"kind": "NodeMetrics"}]
)
def test_unknown_message_is_refused(frame: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="not a control message"):
        from_frame(frame)


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        pytest.param((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "announces", id="too-large"),
        pytest.param(b"\0\0\0\1\x07", "instead of a map", id="no-map"),
        pytest.param(b"\0\0\0\1\xc1", "not msgpack", id="no-msgpack"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", "announces", id="http"),
    ],
)
async def test_bytes_that_are_no_frame_are_refused(sent: bytes, complaint: str) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(sent)

    with pytest.raises(FrameError, match=complaint):
        await read_frame(reader)


async def test_frame_too_large_for_the_peer_is_not_sent(identity: TlsIdentity) -> None:
    async with serving(FakeNode(), identity) as address, client_of(address, identity, Ears()) as client:
        with pytest.raises(FrameError, match="larger"):
            await client.send(Kill(worker=0, incarnation="x" * MAX_FRAME_BYTES))


async def test_client_hears_the_state_first_then_reports(identity: TlsIdentity) -> None:
    node, ears = FakeNode(), Ears()
    async with serving(node, identity) as address, client_of(address, identity, ears):
        assert await ears.messages.get() == RUNNING
        node.server.broadcast(TimeoutWarning(seconds_left=1))
        assert await ears.messages.get() == TimeoutWarning(seconds_left=1)


async def test_commands_and_pings_reach_the_node(identity: TlsIdentity) -> None:
    node = FakeNode()
    async with serving(node, identity) as address, client_of(address, identity, Ears()) as client:
        assert await node.heard.get() == Ping(n=1)
        await client.send(Kill(worker=1, incarnation="b"))
        assert await node.heard.get() == Kill(worker=1, incarnation="b")


async def test_client_redials_and_hears_the_state_again(identity: TlsIdentity) -> None:
    node, ears = FakeNode(), Ears()
    async with serving(node, identity) as address, client_of(address, identity, ears):
        await ears.messages.get()
        for writer in tuple(node.server._writers):
            writer.transport.abort()
        await ears.losses.get()
        assert await ears.messages.get() == RUNNING


async def test_client_that_gets_no_pongs_redials(identity: TlsIdentity) -> None:
    node, ears = FakeNode(), Ears()
    node.mute = True
    async with serving(node, identity) as address, client_of(address, identity, ears, ping_s=0.02):
        await ears.losses.get()
        node.mute = False
        while await node.heard.get() != Ping(n=1):
            continue
        while await node.heard.get() != Ping(n=2):  # on a busy machine it may have given up once more
            continue


async def test_closing_the_client_tells_the_node(identity: TlsIdentity) -> None:
    node, ears = FakeNode(), Ears()
    async with serving(node, identity) as address:
        async with client_of(address, identity, ears):
            await ears.messages.get()
            assert node.clients == 1
        await wait_until(nobody_at(node), deadline_s=5, interval_s=0.01, what="the node to notice")


async def test_stop_returns_once_the_node_has_said_goodbye(identity: TlsIdentity) -> None:
    node, ears = FakeNode(), Ears()
    async with serving(node, identity) as address, client_of(address, identity, ears) as client:
        stopping = asyncio.create_task(client.stop_node(5))
        while not isinstance(await node.heard.get(), Stop):
            continue
        node.server.broadcast(Ending(reason="asked"))
        while not isinstance(await ears.messages.get(), Ending):
            continue
        assert not stopping.done()
        await node.server.close()
        await stopping
        with pytest.raises(UnreachableError, match="ended"):
            await client.send(Ping(n=1))
        await client.stop_node(1)


async def test_stop_reaches_a_node_although_its_opening_was_cancelled_before_it_answered(identity: TlsIdentity) -> None:
    node = FakeNode()
    async with serving(node, identity) as address:
        client = ControlClient(address, identity, on_message=print, on_lost=print)
        opening = asyncio.create_task(client.connect(5))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        stopping = asyncio.create_task(client.stop_node(5))
        while not isinstance(await node.heard.get(), Stop):
            continue
        node.server.broadcast(Ending(reason="asked"))
        await node.server.close()
        await stopping
        await client.close()


async def test_stop_that_is_not_confirmed_is_an_error(identity: TlsIdentity) -> None:
    async with serving(FakeNode(), identity) as address, client_of(address, identity, Ears()) as client:
        with pytest.raises(UnreachableError, match=r"did not end within 0\.05 s"):
            await client.stop_node(0.05)


async def test_nobody_there_is_unreachable(identity: TlsIdentity) -> None:
    async with serving(FakeNode(), identity) as address:
        pass
    client = ControlClient(address, identity, on_message=print, on_lost=print)
    with pytest.raises(UnreachableError, match="to answer"):
        await client.connect(0.1)


async def test_node_of_another_pool_is_refused_at_once(identity: TlsIdentity) -> None:
    node = FakeNode()
    async with serving(node, issue()) as address:
        client = ControlClient(address, identity, on_message=print, on_lost=print)
        with pytest.raises(AuthenticationError, match="not of this pool"):
            await client.connect(5)
    assert node.heard.empty()


@asynccontextmanager
async def silent_client(address: str, identity: TlsIdentity) -> AsyncIterator[None]:
    """A client that reads nothing after the first frame."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(identity))
    assert await read_frame(reader) == to_frame(RUNNING)
    writer.transport.pause_reading()
    yield
    writer.transport.abort()


async def test_client_that_is_away_is_dropped_instead_of_filling_the_memory(identity: TlsIdentity) -> None:
    node = FakeNode()
    async with serving(node, identity) as address, silent_client(address, identity):
        (writer,) = node.server._writers
        while not writer.transport.is_closing():
            node.server.broadcast(ServiceExit(name="dask", reason="x" * 500_000))


async def test_a_client_that_is_away_keeps_no_server_from_closing(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing any more, not even goodbye."""
    monkeypatch.setattr("skyward.node.supervisor.control_server._FAREWELL_S", 0.2)
    node = FakeNode()
    async with serving(node, identity) as address, silent_client(address, identity):
        await node.server.close()

        await wait_until(nobody_at(node), deadline_s=5, interval_s=0.01, what="the node to let it go")
