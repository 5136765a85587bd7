"""How a pool is opened and closed, whatever comes in between: an error, Ctrl-C, a signal, a fork, the process's end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache
from types import ModuleType, TracebackType
from typing import Self

from skyward._concurrency.exits import arm, at_exit, disarm, hold, release, uninterrupted, wait_for
from skyward.distributed.runtime import refuse_inside_call
from skyward.errors import PoolStateError
from skyward.provision.fleet.machines import to_its_end

__all__ = ["Opens", "innermost"]

_logger = logging.getLogger("skyward")
_current: ContextVar[Opens | None] = ContextVar("skyward_pool", default=None)
# Threads start with an empty context: there the pool that was opened last counts.
_open: list[Opens] = []


class Opens(ABC):
    """A context manager, ``async`` too, that is left in any case, at the latest when the interpreter exits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = False
        self._closing = ExitStack()
        self._shutting = threading.RLock()
        self._opener = threading.current_thread()
        self._outer: Opens | None = None

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the pool is open: provisioned, and not yet on its way out."""

    @abstractmethod
    def _open(self, stack: ExitStack) -> None:
        """Open everything; ``stack`` is told at once how each part is closed."""

    @abstractmethod
    def _retire(self) -> None:
        """The pool is about to close: it takes nothing more."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing of it is there any more, or it is another process's."""

    def __enter__(self) -> Self:
        refuse_inside_call()
        with self._lock:
            if self._entered:
                raise PoolStateError("the pool is already open; leave its `with` block first, or make another pool")
            self._entered = True
        self._opener = threading.current_thread()
        _open.append(self)  # from the first, so that whatever comes in between, it is closed at exit
        try:
            _register_with_joblib()
            hold(_close_all_now)
            self._closing.callback(release)
            self._open(self._closing)
            self._make_current()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with uninterrupted(), self._shutting:
            if _current.get() is self:
                _current.set(self._outer)
            self._retire()
            try:
                self._closing.close()
            finally:
                self._entered = False
                if self in _open:  # else this is a forked child, which has nothing to close
                    _open.remove(self)

    async def __aenter__(self) -> Self:
        arm()
        opening = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: the pool opens, and is closed at once.
            await to_its_end(self._close_once_open(opening))
            raise
        finally:
            disarm()
        self._make_current()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await to_its_end(asyncio.to_thread(self.__exit__, exc_type, exc, traceback))
        finally:
            disarm()

    async def _close_once_open(self, opening: asyncio.Future[Self]) -> None:
        await asyncio.gather(opening, return_exceptions=True)
        if opening.exception() is None:
            await asyncio.to_thread(self.__exit__, None, None, None)

    def _make_current(self) -> None:
        self._outer = _current.get()
        _current.set(self)

    def leave_to_parent(self) -> None:
        """In a forked child: the pool is the parent's, and the thread that would do its work was not copied."""
        self._forget()
        self._closing = ExitStack()
        self._lock = threading.Lock()
        self._shutting = threading.RLock()
        self._entered = False

    def close_at_exit(self) -> None:
        """The interpreter exits: end the machines, once the thread that opened the pool had its time to."""
        wait_for(self._opener)
        self.close_logged("the interpreter exits")

    def close_logged(self, why: str) -> None:
        """End the machines, in whatever thread; log an error instead of raising it."""
        try:
            self.__exit__(None, None, None)
        except Exception:
            _logger.exception("a pool could not be closed as %s", why)


@cache
def _register_with_joblib() -> None:
    """Make joblib's name ``"skyward"`` known, now or when joblib is imported; without joblib, load nothing."""
    import wrapt

    wrapt.register_post_import_hook(_import_backend, "joblib")


def _import_backend(_: ModuleType) -> None:
    try:
        importlib.import_module("skyward_joblib")
    except ImportError as error:  # an older joblib: the program may have no use for the backend
        _logger.debug("joblib's backend is not registered: %s", error)


def innermost() -> Opens | None:
    """The innermost pool in whose ``with`` block this code runs; in other threads, the pool opened last."""
    pool = _current.get()
    if pool is not None and pool.is_active:
        return pool
    return next((pool for pool in reversed(_open) if pool.is_active), None)


def _leave_all_to_parent() -> None:
    for pool in _open:
        pool.leave_to_parent()
    _open.clear()


def _close_all() -> None:
    for pool in list(reversed(_open)):
        pool.close_at_exit()


def _close_all_now() -> None:
    for pool in list(reversed(_open)):
        pool.close_logged("a signal ends the process")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
at_exit(_close_all)
