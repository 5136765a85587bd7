"""Sockets of SSH connections: dialled over TCP or through a proxy command, with detection of dead peers."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from skyward._concurrency.descriptors import keep_from_forks
from skyward._concurrency.linux_parts import NOTSENT_LOWAT

__all__ = ["Dialled", "LiveSocket", "dial_command", "dial_tcp", "resolve"]

_ADDRESS_TIMEOUT_S: Final = 10.0
_DIAL_POLL_S = 0.1
_COMPLAINT_CHARACTERS = 500
_TICKS: Final = 30
_IDLE_TICKS: Final = 10
_READ_BYTES = 256 << 10
_UNSENT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A connected socket and its proxy command, if it has one.

    Attributes:
        socket: the socket.
        hang_up: ends the proxy command; to be called after the socket was closed.
        complaint: returns the end of the proxy command's standard error, after ``hang_up``.
        address: the machine's address, where it was dialled directly.
    """

    socket: socket.socket
    hang_up: Callable[[], None] | None = None
    complaint: Callable[[], str] = str
    address: str = ""


def resolve(host: str, port: int, family: int = socket.AF_UNSPEC) -> Sequence[tuple[Any, ...]]:
    """Return the addresses of a name, of that family, as ``socket.getaddrinfo`` does.

    Raises:
        OSError: the name has none, or no resolver answers.
    """
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no valid host name") from error


def dial_tcp(
    host: str,
    port: int,
    *,
    deadline: float,
    stopped: threading.Event,
    family: int = socket.AF_UNSPEC,
    bind: tuple[str, str] = ("", ""),
    address_s: float | None = None,
) -> Dialled:
    """Connect to the first address that answers; IPv4 comes first.

    Args:
        host: name or address.
        port: TCP port.
        deadline: time on the monotonic clock at which to give up.
        stopped: ends the attempt when set.
        family: family of addresses; all by default.
        bind: own address and interface to connect from; empty for any.
        address_s: time for one address; ten seconds by default.

    Raises:
        OSError: no address answered; the failure of the last one.
    """
    found = resolve(host, port, family)
    failure: OSError = TimeoutError("the host has no address")
    # One at a time: an address that does not answer costs up to ten seconds.
    for own_family, kind, protocol, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        sock = keep_from_forks(socket.socket(own_family, kind, protocol))
        try:
            _bind(sock, *bind)
            _connect(sock, address, min(deadline, time.monotonic() + (address_s or _ADDRESS_TIMEOUT_S)), stopped)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return Dialled(socket=sock, address=str(address[0]))
    raise failure


def _bind(sock: socket.socket, address: str, interface: str) -> None:
    """Connect from an address, or from the first one of an interface."""
    own = [each.address for each in psutil.net_if_addrs().get(interface, ()) if each.family == sock.family]
    if interface and not own and not address:
        raise OSError(errno.EADDRNOTAVAIL, f"the interface {interface} (BindInterface) has no address to connect from")
    if address or own:
        sock.bind(socket.getaddrinfo(address or own[0], None, sock.family, socket.SOCK_STREAM)[0][4])


def _connect(sock: socket.socket, address: object, deadline: float, stopped: threading.Event) -> None:
    sock.settimeout(0)  # not blocking, so that `stopped` ends the attempt within a tenth of a second
    with contextlib.suppress(BlockingIOError):
        sock.connect(address)  # pyright: ignore[reportArgumentType]
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while not selector.select(_DIAL_POLL_S):
            if stopped.is_set():
                raise ConnectionAbortedError("the connection was closed meanwhile")
            if time.monotonic() >= deadline:
                raise TimeoutError("no answer")
    if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def dial_command(command: str, *, shell: str = "/bin/sh", passes_socket: bool = False) -> Dialled:
    """Start a proxy command, whose input and output carry the connection.

    Args:
        command: the command line.
        shell: the shell that runs it.
        passes_socket: True if it connects a socket, hands that over through its output, and ends.

    Raises:
        OSError: the process cannot be started, or hands over no socket.
    """
    ours, theirs = map(keep_from_forks, socket.socketpair())
    # A file, as a pipe that nobody reads would block a talkative command.
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `hang_up`
    with theirs:
        try:
            process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],  # exec: a kill must reach the command, not a shell above it
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                start_new_session=True,  # Ctrl-C in the terminal must not end the connection before the pool is closed
            )
        except BaseException:
            ours.close()
            complaints.close()
            raise

    said = ""

    def hang_up() -> None:
        nonlocal said
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the command has started holds the connection, too
        process.wait()
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
        complaints.close()

    if passes_socket:
        with ours:
            ours.settimeout(_ADDRESS_TIMEOUT_S)
            try:
                _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
                ours = keep_from_forks(socket.socket(fileno=descriptors[0]))
            except (OSError, IndexError) as error:
                hang_up()
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, f"the proxy command passes no socket: {said}"
                ) from error
    return Dialled(socket=ours, hang_up=hang_up, complaint=lambda: said)


class LiveSocket:
    """Socket for paramiko that detects a dead peer.

    A connection is dead when the peer has not answered a request for ``silence_s``, or accepted no byte for as long.
    Time in which this process did not run does not count.

    Args:
        sock: the connected socket; owned from now on.
        silence_s: seconds without a byte until the peer counts as dead.
        gate: see :class:`~skyward.transport._pump.Pump`.
        on_close: called once, after the socket is closed.

    Attributes:
        on_idle: requests an answer; called in the reading thread after each silent third of ``silence_s``. None means
            that silence is allowed.
        reason: the reason for which this side gave the connection up; empty if it did not.
        stopped: ends reading within a tick when set; None means that only :meth:`close` does.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        silence_s: float,
        gate: threading.Lock | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        _tune(sock, silence_s / _TICKS)
        self._silence_s = silence_s
        self.on_idle: Callable[[], None] | None = None
        self.reason = ""
        self.stopped: threading.Event | None = None
        self._socket = sock
        self._gate = gate or threading.Lock()
        self._gate_keeper = 0
        self._on_close = on_close
        self._closed = False  # paramiko reads this attribute of its sockets: see test_paramiko_internals.py
        self._silent_ticks = 0
        # paramiko reads a few bytes at a time; one system call fetches many packets.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._unread = self._buffer[:0]

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing: reads always wait for one tick, a thirtieth of ``silence_s``."""

    def getpeername(self) -> object:
        """Return the address of the peer."""
        return self._socket.getpeername()

    def recv(self, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes; none at the end.

        Raises:
            TimeoutError: nothing came within a tick; call again.
            ConnectionAbortedError: nothing came for ``silence_s``, or until :attr:`stopped` was set.
            OSError: the connection is broken.
        """
        if not self._unread:
            self._unread = self._buffer[: self._receive()]
        chunk = bytes(self._unread[:nbytes])
        self._unread = self._unread[nbytes:]
        return chunk

    def send(self, data: bytes) -> int:
        """Send all of ``data``; return its length.

        Raises:
            ConnectionAbortedError: the peer accepted no byte for ``silence_s``.
            OSError: the connection is broken.
        """
        view = memoryview(data)
        stalled_ticks = 0
        while view:
            try:
                view = view[self._socket.send(view) :]
                stalled_ticks = 0
            except BlockingIOError:
                stalled_ticks += 1
                if stalled_ticks >= _TICKS:
                    self._give_up("accepted nothing")
        return len(data)

    def abort(self, reason: str) -> None:
        """End both directions of the connection, for all threads that use it."""
        self.reason = self.reason or reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def shut_gate(self) -> None:
        """Stop sending on channels until this thread opens the gate again or closes the socket."""
        self._gate.acquire()
        self._gate_keeper = threading.get_ident()

    def open_gate(self) -> None:
        """Open the gate again, if this thread has shut it."""
        if self._gate_keeper == threading.get_ident():
            self._gate_keeper = 0
            self._gate.release()

    def close(self) -> None:
        """Close the socket, and open the gate if this thread has shut it. Idempotent."""
        self.open_gate()
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close() alone would not wake a thread that waits in recv()
        self._socket.close()
        if self._on_close is not None:
            self._on_close()

    def _receive(self) -> int:
        try:
            received = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            self._stay_silent()
            raise TimeoutError from None
        self._silent_ticks = 0
        return received

    def _stay_silent(self) -> None:
        if self.stopped is not None and self.stopped.is_set():
            self.abort("the connection was closed before it was complete")
            raise ConnectionAbortedError(errno.ECONNABORTED, self.reason)
        if self.on_idle is None:
            return
        # Ticks, not a clock: after the process was stopped, or its machine asleep, the peer has not been silent.
        self._silent_ticks += 1
        if self._silent_ticks >= _TICKS:
            self._give_up("did not answer")
        if self._silent_ticks % _IDLE_TICKS == 0:
            self.on_idle()

    def _give_up(self, what: str) -> None:
        self.abort(f"the peer {what} for {self._silence_s:g} s")
        raise ConnectionAbortedError(errno.ECONNABORTED, self.reason)


def _tune(sock: socket.socket, tick_s: float) -> None:
    """Set the system's timeouts to one tick, and bound the unsent bytes that the system holds."""
    # Timeouts of the system, as those of Python cost a poll() before every call.
    sock.settimeout(None)
    tick = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A small message must not wait behind megabytes of a large one in the system's buffer.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, _UNSENT_BYTES)
