"""The thread that sends what a connection's streams have to send, and the forwarded connections among these streams."""

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

__all__ = ["CHUNK_BYTES", "Pump", "Step", "Tunnel"]

log = logging.getLogger("skyward.transport")

CHUNK_BYTES: Final = (32 << 10) - 64
"""What fits into one packet of OpenSSH's."""

_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.032
_ACKNOWLEDGE_BYTES = WINDOW_BYTES // 8
_CHUNKS_IN_TURN = 2
_RESET = struct.pack("ii", 1, 0)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Step(enum.Enum):
    """What became of an attempt to go on."""

    MOVED = enum.auto()
    """Something was sent, and there is more: as soon as others had their turn."""
    BLOCKED = enum.auto()
    """The other side takes nothing now. Nobody says when it will: it is tried again and again."""
    DONE = enum.auto()
    """There is nothing more to do."""


class Pump:
    """Runs until :meth:`stop`. What it calls must not block, but for the connection as a whole.

    Args:
        name: of its thread.

    Attributes:
        gate: held by whoever sends on a channel, and by paramiko's thread while it answers that one was closed. What
            was sent after that answer would be the end of the whole connection.
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
        self._wake_out.settimeout(0)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._wake_up)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def request(self, action: Callable[[], None]) -> None:
        """Have ``action`` called in the pump's thread, soon. From any thread; takes no lock."""
        self._requests.append(action)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # it has stopped, or has enough to wake up for
                self._wake_out.send(b"\0")

    def keep_trying(self, step: Callable[[], Step]) -> None:
        """Have ``step`` called until it is done. In the pump's thread."""
        self._trying[step] = None
        self._pause_s = _SHORTEST_PAUSE_S

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Have ``ready`` called whenever one of ``events`` is so; 0 for never again. In the pump's thread."""
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
        """Keep a stream alive, which nobody else may refer to while it waits. From any thread."""
        self._held.add(stream)

    def let_go(self, stream: object) -> None:
        """It is over."""
        self._held.discard(stream)

    def stop(self) -> None:
        """What was requested before is done, no more. Waits for the thread, unless called in it. Idempotent."""
        self._stopping = True
        self.request(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        limit_s: float | None = None
        while not self._stopping or self._requests:
            for key, events in self._selector.select(limit_s):
                _guarded(lambda key=key, events=events: key.data(events))
            self._woken = False
            while self._requests:
                _guarded(self._requests.popleft())
            limit_s = self._try_all()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _try_all(self) -> float | None:
        """Every step once; how long to wait before the next time."""
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
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _wake_up(self, _events: int) -> None:
        self._wake_in.recv(4096)


def _guarded(action: Callable[[], Step | None]) -> Step | None:
    try:
        return action()
    except BaseException:  # one stream's trouble is not the others'
        log.exception("a stream of an SSH connection failed")
        return None


class Tunnel:
    """Passes bytes both ways, and each end; lives until both have ended, or one is broken.

    What comes from the machine is written to the socket in paramiko's thread, and only what the socket does not take at
    once in the pump's. What goes there is read no faster than the channel takes it.

    Args:
        pump: whose thread does the work.
        sock: this side; owned from now on.
        channel: the other; likewise.
    """

    def __init__(self, pump: Pump, sock: socket.socket, channel: Channel) -> None:
        sock.settimeout(0)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.settimeout(0)
        self._pump = pump
        self._socket = sock
        self._channel = channel
        self._lock = threading.Lock()
        self._unwritten: deque[memoryview] = deque()
        self._unsent = b""
        self._taken_bytes = 0
        self._called = True  # until the first time is requested, when all is in place
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
            elif self._taken_bytes >= _ACKNOWLEDGE_BYTES:
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
        """Break both ends off."""
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
        """Tell the machine how much more it may send."""
        with self._lock:
            if self._over or self._taken_bytes < _ACKNOWLEDGE_BYTES:
                return
            taken_bytes, self._taken_bytes = self._taken_bytes, 0
        self._use(lambda: self._channel.recv(taken_bytes))

    def _read(self) -> None:
        for _ in range(_CHUNKS_IN_TURN):
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
            except Exception:  # SSHException, EOFError, OSError: no more can be sent
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
        except Exception as error:  # whatever it is, nothing more can be done with the channel
            log.debug("a channel broke off: %s", error)
            self._broken = True

    def _settle(self) -> None:
        """After anything has happened: pass on an end, watch for what matters now, or end altogether."""
        if self._over:
            return
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
        if reset:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
        self._use(self._channel.close)
