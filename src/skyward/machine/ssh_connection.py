"""Shared SSH connections, one per machine, opened on first use and again after a loss; and the streams over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from skyward.base.descriptors import keep_from_forks
from skyward.base.loop import SharedLoop
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import AuthenticationError, UnreachableError
from skyward.machine.paramiko_parts import (
    WINDOW_BYTES,
    Channel,
    Client,
    RefusedSessionError,
    StaleConnectionError,
    open_channel,
    take_output,
)
from skyward.machine.ssh_config import SSHTarget, route

if TYPE_CHECKING:
    from skyward.machine.ssh_login import Dial, SSHSession

log = logging.getLogger("skyward.machine")

T = TypeVar("T")
Connect: TypeAlias = "Callable[[SSHTarget, Dial | None, Callable[[str], None], threading.Lock], Awaitable[SSHSession]]"

ACKNOWLEDGE_BYTES: Final = WINDOW_BYTES // 8
"""Received bytes after which a stream opens the machine's window again: each time costs a packet and a wake-up."""

_CHUNK_BYTES = (32 << 10) - 64
"""Payload bytes that fit into one packet of OpenSSH's."""
_CHUNKS_IN_TURN = 2
"""Chunks that a stream sends before the others: a small call must not wait for a large file."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.032
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s, so that closing sends a reset
_THREADS = 4
"""Most threads of the loop that one connection uses at a time."""
_LOOP: Final = SharedLoop("skyward-ssh", helpers=32)
"""Runs all connections of this process."""
_COMMANDS = 8  # of the 10 sessions that sshd allows on a connection
_BACKLOG = 512
_OPENING_S = 10.0
"""Limit for opening one forwarded connection. Whoever dials gives up before, and two that hang keep out all others."""
_ACCEPT_PAUSE_S = 0.03
_AUTHENTICATION_REFUSED_FOR_S = 2.0  # a refusal answers callers for so long without another attempt
_COMMANDS_REFUSED_FOR_S = 10.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0


def send_some(connection: SSHConnection, channel: Channel, data: memoryview) -> memoryview:
    """Send up to two chunks, as far as the machine accepts them now; return the rest. Never waits for the machine.

    Raises:
        Exception: nothing can be sent any more; paramiko's own exceptions.
    """
    for _ in range(_CHUNKS_IN_TURN):
        if not data or not connection.may_send or not connection.gate.acquire(blocking=False):
            break
        try:
            sent = channel.send(cast("bytes", data[:_CHUNK_BYTES]))  # paramiko takes any buffer
        except TimeoutError:
            break
        finally:
            connection.gate.release()
        if not sent:
            raise EOFError("the channel is closed")
        data = data[sent:]
    return data


async def send_all(connection: SSHConnection, channel: Channel, data: memoryview) -> None:
    """Send ``data``, and serve other streams meanwhile; raises what :func:`send_some` does."""
    pause_s = 0.0
    while data:
        await SYSTEM_CLOCK.sleep(pause_s)
        await connection.wait_writable()
        rest = send_some(connection, channel, data)
        # paramiko gives no signal for an open window. Poll at 1 ms to 32 ms: a closed one must not cost a whole
        # processor.
        pause_s = 0.0 if len(rest) < len(data) else _after(pause_s)
        data = rest


def _after(pause_s: float) -> float:
    """Return the pause that follows one in vain."""
    return min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)


class Tunnel(asyncio.Protocol):
    """One forwarded connection: bytes and ends of stream, both ways, between a socket and a channel.

    paramiko's thread writes the machine's bytes to the socket; the loop writes only what the socket did not accept at
    once. Bytes for the machine are read no faster than the channel accepts them.

    Args:
        connection: the SSH connection, in whose loop the protocol runs.
        sock: the local end, which the protocol's transport owns.
        channel: the remote end; owned from now on.
    """

    def __init__(self, connection: SSHConnection, sock: socket.socket, channel: Channel) -> None:
        channel.settimeout(0)
        self._connection = connection
        self._socket = sock
        self._channel = channel
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        """Bytes handed to the loop, and not yet accepted by the socket."""
        self._passed_bytes = 0
        """Those of them that the transport has."""
        self._accepted_bytes = 0
        """Bytes that the socket has accepted, and for which the window was not opened again."""
        self._local_ended = False
        self._output_ended = False
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with both directions."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)  # `resume_writing` is called when everything is written
        self._connection.tunnels.add(self)  # paramiko refers to its channels weakly: both would be collected
        wake = partial(self._connection.request, self._drain)
        self._buffer = take_output(self._channel, "in_buffer", deliver=self._arrive, end=self._finish, wake=wake)
        self._drain()

    # in paramiko's thread

    def _arrive(self, data: bytes) -> None:
        with self._lock:
            if self._over:
                return
            written = 0
            if not self._unwritten_bytes:
                # At once, in this thread: the way through the loop's would cost a thread switch.
                try:
                    written = self._socket.send(data)
                except BlockingIOError:
                    written = 0
                except OSError:
                    self._connection.request(self.reset)
                    return
            self._accepted_bytes += written
            if written < len(data):
                self._unwritten_bytes += len(data) - written
                self._connection.request(partial(self._write, memoryview(data)[written:]))
            elif self._accepted_bytes >= ACKNOWLEDGE_BYTES:
                self._connection.request(self._acknowledge)

    def _finish(self) -> None:
        self._connection.request(self._end_output)

    # in the connection's loop

    def reset(self) -> None:
        """Break both ends: the local program sees an error, not a regular end of the stream."""
        if not self._over:
            reset_on_close(self._socket)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Send the local program's bytes to the machine."""
        try:
            rest = send_some(self._connection, self._channel, memoryview(data))
        except Exception:  # SSHException, EOFError or OSError: nothing can be sent any more
            self.reset()
            return
        if rest:
            self._transport.pause_reading()
            self._connection.spawn(self._send_rest(rest))

    def eof_received(self) -> bool:
        """Pass on that the local program has ended its stream; keep the other direction open."""
        self._local_ended = True
        self._use(self._channel.shutdown_write)
        return not self._output_ended  # True: the other direction stays open

    def resume_writing(self) -> None:
        """Count what the transport had as accepted: all of it is written."""
        with self._lock:
            self._unwritten_bytes -= self._passed_bytes
            self._accepted_bytes += self._passed_bytes
            self._passed_bytes = 0
        self._acknowledge()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End the channel with the socket."""
        with self._lock:
            self._over = True
        self._connection.tunnels.discard(self)
        self._use(self._channel.close)

    def _drain(self) -> None:
        if not self._over:
            self._buffer.drain()

    def _write(self, data: memoryview) -> None:
        self._passed_bytes += len(data)
        self._transport.write(data)
        if not self._transport.get_write_buffer_size():
            self.resume_writing()

    async def _send_rest(self, rest: memoryview) -> None:
        try:
            await send_all(self._connection, self._channel, rest)
        except Exception:
            self.reset()
        else:
            self._transport.resume_reading()

    def _acknowledge(self) -> None:
        """Open the channel's window by the bytes that the socket has accepted."""
        # Only now, not on receipt: else a slow reader here would let megabytes pile up in memory.
        with self._lock:
            if self._over or self._accepted_bytes < ACKNOWLEDGE_BYTES:
                return
            accepted_bytes, self._accepted_bytes = self._accepted_bytes, 0
        self._use(lambda: self._channel.recv(accepted_bytes))

    def _end_output(self) -> None:
        """Pass on that the machine has ended its stream, or that the channel has ended."""
        if self._over:
            return
        self._output_ended = True
        # Without an end of stream the channel did not finish: its connection was lost, or the machine gave it up.
        if not self._channel.eof_received:
            self.reset()
        elif self._local_ended or self._channel.closed:
            self._transport.close()
        else:
            with contextlib.suppress(OSError):  # the local program has broken off meanwhile
                self._transport.write_eof()

    def _use(self, action: Callable[[], object]) -> None:
        try:
            if not self._connection.act(action):
                self._connection.spawn(self._use_later(action))
        except Exception as error:
            self._break_off(error)

    async def _use_later(self, action: Callable[[], object]) -> None:
        try:
            await self._connection.act_later(action)
        except Exception as error:
            self._break_off(error)

    def _break_off(self, error: Exception) -> None:
        """Reset: after any exception the channel is of no further use."""
        log.debug("a channel broke off: %s", error)
        self.reset()


def reset_on_close(sock: socket.socket) -> None:
    """Have the closing of a socket send a reset, so that the peer gets an error instead of an empty stream."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class SSHConnection:
    """Shared SSH connection to one machine; opened lazily, reconnects by itself. Thread-safe.

    All connections share an event loop in a thread, which never waits for a machine, and the threads of that loop for
    blocking work, which is to connect and to open channels. paramiko has a thread for each connection.

    Args:
        way: the jump hosts, then the machine itself. For a machine alone, the SSH configuration names the jump hosts.
        connections: source of the connections to the jump hosts.

    Attributes:
        target: the machine, at its present address.
        loop: the event loop of all connections.
        gate: lock, held to send on a channel, and by paramiko's thread while it answers that a channel was closed.
            The server ends the whole connection when bytes for a channel follow that answer. The loop does not wait for
            it: whoever holds it may be waiting for the machine.
        commands: limit on the commands that run at a time; to be held, in the loop, for each.
        tunnels: open forwarded connections.
    """

    def __init__(self, way: tuple[SSHTarget, ...], connections: SSHConnections) -> None:
        self.target = way[-1]
        self._loop_thread = _LOOP.acquire()
        self.loop = self._loop_thread.loop
        self.gate = threading.Lock()
        self.commands = asyncio.Semaphore(_COMMANDS)
        self.tunnels: set[Tunnel] = set()
        self._turns = asyncio.Semaphore(_THREADS)
        # A port that does not answer keeps a thread waiting; the other half stays free for commands.
        self._openings = asyncio.Semaphore(_THREADS // 2)
        self._before = way[:-1]
        self._connections = connections
        self._jump: SSHConnection | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._session: SSHSession | None = None
        self._attempt: asyncio.Task[SSHSession] | None = None
        self._last_error = ""
        self._refused: tuple[float, BaseException] | None = None
        self._listeners: dict[tuple[str, int], tuple[socket.socket, Future[None]]] = {}
        self._listening: Counter[tuple[str, int]] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def connected(self) -> bool:
        """True while the connection is open, as far as is known."""
        session = self._session
        return session is not None and session.alive

    @property
    def may_send(self) -> bool:
        """False while whoever sends would wait for the machine."""
        session = self._session
        return session is None or not session.alive or session.may_send

    @property
    def runs(self) -> bool:
        """False once the loop has ended, by the end of its last connection or because its descriptors were closed."""
        return self._loop_thread.runs

    @property
    def last_error(self) -> str:
        """Reason of the last failed attempt, or of the last connection's end; empty if there is none."""
        session = self._session
        if session is not None and not session.alive:
            return session.socket.reason or "the machine closed the connection"
        return self._last_error

    def perform(self, action: Callable[[Client], T]) -> Future[T]:
        """Do :meth:`use` from any thread."""
        return self.submit(partial(self.use, action))

    def submit(self, work: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run a coroutine function in the connection's loop, from any thread; cancel it with the future.

        The future fails with UnreachableError if the connection is closed first.
        """
        with self._lock:
            if not self._closing and self.runs:
                return asyncio.run_coroutine_threadsafe(self._run_until_closed(work), self.loop)
        closed: Future[T] = Future()
        closed.set_exception(self._closed_error())
        return closed

    def request(self, action: Callable[[], object]) -> None:
        """Call ``action`` in the loop, soon, from any thread; perhaps not at all once the connection is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(action)

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Return the local address of the machine's ``host:port``, open until :meth:`unlisten` was called as often.

        Raises:
            UnreachableError: this connection was closed.
        """
        with self._lock:
            if self._closing or not self.runs:
                raise self._closed_error()
            if (host, port) not in self._listeners:
                listener = keep_from_forks(socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG))
                listener.settimeout(0)
                # For the accepted sockets, which inherit it: asyncio leaves them to Nagle's algorithm.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                accepting = asyncio.run_coroutine_threadsafe(self._accept_all(listener, host, port), self.loop)
                self._listeners[host, port] = listener, accepting
            self._listening[host, port] += 1
            return ("127.0.0.1", int(self._listeners[host, port][0].getsockname()[1]))

    def dial(self, host: str, port: int) -> Future[socket.socket]:
        """Open a connection from the machine to ``host:port``; the future fails as connecting does."""

        async def dialled() -> socket.socket:
            ours, theirs = map(keep_from_forks, socket.socketpair())
            try:
                await self._tunnel(theirs, host, port, turn=contextlib.nullcontext())
            except BaseException:
                ours.close()
                raise
            return ours

        return self.submit(dialled)

    def unlisten(self, host: str, port: int) -> None:
        """Drop one use of a port of :meth:`listen`; the last one closes the port. Accepted connections live on."""
        with self._lock:
            self._listening[host, port] -= 1
            if not self._listening[host, port] and (host, port) in self._listeners:
                self._listeners.pop((host, port))[1].cancel()

    def move(self, target: SSHTarget) -> None:
        """Dial the same machine at another address from now on; an attempt at the former one ends, and fails.

        Forwards keep their local ports. An open connection stays: its end shows if the machine is still there.
        """
        with self._lock:
            self.target, self._refused = target, None
            attempt = self._attempt
        if attempt is not None:  # not a later one, which dials the new address
            self.request(attempt.cancel)

    def close(self) -> None:
        """End the connection and the forwards, with the last one also the loop, and wait for their end. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for listener, accepting in self._listeners.values():
                if self.runs:
                    accepting.cancel()
                else:
                    listener.close()
        self._hang_up()
        if self.runs:
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self.loop).result()
            self._hang_up()  # again, as an attempt may have succeeded since the first time
        _LOOP.release(self._loop_thread)
        if self._jump is not None:
            self._connections.release(self._jump)
            self._jump = None

    # in the loop

    async def use(self, action: Callable[[Client], T]) -> T:
        """Connect if necessary, then call ``action``, which may block, in one of the connection's threads.

        If it raises StaleConnectionError, it is called once more over a new connection: only once, since a machine that
        accepts and drops connections would be dialled for ever.
        """
        session = await self._open_session()
        async with self._turns:
            try:
                return await asyncio.to_thread(action, session.client)
            except StaleConnectionError:
                session = await self._open_session()
                return await asyncio.to_thread(action, session.client)

    async def start(self, command: Callable[[Client], T]) -> T:
        """Start a command by :meth:`use`; retry for 10 s while the machine allows no further one."""
        # sshd counts a command that has just ended until it has noticed that, so a refusal passes (MaxSessions).
        # Connect first, so that the ten seconds for refusals do not pass while the machine is dialled.
        await self._open_session()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RefusedSessionError),
            stop=stop_after_delay(_COMMANDS_REFUSED_FOR_S),
            wait=wait_exponential(_FIRST_RETRY_S, _LONGEST_RETRY_S),
            reraise=True,
        )
        return await retrying(self.use, command)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background, until the connection is closed at most."""
        return self._track(self.loop.create_task(work))

    async def wait_writable(self) -> None:
        """Return once the machine's socket takes bytes, or there is no connection."""
        session = self._session
        if session is not None and not session.socket.is_writable:
            await session.socket.wait_writable()

    def act(self, action: Callable[[], object]) -> bool:
        """Do something that sends on a channel, in a few bytes; return False if that would wait, and do nothing."""
        if not self.may_send or not self.gate.acquire(blocking=False):
            return False
        try:
            action()
        finally:
            self.gate.release()
        return True

    async def act_later(self, action: Callable[[], object]) -> None:
        """Do :meth:`act` as soon as it need not wait; never, if the connection ends before."""
        pause_s = 0.0
        while self.connected and not self.act(action):
            await SYSTEM_CLOCK.sleep(pause_s)
            pause_s = _after(pause_s)
            await self.wait_writable()  # last, as other streams fill the socket again at once

    def _track(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Have a task end with the connection."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open_session(self) -> SSHSession:
        """Return the connection; all callers share one attempt to open it."""
        if self._closing:
            raise self._closed_error()
        if self._session is not None and self._session.alive:
            return self._session
        if self._refused is not None and time.monotonic() < self._refused[0]:
            raise self._refused[1]
        if self._attempt is None or self._attempt.done():
            self._attempt = self.spawn(self._connect())
        attempt = self._attempt
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if attempt.cancelled() and not self._closing:
                raise UnreachableError(f"the machine has another address now: {self.target}") from None
            raise

    async def _connect(self) -> SSHSession:
        try:
            by_jump = await self._dialler()
            session = await self._connections.connect(self.target, by_jump, self._report, self.gate)
        except Exception as error:
            self._report(str(error))
            if isinstance(error, AuthenticationError):  # servers lock out a client that is refused repeatedly
                self._refused = (time.monotonic() + _AUTHENTICATION_REFUSED_FOR_S, error)
            raise
        self._last_error = ""
        session.socket.on_idle = session.ask
        self._session = session
        return session

    async def _dialler(self) -> Dial | None:
        """Return the function that dials by way of the last jump host; None without jump hosts."""
        if self._jump is None and (before := self._before or await asyncio.to_thread(route, self.target)):
            self._jump = self._connections.acquire(before)
        jump = self._jump
        return None if jump is None else lambda host, port: asyncio.wrap_future(jump.dial(host, port))

    def _report(self, why: str) -> None:
        self._last_error = why

    async def _run_until_closed(self, work: Callable[[], Awaitable[T]]) -> T:
        task = self._track(cast("asyncio.Task[T]", asyncio.current_task()))
        # Who has cancelled the future does not ask why the coroutine failed, and asyncio would log that.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self._closing:
            raise self._closed_error()
        try:
            return await work()
        except asyncio.CancelledError:
            if self._closing:
                raise self._closed_error() from None
            raise

    async def _accept_all(self, listener: socket.socket, host: str, port: int) -> None:
        self._track(cast("asyncio.Task[None]", asyncio.current_task()))
        with listener:
            while True:
                try:
                    sock = keep_from_forks((await self.loop.sock_accept(listener))[0])
                except OSError as error:
                    # This process has too many open files (EMFILE). The connection waits in the backlog meanwhile.
                    log.debug("a connection to port %s of %s cannot be accepted yet: %s", port, self.target, error)
                    await SYSTEM_CLOCK.sleep(_ACCEPT_PAUSE_S)
                else:
                    self.spawn(self._serve(sock, host, port))

    async def _serve(self, sock: socket.socket, host: str, port: int) -> None:
        with contextlib.suppress(Exception):  # the caller dials again
            await self._tunnel(sock, host, port, turn=self._openings)

    async def _tunnel(
        self, sock: socket.socket, host: str, port: int, *, turn: AbstractAsyncContextManager[None]
    ) -> None:
        """Join a local socket, owned from now on, with the machine's ``host:port``, when it is its turn."""
        try:
            async with turn:
                channel = await self.use(
                    lambda client: open_channel(client, "direct-tcpip", (host, port), timeout_s=_OPENING_S)
                )
            await self.loop.create_connection(lambda: Tunnel(self, sock, channel), sock=sock)
        except BaseException as error:
            log.debug("port %s of %s does not answer: %s", port, self.target, error)  # expected while a node starts
            reset_on_close(sock)
            sock.close()
            raise

    async def _end_tasks(self) -> None:
        for tunnel in tuple(self.tunnels):
            tunnel.reset()
        tasks = tuple(self._tasks)  # those that have not begun see that the connection is closed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, SYSTEM_CLOCK.sleep(0), return_exceptions=True)

    # in other threads

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _closed_error(self) -> UnreachableError:
        how = "was closed" if self._closing or self.runs else "ended with its event loop, whose descriptors were closed"
        return UnreachableError(f"the connection to {self.target} {how}: open a new transport")


class SSHConnections:
    """Connections by the way to their machines, each open until its last user releases it. Thread-safe.

    Args:
        connect: opens connections; None means :func:`skyward.machine.ssh_login.connect`.
    """

    def __init__(self, connect: Connect | None = None) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._connections: dict[tuple[SSHTarget, ...], SSHConnection] = {}
        self._users: dict[SSHConnection, int] = {}

    @property
    def connect(self) -> Connect:
        """Function that opens connections."""
        if self._connect is None:
            from skyward.machine.ssh_login import connect  # imports paramiko

            self._connect = connect
        return self._connect

    def acquire(self, way: tuple[SSHTarget, ...]) -> SSHConnection:
        """Return the connection to the last machine of ``way``; pair every call with one of :meth:`release`."""
        with self._lock:
            connection = self._connections.get(way)
            if connection is None or not connection.runs:
                connection = self._connections[way] = SSHConnection(way, self)
            self._users[connection] = self._users.get(connection, 0) + 1
            return connection

    def move(self, connection: SSHConnection, target: SSHTarget) -> None:
        """Have a connection dial the same machine at another address; see :meth:`SSHConnection.move`."""
        with self._lock:
            if connection.target == target:
                return
            connection.move(target)
            others = {way: other for way, other in self._connections.items() if other is not connection}
            # Whoever asks for the former address gets a connection of its own: another machine may be there by now.
            self._connections = {(target,): connection, **others}

    def release(self, connection: SSHConnection) -> None:
        """Drop a reference; the last one closes the connection and waits for its end."""
        with self._lock:
            self._users[connection] -= 1
            if self._users[connection]:
                return
            del self._users[connection]
            self._connections = {way: other for way, other in self._connections.items() if other is not connection}
        connection.close()  # without the lock, as it waits for threads, which may use other connections
