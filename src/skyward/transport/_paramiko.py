"""Everything of paramiko's that is not promised: protocols of its objects, and the private parts in use.

``tests/unit/transport/test_paramiko_internals.py`` fails when one of them changes. paramiko itself is imported on use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from skyward.transport._socket import LiveSocket

__all__ = [
    "WINDOW_BYTES",
    "Channel",
    "ChannelBuffer",
    "Client",
    "RefusedSessionError",
    "StaleConnectionError",
    "StockBuffer",
    "end_handshake",
    "open_channel",
    "packetizer_class",
    "take_errors",
    "take_output",
]

WINDOW_BYTES: Final = 4 << 20
"""How much the machine may send on a channel before this side has taken it."""

_OPEN_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 20


class StockBuffer(Protocol):
    """paramiko's buffer of what has come on a channel."""

    def set_event(self, event: Any) -> None:
        """Have ``event.set()`` called when there is something, or the end; at once if there is already."""
        ...

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:
        """What there is; nothing at the end. Raises an OSError where there is nothing yet."""
        ...


class Channel(Protocol):
    """One stream of a connection."""

    in_buffer: Any
    in_stderr_buffer: Any
    closed: bool
    eof_received: bool

    def settimeout(self, timeout: float | None) -> None:
        """0 means never to wait for the window."""
        ...

    def exec_command(self, command: str) -> None:
        """Ask for a command."""
        ...

    def send(self, s: bytes | memoryview) -> int:
        """How much went; raises TimeoutError while the window is closed, OSError or EOFError when it is all over."""
        ...

    def send_ready(self) -> bool:
        """Whether the window is open, or the channel closed."""
        ...

    def recv(self, nbytes: int) -> bytes:
        """Reads the buffer, and opens the window by as much."""
        ...

    def recv_stderr(self, nbytes: int) -> bytes:
        """Likewise."""
        ...

    def shutdown_write(self) -> None:
        """Nothing more will be sent."""
        ...

    def close(self) -> None:
        """Both directions end."""
        ...


class Client(Protocol):
    """A connection on which the user is logged in."""

    def is_active(self) -> bool:
        """Whether it is still there."""
        ...

    def open_channel(
        self,
        kind: str,
        dest_addr: tuple[str, int] | None = None,
        src_addr: tuple[str, int] | None = None,
        *,
        window_size: int | None = None,
        timeout: float | None = None,
    ) -> Channel:
        """Ask for a channel, and wait for it."""
        ...

    def global_request(self, kind: str, data: Any = None, wait: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Ask the server something."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its thread."""
        ...


class StaleConnectionError(Exception):
    """The connection had ended before the machine could open a channel: nothing was asked of it yet."""


class RefusedSessionError(Exception):
    """The machine runs no more commands on this connection, for now or at all."""


def open_channel(client: Client, kind: str, destination: tuple[str, int] | None = None) -> Channel:
    """Ask for a channel, and wait for it.

    Raises:
        RefusedSessionError: the machine allows no further command.
        StaleConnectionError: the connection has ended.
        Exception: what else paramiko raises of.
    """
    origin = None if destination is None else ("127.0.0.1", 0)
    try:
        return client.open_channel(kind, destination, origin, window_size=WINDOW_BYTES, timeout=_OPEN_TIMEOUT_S)
    except Exception as error:
        if client.is_active() and kind == "session":  # of two refused at once, one is told no reason
            raise RefusedSessionError("it allows no further command on this connection") from error
        if client.is_active():
            raise
        raise StaleConnectionError(str(error)) from error


class ChannelBuffer:
    """Stands in for a channel's buffer (``in_buffer`` or ``in_stderr_buffer``).

    The channel had a buffer of paramiko's before, and something may still be on its way into that: it is read until the
    first thing comes here.

    Args:
        stock: the buffer it replaces.
        deliver: takes what comes, in order, and must neither wait nor use the channel.
        end: called, more than once, when nothing more will come or the channel is closed; under the same conditions.
        wake: asks for :meth:`drain` to be called in another thread, soon.
    """

    def __init__(
        self,
        stock: StockBuffer,
        *,
        deliver: Callable[[bytes], None],
        end: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._stock: StockBuffer | None = stock
        self._deliver = deliver
        self._end = end
        self._wake = wake
        self._lock = threading.RLock()

    def drain(self) -> None:
        """Take what has come into the other buffer."""
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
        """Called by paramiko: this has come."""
        with self._lock:
            self.drain()
            self._stock = None
            self._deliver(data)

    def close(self) -> None:
        """Called by paramiko, more than once: nothing more will come."""
        with self._lock:
            self.drain()
            self._stock = None
            self._end()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        """For ``recv``, which counts these bytes, no more: what has been delivered is told to the sender by it."""
        return bytes(nbytes)

    def set(self) -> None:
        """The other buffer: something has come."""
        self._wake()

    def clear(self) -> None:
        """The other buffer: there is nothing."""

    def __len__(self) -> int:
        return 0


def take_output(
    channel: Channel, *, deliver: Callable[[bytes], None], end: Callable[[], None], wake: Callable[[], None]
) -> ChannelBuffer:
    """Have what comes on a channel's first stream delivered."""
    stock = channel.in_buffer
    buffer = channel.in_buffer = ChannelBuffer(stock, deliver=deliver, end=end, wake=wake)
    stock.set_event(buffer)
    return buffer


def take_errors(
    channel: Channel, *, deliver: Callable[[bytes], None], end: Callable[[], None], wake: Callable[[], None]
) -> ChannelBuffer:
    """Likewise its second one."""
    stock = channel.in_stderr_buffer
    buffer = channel.in_stderr_buffer = ChannelBuffer(stock, deliver=deliver, end=end, wake=wake)
    stock.set_event(buffer)
    return buffer


@functools.cache
def packetizer_class() -> type[Any]:
    """Return the packetizer for paramiko's connections; it is made on use, as paramiko is imported on use."""
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

        def read_message(self) -> tuple[int, Any]:
            self._live_socket.open_gate()
            kind, message = super().read_message()
            if kind == MSG_CHANNEL_CLOSE:
                self._live_socket.shut_gate()
            return kind, message

    return GatedPacketizer


def end_handshake(client: Any) -> None:
    """Stop the timer of the handshake, whose thread would wait on after a failure."""
    client.packetizer.complete_handshake()
