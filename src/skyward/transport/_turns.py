"""Turns: a server allows only so many commands on a connection at a time."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

__all__ = ["Turns"]


class Turns:
    """So many may do something at a time, the others wait for their turn. Thread-safe, and no thread waits.

    Args:
        number: how many.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._waiting: deque[Future[None]] = deque()

    def take(self) -> Future[None]:
        """Done when it is one's turn, which is to be given back then; may be cancelled before."""
        turn: Future[None] = Future()
        with self._lock:
            self._waiting.append(turn)
        self._go_on(0)
        return turn

    def give(self) -> None:
        """One's turn is over."""
        self._go_on(1)

    def _go_on(self, freed: int) -> None:
        granted: list[Future[None]] = []
        with self._lock:
            self._free += freed
            while self._waiting and self._free:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    granted.append(turn)
        for turn in granted:  # without the lock: whoever hears of it may give the turn back at once
            turn.set_result(None)
