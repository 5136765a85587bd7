"""``Stream``: what workers send, item by item, for ``for`` and ``async for``."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from skyward.base.exits import uninterrupted
from skyward.hidden_frames import hide_frames, is_explained
from skyward.scheduling.calls import RawOutcome
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.streams import Arrivals, Inbox, StreamBatch
from skyward.submission import ArgumentMemo, Invocation, named
from skyward.wire.messages import STREAM_BYTES, STREAM_ITEMS

__all__ = ["Stream"]

T_co = TypeVar("T_co", covariant=True)

_OVER: Final[Any] = object()
_NOT_YET: Final[Any] = object()
_GRANT = 4
"""Part of what a worker may run ahead after which it is told how much was read."""


class Stream(Iterator[T_co]):
    """Iterator of what workers send, item by item, for ``for`` and for ``async for``; for one reader at a time.

    Workers run ahead of a slow reader only so far. Leaving the loop, or :meth:`close`, ends the work behind the
    stream: when the last reference to it is gone, its calls end. Pools make streams.

    Args:
        arrivals: wakes the reader when something has come.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._deadline_s: float | None = None
        self._owner = os.getpid()
        self._is_closed = False

    @abstractmethod
    def _next_item(self) -> Any:
        """Return the next item, ``_OVER`` or ``_NOT_YET``; raise what stands in the place of the item."""

    @abstractmethod
    def _has_news(self) -> bool:
        """Return True if the next item, or the end, may have come."""

    @abstractmethod
    def _end_work(self) -> None:
        """End what still runs, without waiting for it; called once."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        try:
            while (item := self._taken()) is _NOT_YET:
                if not self._arrivals.wait(self._has_news, self._deadline_s):
                    raise TimeoutError("the results have not come in time")
        except BaseException as error:
            self._close_for(error)
            raise
        if item is _OVER:
            raise StopIteration
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        while (item := self._taken_async()) is _NOT_YET:
            await self._arrivals.wait_async(self._has_news)
        if item is _OVER:
            raise StopAsyncIteration
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # its creation failed
            self.close()

    def close(self) -> None:
        """End the work behind the stream, which has no further items then. Returns at once. Idempotent."""
        # A forked child has the pool's locks as they were: the parent alone ends the work.
        if not self._is_closed and self._owner == os.getpid():
            self._is_closed = True
            self._end_work()

    def _taken(self) -> Any:
        if self._is_closed:
            return _OVER
        try:
            item = self._next_item()
        except StopIteration as error:  # it would end the loop as if all was well
            raise RuntimeError(f"the call raised {named(error)}") from error
        if item is _OVER:
            self.close()
        return item

    def _taken_async(self) -> Any:
        try:
            return self._taken()
        except BaseException as error:
            self._close_for(error)
            raise

    def _close_for(self, error: BaseException) -> None:
        with uninterrupted():
            self.close()
        if is_explained(error):
            hide_frames(error)


class GeneratorStream(Stream[Any]):
    """Items of one generator.

    Args:
        inbox: what has arrived of them.
        scheduler: the scheduler of its call.
    """

    def __init__(self, inbox: Inbox, scheduler: Scheduler) -> None:
        super().__init__(inbox.arrivals)
        self._inbox = inbox
        self._scheduler = scheduler
        self._items = self._nbytes = self._granted_items = self._granted_bytes = 0

    def _has_news(self) -> bool:
        return bool(self._inbox.entries) or self._inbox.end is not None

    def _next_item(self) -> Any:
        end = self._inbox.end  # before the entries: once it is there, all items are
        if not self._inbox.entries:
            if end is None:
                return _NOT_YET
            end.value()
            return _OVER
        entry = self._inbox.entries.popleft()
        raw = RawOutcome(entry, None, self._inbox.worker) if isinstance(entry, bytes) else entry
        self._count(len(raw.data) + sum(memoryview(buffer).nbytes for buffer in raw.buffers))
        return raw.value()

    def _count(self, nbytes: int) -> None:
        """Count an item that was read; tell the worker about it now and then."""
        self._items += 1
        self._nbytes += nbytes
        items, size = self._items - self._granted_items, self._nbytes - self._granted_bytes
        if items >= STREAM_ITEMS // _GRANT or size >= STREAM_BYTES // _GRANT:
            self._granted_items, self._granted_bytes = self._items, self._nbytes
            if (call := self._inbox.call) is not None:
                self._scheduler.grant(call, self._items, self._nbytes)

    def _end_work(self) -> None:
        self._inbox.entries.clear()
        if (call := self._inbox.call) is not None:
            self._scheduler.stop_stream(call)


def open_streams(scheduler: Scheduler, call: Invocation, *, everywhere: bool) -> tuple[GeneratorStream, ...]:
    """Submit the call of a generator; return the stream of its items, or with ``everywhere`` one for each worker."""
    batch = StreamBatch()
    with uninterrupted():  # Ctrl-C in between would leave a generator without a reader
        if everywhere:
            scheduler.broadcast(call, batch)
        else:
            scheduler.submit([call], ArgumentMemo(), batch)
        return tuple(GeneratorStream(inbox, scheduler) for inbox in batch.inboxes)
