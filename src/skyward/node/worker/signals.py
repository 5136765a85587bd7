"""Signal handlers and timers of a worker's main thread, in which calls run: what a call has set ends with it."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_HANDLED: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGALRM", "SIGHUP", "SIGINT", "SIGPROF", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
    if hasattr(signal, name)
)
"""Signals that programs handle. Not SIGCHLD: libraries set its handler once and rely on it, as torch's DataLoader."""

# Beneath the function that makes an enum of each handler, which costs as much as a short call.
_get_handler: Final[Callable[[int], Any]] = inspect.unwrap(signal.getsignal)


class Signals:
    """Handlers of the present thread, to be restored after each call. Outside of the main thread there are none."""

    def __init__(self) -> None:
        self._handlers = self._present()
        self._is_main = threading.current_thread() is threading.main_thread()

    def restore(self) -> None:
        """Stop timers and put the handlers back. Takes a microsecond; half of it is the system call."""
        if not self._is_main:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm after its call would interrupt another one
        present = self._present()
        if present == self._handlers:
            return
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, before, now in zip(_HANDLED, self._handlers, present, strict=True):
            if now is not before:
                signal.signal(number, signal.SIG_DFL if before is None else before)  # None: C code has set it

    @staticmethod
    def _present() -> list[Any]:
        return [*map(_get_handler, _HANDLED)]
