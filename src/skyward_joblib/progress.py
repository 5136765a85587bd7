"""How far one joblib call is, for the pool's display."""

from __future__ import annotations

import threading
import time

from skyward.events import Progress
from skyward.submission import TaskSubmitter

__all__ = ["LoopProgress"]

_INTERVAL_S = 0.1


class LoopProgress:
    """Publishes the progress of one joblib call, if there is one who listens. Thread-safe.

    Args:
        pool: where the call runs; None keeps silent.
        total: tasks in the call; None if joblib does not know.
    """

    def __init__(self, pool: TaskSubmitter | None, *, total: int | None) -> None:
        self._publisher = pool
        self._total = total
        self._label = ""
        self._done = 0
        self._due = 0.0
        self._lock = threading.Lock()

    def begin(self, label: str) -> None:
        """The first batch is on its way; later ones change nothing."""
        with self._lock:
            if not self._label:
                self._label = label
                self._publish()

    def add(self, tasks: int) -> None:
        """So many tasks more are done; told ten times a second, and when they are the last ones."""
        with self._lock:
            self._done += tasks
            now = time.monotonic()
            if now >= self._due or self._done == self._total:
                self._due = now + _INTERVAL_S
                self._publish()

    def end(self) -> None:
        """No more is to come, be it done or given up. Idempotent."""
        with self._lock:
            if self._done != self._total:
                self._total = self._done
                self._publish()
            self._publisher = None

    def _publish(self) -> None:
        if self._publisher is not None and self._label:
            self._publisher.publish(Progress(self._label, self._done, self._total))
