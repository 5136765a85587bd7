"""What lies between paramiko and Skyward: its private parts in use, and the socket that it reads.

paramiko itself is imported on use.
``tests/unit/machine/test_paramiko_internals.py`` fails when one of them changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import NOTSENT_LOWAT, allocate_memory, is_writable

if TYPE_CHECKING:
    import paramiko
    from paramiko.buffered_pipe import BufferedPipe

WINDOW_BYTES: Final = 4 << 20
"""Bytes that the machine may send on a channel before this side acknowledges them."""

RSA_SIGNATURES: Final = ("rsa-sha2-512", "rsa-sha2-256")
"""Algorithms for host keys of the type ``ssh-rsa``, whose own one, with SHA-1, is refused."""

_LOGGER: Final = "skyward.machine.paramiko"
_OPEN_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 20
_TICKS: Final = 30
_IDLE_TICKS: Final = 10
_SOCKET_READ_BYTES = 256 << 10
_UNSENT_BYTES = 128 << 10
_SMALL_BYTES = 16 << 10


Client: TypeAlias = "paramiko.Transport"
"""Connection on which the user is logged in."""

Channel: TypeAlias = "paramiko.Channel"
"""One stream of a connection."""


class StaleConnectionError(Exception):
    """End of the connection before the machine opened a channel: nothing was requested of it yet."""


class RefusedSessionError(Exception):
    """Refusal of one more command on this connection, for now or for good."""


def open_channel(
    client: Client, kind: str, destination: tuple[str, int] | None = None, *, timeout_s: float = _OPEN_TIMEOUT_S
) -> Channel:
    """Request a channel, and wait for it.

    Raises:
        RefusedSessionError: the machine allows no further command.
        StaleConnectionError: the connection has ended.
        Exception: paramiko's own exceptions, in all other cases.
    """
    origin = None if destination is None else ("127.0.0.1", 0)
    try:
        return client.open_channel(kind, destination, origin, window_size=WINDOW_BYTES, timeout=timeout_s)
    except Exception as error:
        # Not by the type of the exception: of two channels refused at once, paramiko gives a reason for one only.
        if client.is_active() and kind == "session":
            raise RefusedSessionError("the machine allows no further command on this connection") from error
        if client.is_active():
            raise
        raise StaleConnectionError(str(error)) from error


class ChannelBuffer:
    """Replacement of a channel's buffer (``in_buffer`` or ``in_stderr_buffer``) that delivers in paramiko's thread.

    paramiko may still be filling the buffer that was there before. That one is read until the first bytes arrive here.

    Args:
        stock: the replaced buffer.
        deliver: receives all bytes in order; must neither block nor use the channel.
        end: called at the end of the stream or the channel, also repeatedly; under the same conditions.
        wake: requests a call of :meth:`drain` in another thread, soon.
    """

    def __init__(
        self,
        stock: BufferedPipe[bytes],
        *,
        deliver: Callable[[bytes], None],
        end: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._stock: BufferedPipe[bytes] | None = stock
        self._deliver = deliver
        self._end = end
        self._wake = wake
        self._lock = threading.RLock()  # reentrant: `feed` and `close` drain first

    def drain(self) -> None:
        """Deliver the bytes in the replaced buffer."""
        with self._lock:
            while self._stock is not None:
                try:
                    data = self._stock.read(_READ_BYTES, 0.0)
                except OSError:
                    return
                if data:
                    self._deliver(data)
                else:
                    self._stock = None
                    self._end()

    def feed(self, data: bytes) -> None:
        """Deliver ``data``; called by paramiko."""
        with self._lock:
            self.drain()
            self._stock = None
            self._deliver(data)

    def close(self) -> None:
        """End the stream; called by paramiko, also repeatedly."""
        with self._lock:
            self.drain()
            self._stock = None
            self._end()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        """Return ``nbytes`` zeros: ``recv`` opens the window by their number, its only purpose here."""
        return bytes(nbytes)

    def set(self) -> None:
        """Request :meth:`drain`: bytes came into the replaced buffer. Part of its event's interface."""
        self._wake()

    def clear(self) -> None:
        """Do nothing. Part of the interface of the replaced buffer's event."""

    def __len__(self) -> int:
        return 0


def take_output(
    channel: Channel,
    buffer: str,
    *,
    deliver: Callable[[bytes], None],
    end: Callable[[], None],
    wake: Callable[[], None],
) -> ChannelBuffer:
    """Replace ``in_buffer`` or ``in_stderr_buffer`` of a channel, whose bytes are delivered from now on."""
    stock = getattr(channel, buffer)
    replacement = ChannelBuffer(stock, deliver=deliver, end=end, wake=wake)
    setattr(channel, buffer, replacement)
    stock.set_event(replacement)
    return replacement


@functools.cache
def packetizer_class() -> type[Any]:
    """Return the packetizer class for paramiko's connections; made on use, as paramiko is imported on use."""
    from paramiko.common import MSG_CHANNEL_CLOSE
    from paramiko.packet import Packetizer

    class GatedPacketizer(Packetizer):
        """Packetizer that renews keys rarely and closes the gate while the closing of a channel is answered.

        paramiko's thread calls :meth:`read_message`, answers the message, and calls it again.
        """

        # As OpenSSH does with these ciphers (RFC 4344). paramiko renews every 512 MiB, and traffic pauses meanwhile.
        REKEY_BYTES = 1 << 35

        def __init__(self, sock: LiveSocket) -> None:
            packetizer: Any = super()
            packetizer.__init__(sock)
            self._live_socket = sock
            self._period_s = 0
            self._renewed_at = 0.0

        def renew_keys_after(self, nbytes: int, seconds: int) -> None:
            """Renew keys after so many bytes or seconds; 0 leaves the usual number."""
            self.REKEY_BYTES = nbytes or self.REKEY_BYTES  # pyright: ignore[reportConstantRedefinition]
            self._period_s = seconds
            self._renewed_at = time.monotonic()

        def need_rekey(self) -> bool:
            due = bool(self._period_s) and time.monotonic() - self._renewed_at >= self._period_s
            if due:
                self._renewed_at = time.monotonic()
            return due or bool(super().need_rekey())

        def read_message(self) -> tuple[int, Any]:
            # paramiko has answered the previous message when it asks for the next one.
            self._live_socket.open_gate()
            kind, message = super().read_message()
            if kind == MSG_CHANNEL_CLOSE:
                self._live_socket.shut_gate()
            return kind, message

    return GatedPacketizer


@functools.cache
def client_class() -> type[Any]:
    """Return the class of paramiko's connections, which knows what the machine offers; made on use."""
    from paramiko import Transport
    from paramiko.kex_curve25519 import KexCurve25519

    former, name = "curve25519-sha256@libssh.org", "curve25519-sha256"
    stock: Any = Transport

    class OfferedTransport(stock):
        """Transport that keeps the machine's lists of algorithms in ``offered``.

        It has the key exchange of RFC 8731 under its name, not only under the former one, and needs no MAC in common
        where the cipher authenticates by itself, as OpenSSH does not.
        """

        _kex_info: ClassVar = {**stock._kex_info, name: KexCurve25519}  # noqa: SLF001
        _preferred_kex = tuple(
            each
            for kex in stock._preferred_kex  # noqa: SLF001
            for each in ([name, kex] if kex == former else [kex])
        )
        offered: Mapping[str, list[str]] = MappingProxyType({})

        def _really_parse_kex_init(self, m: Any, ignore_first_byte: bool = False) -> dict[str, list[str]]:  # noqa: FBT001, FBT002
            transport: Any = super()
            parsed: dict[str, list[str]] = transport._really_parse_kex_init(m, ignore_first_byte)  # noqa: SLF001
            if ignore_first_byte:  # this side's own
                return parsed
            self.offered = {field: [*names] for field, names in parsed.items() if field.endswith("_list")}
            options: Any = transport.get_security_options()
            for side in ("client", "server"):
                ciphers = parsed[f"{side}_encrypt_algo_list"]
                if "gcm" in next((cipher for cipher in options.ciphers if cipher in ciphers), ""):
                    parsed[f"{side}_mac_algo_list"] += options.digests
            return parsed

    return OfferedTransport


def renews_keys(client: Client) -> bool:
    """Return True while both sides agree on new keys: whoever sends waits for that."""
    return not client.clear_to_send.is_set()


def request_answer(client: Any, kind: str) -> None:
    """Send a request that the machine answers; do not wait for the answer."""
    from paramiko import Message
    from paramiko.common import cMSG_GLOBAL_REQUEST

    message = Message()
    message.add_byte(cMSG_GLOBAL_REQUEST)
    message.add_string(kind)
    message.add_boolean(True)  # noqa: FBT003
    client._send_user_message(message)  # noqa: SLF001  # `global_request` waits for the answer


def end_handshake(client: Any) -> None:
    """Stop the timer of a failed handshake."""
    # paramiko stops it only after success: its thread would wait for the whole timeout.
    client.packetizer.complete_handshake()


def new_client(sock: LiveSocket | Channel, host: str, *, timeout_s: float, **options: Any) -> Any:
    """Return a connection to a host over ``sock``, not started; each step of its start may take ``timeout_s``.

    paramiko's log of it goes to a logger of its own, silent unless the user has set its level.
    """
    client = client_class()(sock, **options)
    client.name = f"skyward-ssh {host}"
    client.banner_timeout = client.handshake_timeout = client.auth_timeout = timeout_s
    quiet = logging.getLogger(_LOGGER)
    if quiet.level == logging.NOTSET:
        quiet.setLevel(logging.CRITICAL)  # paramiko logs failures that are also raised, with tracebacks
    client.set_log_channel(_LOGGER)
    return client


class LiveSocket:
    """Socket for paramiko that detects a dead peer.

    A connection is dead when the peer has not answered a request for ``silence_s``, or accepted no byte for as long.
    Time in which this process did not run does not count.

    Args:
        sock: the connected socket; owned from now on.
        silence_s: seconds without a byte until the peer counts as dead.
        gate: see :class:`~skyward.machine.ssh_connection.SSHConnection`.
        on_close: called once, after the socket is closed.

    Attributes:
        on_idle: requests an answer, or returns False if that would wait for the peer; called in the reading thread
            after each silent third of ``silence_s``, and each tick after the first one until it has requested an
            answer. None means that silence is allowed.
        reason: the reason for which this side gave the connection up; empty if it did not.
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
        self.on_idle: Callable[[], bool] | None = None
        self.reason = ""
        self._socket = sock
        self._gate = gate or threading.Lock()
        self._gate_keeper = 0
        self._on_close = on_close
        self._closed = False  # paramiko reads this attribute of its sockets: see test_paramiko_internals.py
        self._silent_ticks = 0
        self._asked_at: int | None = None
        """Silent tick of the first request for an answer."""
        # paramiko reads a few bytes at a time; one system call fetches many packets.
        self._buffer = memoryview(allocate_memory(_SOCKET_READ_BYTES))
        self._unread = self._buffer[:0]

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    @property
    def is_writable(self) -> bool:
        """True if two chunks would not wait for the peer, and for a closed socket."""
        try:
            return is_writable(self._socket.fileno())
        except (OSError, ValueError):
            return True

    async def wait_writable(self) -> None:
        """Return once the socket is writable, or ended."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            # A copy: another thread may close the socket meanwhile, and the loop would watch what gets its number.
            copy = keep_from_forks(self._socket.dup())
        except OSError:  # closed already, or no descriptor is free: the caller looks again
            return
        with copy:
            loop.add_writer(copy, lambda: ready.done() or ready.set_result(None))
            try:
                await ready
            finally:
                loop.remove_writer(copy)

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing: reads always wait for one tick, a thirtieth of ``silence_s``."""

    def getpeername(self) -> object:
        """Return the address of the peer."""
        return self._socket.getpeername()

    def recv(self, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes; none at the end.

        Raises:
            TimeoutError: nothing came within a tick; call again.
            ConnectionAbortedError: nothing came for ``silence_s``.
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
        self._silent_ticks, self._asked_at = 0, None
        if received < _SMALL_BYTES:
            self._acknowledge_at_once()
        return received

    def _acknowledge_at_once(self) -> None:
        """Acknowledge the last packet now: the server sends its next small one only then (Nagle's algorithm)."""
        # Linux waits for 40 ms otherwise. The request is good for one acknowledgement.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # closed meanwhile, or no TCP
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _stay_silent(self) -> None:
        if self.on_idle is None:
            return
        # Ticks, not a clock: after the process was stopped, or its machine asleep, the peer has not been silent.
        self._silent_ticks += 1
        asked_at = self._asked_at
        if self._silent_ticks >= (_TICKS if asked_at is None else asked_at + _TICKS - _IDLE_TICKS):
            self._give_up("accepted nothing" if asked_at is None else "did not answer")
        due = self._silent_ticks % _IDLE_TICKS == 0 if asked_at is not None else self._silent_ticks >= _IDLE_TICKS
        if due and self.on_idle() and asked_at is None:
            self._asked_at = self._silent_ticks

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
