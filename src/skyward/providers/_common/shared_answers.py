"""Answers of calls with a quota: kept for a time, and asked for once however many want them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["SharedAnswer", "SharedAnswers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedAnswer(Generic[T]):
    """Answer of a call.

    Attributes:
        value: the answer.
        at: the time at which it came.
    """

    value: T
    at: float


class SharedAnswers(Generic[T]):
    """Answers of calls, by name. At most one call of a name is under way, of all tasks and event loops of the process.

    Args:
        longest_s: longest age of an answer.
        now: the time in seconds.
    """

    def __init__(self, longest_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, SharedAnswer[T]] = {}
        self._coming: dict[str, Future[SharedAnswer[T] | None]] = {}

    async def of(self, name: str, call: Callable[[], Awaitable[T]]) -> SharedAnswer[T]:
        """Return the answer that is kept under a name, else that of the call under way, else that of ``call``.

        An error of the call is raised by everybody who waits for it. If its task is cancelled, the next one calls.
        """
        while True:
            with self._lock:
                kept = self._kept.get(name)
                if kept is not None and self._now() - kept.at <= self._longest_s:
                    return kept
                coming = self._coming.get(name)
                if coming is None:
                    own = self._coming[name] = Future[SharedAnswer[T] | None]()
                    own.set_running_or_notify_cancel()  # so that no cancelled waiter cancels it for the others
                    break
            if (answer := await asyncio.wrap_future(coming)) is not None:
                return answer
        return await self._call(name, call, own)

    async def _call(
        self, name: str, call: Callable[[], Awaitable[T]], coming: Future[SharedAnswer[T] | None]
    ) -> SharedAnswer[T]:
        try:
            answer = SharedAnswer(await call(), self._now())
        except BaseException as error:
            with self._lock:
                del self._coming[name]
            if isinstance(error, Exception):
                coming.set_exception(error)
            else:
                coming.set_result(None)
            raise
        with self._lock:
            del self._coming[name]
            self._kept[name] = answer
        coming.set_result(answer)
        return answer
