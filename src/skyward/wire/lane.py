"""One end of a lane: an ordered, resumable stream of numbered items, over one connection at a time.

The same on both ends: :class:`Connection` is a socket with TLS that carries messages, :class:`Session` is the state of
the exchange, which outlives connections, and :class:`Link` writes and reads it (docs/decisions/002).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from operator import methodcaller
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgpack

from skyward.base.descriptors import Descriptors
from skyward.base.platform import MutableEvents, allocate_memory, mutable_events
from skyward.base.waiting import EAGER_S
from skyward.wire.frames import LENGTH, FrameError, forget_tls_errors
from skyward.wire.messages import TEXTS, Item, LaneItem, result_bytes

log = logging.getLogger("skyward.wire")

_LARGEST_BYTES = 64 << 20  # a session's messages have a few MiB: a larger length is no length
_READ_BYTES = 256 << 10
_PACKED_BYTES = 64 << 10
_RECORD_BYTES = 16 << 10  # the largest record of TLS

_DIALS_AT_ONCE = 256
_TURN_S = 2.0

_ACK_DELAY_S = 0.02  # most acknowledgements travel with an item that is sent meanwhile
CHUNK_BYTES = 4 << 20
"""Size of the largest piece of a large result, in bytes."""
_WINDOW_BYTES = 32 << 20  # credit of bulk items (docs/decisions/002)
# A message is handed over as a whole: with larger ones the first items would wait for the last.
_MESSAGE_BYTES = 1 << 20
_MESSAGE_ITEMS = 4096
_ACK_EVERY_BYTES = 8 << 20  # a quarter of the window, so that a fast peer need not stop


class _Buffers(threading.local):
    """Buffer of each thread for encrypted bytes; None before its first read."""

    encrypted: memoryview | None = None


_buffers = _Buffers()


def _read_buffer() -> memoryview:
    """Return this thread's buffer: one for each of a thousand connections would take four fifths of their memory."""
    if _buffers.encrypted is None:
        _buffers.encrypted = memoryview(allocate_memory(_READ_BYTES))
    return _buffers.encrypted


_turns: WeakKeyDictionary[ssl.SSLContext, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def turn_to_dial(context: ssl.SSLContext) -> AsyncGenerator[None]:
    """Wait until few other connections with a pool's context are being opened, and open one inside the block.

    Were a thousand opened at once, all of them would be done at the same time, and on a busy machine none within the
    limit of a handshake. A silent peer keeps its turn for two seconds only.
    """
    turns = _turns.setdefault(context, asyncio.Semaphore(_DIALS_AT_ONCE))
    await turns.acquire()
    with ExitStack() as turn:
        turn.callback(turns.release)
        turn.callback(asyncio.get_running_loop().call_later(_TURN_S, turn.close).cancel)
        yield


class MessageError(ConnectionError):
    """Bytes from the peer that are no message."""


class Connection:
    """A socket, its TLS, and the messages on it. Not thread-safe: its owner holds a lock.

    TLS works in memory and the socket never blocks, so that any thread may write while another one reads. The event
    loop's own TLS allows only its own thread, and each message would pay for the way there (docs/decisions/006).

    Args:
        sock: the socket, connected or to be connected by :meth:`connect`; owned from now on.
        context: context that refuses peers without the pool's certificate.
        server_side: True at the accepting end.
        largest_bytes: size limit of a message, in either direction.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        largest_bytes: int = _LARGEST_BYTES,
    ) -> None:
        sock.settimeout(0)
        # A small message must not wait for the acknowledgement of the one before (Nagle).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_peer, self._to_peer, server_side=server_side)
        # Made once: see docs/decisions/007.
        self._pack: Callable[[Any], bytes] = msgpack.Packer(
            default=methodcaller("to_wire"), buf_size=_PACKED_BYTES, unicode_errors=TEXTS
        ).pack
        self._largest_bytes = largest_bytes
        self._partial = bytearray()
        self._early: list[Any] = []
        self._peer_ended = False
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # at once, although another thread may be polling it
        self._socket.close()

    async def connect(self, address: str) -> None:
        """Dial ``host:port``; the dialling end calls this first.

        Raises:
            OSError: there is no answer.
        """
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().sock_connect(self._socket, (host, int(port)))

    async def handshake(self) -> None:
        """Perform the TLS handshake; nothing else may use the connection meanwhile.

        Raises:
            OSError: the peer is gone, or shows no certificate of the pool.
        """
        loop = asyncio.get_running_loop()
        agreed = False
        while not agreed:
            try:
                self._tls.do_handshake()
                agreed = True
            except ssl.SSLWantReadError:
                pass
            # Also at the end: the peer waits for the last part.
            await loop.sock_sendall(self._socket, self._to_peer.read())
            if not agreed:
                self._take_in(await loop.sock_recv(self._socket, _RECORD_BYTES))

    async def exchange(self, message: Any) -> None:
        """Send one whole message; nothing else may use the connection meanwhile."""
        self.write(message)
        await asyncio.get_running_loop().sock_sendall(self._socket, self._to_peer.read())

    async def next_message(self) -> Any:
        """Return the next message; nothing else may use the connection meanwhile."""
        loop = asyncio.get_running_loop()
        while not self._early:
            self._early = self._messages()
            if not self._early:
                self._take_in(await loop.sock_recv(self._socket, _RECORD_BYTES))
        message, *self._early = self._early  # a peer may send on before it has an answer
        return message

    def write(self, message: Any) -> None:
        """Encrypt a message; :meth:`send` sends it.

        Raises:
            FrameError: the message is larger than the peer accepts.
        """
        body = self._pack(message)
        if len(body) > self._largest_bytes:
            raise FrameError(f"a message of {len(body)} bytes is larger than the {self._largest_bytes} allowed")
        if len(body) < _RECORD_BYTES:  # one record: two would cost the peer another read
            self._tls.write(LENGTH.pack(len(body)) + body)
            return
        self._tls.write(LENGTH.pack(len(body)))
        rest = memoryview(body)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def send(self) -> bool:
        """Send written messages as far as the socket accepts them; return True if that was all."""
        if not self._unsent:
            if not self._to_peer.pending:
                return True
            self._unsent = memoryview(self._to_peer.read())
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the messages that have come. To be called when the socket is readable, and once after the greeting.

        Raises:
            OSError: the connection is lost.
        """
        buffer = _read_buffer()
        with suppress(BlockingIOError):
            self._take_in(buffer[: self._socket.recv_into(buffer)])
        early, self._early = self._early, []
        return early + self._messages()

    def _take_in(self, encrypted: bytes | memoryview) -> None:
        if not encrypted:
            raise ConnectionResetError("the peer hung up")
        self._from_peer.write(encrypted)

    def _messages(self) -> list[Any]:
        received = self._decrypt()
        messages: list[Any] = []
        start = 0
        while len(received) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(received, start)
            if size > self._largest_bytes:
                raise MessageError(f"the peer announces a message of {size} bytes, more than {self._largest_bytes}")
            begin, end = start + LENGTH.size, start + LENGTH.size + size
            if len(received) < end:
                break
            # Views are released at once: a bytearray cannot shrink while one is there.
            with memoryview(received) as whole, whole[begin:end] as body:
                messages.append(msgpack.unpackb(body, use_list=False, unicode_errors=TEXTS))
            start = end
        if received is self._partial:
            del self._partial[:start]
        else:
            self._partial += received[start:]
        if self._peer_ended and not messages:  # its last message counts
            raise ConnectionResetError("the peer ended the connection")
        return messages

    def _decrypt(self) -> bytes | bytearray:
        """Return all decrypted bytes; a single record, as most messages are, is not copied."""
        alone = b""
        # Checked first: a read that TLS refuses costs as much as a record (docs/decisions/007).
        while self._from_peer.pending or self._tls.pending():
            try:
                data = self._tls.read(_RECORD_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                raise
            except OSError:  # of another connection: this one works in memory
                forget_tls_errors()
                continue
            if not data:
                self._peer_ended = True
                break
            if alone or self._partial:
                self._partial += alone
                self._partial += data
                alone = b""
            else:
                alone = data
        return alone or self._partial


class BrokenSessionError(Exception):
    """Missing items: the two ends do not have the same session."""


class _Entry(NamedTuple):
    item: LaneItem | Item
    nbytes: int
    bulk: bool


class Session:
    """Numbered items of both directions: sent ones until they are acknowledged, received ones without duplicates.

    Small items overtake bulk ones. Bulk items wait while 32 MiB of them are unacknowledged: the peer's
    acknowledgements are the credit. Pure: no I/O, no clock (docs/decisions/002). Not thread-safe, except for
    :meth:`push`.

    Attributes:
        seen: number of the last item received.
        ack_owed: True if the peer waits for an acknowledgement that no message has carried yet.
        unacknowledged_bytes: size of the large results received since the last acknowledgement.
        kept_bytes: approximate size of the items collected that the peer has not acknowledged.
    """

    def __init__(self) -> None:
        self._pushed: deque[_Entry] = deque()
        self._small: deque[_Entry] = deque()
        self._bulk: deque[_Entry] = deque()
        self._sent: deque[_Entry] = deque()
        self._again: deque[_Entry] = deque()  # sent on an earlier connection, in the order of their numbers
        self._first_unacked = 1
        self._bulk_in_flight = 0
        self.unacknowledged_bytes = 0
        self.ack_owed = False
        self.seen = 0
        self.kept_bytes = 0

    def push(self, item: LaneItem | Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Queue an item; ``nbytes`` is its approximate size.

        Takes no lock, as appending is atomic: a finalizer that prints may run in a thread that holds one.
        """
        self._pushed.append(_Entry(item, nbytes, bulk))

    @property
    def has_unsent(self) -> bool:
        """True if items are queued or have to be sent again; bulk items may be waiting for credit."""
        return bool(self._pushed or self._small or self._bulk or self._again)

    @property
    def drained(self) -> bool:
        """True if the peer has acknowledged all items."""
        return not (self._pushed or self._small or self._bulk or self._again or self._sent)

    def collect(self) -> None:
        """Sort pushed items into small and bulk ones, and count them; :meth:`take` does so, too."""
        while self._pushed:
            entry = self._pushed.popleft()
            (self._bulk if entry.bulk else self._small).append(entry)
            self.kept_bytes += entry.nbytes

    def take(self, *, acknowledge: bool = False) -> list[Any] | None:
        """Return the next message to write; None if no items are left to send.

        With ``acknowledge``, an acknowledgement that is owed is a message, too.
        """
        if not (self.has_unsent or (acknowledge and self.ack_owed)):
            return None
        self.collect()
        # A message names the number of its first item only: the others follow from the order.
        first = self._first_unacked + len(self._sent)
        # Bulk items one at a time, and only without small ones: a small result never waits for more than 4 MiB.
        is_bulk = not (self._again or self._small) and self._bulk_in_flight < _WINDOW_BYTES
        queue, most = (self._bulk, 1) if is_bulk else (self._again or self._small, _MESSAGE_ITEMS)
        items: list[LaneItem | Item] = []
        size = 0
        # At least one item, however large: it could never be sent otherwise.
        while queue and size < _MESSAGE_BYTES and len(items) < most:
            entry = queue.popleft()
            self._sent.append(entry)
            items.append(entry.item)
            size += entry.nbytes
        if is_bulk:
            self._bulk_in_flight += size
        if not items:
            if not (acknowledge and self.ack_owed):
                return None
            first = 0
        self.ack_owed, self.unacknowledged_bytes = False, 0
        return [first, self.seen, items]

    def receive(self, message: Sequence[Any], nbytes: int = 0) -> list[Item]:
        """Return the new items of a message, in order.

        Args:
            message: the message.
            nbytes: size of the large results in it.

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
        self.unacknowledged_bytes += nbytes
        return fresh

    def resume(self, peer_seen: int) -> None:
        """Continue on a new connection: items after ``peer_seen`` are sent again."""
        self._forget(peer_seen)
        self._again.extendleft(reversed(self._sent))
        self._sent.clear()

    def _forget(self, acknowledged: int) -> None:
        # Items to be sent again may have arrived on the earlier connection.
        while self._first_unacked <= acknowledged and (queue := self._sent or self._again):
            entry = queue.popleft()
            self._first_unacked += 1
            self.kept_bytes -= entry.nbytes
            if entry.bulk:
                self._bulk_in_flight -= entry.nbytes


class Link:
    """Writer and reader of a session's items on successive connections.

    Items may be pushed and flushed from any thread. The flushing thread writes to the socket; the event loop writes the
    rest that the socket did not accept. A thread that only waits for items may read them itself.

    Args:
        session: state of the exchange, which outlives connections.
        on_items: receives new items in order, on the event loop or in the reading thread; must not block.
    """

    def __init__(self, session: Session, on_items: Callable[[list[Item]], object]) -> None:
        self.session = session
        self._on_items = on_items
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
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

    def flush(self, *, acknowledge: bool = False, if_free: bool = False) -> bool:
        """Send pushed items as far as the socket accepts them; with ``acknowledge``, an acknowledgement that is owed.

        With ``if_free``, do nothing and return False while a thread is flushing, this one included.
        """
        if not self._lock.acquire(blocking=not if_free):
            return False
        connection = self._connection
        try:
            if connection is None or self._writing:  # an acknowledgement travels with the next message then
                self.session.collect()
                return True
            while connection.send():
                message = self.session.take(acknowledge=acknowledge)
                if message is None:
                    return True
                connection.write(message)
            self._writing = True  # the socket is full
            self._loop.call_soon_threadsafe(self._write_when_possible, connection)
        except OSError as error:
            self._loop.call_soon_threadsafe(self._end, connection, error)  # this may be any thread
        finally:
            self._lock.release()
        return True

    def send_soon(self, item: LaneItem) -> None:
        """Send an item from any thread, also between any two steps of it, as a finalizer does."""
        self.session.push(item, item.nbytes)
        with suppress(RuntimeError):  # the loop is closed, and with it the lane
            self._loop.call_soon_threadsafe(self.flush)

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
        assert sys.platform != "win32"  # only workers read in turn
        ready = select.poll()
        ready.register(waker, select.POLLIN)
        with self._lock:
            connection = self._connection if self._gate is not None else None
            if connection is not None and self._gate is not None:
                self._gate.mute()  # else the same bytes would wake the event loop, too
                ready.register(connection, select.POLLIN)
        found = _poll_awake(ready.poll) if eager else []
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

    def _write_when_possible(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._loop.add_writer(connection, self._write_on, connection)

    def _write_on(self, connection: Connection) -> None:
        with self._lock:
            self._stop_writing(connection)
        self.flush()

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
                        fresh += self.session.receive(message, sum(map(result_bytes, message[2])))
            except Exception as error:
                with self._lock:
                    if self._connection is connection:
                        self._connection = None
                self._loop.call_soon_threadsafe(self._end, connection, error)
            try:
                if fresh:
                    self._on_items(fresh)
            except BaseException:  # the items behind it count as seen; user code may have raised SystemExit
                log.exception("items could not be handled")
        self._answer(on_loop=on_loop)

    def _answer(self, *, on_loop: bool = True) -> None:
        """Acknowledge at once if the peer may be waiting for credit, else soon, or with the next message."""
        session = self.session
        if session.unacknowledged_bytes >= _ACK_EVERY_BYTES:
            self.flush(acknowledge=True)
        elif session.ack_owed and on_loop and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(_ACK_DELAY_S, self._acknowledge_late)
        if session.has_unsent:
            self.flush()

    def _acknowledge_late(self) -> None:
        self._ack_timer = None
        self.flush(acknowledge=True)

    def _end(self, connection: Connection | None, error: Exception) -> None:
        if connection is self._served and self._lost is not None and not self._lost.done():
            self._lost.set_exception(error)


def _poll_awake(poll: Callable[[int], list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Busy-wait for a moment; return the ready descriptors.

    A thread that stays awake has warm caches: a round trip took 400 µs instead of 610 (docs/decisions/007).
    """
    assert sys.platform != "win32"
    found: list[tuple[int, int]] = []
    until = time.perf_counter() + EAGER_S
    while not found and time.perf_counter() < until:
        os.sched_yield()  # the peer may need this very processor
        found = poll(0)
    return found


def _open_gate(connection: Connection) -> MutableEvents | None:
    """Return a connection's events, which a reading thread mutes; None where only the event loop can read."""
    try:
        return mutable_events(connection.fileno())
    except OSError as error:  # no descriptor left: slower, but no reason to lose the lane
        log.info("the event loop reads this connection alone: %s", error)
        return None
