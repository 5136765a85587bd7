"""End of a process that has machines: signals unwind it like Ctrl-C, and its exit closes all open pools.

SIGTERM and SIGHUP unwind the main thread, but only that thread can set handlers for them. Where pools are opened in
other threads, and for SIGQUIT always, a thread closes all pools, and then the signal has its usual effect.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from skyward.base.platform import (
    ENDING_SIGNALS,
    WATCHED_SIGNALS,
    is_caught,
    run_in_forks,
    stop_writing_on_signal,
    wait_readable,
    write_on_signal,
)
from skyward.errors import PoolStateError

_AT_EXIT = (
    "a pool cannot be opened while the interpreter shuts down: threads can no longer be started. Open it before your "
    "program ends, not in a function registered with atexit"
)

try:
    import concurrent.futures.thread  # its hook at exit has to be registered before ours, so that ours is called first
except RuntimeError as error:  # the interpreter registers no more hooks
    raise PoolStateError(_AT_EXIT) from error

_ABOVE = 128
"""Offset of the exit status of a process that a signal ended, as shells have it."""


class _Held:
    """Count of the pools that are open or being opened, in any thread; whether the interpreter shuts down."""

    lock = threading.Lock()
    pools = 0
    exiting = False
    watch: _Watch | None = None


class _Watch:
    """Thread that closes all pools on a signal that would end the process, and then lets it end the process.

    Python's own handlers can be set in the main thread only, and wait for it. Those of faulthandler can be set in any
    thread, and write to a file at once: here a pipe, one for each signal.

    Args:
        close: closes all pools.
    """

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        self._closing = False
        self._pipes = {number: os.pipe() for number in WATCHED_SIGNALS}
        self._watched = set[signal.Signals]()
        self._stopped, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, name="skyward-signals", daemon=True)
        self._thread.start()

    def extend(self) -> None:
        """Watch every signal that has its default effect."""
        for number in _with_default_effect():
            if number in self._watched:
                stop_writing_on_signal(number)  # else a handler that has replaced this one meanwhile stays
            elif is_caught(number):  # in C code: the application's ``faulthandler.register``
                continue
            write_on_signal(number, self._pipes[number][1])
            self._watched.add(number)

    def stop(self) -> None:
        """Restore the default effect of signals. Wait for the thread, unless it is about to end the process."""
        self.forget()
        os.close(self._stop)
        if not self._closing:  # else it may wait for a pool that the present thread is closing
            self._thread.join()

    def forget(self) -> None:
        """Undo :meth:`extend`, except for signals that the application handles by now."""
        for number in self._watched.intersection(_with_default_effect()):
            stop_writing_on_signal(number)
        self._watched.clear()

    def leave(self) -> None:
        """Stop watching in a forked child, which has no such thread and whose pipes lead to the parent."""
        self.forget()
        os.close(self._stop)
        self._close_pipes()

    def _run(self) -> None:
        readers = {pipe[0]: number for number, pipe in self._pipes.items()}
        ready = wait_readable(*readers, self._stopped)
        number = None if ready is None else readers.get(ready)
        if number is not None:
            try:
                if self._is_needed():
                    self._close()
            finally:
                stop_writing_on_signal(number)
                os.kill(os.getpid(), number)
        self._close_pipes()

    def _is_needed(self) -> bool:
        """Return True if pools are still held; then :meth:`stop` does not wait from now on."""
        with _Held.lock:
            self._closing = _Held.watch is self
        return self._closing

    def _close_pipes(self) -> None:
        for descriptor in (self._stopped, *(end for pipe in self._pipes.values() for end in pipe)):
            os.close(descriptor)


def hold(close: Callable[[], object] = lambda: None) -> None:
    """Count a pool that is about to open: from now on SIGTERM and SIGHUP unwind the main thread with ``SystemExit``.

    That needs a call of this or of :func:`arm` in the main thread. Otherwise, and on SIGQUIT, ``close`` is called in
    another thread, and the signal ends the process after it. The application's own handlers stay. Pair each call with
    one of :func:`release`.

    Args:
        close: closes all pools. That of the first call counts.
    """
    arm()
    with _Held.lock:
        if WATCHED_SIGNALS:
            _Held.watch = _Held.watch or _Watch(close)
            _Held.watch.extend()
        _Held.pools += 1


def release() -> None:
    """Count a pool that is closed; the last one restores the previous effect of signals."""
    with _Held.lock:
        _Held.pools -= 1
        watch = None if _Held.pools else _Held.watch
        if watch is not None:
            _Held.watch = None
    if watch is not None:
        watch.stop()
    disarm()


def arm() -> None:
    """Handle signals in the main thread, for pools that other threads open for it. Idempotent.

    As long as no pool is held, signals still have their default effect.
    """
    if threading.current_thread() is threading.main_thread():
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _unwind)


def disarm() -> None:
    """Undo :func:`arm` in the main thread, unless a pool is held. Idempotent."""
    if threading.current_thread() is threading.main_thread() and not _Held.pools:
        _restore()


@contextmanager
def uninterrupted() -> Generator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP to the end of this block. Effective in the main thread only.

    The application's own handlers still run at once.
    """
    delay = _Delay()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING_SIGNALS):
                handler = _handler_of(number)
                if handler in (signal.default_int_handler, _unwind):
                    delay.before[number] = handler
                    signal.signal(number, delay)
        yield
    finally:
        try:
            for number, handler in reversed(delay.before.items()):  # SIGINT last: its exception would end this loop
                signal.signal(number, handler)
        finally:
            delay.inside = False
        disarm()  # the last pool may have been closed meanwhile
        if delay.kept:
            raise KeyboardInterrupt if delay.kept[0] == signal.SIGINT else SystemExit(_ABOVE + delay.kept[0])


class _Delay:
    """Handler that keeps signals for the end of a block. Afterwards it stands for the handler that it replaced.

    It may stay in place after its block: a SIGTERM that comes while the handlers are restored ends that.
    """

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.before: dict[int, Any] = {}
        self.inside = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.inside:
            self.kept.append(number)
        else:
            self.before[number](number, frame)


def _handler_of(number: int) -> Any:
    handler = signal.getsignal(number)
    while isinstance(handler, _Delay) and not handler.inside:
        handler = handler.before[number]
    return handler


def at_exit(function: Callable[[], object]) -> None:
    """Call ``function`` when the interpreter exits, the last one registered first."""
    # While threads can still be started, without which no machine can be terminated: `atexit` runs too late for that.
    getattr(threading, "_register_atexit", atexit.register)(function)


def refuse_at_exit() -> None:
    """Raise an error while the interpreter shuts down.

    Raises:
        PoolStateError: no thread can be started any more.
    """
    if _Held.exiting:
        raise PoolStateError(_AT_EXIT)


def wait_for(thread: threading.Thread) -> None:
    """Wait at exit for a thread that the interpreter would wait for anyway."""
    # Threads of executors wait for the exit themselves: waiting for them here would never end.
    waits_for_us = getattr(concurrent.futures.thread, "_threads_queues", {})
    ours = (threading.current_thread(), threading.main_thread())
    if thread not in ours and not thread.daemon and thread not in waits_for_us:
        thread.join()


def _unwind(number: int, _: FrameType | None) -> None:
    if _Held.pools:
        raise SystemExit(_ABOVE + number)
    # The last pool was closed in another thread, which cannot restore the handler.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _restore() -> None:
    for number in ENDING_SIGNALS:
        if _handler_of(number) is _unwind:
            signal.signal(number, signal.SIG_DFL)


def _with_default_effect() -> list[signal.Signals]:
    return [number for number in WATCHED_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]


def _forget() -> None:
    """Drop the parent's pools and handlers in a forked child."""
    _Held.lock = threading.Lock()
    _Held.pools = 0
    if _Held.watch is not None:
        _Held.watch.leave()
        _Held.watch = None
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        if isinstance(handler := signal.getsignal(number), _Delay):
            handler.inside = False  # its block runs in the parent only, if another thread forked
    _restore()


def _note_exit() -> None:
    _Held.exiting = True


at_exit(_note_exit)
run_in_forks(_forget)
