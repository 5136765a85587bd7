"""What arrives on a channel is taken in paramiko's own thread, without a way over another one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyward.transport._paramiko import Channel, StockBuffer

__all__ = ["Intake", "take_errors", "take_output"]

_READ_BYTES = 1 << 20


class Intake:
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
) -> Intake:
    """Have what comes on a channel's first stream delivered."""
    stock = channel.in_buffer
    intake = channel.in_buffer = Intake(stock, deliver=deliver, end=end, wake=wake)
    stock.set_event(intake)
    return intake


def take_errors(
    channel: Channel, *, deliver: Callable[[bytes], None], end: Callable[[], None], wake: Callable[[], None]
) -> Intake:
    """Likewise its second one."""
    stock = channel.in_stderr_buffer
    intake = channel.in_stderr_buffer = Intake(stock, deliver=deliver, end=end, wake=wake)
    stock.set_event(intake)
    return intake
