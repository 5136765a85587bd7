"""Ways to open and close a pool besides ``with``: ``async with``, and ``open`` and ``close`` for notebooks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from skyward._concurrency.exits import arm, disarm
from skyward._concurrency.waiting import to_its_end
from skyward.wire.code.tracebacks import hide_frames, is_explained

__all__ = ["Opening"]


class Opening(ABC):
    """Context manager that also opens in ``async with``, and by ``open()`` and ``close()``."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def _make_current(self) -> None: ...

    def open(self) -> Self:
        """Open the pool without a ``with`` block, for notebooks and consoles; return it.

        The machines end with :meth:`close`, and as those of a ``with`` block do: at the end of the interpreter or the
        notebook's kernel, on SIGTERM, and on Ctrl-C while the pool opens.

        Raises:
            PoolStateError: it is open already.
        """
        try:
            return self.__enter__()
        except BaseException as error:
            if is_explained(error):
                hide_frames(error)
            raise

    def close(self) -> None:
        """Terminate the machines and confirm it, as at the end of a ``with`` block. Idempotent."""
        self.__exit__(None, None, None)

    async def __aenter__(self) -> Self:
        arm()
        opening = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: let the pool open, then close it at once.
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
            await asyncio.to_thread(self.close)
