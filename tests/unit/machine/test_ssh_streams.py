"""Streams over an SSH connection, at the moments that a real server does not offer at will."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
from paramiko.buffered_pipe import BufferedPipe

from skyward.machine.ssh_commands import CommandExchange
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_connection import SSHConnection, SSHConnections, reset_on_close
from skyward.machine.ssh_login import SSHSession

DEADLINE_S = 10.0
TOKEN = b"0123456789abcdef"


class FakeChannel:
    """A channel whose bytes and end come when a test says so, as from paramiko's thread."""

    def __init__(self) -> None:
        self.in_buffer: Any = BufferedPipe()
        self.in_stderr_buffer: Any = BufferedPipe()
        self.eof_received = False
        self.before_state: Callable[[], None] = lambda: None
        self.sent = threading.Event()
        self.accepts = threading.Event()
        """Set while the machine takes bytes: else whoever sends waits for it, as in paramiko."""
        self.accepts.set()
        self.did: list[str] = []

    def _send(self, what: str) -> None:
        assert self.accepts.wait(DEADLINE_S)
        self.did.append(what)

    @property
    def closed(self) -> bool:
        self.before_state()
        return False

    def settimeout(self, seconds: float) -> None: ...

    def send(self, data: memoryview) -> int:
        self._send("data")
        self.sent.set()
        return len(data)

    def recv(self, count: int) -> bytes:
        self._send("window")
        return bytes(count)

    recv_stderr = recv

    def shutdown_write(self) -> None:
        self._send("end of input")

    def close(self) -> None:
        self._send("close")


class FakeClient:
    def __init__(self, channel: FakeChannel) -> None:
        self._channel = channel

        self.clear_to_send = threading.Event()
        self.clear_to_send.set()

    def is_active(self) -> bool:
        return True

    def open_channel(self, *_: object, **__: object) -> FakeChannel:
        return self._channel

    def close(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class FakeSocket:
    reason = ""
    on_idle: Callable[[], bool] | None = None

    def __init__(self, accepts: threading.Event) -> None:
        self.accepts = accepts

    @property
    def is_writable(self) -> bool:
        return self.accepts.is_set()

    async def wait_writable(self) -> None:
        await asyncio.to_thread(self.accepts.wait, DEADLINE_S)

    def close(self) -> None: ...


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def sockets() -> list[FakeSocket]:
    """Those of the connections, in the order of their logins."""
    return []


@pytest.fixture
def connection(channel: FakeChannel, sockets: list[FakeSocket]) -> Iterator[SSHConnection]:
    async def connect(*_: object) -> SSHSession:
        sockets.append(FakeSocket(channel.accepts))
        return SSHSession(client=cast("Any", FakeClient(channel)), socket=cast("Any", sockets[-1]))

    connections = SSHConnections(connect)
    connection = connections.acquire((SSHTarget(host="box", config_path="/dev/null"),))
    yield connection
    connections.release(connection)


def test_a_small_answer_does_not_wait_for_the_acknowledgement_of_the_one_before(
    connection: SSHConnection, channel: FakeChannel
) -> None:
    with socket.create_connection(connection.listen("127.0.0.1", 9), DEADLINE_S) as local:
        local.sendall(b"x")
        assert channel.sent.wait(DEADLINE_S)
        (tunnel,) = connection.tunnels
        assert tunnel._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_machine_that_accepts_nothing_does_not_delay_another(
    connection: SSHConnection, channel: FakeChannel, sockets: list[FakeSocket]
) -> None:
    """One loop sends to all of them."""
    other = connection._connections.acquire((SSHTarget(host="other", config_path="/dev/null"),))
    assert other.loop is connection.loop
    try:
        other.perform(lambda _: None).result(DEADLINE_S)
        sockets[0].accepts.clear()
        with socket.create_connection(other.listen("127.0.0.1", 9), DEADLINE_S) as stuck:
            stuck.sendall(b"x" * (1 << 20))
            while not other.tunnels:
                other.perform(lambda _: None).result(DEADLINE_S)
            assert connection.perform(lambda _: True).result(DEADLINE_S)
            assert not channel.sent.is_set()
            sockets[0].accepts.set()
            assert channel.sent.wait(DEADLINE_S)
    finally:
        connection._connections.release(other)


def _end_a_tunnel(connection: SSHConnection, channel: FakeChannel) -> Callable[[], None]:
    local = socket.create_connection(connection.listen("127.0.0.1", 9), DEADLINE_S)
    local.sendall(b"x")
    assert channel.sent.wait(DEADLINE_S)

    return local.close


def _break_a_tunnel(connection: SSHConnection, channel: FakeChannel) -> Callable[[], None]:
    local = socket.create_connection(connection.listen("127.0.0.1", 9), DEADLINE_S)
    local.sendall(b"x")
    assert channel.sent.wait(DEADLINE_S)
    reset_on_close(local)
    return local.close


def _read_much(connection: SSHConnection, channel: FakeChannel) -> Callable[[], None]:
    local = socket.create_connection(connection.listen("127.0.0.1", 9), DEADLINE_S)
    local.sendall(b"x")
    assert channel.sent.wait(DEADLINE_S)

    def read() -> None:
        with local:
            channel.in_buffer.feed(bytes(1 << 20))
            arrived = 0
            while arrived < 1 << 20:
                arrived += len(local.recv(1 << 20))

    return read


def _put(connection: SSHConnection, channel: FakeChannel) -> Future[object]:
    async def put() -> object:
        exchange = CommandExchange(connection, cast("Any", channel), TOKEN)
        return await exchange.complete([b"x", bytes(1 << 20)], end_input=True)

    connection.perform(lambda _: None).result(DEADLINE_S)
    return connection.submit(put)


def _cancel_a_put(connection: SSHConnection, channel: FakeChannel) -> Callable[[], None]:
    putting = _put(connection, channel)
    assert channel.sent.wait(DEADLINE_S)

    def cancel() -> None:
        putting.cancel()

    return cancel


def _complete_a_put(connection: SSHConnection, channel: FakeChannel) -> Callable[[], None]:
    _put(connection, channel)
    assert channel.sent.wait(DEADLINE_S)

    def end() -> None:
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.feed(TOKEN + TOKEN + b"0\n")

    return end


@pytest.mark.parametrize("gate_is_shut", [False, True])
@pytest.mark.parametrize(
    ("prepare", "last"),
    [
        (_end_a_tunnel, "end of input"),
        (_break_a_tunnel, "close"),
        (_read_much, "window"),
        (_cancel_a_put, "close"),
        (_complete_a_put, "close"),
    ],
)
def test_streams_of_a_machine_that_accepts_nothing_end_without_holding_up_the_loop(
    connection: SSHConnection,
    channel: FakeChannel,
    prepare: Callable[[SSHConnection, FakeChannel], Callable[[], None]],
    last: str,
    *,
    gate_is_shut: bool,
) -> None:
    act = prepare(connection, channel)
    with connection.gate if gate_is_shut else nullcontext():
        channel.accepts.clear()
        channel.did.clear()
        act()
        for _ in range(50):  # the loop goes on, with whatever the act has led to
            connection.submit(partial(asyncio.sleep, 0)).result(DEADLINE_S)
        assert not channel.did
        if gate_is_shut:
            channel.accepts.set()
            for _ in range(50):
                connection.submit(partial(asyncio.sleep, 0)).result(DEADLINE_S)
            assert not channel.did
    channel.accepts.set()
    _wait_until(lambda: last in channel.did)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_the_machine_sent_before_its_end_arrives_after_the_local_programs_end(
    connection: SSHConnection, channel: FakeChannel
) -> None:
    """The loop sees the local end while it has yet to write the machine's last bytes."""
    sent = b"x" * (16 << 20)
    with socket.create_connection(connection.listen("127.0.0.1", 9), DEADLINE_S) as local:
        local.sendall(b"x")
        assert channel.sent.wait(DEADLINE_S)
        turns = [(threading.Event(), threading.Event()) for _ in range(2)]
        for begun, over in turns:
            connection.request(partial(_hold, begun, over))
            if begun is turns[0][0]:
                assert begun.wait(DEADLINE_S)
                local.shutdown(socket.SHUT_WR)
        turns[0][1].set()
        assert turns[1][0].wait(DEADLINE_S)
        channel.in_buffer.feed(sent)
        channel.eof_received = True
        channel.in_buffer.close()
        turns[1][1].set()
        arrived = 0
        while part := local.recv(1 << 20):
            arrived += len(part)
    assert arrived == len(sent)


def _hold(begun: threading.Event, over: threading.Event) -> None:
    begun.set()
    assert over.wait(DEADLINE_S)


def test_a_status_that_arrives_with_the_end_of_the_output_counts(
    connection: SSHConnection, channel: FakeChannel
) -> None:
    def end() -> None:
        channel.before_state = lambda: None
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.feed(TOKEN + TOKEN + b"0\n")
        channel.eof_received = True

    async def exchange() -> int | None:
        return (await CommandExchange(connection, cast("Any", channel), TOKEN).complete([], end_input=False)).status

    channel.before_state = end
    assert connection.submit(exchange).result(DEADLINE_S) == 0
