"""The client's one event loop, in a thread that lives until its last user releases it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from skyward.base.exits import uninterrupted
from skyward.base.platform import run_in_forks, waits_for_disk
from skyward.errors import PoolStateError

T = TypeVar("T")

_logger = logging.getLogger("skyward")


class LoopThread:
    """Asyncio loop in a thread of its own. Acquired with :func:`acquire_loop`, given up with :meth:`release`.

    Args:
        name: name of the thread.
        helpers: largest number of threads for :func:`asyncio.to_thread`; None means asyncio's own number.
        waits: False to end without waiting for these threads, whose number is then not limited.
    """

    def __init__(self, name: str = "skyward-loop", helpers: int | None = None, *, waits: bool = True) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._spawned: set[Future[Any]] = set()
        self._stop = asyncio.Event()
        # Windows' usual loop cannot watch the sockets of links.
        self._loop = asyncio.SelectorEventLoop() if sys.platform == "win32" else asyncio.new_event_loop()
        if helpers is not None:
            from concurrent.futures import ThreadPoolExecutor  # cannot be imported while the interpreter shuts down

            self._loop.set_default_executor(ThreadPoolExecutor(helpers, thread_name_prefix=name))
        if not waits:
            from skyward.base.daemon_threads import DaemonThreads

            self._loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself: plain asyncio, so tornado's ``IOLoop.current()`` works inside it."""
        return self._loop

    @property
    def runs(self) -> bool:
        """False once the loop has ended."""
        return not self._ended

    @property
    def waits_for_disk(self) -> bool:
        """True while the loop waits in the kernel for a disk or a file server."""
        return waits_for_disk(self._thread.native_id)

    @property
    def is_current(self) -> bool:
        """True in the loop's own thread."""
        return threading.current_thread() is self._thread

    def call(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coro`` on the loop and wait for its result, in the caller's context.

        When the wait ends early, by Ctrl-C or after ``timeout_s``, the coroutine is cancelled; its clean-up goes on in
        the background.

        Raises:
            TimeoutError: it took longer than ``timeout_s``.
            PoolStateError: called in the loop's own thread, which would wait for itself, or after the loop ended.
        """
        self._refuse_own_thread(coro)
        with self._lock:
            self._refuse_ended(coro)
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def finish(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run ``coro`` as :meth:`call` does, but to its end: Ctrl-C is raised after it, even if it failed.

        Raises:
            PoolStateError: called in the loop's own thread, which would wait for itself, or after the loop ended.
        """
        self._refuse_own_thread(coro)
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if not tasks:
                tasks.append(self._loop.create_task(coro))
                tasks[0].add_done_callback(partial(_complete, done))

        interrupt: BaseException | None = None
        runs = True
        with uninterrupted():
            while runs and not done.done():
                try:
                    if runs := self.call_soon(begin):  # again after an interrupt, which may have come first
                        wait([done])
                except BaseException as error:  # of the application's own signal handler, of whatever class
                    interrupt = error
            if not runs:
                if interrupt is not None:
                    self._thread.join()  # the loop's end cancels the work, if that began
                coro.close()
                raise interrupt or _ended()
            if interrupt is not None:
                raise interrupt from (None if done.cancelled() else done.exception())
            return done.result()

    def _refuse_own_thread(self, coro: Coroutine[Any, Any, object]) -> None:
        if self.is_current:
            coro.close()
            raise PoolStateError("blocking call in Skyward's event loop thread: await the coroutine there instead")

    def call_soon(self, callback: Callable[[], None]) -> bool:
        """Hand a callback to the loop, from any thread; return False if that has ended."""
        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(callback)
            return not self._ended

    def spawn(self, coro: Coroutine[Any, Any, object]) -> None:
        """Run ``coro`` on the loop without waiting; its exception is logged. Allowed from any thread.

        Raises:
            PoolStateError: the loop has ended.
        """
        with self._lock:
            self._refuse_ended(coro)
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        self._spawned.add(future)
        future.add_done_callback(self._report)

    def release(self) -> None:
        """Drop a use of the loop. The last one ends it: tasks are cancelled and awaited, the thread is joined.

        Raises:
            PoolStateError: called in the loop's own thread, which cannot wait for its own end.
        """
        if self.is_current:
            raise PoolStateError("Skyward's event loop cannot be released from its own thread")
        _shared.release(self)

    def end(self) -> None:
        """Stop the loop and join its thread, even while it has users. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def forget(self) -> None:
        """Mark the loop as ended in a forked child, which has no copy of its thread."""
        self._lock = threading.Lock()  # another thread of the parent may have held it at the fork
        self._ended = True

    def _refuse_ended(self, coro: Coroutine[Any, Any, object]) -> None:
        if self._ended:
            coro.close()  # else it warns that it was never awaited
            raise _ended()

    def _report(self, future: Future[Any]) -> None:
        self._spawned.discard(future)
        if not future.cancelled() and (error := future.exception()):
            _logger.error("a background task failed", exc_info=error)

    def _run(self) -> None:
        """Run until the stop is set, also after a callback raised SystemExit, which asyncio does not catch."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                while not self._stop.is_set():
                    try:
                        runner.run(self._wait_for_stop())
                    except (OSError, ValueError):  # of the selector: user code has closed its descriptor
                        raise  # no event would arrive any more
                    except BaseException:
                        _logger.exception("Skyward's event loop was interrupted, and goes on")
        finally:
            self._ended = True

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()


def _ended() -> PoolStateError:
    return PoolStateError("Skyward's event loop has ended: the pool was closed, or this is a forked child")


def _complete(future: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()  # `cancel` alone frees no waiter
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


class SharedLoop:
    """Loop thread that runs from its first user to its last. Thread-safe; a forked child starts its own.

    Args:
        name: see :class:`LoopThread`.
        helpers: see :class:`LoopThread`.
    """

    def __init__(self, name: str = "skyward-loop", helpers: int | None = None) -> None:
        self._name = name
        self._helpers = helpers
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._users = 0
        run_in_forks(self._forget)

    def acquire(self) -> LoopThread:
        """Return the loop thread; pair every call with one of :meth:`release`."""
        with self._lock:
            if self._thread is None or not self._thread.runs:  # user code has closed the loop's descriptors
                self._thread, self._users = LoopThread(self._name, self._helpers), 0
            self._users += 1
            return self._thread

    def release(self, thread: LoopThread) -> None:
        """Drop a use; the last one ends the loop and waits for its threads."""
        with self._lock:
            if thread is not self._thread:
                return
            self._users -= 1
            if self._users:
                return
            self._thread = None
        thread.end()

    def _forget(self) -> None:
        if self._thread is not None:
            self._thread.forget()
        self._lock = threading.Lock()  # another thread of the parent may have held it at the fork
        self._thread = None
        self._users = 0


_shared = SharedLoop()


def acquire_loop() -> LoopThread:
    """Return the process's loop thread, started for its first user; pair every call with one ``release()``."""
    return _shared.acquire()
