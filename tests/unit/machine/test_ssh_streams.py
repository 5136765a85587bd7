"""Streams over an SSH connection, at the moments that a real server does not offer at will."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from paramiko.buffered_pipe import BufferedPipe

from skyward.machine.ssh_commands import CommandExchange
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_connection import SSHConnection, SSHConnections
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

    @property
    def closed(self) -> bool:
        self.before_state()
        return False

    def settimeout(self, seconds: float) -> None: ...

    def send(self, data: memoryview) -> int:
        self.sent.set()
        return len(data)

    def recv(self, count: int) -> bytes:
        return bytes(count)

    recv_stderr = recv

    def shutdown_write(self) -> None: ...

    def close(self) -> None: ...


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
    on_idle: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.accepts = threading.Event()
        self.accepts.set()

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
        sockets.append(FakeSocket())
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
