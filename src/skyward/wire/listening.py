"""Ports that go on accepting connections while descriptors run out or strangers flood them, and connections to them."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from skyward.base.descriptors import keep_from_forks
from skyward.base.waiting import NotYet, keep, wait_until
from skyward.wire.node_config import HANDSHAKE_S

log = logging.getLogger("skyward.wire")

T = TypeVar("T")

STRANGERS = 64
"""Number of connections of a port that may be unauthenticated; descriptors must be left for everything else."""
BACKLOG = 128
"""Number of connections that the system holds until they are accepted."""

LINE_BYTES = 1 << 16
"""asyncio's own limit of a reader."""

_PAUSE_S = 0.05


class Listener(Generic[T]):
    """Accept loop of one port, with a bound on connections that have not authenticated.

    A connection is a stranger until ``admit`` has returned. When there are too many strangers, the oldest one makes
    room: a peer of the pool needs a few round trips, an idle connection never gets further. While the process has no
    descriptor or memory left, connections wait in the system's backlog and are accepted later.

    Args:
        listening: the bound socket; its owner closes it.
        admit: authenticates a connection; takes over the socket once it returns. Raises ``OSError`` for a peer that
            fails.
        serve: uses an authenticated connection until its end, and closes it.
        strangers: number of strangers allowed at a time.
        admission_s: seconds that ``admit`` may take.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        admit: Callable[[socket.socket], Awaitable[T]],
        serve: Callable[[T], Awaitable[None]],
        strangers: int = STRANGERS,
        admission_s: float = HANDSHAKE_S,
    ) -> None:
        listening.settimeout(0)
        self._listening = listening
        self._admit = admit
        self._serve = serve
        self._bound = strangers
        self._admission_s = admission_s
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._exhausted = False

    async def run(self) -> None:
        """Accept until cancelled; strangers are dropped then, authenticated connections live on.

        Raises:
            OSError: the listening socket was closed.
        """
        try:
            while True:
                sock = await wait_until(
                    self._accept, deadline_s=math.inf, interval_s=_PAUSE_S, what="a connection that can be accepted"
                )
                self._host(sock)
        finally:
            self._drop_strangers(0)

    async def _accept(self) -> socket.socket | NotYet:
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listening)
        except OSError as error:  # no descriptor or no memory at the moment, or the peer is gone already
            if self._listening.fileno() < 0:
                raise
            # One warning for a shortage, not one for each attempt while it lasts.
            log.log(logging.DEBUG if self._exhausted else logging.WARNING, "a connection has to wait: %s", error)
            self._exhausted = True
            self._drop_strangers(self._bound // 2)  # frees descriptors: a flood of strangers may be the cause
            return NotYet(str(error))
        self._exhausted = False
        return sock

    def _host(self, sock: socket.socket) -> None:
        self._drop_strangers(self._bound - 1)
        task = asyncio.ensure_future(self._converse(sock))
        self._strangers[task] = None
        self._tasks.add(task)  # asyncio refers to tasks weakly
        task.add_done_callback(partial(self._forget, sock))

    def _drop_strangers(self, bound: int) -> None:
        """Keep at most ``bound`` of them, the newest."""
        # The oldest go: a peer of the pool authenticates within a few round trips.
        for task in tuple(self._strangers)[: max(0, len(self._strangers) - bound)]:
            del self._strangers[task]
            task.cancel()

    async def _converse(self, sock: socket.socket) -> None:
        try:
            admitted = await self._admitted(sock)
        except OSError as error:
            log.debug("a connection did not authenticate: %s", error or type(error).__name__)
            return
        try:
            await self._serve(admitted)
        except OSError as error:
            log.info("a connection was lost: %s", error)
        except Exception:
            log.exception("a connection was dropped")

    async def _admitted(self, sock: socket.socket) -> T:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._admission_s):
                return await self._admit(sock)
        except BaseException:
            sock.close()
            raise
        finally:
            self._strangers.pop(task, None)

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it began
            sock.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Both directions of an authenticated connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class StreamPort:
    """Listening port for peers with the pool's certificate, open from now until :meth:`close`.

    Args:
        address: address to listen at, on a free port.
        tls: context that refuses peers without the certificate.
        serve: uses a peer's connection until its end, and closes it.
        admission_s: seconds that a peer has to authenticate.

    Attributes:
        number: the port.
    """

    def __init__(
        self,
        address: str,
        tls: ssl.SSLContext,
        serve: Callable[[Streams], Awaitable[None]],
        *,
        admission_s: float = HANDSHAKE_S,
    ) -> None:
        self._listening = socket.create_server((address, 0), backlog=BACKLOG)
        self.number: int = self._listening.getsockname()[1]
        listener = Listener(
            self._listening, admit=lambda sock: _open_streams(sock, tls), serve=serve, admission_s=admission_s
        )
        self._accepting = asyncio.ensure_future(keep(listener.run, what=f"accepting at port {self.number}"))

    async def close(self) -> None:
        """Stop listening; authenticated connections live on. Idempotent."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listening.close()


async def dial(address: str, tls: ssl.SSLContext, *, limit: int = LINE_BYTES) -> Streams:
    """Connect to a port of the pool.

    Args:
        address: ``host:port``.
        tls: context that refuses peers without the pool's certificate.
        limit: see :class:`asyncio.StreamReader`.

    Raises:
        OSError: nobody answers there, or the peer shows no certificate of the pool.
    """
    host, _, port = address.rpartition(":")
    sock = keep_from_forks(socket.socket())
    try:
        sock.settimeout(0)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return await _open_streams(sock, tls, server_hostname=host, limit=limit)
    except BaseException:
        sock.close()
        raise


async def _open_streams(
    sock: socket.socket, tls: ssl.SSLContext, *, server_hostname: str | None = None, limit: int = LINE_BYTES
) -> Streams:
    """Authenticate the peer of a connected socket; without a host name, of an accepted one.

    Raises:
        OSError: the peer closed the connection, or shows no certificate of the pool.
    """
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader := asyncio.StreamReader(limit=limit))
    # In two steps: asyncio's single one, when cancelled before the first turn of the handshake, goes on for nobody.
    plain, _ = await loop.connect_accepted_socket(_Paused, sock)
    try:
        transport: Any = await loop.start_tls(
            plain, protocol, tls, server_side=server_hostname is None, server_hostname=server_hostname
        )
        if transport is None:
            raise ConnectionResetError("the peer hung up after the handshake")
    except BaseException:
        plain.abort()  # it would wait up to 30 s for the peer to agree
        raise
    protocol.connection_made(transport)
    return Streams(reader=reader, writer=asyncio.StreamWriter(transport, protocol, reader, loop))


class _Paused(asyncio.Protocol):
    """Protocol of a connection before its TLS handshake; reads nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.ReadTransport", transport).pause_reading()
