"""Ports under connections that never authenticate, and without descriptors."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from skyward.base.waiting import wait_until
from skyward.scheduling.certificates import issue
from skyward.wire.frames import TlsIdentity, client_context, server_context
from skyward.wire.listening import STRANGERS, StreamPort, Streams, dial

ADDRESS = "127.83.7.1"


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


async def greet(streams: Streams) -> None:
    streams.writer.write(b"welcome")
    streams.writer.close()


@asynccontextmanager
async def opened(identity: TlsIdentity, admission_s: float = 60) -> AsyncIterator[StreamPort]:
    port = StreamPort(ADDRESS, server_context(identity), greet, admission_s=admission_s)
    try:
        async with asyncio.timeout(30):
            yield port
    finally:
        await port.close()


async def use(port: StreamPort, tls: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection(ADDRESS, port.number, ssl=tls)
    try:
        return await reader.read()
    finally:
        writer.transport.abort()


async def connect(stack: ExitStack, port: StreamPort) -> socket.socket:
    sock = stack.enter_context(socket.socket())
    sock.settimeout(0)
    await asyncio.get_running_loop().sock_connect(sock, (ADDRESS, port.number))
    return sock


async def test_idle_connections_are_bounded_and_keep_nobody_of_the_pool_out(identity: TlsIdentity) -> None:
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        async with opened(identity) as port:
            idle = [await connect(stack, port) for _ in range(STRANGERS + 20)]
            assert await use(port, client_context(identity)) == b"welcome"
            for first in idle[:20]:  # the oldest made room
                assert await loop.sock_recv(first, 1) == b""
            assert await use(port, client_context(identity)) == b"welcome"
        for rest in idle[20:]:
            assert await loop.sock_recv(rest, 1) == b""


async def test_a_connection_that_does_not_authenticate_in_time_is_dropped(identity: TlsIdentity) -> None:
    with ExitStack() as stack:
        async with opened(identity, admission_s=0.05) as port:
            idle = await connect(stack, port)
            assert await asyncio.get_running_loop().sock_recv(idle, 1) == b""


async def test_a_peer_of_another_pool_is_not_served(identity: TlsIdentity) -> None:
    async with opened(identity) as port:
        stranger = client_context(issue())
        stranger.verify_mode = ssl.CERT_NONE
        with pytest.raises((OSError, ssl.SSLError)):
            assert await use(port, stranger) == b""
            raise ConnectionResetError("it was not let in, without a word")


async def test_a_port_accepts_again_once_there_is_a_free_descriptor(
    identity: TlsIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    async def has_to_wait() -> bool | None:
        return "a connection has to wait" in caplog.text or None

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        early.settimeout(0)
        async with opened(identity) as port:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                await asyncio.get_running_loop().sock_connect(early, (ADDRESS, port.number))
                await wait_until(has_to_wait, deadline_s=20, interval_s=0.001, what="the port to run out")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await use(port, client_context(identity)) == b"welcome"


def test_whenever_a_dial_is_cancelled_its_connection_is_closed(identity: TlsIdentity) -> None:
    """Every dial by asyncio alone that is cancelled in one of these turns leaves its connection open."""
    tls = client_context(identity)

    async def cancel_after(address: str, turns: int) -> None:
        dialling = asyncio.create_task(dial(address, tls))
        for _ in range(turns):
            await asyncio.sleep(0)
        dialling.cancel()
        for dialled in await asyncio.gather(dialling, return_exceptions=True):
            if isinstance(dialled, Streams):
                dialled.writer.transport.abort()

    async def cancel_many() -> None:
        async with opened(identity) as port:
            for turns in [4, 5, 6, 7, 8] * 30:
                await cancel_after(f"{ADDRESS}:{port.number}", turns)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        asyncio.run(cancel_many())
        gc.collect()
    assert [str(each.message) for each in seen] == []
