"""Signal handlers and timers of a worker's main thread, in which calls run: what a call has set ends with it."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_HANDLED: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGALRM", "SIGHUP", "SIGINT", "SIGPROF", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
    if hasattr(signal, name)
)
"""Signals that programs handle. Not SIGCHLD: libraries set its handler once and rely on it, as torch's DataLoader."""


class Signals:
    """Context of the thread that runs calls, whose handlers are restored after each call, if it is the main thread.

    Inside, :mod:`signal` notes that a call uses it: to ask for nine handlers after each call would take 5 µs.
    """

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._in_use = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handlers = self._present()
            self._functions = {name: getattr(signal, name) for name in ("alarm", "setitimer", "signal")}
            for name, function in self._functions.items():
                setattr(signal, name, self._noted(function))

    def __exit__(self, *_error: object) -> None:
        for name, function in self._functions.items():
            setattr(signal, name, function)

    def restore(self) -> None:
        """Stop timers and put the handlers back."""
        if not self._in_use:
            return
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm after its call would interrupt another one
        for number, before, now in zip(_HANDLED, self._handlers, self._present(), strict=True):
            if now is not before:
                signal.signal(number, signal.SIG_DFL if before is None else before)  # None: C code has set it
        self._in_use = False

    def _noted(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def note(*args: P.args, **kwargs: P.kwargs) -> R:
            self._in_use = True
            return function(*args, **kwargs)

        return note

    @staticmethod
    def _present() -> list[Any]:
        return [*map(signal.getsignal, _HANDLED)]
