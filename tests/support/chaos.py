"""A TCP proxy that makes a loopback connection behave like a long, narrow or broken one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import PoolStateError

__all__ = ["ChaosProxy", "Link"]

T = TypeVar("T")

_BUFFER_BYTES: Final = 256 << 10
"""What is read at a time where nothing holds it back."""
_CHUNK_BYTES: Final = 16 << 10
"""What is sent at a time: small, so that connections share a narrow link evenly."""
_IN_FLIGHT_BYTES: Final = 16 << 20
"""What one direction of one connection may hold while it is under way: the proxy's memory is bounded by it."""
_RECEIVE_BYTES: Final = 256 << 10
"""The kernel's buffer in front of the proxy: a router has no megabytes either."""
_QUEUE_S: Final = 0.02
"""How long bytes may wait for a narrow link before their sender is held back."""
_BACKLOG: Final = 100
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_LINGER_AS_EVER: Final = struct.pack("ii", 0, 0)

_Way: TypeAlias = Literal["up", "down"]


class Link:
    """What lies between two places. Proxies that are given the same one share its bandwidth; both ways are alike.

    Attributes:
        latency_s: one way. A new connection reaches the other end after three of these, as with TCP's handshake; TCP's
            slow start is not imitated.
        bytes_per_s: each way; None means as fast as it goes.
    """

    def __init__(self, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = {"up": 0.0, "down": 0.0}

    def send(self, way: _Way, count: int) -> float:
        """Take ``count`` bytes' time of the link, after those who came before; returns the moment they have left."""
        with self._lock:
            busy_s = count / self.bytes_per_s if self.bytes_per_s else 0.0
            self._free_at_s[way] = max(self._free_at_s[way], SYSTEM_CLOCK.monotonic()) + busy_s
            return self._free_at_s[way]


class ChaosProxy:
    """Listens, and passes what it gets on to ``target`` as over ``link``. A context manager, with a thread of its own.

    It can be broken in two ways, and :meth:`heal` ends both. :meth:`cut` is a cable pulled at a machine that says so:
    connections are reset and new ones refused. :meth:`freeze` is the silent kind, a machine asleep or a Wi-Fi out of
    reach: connections stay open and nothing moves on them, new ones are accepted, as far as their opener can see, and
    never answered. (A real network would not acknowledge what is sent meanwhile; here the kernel does, until its
    buffers are full. Timers of TCP itself see nothing.)

    Args:
        address: where it listens, an address in 127.0.0.0/8.
        target: where connections lead, host and port.
        port: 0 means a free one.
        link: what is between; None means nothing is.

    Attributes:
        address: as given.
        port: where it listens, the same for its life.
        link: as given; what is changed there counts from the next byte on.
        connections: how many were accepted so far.
        bytes_up: how many bytes were sent towards ``target`` so far.
        bytes_down: the other way.
    """

    def __init__(self, address: str, target: tuple[str, int], *, port: int = 0, link: Link | None = None) -> None:
        self.link = link or Link()
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._target = target
        self._frozen = False
        self._loop = asyncio.new_event_loop()
        self._listener: socket.socket | None = None
        self._open: set[_Connection] = set()
        # Bound and never listening, it keeps the port while connections are refused.
        self._reserved = _bound(address, port)
        self.address = address
        self.port: int = self._reserved.getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def place(self) -> tuple[str, int]:
        """The address and the port."""
        return (self.address, self.port)

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until :meth:`heal`."""
        self._call(self._cut())

    def freeze(self) -> None:
        """Let nothing through, say nothing to anybody, until :meth:`heal`."""
        self._call(self._freeze())

    def heal(self, frozen: Literal["forgotten", "reset", "resumed"] = "forgotten") -> None:
        """Let new connections through again.

        Args:
            frozen: what becomes of those that were frozen. "forgotten": what they held is dropped and they stay
                silent for ever, as behind a router that has lost its table and drops what it does not know.
                "reset": as behind one that says so. "resumed": they go on where they were, as after a gap that TCP
                has survived.
        """
        self._call(self._heal(frozen))

    def close(self) -> None:
        """Reset what is open, and end. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    def _call(self, coro: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coro.close()
            raise PoolStateError("this proxy is closed")
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result()

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.address, self.port)
            self._listener.listen(_BACKLOG)
            self._listener.settimeout(0)
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Take every connection that has come by now: what it meets is decided by when it came."""
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                connection = _Connection(self._target, self.link, self._count, sock, frozen=self._frozen)
                self._open.add(connection)
                connection.task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: _Connection, _task: asyncio.Task[None]) -> None:
        self._open.discard(connection)
        connection.close()

    def _count(self, way: _Way, count: int) -> None:
        if way == "up":
            self.bytes_up += count
        else:
            self.bytes_down += count

    async def _cut(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = [connection.task for connection in self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _freeze(self) -> None:
        if self._listener is not None:
            self._accept()
        self._frozen = True
        for connection in self._open:
            connection.moving.clear()

    async def _heal(self, frozen: Literal["forgotten", "reset", "resumed"]) -> None:
        if self._listener is not None:
            self._accept()
        if self._frozen and frozen == "reset":
            await self._cut()
        for connection in self._open:
            connection.forgotten = connection.forgotten or (self._frozen and frozen == "forgotten")
            connection.moving.set()
        self._frozen = False
        await self._listen()


@dataclass(slots=True)
class _End:
    """One of a connection's two sockets."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Connection:
    """Two pipes between two sockets. ``task`` runs them, and resets both sockets when it ends."""

    def __init__(
        self,
        target: tuple[str, int],
        link: Link,
        count: Callable[[_Way, int], None],
        client: socket.socket,
        *,
        frozen: bool,
    ) -> None:
        self.moving = asyncio.Event()
        self.forgotten = False
        self._target = target
        self._link = link
        self._count = count
        self._client = client
        self._ends: list[_End] = []
        if not frozen:
            self.moving.set()
        self.task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Reset the client's socket, if the task was cancelled before it could."""
        if not self._ends:
            _reset_at_close(self._client)
            self._client.close()

    async def _run(self) -> None:
        try:
            client = await self._open(self._client)
            await SYSTEM_CLOCK.sleep(2 * self._link.latency_s)
            async with asyncio.TaskGroup() as tasks:
                up, down = _Pipe(), _Pipe()
                tasks.create_task(self._send(client, "up", up))
                await SYSTEM_CLOCK.sleep(self._link.latency_s)
                await self.moving.wait()
                if not self.forgotten:
                    target = await self._open(await _dial(self._target))
                    tasks.create_task(self._deliver(up, target))
                    tasks.create_task(self._send(target, "down", down))
                    tasks.create_task(self._deliver(down, client))
            for end in self._ends:
                end.writer.close()
                await end.writer.wait_closed()
        except* OSError:
            pass  # one side is gone, and the other learns it now
        finally:
            for end in self._ends:
                _reset(end.writer)

    async def _open(self, sock: socket.socket) -> _End:
        _reset_at_close(sock)  # cancelled in here, asyncio would close it in order, and its peer would see an end
        end = _End(*await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_AS_EVER)
        self._ends.append(end)
        return end

    async def _send(self, end: _End, way: _Way, pipe: _Pipe) -> None:
        """From the socket onto the link, no faster than the link takes it."""
        data = b"?"
        while data:
            data = await end.reader.read(_CHUNK_BYTES if self._link.bytes_per_s else _BUFFER_BYTES)
            await self.moving.wait()
            if data and self.forgotten:
                continue
            left_s = self._link.send(way, len(data))
            self._count(way, len(data))
            await pipe.put(data, left_s + self._link.latency_s)
            await _until(left_s - _QUEUE_S)

    async def _deliver(self, pipe: _Pipe, end: _End) -> None:
        """From the link into the other socket, each piece when its time has come."""
        data = b"?"
        while data:
            data, due_s = await pipe.get()
            await _until(due_s)
            await self.moving.wait()
            if self.forgotten:
                continue
            if data:
                end.writer.write(data)
                await end.writer.drain()
            elif end.writer.can_write_eof():
                end.writer.write_eof()


class _Pipe:
    """What is under way in one direction: pieces, and when each arrives. Holds back who puts too much."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue()
        self._held = 0
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, data: bytes, due_s: float) -> None:
        """Wait for room, then take it."""
        await self._room.wait()
        self._held += len(data)
        if self._held >= _IN_FLIGHT_BYTES:
            self._room.clear()
        self._pieces.put_nowait((data, due_s))

    async def get(self) -> tuple[bytes, float]:
        """The next piece, and when it arrives."""
        data, due_s = await self._pieces.get()
        self._held -= len(data)
        if self._held < _IN_FLIGHT_BYTES:
            self._room.set()
        return data, due_s


async def _until(moment_s: float) -> None:
    if (rest_s := moment_s - SYSTEM_CLOCK.monotonic()) > 0:
        await SYSTEM_CLOCK.sleep(rest_s)


async def _dial(target: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        sock.settimeout(0)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close it so that the other side sees a reset, unless it is closed already."""
    _reset_at_close(writer.get_extra_info("socket"))
    writer.transport.abort()


def _reset_at_close(sock: socket.socket) -> None:
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


def _bound(address: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    sock.bind((address, port))
    return sock
