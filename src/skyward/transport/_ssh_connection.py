"""Shared SSH connections: one per machine, opened on first use, opened again after a loss."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from skyward._concurrency.descriptors import keep_from_forks
from skyward.errors import AuthenticationError, UnreachableError
from skyward.transport._paramiko import Client, StaleConnectionError, open_channel
from skyward.transport._pump import Pump, Step, Tunnel
from skyward.transport._ssh_config import route
from skyward.transport.access import SSHTarget

if TYPE_CHECKING:
    from skyward.transport._connect import SSHSession

__all__ = ["Connect", "Dial", "FutureSemaphore", "SSHConnection", "SSHConnections"]

log = logging.getLogger("skyward.transport")

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
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s, so that closing sends a reset


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
        connect: opens connections; None means :func:`skyward.transport._connect.connect`.
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
            from skyward.transport._connect import connect  # imports paramiko

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
