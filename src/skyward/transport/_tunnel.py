"""One connection through the machine: a socket on this side, a channel towards the other."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from skyward.transport._intake import take_output
from skyward.transport._paramiko import WINDOW_BYTES, Channel
from skyward.transport._pump import CHUNK_BYTES, Pump, Step

__all__ = ["Tunnel"]

log = logging.getLogger("skyward.transport")

_ACKNOWLEDGE_BYTES = WINDOW_BYTES // 8
_CHUNKS_IN_TURN = 2
_RESET = struct.pack("ii", 1, 0)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


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
        self._intake = take_output(channel, deliver=self._arrive, end=self._finish, wake=self._call)
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
            self._intake.drain()
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
