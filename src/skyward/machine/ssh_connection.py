"""Shared SSH connections: one per machine, opened on first use, opened again after a loss; and their sending thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import logging
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from skyward.base.descriptors import keep_from_forks
from skyward.errors import AuthenticationError, UnreachableError
from skyward.machine.paramiko_parts import (
    WINDOW_BYTES,
    Channel,
    Client,
    StaleConnectionError,
    open_channel,
    take_output,
)
from skyward.machine.ssh_config import SSHTarget, route

if TYPE_CHECKING:
    from skyward.machine.ssh_login import SSHSession

log = logging.getLogger("skyward.machine")


CHUNK_BYTES: Final = (32 << 10) - 64
"""Payload bytes that fit into one packet of OpenSSH's."""
# Then the other streams are served: a small call must not wait for a large file.
CHUNKS_IN_TURN: Final = 2
"""Number of chunks that a stream sends at a time."""
ACKNOWLEDGE_BYTES: Final = WINDOW_BYTES // 8
"""Received bytes after which a stream opens the machine's window again."""

_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.032
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s, so that closing sends a reset
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Step(enum.Enum):
    """Outcome of one attempt to send."""

    MOVED = enum.auto()
    """Some bytes were sent and more are left: call again after the other streams."""
    BLOCKED = enum.auto()
    """The peer accepts nothing now. paramiko gives no signal for its readiness: call again after a pause."""
    DONE = enum.auto()
    """Nothing is left to send."""


class Pump:
    """Thread that sends a little of each stream at a time, until :meth:`stop`. Its callbacks must not block.

    Args:
        name: name of the thread.

    Attributes:
        gate: lock, held to send on a channel, and by paramiko's thread while it answers that a channel was closed.
            The server ends the whole connection when bytes for a channel follow that answer.
    """

    def __init__(self, name: str) -> None:
        self.gate = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, int] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._trying: dict[Callable[[], Step], None] = {}
        self._held: set[object] = set()
        self._pause_s = _SHORTEST_PAUSE_S
        self._woken = False
        self._stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.settimeout(0)  # `request` must never block
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._wake_up)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def request(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the pump's thread, soon. From any thread; takes no lock."""
        self._requests.append(action)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # stopped, or the buffer is full: it wakes up in any case
                self._wake_out.send(b"\0")

    def keep_trying(self, step: Callable[[], Step]) -> None:
        """Call ``step`` until it is done. To be used in the pump's thread."""
        self._trying[step] = None
        self._pause_s = _SHORTEST_PAUSE_S

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready`` whenever one of ``events`` holds; 0 ends that. To be used in the pump's thread."""
        known = self._watched.get(sock, 0)
        if events == known:
            return
        if not events:
            del self._watched[sock]
            self._selector.unregister(sock)
            return
        self._watched[sock] = events
        if known:
            self._selector.modify(sock, events, ready)
        else:
            self._selector.register(sock, events, ready)

    def hold(self, stream: object) -> None:
        """Keep a stream alive until :meth:`let_go`. From any thread."""
        # paramiko refers to its channels weakly, so a waiting stream could be collected together with its channel.
        self._held.add(stream)

    def let_go(self, stream: object) -> None:
        """Release a stream that has ended."""
        self._held.discard(stream)

    def stop(self) -> None:
        """End the thread once earlier requests are performed, and wait for it, except in it. Idempotent."""
        self._stopping = True
        self.request(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        limit_s: float | None = None
        while not self._stopping or self._requests:
            for key, events in self._selector.select(limit_s):
                _guarded(lambda key=key, events=events: key.data(events))
            self._woken = False  # before the requests are taken: a later one wakes the thread again
            while self._requests:
                _guarded(self._requests.popleft())
            limit_s = self._try_all()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _try_all(self) -> float | None:
        """Call every step once; return the pause before the next round, None for no next round."""
        moved = False
        for step in tuple(self._trying):
            outcome = _guarded(step)
            moved = moved or outcome is Step.MOVED
            if outcome not in {Step.MOVED, Step.BLOCKED}:
                self._trying.pop(step, None)
        if not self._trying:
            return None
        if moved:
            self._pause_s = _SHORTEST_PAUSE_S
            return 0
        # All are blocked: poll at 1 ms to 32 ms, as a closed window must not cost a whole processor.
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _wake_up(self, _events: int) -> None:
        self._wake_in.recv(4096)


def _guarded(action: Callable[[], Step | None]) -> Step | None:
    try:
        return action()
    except BaseException:  # a failure of one stream must not end the others
        log.exception("a stream of an SSH connection failed")
        return None


class Tunnel:
    """One forwarded connection: bytes and ends of stream, both ways, between a socket and a channel.

    paramiko's thread writes bytes of the machine to the socket; the pump's thread writes only those that the socket
    did not accept at once. Bytes for the machine are read no faster than the channel accepts them.

    Args:
        pump: the sending thread.
        sock: the local end; owned from now on.
        channel: the remote end; owned from now on.
    """

    def __init__(self, pump: Pump, sock: socket.socket, channel: Channel) -> None:
        sock.settimeout(0)
        if sock.family in (
            socket.AF_INET,
            socket.AF_INET6,
        ):  # not a socket pair, which leads to a jump host
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.settimeout(0)
        self._pump = pump
        self._socket = sock
        self._channel = channel
        self._lock = threading.Lock()
        self._unwritten: deque[memoryview] = deque()
        self._unsent = b""
        self._taken_bytes = 0
        self._called = True  # so that nothing is requested before this object is complete
        self._broken = False
        self._local_ended = False
        self._remote_ended = False
        self._end_passed = False
        self._over = False
        pump.hold(self)
        self._buffer = take_output(channel, "in_buffer", deliver=self._arrive, end=self._finish, wake=self._call)
        pump.request(self._attend)

    # in paramiko's thread

    def _arrive(self, data: bytes) -> None:
        with self._lock:
            if self._broken or self._over:
                return
            written = 0
            # At once, in this thread: the way through the pump's would cost a thread switch.
            if not self._unwritten:
                try:
                    written = self._socket.send(data)
                except BlockingIOError:
                    written = 0
                except OSError:
                    self._broken = True
            self._taken_bytes += written
            if written < len(data):
                self._unwritten.append(memoryview(data)[written:])
                self._call()
            elif self._taken_bytes >= ACKNOWLEDGE_BYTES:
                self._call()

    def _finish(self) -> None:
        self._remote_ended = True
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._pump.request(self._attend)

    # in the pump's thread

    def abort(self) -> None:
        """Break both ends."""
        self._broken = True
        self._settle()

    def _attend(self) -> None:
        self._called = False
        if not self._over:
            self._buffer.drain()
        self._acknowledge()
        self._settle()

    def _ready(self, events: int) -> None:
        if events & _WRITE:
            self._write()
            self._acknowledge()
        if events & _READ:
            self._read()
        self._settle()

    def _write(self) -> None:
        with self._lock:
            while self._unwritten and not self._broken:
                chunk = self._unwritten[0]
                try:
                    written = self._socket.send(chunk)
                except BlockingIOError:
                    return
                except OSError:
                    self._broken = True
                    return
                self._taken_bytes += written
                if written < len(chunk):
                    self._unwritten[0] = chunk[written:]
                else:
                    self._unwritten.popleft()

    def _acknowledge(self) -> None:
        """Open the channel's window by the bytes that the socket has accepted."""
        # Only now, not on receipt: else a slow reader here would let megabytes pile up in memory.
        with self._lock:
            if self._over or self._taken_bytes < ACKNOWLEDGE_BYTES:
                return
            taken_bytes, self._taken_bytes = self._taken_bytes, 0
        self._use(lambda: self._channel.recv(taken_bytes))

    def _read(self) -> None:
        for _ in range(CHUNKS_IN_TURN):
            try:
                self._unsent = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True
                return
            if not self._unsent:
                self._local_ended = True
                self._use(self._channel.shutdown_write)
                return
            if self._send() is not Step.DONE:
                self._pump.keep_trying(self._send_on)
                return

    def _send_on(self) -> Step:
        step = self._send()
        self._settle()
        return step

    def _send(self) -> Step:
        while self._unsent and not self._over and not self._broken:
            try:
                with self._pump.gate:
                    sent = self._channel.send(self._unsent)
            except TimeoutError:
                return Step.BLOCKED
            except Exception:  # SSHException, EOFError or OSError: nothing can be sent any more
                self._broken = True
                return Step.DONE
            self._broken = sent == 0
            self._unsent = self._unsent[sent:]
        self._unsent = b""
        return Step.DONE

    def _use(self, action: Callable[[], object]) -> None:
        try:
            with self._pump.gate:
                action()
        except Exception as error:  # after any exception the channel is of no further use
            log.debug("a channel broke off: %s", error)
            self._broken = True

    def _settle(self) -> None:
        """Pass on an end of stream, update the watched events, or end the tunnel; called after every change."""
        if self._over:
            return
        # Without an end of stream the channel did not finish: its connection was lost, or the machine gave it up.
        lost = self._channel.closed and not self._channel.eof_received
        if self._broken or lost:
            self._end(reset=True)
            return
        if self._remote_ended and not self._unwritten and not self._end_passed:
            self._end_passed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if self._end_passed and (self._local_ended or self._channel.closed):
            self._end(reset=False)
            return
        reading = not self._local_ended and not self._unsent
        self._pump.watch(self._socket, _READ * reading | _WRITE * bool(self._unwritten), self._ready)

    def _end(self, *, reset: bool) -> None:
        self._over = True
        self._pump.let_go(self)
        self._pump.watch(self._socket, 0, self._ready)
        if reset:  # linger 0: the local program must see an error, not a regular end of the stream
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
        self._use(self._channel.close)


T = TypeVar("T")
Dial: TypeAlias = Callable[[str, int], socket.socket]
Connect: TypeAlias = (
    "Callable[[SSHTarget, Dial | None, threading.Event, Callable[[str], None], threading.Lock], SSHSession]"
)

_THREADS = 4
_REFUSED_FOR_S = 2.0  # a refusal answers callers for so long without another attempt
_COMMANDS = 8  # of the 10 sessions that sshd allows on a connection
_BACKLOG = 512
_OPENING_S = 10.0
"""Limit for opening one forwarded connection. Whoever dials gives up before, and two that hang keep out all others."""
_POLL_S = 0.1


class FutureSemaphore:
    """Semaphore whose acquisition is a future. Thread-safe; no thread blocks in it.

    Args:
        number: how many may hold it at a time.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._waiting: deque[Future[None]] = deque()

    def acquire(self) -> Future[None]:
        """Return a future that is done once the semaphore is held, in the order of the calls; it may be cancelled."""
        grant: Future[None] = Future()
        with self._lock:
            self._waiting.append(grant)
        self._grant(0)
        return grant

    def release(self) -> None:
        """Let the next caller have it."""
        self._grant(1)

    def _grant(self, freed: int) -> None:
        granted: list[Future[None]] = []
        with self._lock:
            self._free += freed
            while self._waiting and self._free:
                grant = self._waiting.popleft()
                if grant.set_running_or_notify_cancel():
                    self._free -= 1
                    granted.append(grant)
        for grant in granted:  # outside of the lock: a callback of the future may release at once
            grant.set_result(None)


class SSHConnection:
    """Shared SSH connection to one machine; opened lazily, reconnects by itself. Thread-safe.

    Its threads: paramiko's, the pump's, and at most four for blocking work, which is to connect and to open channels.
    One more thread asks a silent machine for an answer, however busy the four are.

    Args:
        way: the jump hosts, then the machine itself. For a machine alone, the SSH configuration names the jump hosts.
        connections: source of the connections to the jump hosts.

    Attributes:
        target: the machine, at its present address.
        pump: the sending thread.
        commands: limit on the commands that run at a time; acquired for each.
    """

    def __init__(self, way: tuple[SSHTarget, ...], connections: SSHConnections) -> None:
        self.target = way[-1]
        name = f"skyward-ssh {self.target}"
        self.pump = Pump(name)
        self.commands = FutureSemaphore(_COMMANDS)
        # A port that does not answer keeps a thread waiting; the other half stays free for commands.
        self._openings = FutureSemaphore(_THREADS // 2)
        self._before = way[:-1]
        self._connections = connections
        self._jump: SSHConnection | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._outdated = threading.Event()
        """Set once :attr:`target` was replaced, or the connection closed: ends the attempt that dials it."""
        self._session: SSHSession | None = None
        self._attempt: Future[SSHSession] | None = None
        self._last_error = ""
        self._refused: tuple[float, BaseException] | None = None
        self._asking: Future[None] | None = None
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._listening: Counter[tuple[str, int]] = Counter()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self._asker = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def connected(self) -> bool:
        """True while the connection is open, as far as is known."""
        session = self._session
        return session is not None and session.alive

    @property
    def last_error(self) -> str:
        """Reason of the last failed attempt, or of the last connection's end; empty if there is none."""
        session = self._session
        if session is not None and not session.alive:
            return session.socket.reason or "the machine closed the connection"
        return self._last_error

    def perform(self, action: Callable[[Client], T]) -> Future[T]:
        """Connect if necessary, then call ``action``, which may block, in one of the connection's threads.

        If it raises StaleConnectionError, it is called once more over a new connection. Other exceptions become the
        future's exception.
        """
        outcome: Future[T] = Future()
        self._begin().add_done_callback(lambda session: self._hand_over(session, action, outcome))
        return outcome

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Return the local address of the machine's ``host:port``, open until :meth:`unlisten` was called as often.

        Raises:
            UnreachableError: this connection was closed.
        """
        with self._lock:
            if self._closing.is_set():
                raise _closed_error(self.target)
            listener = self._listeners.get((host, port))
            if listener is None:
                listener = keep_from_forks(socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG))
                listener.settimeout(0)
                self._listeners[host, port] = listener
                self.pump.request(lambda: self._watch(listener, host, port))
            self._listening[host, port] += 1
            return ("127.0.0.1", int(listener.getsockname()[1]))

    def unlisten(self, host: str, port: int) -> None:
        """Drop one use of a port of :meth:`listen`; the last one closes the port. Accepted connections live on."""
        with self._lock:
            self._listening[host, port] -= 1
            listener = None if self._listening[host, port] > 0 else self._listeners.pop((host, port), None)
        if listener is not None:
            self.pump.request(lambda: self._unwatch(listener))

    def dial(self, host: str, port: int, stopped: threading.Event) -> socket.socket:
        """Return a connection from the machine to ``host:port``. Blocks, until ``stopped`` is set at most.

        Raises:
            UnreachableError: ``stopped`` was set.
            Exception: the failure to connect to the machine, or from it.
        """
        ours, theirs = map(keep_from_forks, socket.socketpair())
        opening = self.perform(lambda client: self._tunnel(client, theirs, host, port))
        try:
            while not concurrent.futures.wait([opening], _POLL_S).done:
                if stopped.is_set():
                    opening.cancel()
                    raise UnreachableError(f"closed while connecting to {host} port {port} by way of {self.target}")
            opening.result()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return ours

    def move(self, target: SSHTarget) -> None:
        """Dial the same machine at another address from now on; an attempt at the former one ends, and fails.

        Forwards keep their local ports. An open connection stays: its end shows if the machine is still there.
        """
        with self._lock:
            self.target = target
            self._refused = None
            outdated, self._outdated = self._outdated, threading.Event()
            if self._closing.is_set():
                self._outdated.set()
        outdated.set()

    def close(self) -> None:
        """End the connection, the forwards and the threads, and wait for their end. Idempotent."""
        with self._lock:
            self._closing.set()
            self._outdated.set()
            listeners = tuple(self._listeners.values())
            self._listeners.clear()
        for listener in listeners:
            self.pump.request(lambda listener=listener: self._unwatch(listener))
        self._hang_up()
        self._executor.shutdown(cancel_futures=True)
        self._asker.shutdown(cancel_futures=True)
        self._hang_up()  # again, as an attempt may have succeeded since the first time
        self.pump.stop()
        if self._jump is not None:
            self._connections.release(self._jump)
            self._jump = None

    # in the pump's thread

    def _watch(self, listener: socket.socket, host: str, port: int) -> None:
        def ready(_events: int) -> None:
            if self._accept(listener, host, port) is Step.BLOCKED:
                self.pump.watch(listener, 0, ready)
                self.pump.keep_trying(accept)

        def accept() -> Step:
            step = self._accept(listener, host, port)
            if step is Step.DONE and listener.fileno() >= 0:
                self.pump.watch(listener, selectors.EVENT_READ, ready)
            return step

        self.pump.watch(listener, selectors.EVENT_READ, ready)

    def _unwatch(self, listener: socket.socket) -> None:
        self.pump.watch(listener, 0, lambda _events: None)
        listener.close()

    def _accept(self, listener: socket.socket, host: str, port: int) -> Step:
        try:
            sock = keep_from_forks(listener.accept()[0])
        except BlockingIOError:
            return Step.DONE
        except OSError as error:
            if listener.fileno() < 0:  # closed by `_unwatch`
                return Step.DONE
            # This process has too many open files (EMFILE). The loop must survive that: the connection waits in the
            # backlog, and another attempt is made soon.
            log.debug("a connection to port %s of %s cannot be accepted yet: %s", port, self.target, error)
            return Step.BLOCKED
        self._openings.acquire().add_done_callback(lambda _: self._open(sock, host, port))
        return Step.DONE

    def _open(self, sock: socket.socket, host: str, port: int) -> None:
        opening = self.perform(lambda client: self._tunnel(client, sock, host, port))
        opening.add_done_callback(lambda _: self._openings.release())
        opening.add_done_callback(lambda opening: _reset_if_failed(opening, sock, f"port {port} of {self.target}"))

    # in one of the connection's threads

    def _tunnel(self, client: Client, sock: socket.socket, host: str, port: int) -> None:
        channel = open_channel(client, "direct-tcpip", (host, port), timeout_s=_OPENING_S)
        Tunnel(self.pump, sock, channel)

    def _connect(self) -> SSHSession:
        with self._lock:
            target, outdated = self.target, self._outdated
        try:
            session = self._connections.connect(target, self._dialler(), outdated, self._report, self.pump.gate)
        except BaseException as error:
            self._report(str(error))
            if isinstance(error, AuthenticationError):  # servers lock out a client that is refused repeatedly
                self._refused = (time.monotonic() + _REFUSED_FOR_S, error)
            raise
        self._last_error = ""
        session.socket.on_idle = lambda: self._ask(session)
        self._session = session
        return session

    def _report(self, why: str) -> None:
        self._last_error = why

    def _dialler(self) -> Dial | None:
        """Return the function that dials by way of the last jump host; None without jump hosts."""
        if self._jump is None and (before := self._before or route(self.target)):
            self._jump = self._connections.acquire(before)
        jump = self._jump
        return None if jump is None else lambda host, port: jump.dial(host, port, self._closing)

    # in any thread

    def _begin(self) -> Future[SSHSession]:
        """Return the connection, or the attempt to open one, which all callers share."""
        ready: Future[SSHSession] = Future()
        with self._lock:
            if self._closing.is_set():
                ready.set_exception(_closed_error(self.target))
            elif self._session is not None and self._session.alive:
                ready.set_result(self._session)
            elif self._refused is not None and time.monotonic() < self._refused[0]:
                ready.set_exception(self._refused[1])
            else:
                if self._attempt is None or self._attempt.done():
                    self._attempt = self._executor.submit(self._connect)
                return self._attempt
        return ready

    def _hand_over(
        self,
        connecting: Future[SSHSession],
        action: Callable[[Client], T],
        outcome: Future[T],
        *,
        again: bool = False,
    ) -> None:
        """Perform the action in a thread, or fail its outcome, once ``connecting`` is done."""
        # A callback, as waiting actions would occupy the threads that open the connection.
        try:
            acting = self._executor.submit(self._act, connecting.result(), action, outcome, again=again)
        except BaseException as error:
            _fail(outcome, _closed_error(self.target) if self._closing.is_set() else error)
        else:
            acting.add_done_callback(lambda acting: self._fail_if_dropped(acting, outcome))

    def _act(self, session: SSHSession, action: Callable[[Client], T], outcome: Future[T], *, again: bool) -> None:
        if not outcome.running() and not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(action(session.client))
        except StaleConnectionError as error:
            if again:  # once only: a machine that accepts and drops connections would be dialled for ever
                outcome.set_exception(error)
            else:
                self._begin().add_done_callback(lambda session: self._hand_over(session, action, outcome, again=True))
        except BaseException as error:
            outcome.set_exception(error)

    def _fail_if_dropped(self, acting: Future[None], outcome: Future[T]) -> None:
        if acting.cancelled():  # by the shutdown of the executor: the outcome would stay pending for ever
            _fail(outcome, _closed_error(self.target))

    def _ask(self, session: SSHSession) -> None:
        """Request an answer of a machine that has been silent for a while."""
        if self._asking is None or self._asking.done():
            with contextlib.suppress(
                RuntimeError
            ):  # refused by an executor that is shut down: the connection is being closed
                self._asking = self._asker.submit(session.ask)

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _reset_if_failed(opening: Future[None], sock: socket.socket, what: str) -> None:
    error = None if opening.cancelled() else opening.exception()
    if error is not None:
        log.debug("%s does not answer: %s", what, error)  # expected while a node starts: the caller dials again
        # With this option, closing resets: the client of the forward gets an error, not an empty stream.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()


def _closed_error(target: SSHTarget) -> UnreachableError:
    return UnreachableError(f"the connection to {target} was closed: open a new transport")


def _fail(outcome: Future[T], error: BaseException) -> None:
    if outcome.running() or outcome.set_running_or_notify_cancel():
        outcome.set_exception(error)


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
            if connection is None:
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
        """Drop a reference; the last one closes the connection and waits for its threads."""
        with self._lock:
            self._users[connection] -= 1
            if self._users[connection]:
                return
            del self._users[connection]
            self._connections = {way: other for way, other in self._connections.items() if other is not connection}
        connection.close()  # without the lock, as it waits for threads, which may use other connections
