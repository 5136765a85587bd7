"""Several pools as one context manager, opened and closed in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from skyward.base.exits import arm, disarm, uninterrupted
from skyward.errors import ConfigurationError, PoolStateError

__all__ = ["MultiPool"]

P = TypeVar("P")


class MultiPool(Generic[P]):
    """Context manager that opens pools in parallel: opening takes as long as the slowest one.

    ``with MultiPool(a, b) as (pool_a, pool_b):`` yields the open pools, in order. If one cannot be opened, or on
    Ctrl-C, the others are closed and the error is raised; several errors form an ``ExceptionGroup``. On exit every pool
    is closed, even if another one raises.

    Args:
        pools: closed pools.

    Raises:
        ConfigurationError: one of them is no pool.
        PoolStateError: it is already open.
    """

    def __init__(self, *pools: AbstractContextManager[P]) -> None:
        for position, pool in enumerate(pools, start=1):
            if not isinstance(pool, AbstractContextManager):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"MultiPool takes pools, got {type(pool).__name__} as argument {position}")
        self._pools = pools
        self._in_use = threading.Lock()
        self._closing: list[Callable[..., object]] = []

    def __enter__(self) -> tuple[P, ...]:
        if not self._in_use.acquire(blocking=False):
            raise PoolStateError("this MultiPool is already open; make another one, with other pools")
        arm()
        contexts = [copy_context() for _ in self._pools]  # each pool is opened and closed in its own
        pairs = list(zip(contexts, self._pools, strict=True))
        self._closing = [partial(context.run, pool.__exit__) for context, pool in pairs]
        try:
            return self._open_all([partial(context.run, pool.__enter__) for context, pool in pairs])
        except BaseException:
            self._in_use.release()
            disarm()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            try:
                with _threads(len(self._closing)) as threads:
                    errors = _errors([threads.submit(close, kind, error, trace) for close in self._closing])
            finally:
                self._in_use.release()
            if errors:
                raise _as_one(errors)

    def _open_all(self, enter: Sequence[Callable[[], P]]) -> tuple[P, ...]:
        with _threads(2 * len(enter)) as threads:
            opening: list[Future[P]] = []
            interrupt: BaseException | None = None
            try:
                with uninterrupted():  # an interrupt between two submissions would leave a pool open
                    opening.extend(map(threads.submit, enter))
                done = wait(opening, return_when=FIRST_EXCEPTION).done
                if all(future.exception() is None for future in done):
                    return tuple(future.result() for future in opening)
            except BaseException as error:  # Ctrl-C, SIGTERM, or any exception of a signal handler
                interrupt = error
            with uninterrupted():  # a second Ctrl-C must not leave pools open that are still opening
                pairs = zip(self._closing, opening, strict=False)  # pools without a future were never touched
                errors = _errors([*opening, *(threads.submit(_close_if_opened, *pair) for pair in pairs)])
                if interrupt is not None:
                    raise interrupt from (_as_one(errors) if errors else None)
                raise _as_one(errors)


def _close_if_opened(close: Callable[..., object], opening: Future[Any]) -> None:
    if opening.exception() is None:
        close(None, None, None)


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, count), thread_name_prefix="skyward-multipool")


def _errors(jobs: Sequence[Future[Any]]) -> list[BaseException]:
    wait(jobs)
    return [error for job in jobs if (error := job.exception())]


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    if len(errors) == 1:
        return errors[0]
    return BaseExceptionGroup("several pools failed", errors)
