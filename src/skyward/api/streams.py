"""``Stream``: what workers send, item by item, for ``for`` and ``async for``."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from skyward.api.misuse import kept, note_call, note_chunk, outline
from skyward.base.exits import uninterrupted
from skyward.hidden_frames import hide_frames, is_explained
from skyward.scheduling.calls import RawOutcome, call_name
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.streams import Arrivals, Inbox, ResultLot, ResultWindow, StreamBatch, most_unread, nbytes_of
from skyward.submission import ArgumentMemo, Invocation, named
from skyward.wire.messages import STREAM_BYTES, STREAM_ITEMS

__all__ = ["Stream"]

T_co = TypeVar("T_co", covariant=True)

_OVER: Final[Any] = object()
_NOT_YET: Final[Any] = object()
_READ_S = 0.005
"""Time for which calls are read before results are looked for again."""
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
        self._count(nbytes_of(raw))
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
    try:
        if everywhere:
            scheduler.broadcast(call, batch)
        else:
            scheduler.submit([call], ArgumentMemo(), batch)
        return tuple(GeneratorStream(inbox, scheduler) for inbox in batch.inboxes)
    except (
        BaseException
    ):  # Ctrl-C would leave a generator without a reader; pickling, or a first node, may take minutes
        with uninterrupted():
            for unread in (inbox.call for inbox in batch.inboxes if inbox.call is not None):
                scheduler.stop_stream(unread)
        raise


class ResultStream(Stream[Any]):
    """Results of calls that are made while the results of earlier ones are read.

    Args:
        source: yields the calls; read in the reader's thread.
        scheduler: the scheduler of the calls.
        ordered: whether results come in the order of the calls, or else as they arrive.
        workers: number of workers that the pool has, or may have if it is elastic.
        return_exceptions: whether the exception of a call is an item.
        ends_calls: whether running calls end with the stream, or else go on.
        deadline_s: time by the monotonic clock until which the last result must have come; None for none.
        chunksize: number of the user's items in a call, for messages.
    """

    def __init__(
        self,
        source: Iterator[Invocation],
        scheduler: Scheduler,
        *,
        ordered: bool,
        workers: int = 1,
        return_exceptions: bool = False,
        ends_calls: bool = True,
        deadline_s: float | None = None,
        chunksize: int = 1,
    ) -> None:
        self._window = ResultWindow()
        super().__init__(self._window.arrivals)
        self._source: Iterator[Invocation] | None = source
        self._scheduler = scheduler
        self._ordered = ordered
        self._workers = workers
        self._return_exceptions = return_exceptions
        self._ends_calls = ends_calls
        self._deadline_s = deadline_s
        self._chunksize = chunksize
        self._error: Exception | None = None
        self._arguments: dict[int, tuple[tuple[object, ...], dict[str, object]]] = {}
        self._is_slow = False
        self._enough = 0
        self._submit_some()
        if self._error is not None and not self._window.submitted:
            raise self._error

    def _has_news(self) -> bool:
        return self._is_there() or self._wants_more()

    def _is_there(self) -> bool:
        window = self._window
        there = window.read in window.results if self._ordered else bool(window.results)
        return there or (self._source is None and not window.unread)

    def _wants_more(self) -> bool:
        """Return whether to read on in the source before the next result is handed out."""
        if self._source is None or (self._is_slow and (self._is_there() or self._window.running >= self._capacity)):
            return False
        return (
            4 * (self._most - self._window.unread) >= self._most
        )  # a quarter at once: each submission costs a wake-up

    @property
    def _capacity(self) -> int:
        return max(self._workers, len(self._scheduler.places))

    @property
    def _most(self) -> int:
        """Number of calls whose results may be unread."""
        return most_unread(self._capacity, arrived=self._window.arrived, mean_bytes=self._window.mean_bytes)

    def _next_item(self) -> Any:
        if self._wants_more():
            self._submit_some()
        window = self._window
        if not self._is_there():
            return _NOT_YET
        if not window.unread:
            if self._error is not None:
                raise self._error
            return _OVER
        number = window.read
        if self._ordered:
            raw = window.results.pop(number)
        else:
            number, raw = window.results.popitem(last=False)
        window.read += 1
        try:
            return raw.value()
        except Exception as error:
            self._note(error, raw, number)
            if self._return_exceptions:
                return error
            self._ends_calls = False  # as those of a batch: ending them would cost their workers
            raise
        finally:
            del self._arguments[number]

    def _submit_some(self) -> None:
        """Submit calls for a few milliseconds, one at least. An error comes after the results of the calls before."""
        calls: list[Invocation] = []
        for step in (self._read_some, self._submit):
            try:
                step(calls)
            except Exception as error:  # of the user's iterable and arguments, of any type
                self._error, self._source = error, None
        self._enough = max(2 * self._capacity - 1, self._most // 2)

    def _read_some(self, calls: list[Invocation]) -> None:
        source, room, before_s = self._source, self._most - self._window.unread, time.monotonic()
        until_s = before_s + _READ_S
        while source is not None and before_s < until_s and len(calls) < room:
            call = next(source, None)
            if call is None:
                self._source = None
                return
            calls.append(call)
            now_s = time.monotonic()
            self._is_slow, before_s = now_s - before_s > _READ_S, now_s

    def _submit(self, calls: list[Invocation]) -> None:
        window = self._window
        first = window.submitted
        for number, call in enumerate(calls, first):
            self._arguments[number] = (
                kept(call.args),
                dict(zip(call.kwargs, kept((*call.kwargs.values(),)), strict=True)),
            )
        try:
            if calls:
                self._scheduler.submit(calls, ArgumentMemo(), ResultLot(window))
        except Exception:
            window.drop_from(first)
            if len(calls) == 1:
                raise
            for call in calls:  # those before the one that cannot be sent
                self._submit([call])

    def _note(self, error: BaseException, raw: RawOutcome, number: int) -> None:
        args, kwargs = self._arguments[number]
        name, size = call_name(raw.label, raw.number), self._chunksize
        if size > 1:
            note_chunk(error, name, number * size, (number + 1) * size - 1)
        else:
            note_call(error, name, number, None, outline(name.rpartition("#")[0], args, kwargs))

    def _end_work(self) -> None:
        self._source = None
        if self._window.calls:
            self._scheduler.cancel(list(self._window.calls.values()), kill=self._ends_calls)


def map_ahead(
    calls: Iterator[Invocation], scheduler: Scheduler, *, workers: int, deadline_s: float | None, chunksize: int
) -> Iterator[Any]:
    """Return the results of ``map`` over what has no length, for calls of ``chunksize`` items each."""
    results = ResultStream(
        calls,
        scheduler,
        ordered=True,
        workers=workers,
        ends_calls=False,
        deadline_s=deadline_s,
        chunksize=chunksize,
    )
    return results if chunksize == 1 else _flattened(results)


def _flattened(chunks: ResultStream) -> Iterator[Any]:
    with chunks:
        for chunk in chunks:
            chunk.reverse()
            while chunk:  # the caller decides how long a result lives
                yield chunk.pop()
