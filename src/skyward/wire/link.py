"""One end of a lane: an ordered, resumable stream of numbered items, over one connection at a time.

The same on both ends: :class:`Session` is the state of the exchange, which outlives connections; :class:`Link` writes
and reads it (docs/decisions/002).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skyward._concurrency.descriptors import Descriptors
from skyward._concurrency.linux_parts import MutableEvents, mutable_events
from skyward._concurrency.waiting import EAGER_S
from skyward.wire.connection import Connection
from skyward.wire.messages import Item, Kind

__all__ = ["CHUNK_BYTES", "BrokenSessionError", "Link", "Session"]

log = logging.getLogger("skyward.wire")

_ACK_DELAY_S = 0.02  # most acknowledgements travel with an item that is sent meanwhile


CHUNK_BYTES = 4 << 20
"""Size of the largest piece of a large result, in bytes."""
_WINDOW_BYTES = 32 << 20  # credit of bulk items (docs/decisions/002)
# A message is handed over as a whole: with larger ones the first items would wait for the last.
_MESSAGE_BYTES = 1 << 20
_MESSAGE_ITEMS = 4096
_ACK_EVERY_BYTES = 8 << 20  # a quarter of the window, so that a fast peer need not stop


class BrokenSessionError(Exception):
    """Missing items: the two ends do not have the same session."""


@dataclass(slots=True)
class _Entry:
    item: Item
    nbytes: int
    bulk: bool


class Session:
    """Numbered items of both directions: sent ones until they are acknowledged, received ones without duplicates.

    Small items overtake bulk ones. Bulk items wait while 32 MiB of them are unacknowledged: the peer's
    acknowledgements are the credit. Pure: no I/O, no clock (docs/decisions/002).

    Attributes:
        seen: number of the last item received.
        ack_owed: True if the peer waits for an acknowledgement that no message has carried yet.
        kept_bytes: approximate size of the items that the peer has not acknowledged.
    """

    def __init__(self) -> None:
        self._small: deque[_Entry] = deque()
        self._bulk: deque[_Entry] = deque()
        self._sent: deque[_Entry] = deque()
        self._first_unacked = 1
        self._resend = 0
        self._bulk_in_flight = 0
        self._unacked_bytes = 0
        self.ack_owed = False
        self.seen = 0
        self.kept_bytes = 0

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Enqueue an item; ``nbytes`` is its approximate size."""
        (self._bulk if bulk else self._small).append(_Entry(item, nbytes, bulk))
        self.kept_bytes += nbytes

    @property
    def ack_urgent(self) -> bool:
        """True if enough bytes are unacknowledged that the peer may be waiting for credit."""
        return self._unacked_bytes >= _ACK_EVERY_BYTES

    @property
    def has_unsent(self) -> bool:
        """True if items are queued or have to be sent again; bulk items may be waiting for credit."""
        return bool(self._small or self._bulk or self._resend)

    @property
    def drained(self) -> bool:
        """True if the peer has acknowledged all items."""
        return not (self._small or self._bulk or self._sent)

    def take(self) -> list[Any] | None:
        """Return the next message to write; None if no items are left to send."""
        # A message names the number of its first item only: the others follow from the order.
        first = self._first_unacked + len(self._sent) - self._resend
        items = self._take_unsent() if not self._resend else self._take_again()
        if not items:
            return None
        return [first, self._acknowledge(), items]

    def take_ack(self) -> list[Any]:
        """Return a message that carries an acknowledgement only."""
        return [0, self._acknowledge(), []]

    def receive(self, message: Sequence[Any], nbytes: int = 0) -> list[Item]:
        """Return the new items of a message, in order.

        Raises:
            BrokenSessionError: items before these are missing.
        """
        first, acknowledged, items = message
        self._forget(acknowledged)
        if not items:
            return []
        if first > self.seen + 1:
            raise BrokenSessionError(f"expected item {self.seen + 1}, got {first}")
        # After a reconnect the peer repeats items that it has no acknowledgement for: nothing may run twice.
        fresh = list(items[self.seen + 1 - first :])
        self.seen += len(fresh)
        self.ack_owed = True
        self._unacked_bytes += nbytes
        return fresh

    def resume(self, peer_seen: int) -> None:
        """Continue on a new connection: items after ``peer_seen`` are sent again."""
        self._forget(peer_seen)
        self._resend = len(self._sent)

    def _take_again(self) -> list[Item]:
        start = len(self._sent) - self._resend  # in their old order, small behind bulk: the numbers are given
        items: list[Item] = []
        size = 0
        for index in range(start, len(self._sent)):
            entry = self._sent[index]
            if items and (size + entry.nbytes > _MESSAGE_BYTES or len(items) >= _MESSAGE_ITEMS):
                break
            items.append(entry.item)
            size += entry.nbytes
        self._resend -= len(items)
        return items

    def _take_unsent(self) -> list[Item]:
        items: list[Item] = []
        size = 0
        # At least one item, however large: it could never be sent otherwise.
        while self._small and len(items) < _MESSAGE_ITEMS and (not items or size < _MESSAGE_BYTES):
            size += self._move(self._small, items)
        # One piece at a time, and only without small items: a small result never waits for more than 4 MiB.
        if not items and self._bulk and self._bulk_in_flight < _WINDOW_BYTES:
            self._move(self._bulk, items)
        return items

    def _move(self, queue: deque[_Entry], items: list[Item]) -> int:
        entry = queue.popleft()
        self._sent.append(entry)
        items.append(entry.item)
        if entry.bulk:
            self._bulk_in_flight += entry.nbytes
        return entry.nbytes

    def _forget(self, acknowledged: int) -> None:
        while self._sent and self._first_unacked <= acknowledged:
            entry = self._sent.popleft()
            self._first_unacked += 1
            self.kept_bytes -= entry.nbytes
            if entry.bulk:
                self._bulk_in_flight -= entry.nbytes
        self._resend = min(self._resend, len(self._sent))  # some of these may be acknowledged by now

    def _acknowledge(self) -> int:
        self.ack_owed = False
        self._unacked_bytes = 0
        return self.seen


class Link:
    """Writer and reader of a session's items on successive connections.

    Items may be pushed and flushed from any thread. The flushing thread writes to the socket; the event loop writes the
    rest that the socket did not accept. A thread that only waits for items may read them itself.

    Args:
        session: state of the exchange, which outlives connections.
        on_items: receives new items in order, on the event loop or in the reading thread; must not block.
    """

    def __init__(self, session: Session, on_items: Callable[[list[Item]], None]) -> None:
        self.session = session
        self._on_items = on_items
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        # Appending and taking are atomic, so that `push` needs no lock.
        self._pushed: deque[tuple[Item, int, bool]] = deque()
        self._connection: Connection | None = None
        self._gate: MutableEvents | None = None
        self._descriptors = Descriptors()
        self._served: Connection | None = None
        self._lost: asyncio.Future[None] | None = None
        self._writing = False
        self._ack_timer: asyncio.TimerHandle | None = None

    @property
    def intact(self) -> bool:
        """False if something else in this process has closed the connection's descriptors. For the loop's thread."""
        return self._descriptors.intact

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Queue an item; :meth:`flush` sends it.

        Takes no lock: a finalizer that prints may run in a thread that holds it.
        """
        self._pushed.append((item, nbytes, bulk))

    def flush(self) -> None:
        """Send queued items as far as the socket accepts them."""
        with self._lock:
            self._flush()

    def flush_if_free(self) -> bool:
        """Flush unless a thread is flushing, this one included; return True if it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._flush()
        finally:
            self._lock.release()
        return True

    async def run(self, connection: Connection, *, by_turns: bool = False) -> None:
        """Serve one connection until it is lost; may be called again with the next one.

        Args:
            connection: connection after the greeting; closed at the end.
            by_turns: True if a thread calls :meth:`read_in_turn`.

        Raises:
            BrokenSessionError: the peer has another session.
        """
        self._served = connection
        self._lost = lost = self._loop.create_future()
        gate = _open_gate(connection) if by_turns else None
        watched = gate or connection
        with self._lock:
            self._connection, self._gate, self._writing = connection, gate, False
        self._descriptors = Descriptors(connection.fileno(), watched.fileno())
        self._loop.add_reader(watched, self._read, connection)
        try:
            self._read(connection)  # the socket does not announce items that came with the greeting
            self.flush()
            with suppress(OSError):
                await lost
        finally:
            self._loop.remove_reader(watched)
            with self._lock:
                self._stop_writing(connection)
                self._connection = self._gate = None
            self._descriptors = Descriptors()
            if gate is not None:
                gate.close()
            connection.close()

    def read_in_turn(self, waker: int, timeout_s: float | None, *, eager: bool = False) -> bool:
        """Wait for items in this thread instead of the event loop, and hand them over.

        That saves a small call the way from one thread to another: 60 µs became 24 (docs/decisions/007). Returns also
        when the descriptor ``waker`` is readable, and then returns True. If ``eager``, it busy-waits for a moment.
        """
        if self.session.ack_owed:  # this thread may wait for long: the loop's timer has to send it
            self._loop.call_soon_threadsafe(self._answer)
        ready = select.poll()
        ready.register(waker, select.POLLIN)
        with self._lock:
            connection = self._connection if self._gate is not None else None
            if connection is not None and self._gate is not None:
                self._gate.mute()  # else the same bytes would wake the event loop, too
                ready.register(connection, select.POLLIN)
        found = _poll_awake(ready) if eager else []
        found = found or ready.poll(None if timeout_s is None else 1000 * timeout_s)
        if connection is not None:
            self._read(connection, on_loop=False)
            with self._lock:
                if self._connection is connection and self._gate is not None:
                    self._gate.unmute()
        return any(descriptor == waker for descriptor, _ in found)

    def abort(self) -> None:
        """Close the connection, so that :meth:`run` returns. To be called on the loop."""
        self._end(self._served, ConnectionAbortedError("this end closed the connection"))

    def _flush(self) -> None:
        """Send queued items; requires the lock."""
        self._enqueue()
        if self._connection is not None and not self._writing:
            self._write(self._connection)

    def _write(self, connection: Connection) -> None:
        """Send messages until the socket is full or nothing is left; requires the lock."""
        try:
            while connection.send():
                self._enqueue()
                message = self.session.take()
                if message is None:
                    return
                connection.write(message)
        except OSError as error:
            self._loop.call_soon_threadsafe(self._end, connection, error)  # this may be any thread
            return
        self._writing = True
        self._loop.call_soon_threadsafe(self._write_when_possible, connection)

    def _enqueue(self) -> None:
        """Move pushed items into the session; requires the lock."""
        while self._pushed:
            item, nbytes, bulk = self._pushed.popleft()
            self.session.push(item, nbytes, bulk=bulk)

    def _write_when_possible(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._loop.add_writer(connection, self._write_on, connection)

    def _write_on(self, connection: Connection) -> None:
        with self._lock:
            self._stop_writing(connection)
            self._write(connection)

    def _stop_writing(self, connection: Connection) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(connection)

    def _read(self, connection: Connection, *, on_loop: bool = True) -> None:
        with self._reading:  # two threads may read: items must be handed over in their order
            fresh: list[Item] = []
            try:
                with self._lock:
                    if connection is not self._connection:
                        return
                    for message in connection.receive():
                        # Only chunks are bulk, and use up the credit that acknowledgements give back.
                        nbytes = sum(len(item[-1]) for item in message[2] if item[0] == Kind.CHUNK)
                        fresh += self.session.receive(message, nbytes)
            except Exception as error:
                self._lose(connection, error)
            if fresh:
                self._hand_over(fresh)
        self._answer(on_loop=on_loop)

    def _lose(self, connection: Connection, error: Exception) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        self._loop.call_soon_threadsafe(self._end, connection, error)

    def _hand_over(self, items: list[Item]) -> None:
        try:
            self._on_items(items)
        except BaseException:  # the items behind it count as seen; user code may have raised SystemExit
            log.exception("items could not be handled")

    def _answer(self, *, on_loop: bool = True) -> None:
        """Acknowledge at once if the peer may be waiting for credit, else soon, or with the next message."""
        session = self.session
        if session.ack_urgent:
            self._acknowledge()
        elif session.ack_owed and on_loop and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(_ACK_DELAY_S, self._acknowledge_late)
        if session.has_unsent or self._pushed:
            self.flush()

    def _acknowledge_late(self) -> None:
        self._ack_timer = None
        self._acknowledge()

    def _acknowledge(self) -> None:
        with self._lock:
            # While the socket is full, the acknowledgement travels with the next message.
            if self._connection is not None and not self._writing:
                self._write(self._connection)
                if self.session.ack_owed and not self._writing:
                    self._connection.write(self.session.take_ack())
                    self._write(self._connection)

    def _end(self, connection: Connection | None, error: Exception) -> None:
        if connection is self._served and self._lost is not None and not self._lost.done():
            self._lost.set_exception(error)


def _poll_awake(ready: select.poll) -> list[tuple[int, int]]:
    """Busy-wait for a moment; return the ready descriptors.

    A thread that stays awake has warm caches: a round trip took 400 µs instead of 610 (docs/decisions/007).
    """
    found: list[tuple[int, int]] = []
    until = time.perf_counter() + EAGER_S
    while not found and time.perf_counter() < until:
        os.sched_yield()  # the peer may need this very processor
        found = ready.poll(0)
    return found


def _open_gate(connection: Connection) -> MutableEvents | None:
    """Return a connection's events, which a reading thread mutes; None where only the event loop can read."""
    try:
        return mutable_events(connection.fileno())
    except OSError as error:  # no descriptor left: slower, but no reason to lose the lane
        log.info("the event loop reads this connection alone: %s", error)
        return None
