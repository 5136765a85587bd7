"""The sending thread of an SSH connection, and forwarded connections, which are some of its streams."""

from __future__ import annotations

import contextlib
import enum
import logging
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from skyward.transport._paramiko import WINDOW_BYTES, Channel, take_output

__all__ = ["ACKNOWLEDGE_BYTES", "CHUNKS_IN_TURN", "CHUNK_BYTES", "Pump", "Step", "Tunnel"]

log = logging.getLogger("skyward.transport")

CHUNK_BYTES: Final = (32 << 10) - 64
"""Payload bytes that fit into one packet of OpenSSH's."""
# Then the other streams are served: a small call must not wait for a large file.
CHUNKS_IN_TURN: Final = 2
"""Number of chunks that a stream sends at a time."""
ACKNOWLEDGE_BYTES: Final = WINDOW_BYTES // 8
"""Received bytes after which a stream opens the machine's window again."""

_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.032
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s, so that closing sends a reset
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Step(enum.Enum):
    """Outcome of one attempt to send."""

    MOVED = enum.auto()
    """Some bytes were sent and more are left: call again after the other streams."""
    BLOCKED = enum.auto()
    """The peer accepts nothing now. paramiko gives no signal for its readiness: call again after a pause."""
    DONE = enum.auto()
    """Nothing is left to send."""


class Pump:
    """Thread that sends a little of each stream at a time, until :meth:`stop`. Its callbacks must not block.

    Args:
        name: name of the thread.

    Attributes:
        gate: lock, held to send on a channel, and by paramiko's thread while it answers that a channel was closed.
            The server ends the whole connection when bytes for a channel follow that answer.
    """

    def __init__(self, name: str) -> None:
        self.gate = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, int] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._trying: dict[Callable[[], Step], None] = {}
        self._held: set[object] = set()
        self._pause_s = _SHORTEST_PAUSE_S
        self._woken = False
        self._stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.settimeout(0)  # `request` must never block
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._wake_up)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def request(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the pump's thread, soon. From any thread; takes no lock."""
        self._requests.append(action)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # stopped, or the buffer is full: it wakes up in any case
                self._wake_out.send(b"\0")

    def keep_trying(self, step: Callable[[], Step]) -> None:
        """Call ``step`` until it is done. To be used in the pump's thread."""
        self._trying[step] = None
        self._pause_s = _SHORTEST_PAUSE_S

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready`` whenever one of ``events`` holds; 0 ends that. To be used in the pump's thread."""
        known = self._watched.get(sock, 0)
        if events == known:
            return
        if not events:
            del self._watched[sock]
            self._selector.unregister(sock)
            return
        self._watched[sock] = events
        if known:
            self._selector.modify(sock, events, ready)
        else:
            self._selector.register(sock, events, ready)

    def hold(self, stream: object) -> None:
        """Keep a stream alive until :meth:`let_go`. From any thread."""
        # paramiko refers to its channels weakly, so a waiting stream could be collected together with its channel.
        self._held.add(stream)

    def let_go(self, stream: object) -> None:
        """Release a stream that has ended."""
        self._held.discard(stream)

    def stop(self) -> None:
        """End the thread once earlier requests are performed, and wait for it, except in it. Idempotent."""
        self._stopping = True
        self.request(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        limit_s: float | None = None
        while not self._stopping or self._requests:
            for key, events in self._selector.select(limit_s):
                _guarded(lambda key=key, events=events: key.data(events))
            self._woken = False  # before the requests are taken: a later one wakes the thread again
            while self._requests:
                _guarded(self._requests.popleft())
            limit_s = self._try_all()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _try_all(self) -> float | None:
        """Call every step once; return the pause before the next round, None for no next round."""
        moved = False
        for step in tuple(self._trying):
            outcome = _guarded(step)
            moved = moved or outcome is Step.MOVED
            if outcome not in {Step.MOVED, Step.BLOCKED}:
                self._trying.pop(step, None)
        if not self._trying:
            return None
        if moved:
            self._pause_s = _SHORTEST_PAUSE_S
            return 0
        # All are blocked: poll at 1 ms to 32 ms, as a closed window must not cost a whole processor.
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _wake_up(self, _events: int) -> None:
        self._wake_in.recv(4096)


def _guarded(action: Callable[[], Step | None]) -> Step | None:
    try:
        return action()
    except BaseException:  # a failure of one stream must not end the others
        log.exception("a stream of an SSH connection failed")
        return None


class Tunnel:
    """One forwarded connection: bytes and ends of stream, both ways, between a socket and a channel.

    paramiko's thread writes bytes of the machine to the socket; the pump's thread writes only those that the socket
    did not accept at once. Bytes for the machine are read no faster than the channel accepts them.

    Args:
        pump: the sending thread.
        sock: the local end; owned from now on.
        channel: the remote end; owned from now on.
    """

    def __init__(self, pump: Pump, sock: socket.socket, channel: Channel) -> None:
        sock.settimeout(0)
        if sock.family != socket.AF_UNIX:  # a tunnel through a jump host ends in a socket pair, without TCP options
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.settimeout(0)
        self._pump = pump
        self._socket = sock
        self._channel = channel
        self._lock = threading.Lock()
        self._unwritten: deque[memoryview] = deque()
        self._unsent = b""
        self._taken_bytes = 0
        self._called = True  # so that nothing is requested before this object is complete
        self._broken = False
        self._local_ended = False
        self._remote_ended = False
        self._end_passed = False
        self._over = False
        pump.hold(self)
        self._buffer = take_output(channel, deliver=self._arrive, end=self._finish, wake=self._call)
        pump.request(self._attend)

    # in paramiko's thread

    def _arrive(self, data: bytes) -> None:
        with self._lock:
            if self._broken or self._over:
                return
            written = 0
            # At once, in this thread: the way through the pump's would cost a thread switch.
            if not self._unwritten:
                try:
                    written = self._socket.send(data)
                except BlockingIOError:
                    written = 0
                except OSError:
                    self._broken = True
            self._taken_bytes += written
            if written < len(data):
                self._unwritten.append(memoryview(data)[written:])
                self._call()
            elif self._taken_bytes >= ACKNOWLEDGE_BYTES:
                self._call()

    def _finish(self) -> None:
        self._remote_ended = True
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._pump.request(self._attend)

    # in the pump's thread

    def abort(self) -> None:
        """Break both ends."""
        self._broken = True
        self._settle()

    def _attend(self) -> None:
        self._called = False
        if not self._over:
            self._buffer.drain()
        self._acknowledge()
        self._settle()

    def _ready(self, events: int) -> None:
        if events & _WRITE:
            self._write()
            self._acknowledge()
        if events & _READ:
            self._read()
        self._settle()

    def _write(self) -> None:
        with self._lock:
            while self._unwritten and not self._broken:
                chunk = self._unwritten[0]
                try:
                    written = self._socket.send(chunk)
                except BlockingIOError:
                    return
                except OSError:
                    self._broken = True
                    return
                self._taken_bytes += written
                if written < len(chunk):
                    self._unwritten[0] = chunk[written:]
                else:
                    self._unwritten.popleft()

    def _acknowledge(self) -> None:
        """Open the channel's window by the bytes that the socket has accepted."""
        # Only now, not on receipt: else a slow reader here would let megabytes pile up in memory.
        with self._lock:
            if self._over or self._taken_bytes < ACKNOWLEDGE_BYTES:
                return
            taken_bytes, self._taken_bytes = self._taken_bytes, 0
        self._use(lambda: self._channel.recv(taken_bytes))

    def _read(self) -> None:
        for _ in range(CHUNKS_IN_TURN):
            try:
                self._unsent = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True
                return
            if not self._unsent:
                self._local_ended = True
                self._use(self._channel.shutdown_write)
                return
            if self._send() is not Step.DONE:
                self._pump.keep_trying(self._send_on)
                return

    def _send_on(self) -> Step:
        step = self._send()
        self._settle()
        return step

    def _send(self) -> Step:
        while self._unsent and not self._over and not self._broken:
            try:
                with self._pump.gate:
                    sent = self._channel.send(self._unsent)
            except TimeoutError:
                return Step.BLOCKED
            except Exception:  # SSHException, EOFError or OSError: nothing can be sent any more
                self._broken = True
                return Step.DONE
            self._broken = sent == 0
            self._unsent = self._unsent[sent:]
        self._unsent = b""
        return Step.DONE

    def _use(self, action: Callable[[], object]) -> None:
        try:
            with self._pump.gate:
                action()
        except Exception as error:  # after any exception the channel is of no further use
            log.debug("a channel broke off: %s", error)
            self._broken = True

    def _settle(self) -> None:
        """Pass on an end of stream, update the watched events, or end the tunnel; called after every change."""
        if self._over:
            return
        # Without an end of stream the channel did not finish: its connection was lost, or the machine gave it up.
        lost = self._channel.closed and not self._channel.eof_received
        if self._broken or lost:
            self._end(reset=True)
            return
        if self._remote_ended and not self._unwritten and not self._end_passed:
            self._end_passed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if self._end_passed and (self._local_ended or self._channel.closed):
            self._end(reset=False)
            return
        reading = not self._local_ended and not self._unsent
        self._pump.watch(self._socket, _READ * reading | _WRITE * bool(self._unwritten), self._ready)

    def _end(self, *, reset: bool) -> None:
        self._over = True
        self._pump.let_go(self)
        self._pump.watch(self._socket, 0, self._ready)
        if reset:  # linger 0: the local program must see an error, not a regular end of the stream
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
        self._use(self._channel.close)
