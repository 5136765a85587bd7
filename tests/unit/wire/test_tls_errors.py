"""A connection that breaks harms no other one of its thread; with some releases of Python only by our doing."""

from __future__ import annotations

import _ssl
import asyncio
import ctypes
import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from distributed.comm import CommClosedError, connect, listen
from tornado.iostream import IOStream, StreamClosedError

from skyward.scheduling.certificates import issue
from skyward.wire.frames import TlsIdentity, client_context, forget_tls_errors, server_context
from skyward.wire.lane import Connection
from skyward_dask.security import PoolSecurity


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    return here, there


def break_pipe(identity: TlsIdentity) -> None:
    """Write where nobody reads, in this thread, as a library of the user's may."""
    here, there = sockets()
    with ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(server_context(identity).wrap_socket, there, server_side=True)
        broken = client_context(identity).wrap_socket(here)
    with accepting.result(), broken:
        socket.socket.shutdown(broken, socket.SHUT_WR)  # what a peer that is gone comes to, at once
        with pytest.raises(OSError):  # noqa: PT011  # which one depends on the releases of Python and OpenSSL
            broken.send(b"x")


async def test_a_broken_pipe_elsewhere_is_no_error_of_ours() -> None:
    identity = issue()
    here, there = sockets()
    client = Connection(here, client_context(identity))
    server = Connection(there, server_context(identity), server_side=True)
    try:
        await asyncio.gather(client.handshake(), server.handshake())
        client.write("hello")
        sent = client._to_peer.read()
        break_pipe(identity)
        here.sendall(sent[:10])  # of a part of a record TLS says that there is no data, as an error
        await asyncio.sleep(0.05)
        assert server.receive() == []
        here.sendall(sent[10:])
        await asyncio.sleep(0.05)
        assert server.receive() == ["hello"]
    finally:
        client.close()
        server.close()


async def test_a_peer_that_is_gone_before_tls_begins_is_a_closed_connection() -> None:
    PoolSecurity(issue()).get_connection_args("client")
    here, there = sockets()
    there.close()
    stream = IOStream(here)
    stream.close()

    with pytest.raises(StreamClosedError):
        await stream.start_tls(False)


async def test_one_peer_that_is_gone_costs_dask_no_other() -> None:
    security = PoolSecurity(issue())
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    async with listen("tls://127.0.0.1:0", arrived.put, **security.get_listen_args("scheduler")) as listener:
        dialling = security.get_connection_args("client")
        healthy, gone = [await connect(listener.contact_address, **dialling) for _ in range(2)]
        of_healthy, of_gone = await arrived.get(), await arrived.get()
        socket.socket.shutdown(of_gone.stream.socket, socket.SHUT_WR)
        with pytest.raises(CommClosedError):
            await of_gone.write("lost")
            await of_gone.write("refused")
        reading = asyncio.create_task(of_healthy.read())
        await asyncio.sleep(0)
        await healthy.write("hello")
        assert await reading == "hello"
        for comm in (healthy, gone, of_healthy, of_gone):
            await comm.close()


def test_errors_that_openssl_holds_for_this_thread_are_forgotten() -> None:
    openssl = ctypes.CDLL(getattr(_ssl, "__file__", None))
    openssl.ERR_peek_error.restype = ctypes.c_ulong
    openssl.ERR_new()
    openssl.ERR_set_error(2, errno.EPIPE, None)  # 2: ERR_LIB_SYS
    assert openssl.ERR_peek_error()
    forget_tls_errors()
    assert not openssl.ERR_peek_error()
