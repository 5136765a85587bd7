"""Sockets of SSH connections: dialled over TCP or through a proxy command, and watched for a silent peer."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from skyward._concurrency.forking import keep_from_forks

__all__ = ["Dialled", "LiveSocket", "dial_command", "dial_tcp"]

_ADDRESS_TIMEOUT_S: Final = 10.0
_DIAL_POLL_S = 0.1
_COMPLAINT_CHARACTERS = 500
_TICKS: Final = 30
_IDLE_TICKS: Final = 10
_READ_BYTES = 256 << 10
_UNSENT_BYTES = 128 << 10
_LINUX_NOTSENT_LOWAT = 25  # named by Python from 3.12 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A connected socket.

    Attributes:
        socket: it.
        hang_up: to be called when it is closed.
        complaint: after that, what the command that carried it had to say.
    """

    socket: socket.socket
    hang_up: Callable[[], None] | None = None
    complaint: Callable[[], str] = str


def dial_tcp(host: str, port: int, *, deadline: float, stopped: threading.Event) -> Dialled:
    """Connect to the first address that answers; IPv4 comes first.

    Args:
        host: name or address.
        port: of TCP.
        deadline: on the monotonic clock.
        stopped: ends the attempt when set.

    Raises:
        OSError: none answered; the last one's reason.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"no host can be called {host!r}") from error
    failure: OSError = TimeoutError("it has no address")
    for family, kind, protocol, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        sock = keep_from_forks(socket.socket(family, kind, protocol))
        try:
            _connect(sock, address, min(deadline, time.monotonic() + _ADDRESS_TIMEOUT_S), stopped)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return Dialled(socket=sock)
    raise failure


def _connect(sock: socket.socket, address: object, deadline: float, stopped: threading.Event) -> None:
    sock.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        sock.connect(address)  # pyright: ignore[reportArgumentType]
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while not selector.select(_DIAL_POLL_S):
            if stopped.is_set():
                raise ConnectionAbortedError("given up")
            if time.monotonic() >= deadline:
                raise TimeoutError("no answer")
    if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def dial_command(command: str) -> Dialled:
    """Have a command of the SSH configuration's carry the connection, as its input and output.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = map(keep_from_forks, socket.socketpair())
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `hang_up`
    with theirs:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            complaints.close()
            raise

    said = ""

    def hang_up() -> None:
        nonlocal said
        process.kill()
        process.wait()
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
        complaints.close()

    return Dialled(socket=ours, hang_up=hang_up, complaint=lambda: said)


class LiveSocket:
    """What paramiko asks of a socket, over a real one.

    A link is dead when nothing has come for some time although something was asked for, or when not a byte could be
    sent for as long. Time in which this process did not run does not count.

    Args:
        sock: connected; owned from now on.
        silence_s: that time.
        gate: see :class:`~skyward.transport._pump.Pump`.
        on_close: called once, after the socket is closed.

    Attributes:
        on_idle: called each time a third of it has passed and nothing has come, in the thread that reads: to ask for an
            answer. None means that silence is no reason to worry yet.
        reason: why the link was given up here; empty if it was not.
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
        self._socket = sock
        self._gate = gate or threading.Lock()
        self._gate_keeper = 0
        self._on_close = on_close
        self._closed = False  # paramiko asks for it by this name
        self._silent_ticks = 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._unread = self._buffer[:0]

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def settimeout(self, seconds: float | None) -> None:
        """Changes nothing: reads wait for a thirtieth of that time."""

    def getpeername(self) -> object:
        """The address at the other end."""
        return self._socket.getpeername()

    def recv(self, nbytes: int) -> bytes:
        """Up to ``nbytes``; none at the end.

        Raises:
            TimeoutError: nothing has come for a while; ask again.
            ConnectionAbortedError: nothing has come for too long.
            OSError: the connection is broken.
        """
        if not self._unread:
            self._unread = self._buffer[: self._receive()]
        chunk = bytes(self._unread[:nbytes])
        self._unread = self._unread[nbytes:]
        return chunk

    def send(self, data: bytes) -> int:
        """All of it.

        Raises:
            ConnectionAbortedError: the other end took nothing for too long.
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
                    self._give_up("took nothing")
        return len(data)

    def abort(self, reason: str) -> None:
        """End the connection for both directions, in whatever thread they are used."""
        self.reason = self.reason or reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def shut_gate(self) -> None:
        """Let nobody send on a channel, until this thread opens the gate again or closes the socket."""
        self._gate.acquire()
        self._gate_keeper = threading.get_ident()

    def open_gate(self) -> None:
        """Undo it, if this thread has done it."""
        if self._gate_keeper == threading.get_ident():
            self._gate_keeper = 0
            self._gate.release()

    def close(self) -> None:
        """Idempotent."""
        self.open_gate()
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits in it
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
        if self.on_idle is None:
            return
        self._silent_ticks += 1
        if self._silent_ticks >= _TICKS:
            self._give_up("did not answer")
        if self._silent_ticks % _IDLE_TICKS == 0:
            self.on_idle()

    def _give_up(self, what: str) -> None:
        self.abort(f"the other end {what} for {self._silence_s:g} s")
        raise ConnectionAbortedError(errno.ECONNABORTED, self.reason)


def _tune(sock: socket.socket, tick_s: float) -> None:
    """Waits of a tick, made by the system and not by Python; little in the system's hands, so that a small message need
    not wait behind megabytes of a large one.
    """
    sock.settimeout(None)
    tick = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _LINUX_NOTSENT_LOWAT, _UNSENT_BYTES)
