"""What of paramiko's objects is used, for type checkers and for tests: paramiko has no types of its own."""

from __future__ import annotations

from typing import Any, Final, Protocol

__all__ = [
    "WINDOW_BYTES",
    "Channel",
    "Client",
    "RefusedSessionError",
    "StaleConnectionError",
    "StockBuffer",
    "open_channel",
]

WINDOW_BYTES: Final = 4 << 20
"""How much the machine may send on a channel before this side has taken it."""

_OPEN_TIMEOUT_S = 60.0


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
