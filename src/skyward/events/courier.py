"""Threads that run users' callbacks, in order and one at a time; a stuck callback does not block the others."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Final

__all__ = ["PATIENCE_S", "Courier"]

_logger = logging.getLogger("skyward")

PATIENCE_S: Final = 1.0
"""Seconds for which an action may block others before another thread takes them over."""
_THREADS = 16


class Courier:
    """Queue of actions with one thread, which runs them in order and starts with the first of them.

    An action that takes longer than ``patience_s`` while others wait keeps its thread; another thread takes over the
    rest, in order again. Exceptions of actions, ``SystemExit`` included, are logged.

    Args:
        name: name of the threads.
        what: name of an action, for the log: ``"a done-callback"``.
        patience_s: time for which an action may block others; up to twice that, because it is checked periodically.
        threads: maximum number of threads; when all of them are stuck, further actions wait.
    """

    def __init__(self, name: str, *, what: str, patience_s: float = PATIENCE_S, threads: int = _THREADS) -> None:
        self._name = name
        self._what = what
        self._patience_s = patience_s
        self._bound = threads
        # Reentrant: a finalizer may enqueue an action while this thread holds the lock.
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._running: Callable[[], object] | None = None
        self._runs = self._queued = 0
        self._held = False
        self._leader: threading.Thread | None = None
        self._lookout: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._over = threading.Event()

    @property
    def queued(self) -> int:
        """Number of actions enqueued so far, for :meth:`wait_past`."""
        return self._queued

    def wait_past(self, queued: int, timeout_s: float) -> None:
        """Wait until so many actions have run, or were found to be stuck. Returns at once in an action."""
        if self._runs > queued or (self._runs == queued and self._running is None):
            return
        passed = threading.Event()
        if threading.current_thread() not in self._threads and self.run(passed.set):
            passed.wait(timeout_s)

    def run(self, action: Callable[[], object]) -> bool:
        """Enqueue an action. Never blocks; does nothing and returns False once closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(action)
            self._queued += 1
            if self._leader is None:
                self._leader = self._start(self._lead, self._name)
            if self._running is not None:
                self._watch()
            elif not self._held:
                self._changed.notify()
        return True

    @contextmanager
    def together(self) -> Generator[None]:
        """Wake the thread once, at the end, for all actions enqueued meanwhile. In one thread at a time."""
        self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                if self._waiting and self._running is None:
                    self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Run the queued actions and end the threads; return False if a thread is still running. Idempotent.

        A call from an action does not wait.
        """
        with self._changed:
            self._closed = True
            if self._leader is None and self._waiting:
                self._leader = self._start(self._lead, self._name)
            if self._leader is None:
                self._over.set()
            self._changed.notify()
        deadline = monotonic() + timeout_s
        if threading.current_thread() in self._threads:
            return True
        while threads := [thread for thread in tuple(self._threads) if thread.is_alive()]:
            left_s = deadline - monotonic()
            if left_s <= 0:
                return False
            threads[0].join(left_s)
        return True

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread | None:
        """Start a thread; return None if the system refuses one, so that the next action tries again."""
        thread = threading.Thread(target=self._live, args=(work,), name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            _logger.warning("%s is delayed: %s", self._what, error)
            return None
        return thread

    def _live(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._threads.discard(threading.current_thread())

    def _lead(self) -> None:
        me = threading.current_thread()
        while (action := self._next(me)) is not None:
            try:
                action()
            except BaseException:  # SystemExit of user code must not end this thread either
                with suppress(Exception):  # of a user's handler, which may be what raised before
                    _logger.exception("%s raised", self._what)
            del action

    def _next(self, me: threading.Thread) -> Callable[[], object] | None:
        """Return the next action for the leader; None if it has to end, or is no longer the leader."""
        with self._changed:
            if self._leader is not me:
                return None
            self._running = None
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                self._over.set()
                return None
            self._running = self._waiting.popleft()
            self._runs += 1
            self._watch()
            return self._running

    def _watch(self) -> None:
        """Start the lookout if an action blocks others; the caller holds the lock."""
        if self._running is not None and self._waiting and self._lookout is None:
            self._lookout = self._start(self._look_out, f"{self._name}-lookout")

    def _look_out(self) -> None:
        me = threading.current_thread()
        while True:
            runs = self._runs
            self._over.wait(self._patience_s)
            with self._changed:
                if self._running is None or not self._waiting:
                    self._lookout = None
                    return
                if self._runs != runs or len(self._threads) > self._bound:
                    continue
                _logger.warning("%s takes long: another thread continues with the following ones", self._what)
                self._leader, self._lookout = me, None
                me.name = self._name
                break
        self._lead()
