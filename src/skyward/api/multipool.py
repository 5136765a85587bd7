"""Several pools as one context manager, opened and closed in parallel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from skyward._concurrency.exits import arm, disarm, uninterrupted
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
        self._members: tuple[_PoolInContext[P], ...] = ()

    def __enter__(self) -> tuple[P, ...]:
        if not self._in_use.acquire(blocking=False):
            raise PoolStateError("this MultiPool is already open; make another one, with other pools")
        arm()
        self._members = tuple(_PoolInContext(pool=pool, context=copy_context()) for pool in self._pools)
        try:
            return self._open_all()
        except BaseException:
            self._in_use.release()
            disarm()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            try:
                with _threads(len(self._members)) as threads:
                    errors = _errors([threads.submit(member.close, kind, error, trace) for member in self._members])
            finally:
                self._in_use.release()
            if errors:
                raise _as_one(errors)

    def _open_all(self) -> tuple[P, ...]:
        with _threads(2 * len(self._members)) as threads:
            opening: list[Future[P]] = []
            interrupt: BaseException | None = None
            try:
                with uninterrupted():  # an interrupt between two submissions would leave a pool open
                    opening.extend(threads.submit(member.open) for member in self._members)
                done = wait(opening, return_when=FIRST_EXCEPTION).done
                if all(future.exception() is None for future in done):
                    return tuple(future.result() for future in opening)
            except BaseException as error:  # Ctrl-C, SIGTERM, or any exception of a signal handler
                interrupt = error
            with uninterrupted():  # a second Ctrl-C must not leave pools open that are still opening
                pairs = zip(self._members, opening, strict=False)  # pools without a future were never touched
                closing = [threads.submit(member.close_if_opened, future) for member, future in pairs]
                errors = _errors([*opening, *closing])
                if interrupt is not None:
                    raise interrupt from (_as_one(errors) if errors else None)
                raise _as_one(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolInContext(Generic[P]):
    """Pool and its copy of the caller's context variables, in which it is opened and closed."""

    pool: AbstractContextManager[P]
    context: Context

    def open(self) -> P:
        return self.context.run(self.pool.__enter__)

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.context.run(self.pool.__exit__, kind, error, trace)

    def close_if_opened(self, opening: Future[P]) -> None:
        if opening.exception() is None:
            self.close()


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, count), thread_name_prefix="skyward-multipool")


def _errors(jobs: Sequence[Future[Any]]) -> list[BaseException]:
    wait(jobs)
    return [error for job in jobs if (error := job.exception())]


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    if len(errors) == 1:
        return errors[0]
    return BaseExceptionGroup("several pools failed", errors)
