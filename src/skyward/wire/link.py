"""Transport of a :class:`~skyward.wire.session.Session` over one connection at a time, the same on both ends."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from skyward._concurrency.descriptors import Descriptors
from skyward._concurrency.linux_parts import MutableEvents, mutable_events
from skyward._concurrency.waiting import EAGER_S
from skyward.wire.connection import Connection
from skyward.wire.messages import Kind
from skyward.wire.session import Item, Session

__all__ = ["Link"]

log = logging.getLogger("skyward.wire")

_ACK_DELAY_S = 0.02  # most acknowledgements travel with an item that is sent meanwhile


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
