"""The one thread that sends what a connection's streams have to send, each a little at a time."""

from __future__ import annotations

import contextlib
import enum
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["CHUNK_BYTES", "Pump", "Step"]

log = logging.getLogger("skyward.transport")

CHUNK_BYTES: Final = (32 << 10) - 64
"""What fits into one packet of OpenSSH's."""

_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.032


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
