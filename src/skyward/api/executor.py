"""``submit`` and ``map`` of pools, and the pool as an executor."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import islice
from typing import Any, ParamSpec, TypeVar, overload
from weakref import WeakSet

from skyward.api.calls import ComputeFunction, PendingCompute, invocation_of
from skyward.api.misuse import kept, note_call, note_chunk, outline
from skyward.errors import ConfigurationError, PoolStateError
from skyward.hidden_frames import hide_frames, is_explained
from skyward.scheduling.calls import CallBatch
from skyward.submission import CallFuture, Invocation, TaskSubmitter

__all__ = ["PoolExecutor"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


_Note = Callable[[BaseException, int], None]
"""Adds a note to the exception of the call with an index."""


class CallsByFunction(ABC):
    """``submit`` and ``map`` of executors, for plain functions and compute functions."""

    @abstractmethod
    def _submit_all(self, calls: Sequence[Invocation]) -> list[CallFuture[Any]]: ...

    def _map_ahead(
        self,
        calls: Iterator[Invocation],  # noqa: ARG002 - for those that can
        deadline_s: float | None,  # noqa: ARG002
        chunksize: int,  # noqa: ARG002
    ) -> Iterator[Any] | None:
        """Return the results of calls that are made while results are read; None to make all calls at once."""
        return None

    @overload
    def submit(self, fn: PendingCompute[R], /) -> CallFuture[R]: ...
    @overload
    def submit(self, fn: ComputeFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]: ...
    @overload
    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]: ...
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Enqueue ``fn(*args, **kwargs)``, or a pending call such as ``f(1)``, for any worker.

        Raises:
            ConfigurationError: ``fn`` is async, a generator, or no function.
            PoolStateError: the pool is not open, or the executor was shut down.
            SerializationError: the function or an argument cannot be pickled.
        """
        return self._submit_all([invocation_of(fn, args, kwargs)])[0]

    @overload
    def map(
        self,
        fn: ComputeFunction[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[R]: ...
    @overload
    def map(
        self, fn: Callable[..., R], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[R]: ...
    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Enqueue ``fn`` for every item; the iterator yields the results in order, as they arrive.

        Queued calls are dropped when a call fails, the timeout expires, or the iterator is closed.

        Args:
            fn: called with one item of each iterable.
            iterables: read to the end of the shortest before this returns. A pool reads an iterator, or another one
                without a length, as results are read: it may be of any length.
            timeout: seconds from now until all results must have arrived.
            chunksize: items per call; more than one is faster when a call takes well under a millisecond.

        Raises:
            ConfigurationError: ``fn`` is async, a generator, or no function.
            TimeoutError: from the iterator, when the timeout expires.
        """
        if chunksize < 1:
            raise ConfigurationError(f"chunksize must be a whole number ≥ 1, got {chunksize!r}")
        for position, items in enumerate(iterables, start=2):
            if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(
                    f"map takes iterables, got {type(items).__name__} as argument {position}: write map(f, [...]) for "
                    "several calls, submit(f, ...) for one"
                )
        deadline_s = None if timeout is None else time.monotonic() + timeout
        rows = zip(*iterables, strict=False)
        if not all(isinstance(items, Sized) for items in iterables):
            results = self._map_ahead(_calls_of(fn, rows, chunksize), deadline_s, chunksize)
            if results is not None:
                return results
        items = list(rows)
        calls = [*_calls_of(fn, items, chunksize)]
        name = calls[0].label if calls else ""
        note = (
            functools.partial(_note_item, name, [kept(item) for item in items])
            if chunksize == 1
            else functools.partial(_note_chunk, name, len(items), chunksize)
        )
        return _results(self._submit_all(calls), deadline_s, note, in_chunks=chunksize > 1)


class PoolExecutor(CallsByFunction, Executor):
    """Executor of a pool's workers, for plain functions and compute functions.

    It borrows the pool: its shutdown leaves the pool open. Works with ``as_completed``, ``wait``,
    ``asyncio.wrap_future`` and ``loop.run_in_executor``; its futures can also be awaited as they are.

    Args:
        submitter: the open pool, or anything else that submits calls.
    """

    def __init__(self, submitter: TaskSubmitter) -> None:
        self._submitter = submitter
        self._lock = threading.Lock()
        # Weak, so that a result is freed once its caller drops the future. The pool holds futures of unfinished calls.
        self._futures: WeakSet[Future[Any]] = WeakSet()
        self._is_shut_down = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """Refuse further calls; the pool stays open.

        Args:
            wait: return only when every call submitted here is done.
            cancel_futures: drop queued calls.
        """
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            concurrent.futures.wait(futures)

    def _submit_all(self, calls: Sequence[Invocation]) -> list[CallFuture[Any]]:
        if self._is_shut_down:
            raise PoolStateError("this executor was shut down; pool.executor() returns a new one")
        futures = self._submitter.submit_calls(calls)
        with self._lock:
            self._futures.update(futures)
        return futures


def _results(
    futures: list[CallFuture[Any]], deadline_s: float | None, note: _Note, *, in_chunks: bool
) -> Iterator[Any]:
    """Yield the results in order, and keep no reference to a yielded one: its caller decides its lifetime."""
    futures.reverse()
    calls = len(futures)
    try:
        while futures:
            chunk = [_take_result(futures, deadline_s, note, calls - len(futures))]
            if in_chunks:
                (chunk,) = chunk
                chunk.reverse()
            while chunk:
                yield chunk.pop()
    except Exception as error:
        if is_explained(error):
            hide_frames(error)
        raise
    finally:
        for future in futures:
            future.cancel()


def _take_result(futures: list[CallFuture[Any]], deadline_s: float | None, note: _Note, index: int) -> Any:
    """Wait for the last future, then drop it, because a future keeps its result alive."""
    try:
        result = futures[-1].result(None if deadline_s is None else deadline_s - time.monotonic())
    except Exception as error:
        if futures[-1].done():  # else the timeout expired
            note(error, index)
        raise
    futures.pop()
    return result


def _calls_of(fn: Callable[..., Any], rows: Iterable[tuple[Any, ...]], chunksize: int) -> Iterator[Invocation]:
    """Yield a call for each row of arguments, or for so many of them."""
    if chunksize == 1:
        yield from (invocation_of(fn, row, {}) for row in rows)
        return
    rows, single, run_chunk = iter(rows), None, fn
    while chunk := [*islice(rows, chunksize)]:
        if single is None:
            single = invocation_of(fn, chunk[0], {})
            before = single.args[: len(single.args) - len(chunk[0])]  # the object of a method
            run_chunk = functools.partial(_run_chunk, functools.partial(single.fn, *before))
        yield replace(single, fn=run_chunk, args=(chunk,), tasks=len(chunk))


def _run_chunk(fn: Callable[..., T], items: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*item) for item in items]


def _note_item(name: str, items: Sequence[tuple[Any, ...]], error: BaseException, index: int) -> None:
    note_call(error, name, index, len(items), outline(name, items[index], {}))


def _note_chunk(name: str, count: int, size: int, error: BaseException, index: int) -> None:
    note_chunk(error, name, index * size, min((index + 1) * size, count) - 1)


def result_of(batch: CallBatch, index: int, calls: Sequence[PendingCompute[Any]]) -> Any:
    """Return the result of a call of a batch, once, or raise its exception, which names it."""
    name = batch.name(index)
    try:
        return batch.result(index)
    except Exception as error:
        call = calls[index]
        note_call(error, name, index, len(calls), outline(name.rpartition("#")[0], call.args, call.kwargs))
        raise
