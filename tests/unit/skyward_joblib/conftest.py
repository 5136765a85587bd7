"""Fleets for these tests: one that works, in threads, and one whose calls the test ends by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any, Self

import pytest

from skyward.events import SkywardEvent
from skyward.shipping.pickling import Packed, pack, unpack
from skyward.shipping.remote_exceptions import pack_error, unpack_error
from skyward.submission import ArgumentMemo, CallFuture, Invocation


class ThreadFleet:
    """Workers that are threads: calls, results and errors are pickled as on their way to a node."""

    def __init__(self, workers: int) -> None:
        self.capacity = workers
        self.events: list[SkywardEvent] = []
        self.labels: list[str] = []
        self.memos: list[ArgumentMemo | None] = []
        self.submitting_threads: set[int] = set()
        self.most_running = 0
        self._running = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Packed, CallFuture[Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"fake-worker-{n}") for n in range(workers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        self.memos.append(memo)
        self.submitting_threads.add(threading.get_ident())
        self.labels += [call.label for call in calls]
        packed = [pack((call.fn, call.args, call.kwargs), what=call.label) for call in calls]
        futures: list[CallFuture[Any]] = [CallFuture() for _ in calls]
        for item in zip(packed, futures, strict=True):
            self._queue.put(item)
        return futures

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        raise NotImplementedError

    def publish(self, event: SkywardEvent) -> None:
        self.events.append(event)

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            if not future.cancel():
                with suppress(InvalidStateError):  # its worker was first
                    future.set_exception(CancelledError())

    def _work(self) -> None:
        while item := self._queue.get():
            packed, future = item
            if future.set_running_or_notify_cancel():
                self._run(packed, future)

    def _run(self, packed: Packed, future: CallFuture[Any]) -> None:
        with self._lock:
            self._running += 1
            self.most_running = max(self.most_running, self._running)
        started = time.perf_counter()
        error: BaseException | None = None
        result: Any = None
        try:
            fn, args, kwargs = unpack(packed.data, packed.buffers)
            result = pack(fn(*args, **kwargs), what="the result")
            result = unpack(result.data, result.buffers)
        except BaseException as raised:
            error = unpack_error(pack_error(raised), where="node 0, worker 0")
        with self._lock:
            self._running -= 1
        future.worker_seconds = time.perf_counter() - started
        with suppress(InvalidStateError):  # `cancel_calls` was first
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


class HandFleet:
    """Keeps calls until the test ends them."""

    def __init__(self, capacity: int = 4) -> None:
        self.capacity = capacity
        self.events: list[SkywardEvent] = []
        self.calls: list[Invocation] = []
        self.futures: list[CallFuture[Any]] = []
        self.cancelled: list[Future[Any]] = []

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        self.calls += calls
        futures: list[CallFuture[Any]] = [CallFuture() for _ in calls]
        self.futures += futures
        return futures

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        raise NotImplementedError

    def publish(self, event: SkywardEvent) -> None:
        self.events.append(event)

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            self.cancelled.append(future)
            future.cancel()


class ReadyFleet(HandFleet):
    """Has every result before ``submit_calls`` returns."""

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        futures = super().submit_calls(calls, memo=memo)
        for call, future in zip(calls, futures, strict=True):
            future.worker_seconds = 0.001
            future.set_result(call.fn(*call.args, **call.kwargs))
        return futures


@pytest.fixture
def fleet_of() -> Iterator[Callable[[int], ThreadFleet]]:
    """Makes working fleets of so many workers."""
    with ExitStack() as fleets:
        yield lambda workers: fleets.enter_context(ThreadFleet(workers))


@pytest.fixture
def fleet(fleet_of: Callable[[int], ThreadFleet]) -> ThreadFleet:
    return fleet_of(2)


@pytest.fixture
def hand_fleet() -> HandFleet:
    return HandFleet()


@pytest.fixture
def ready_fleet() -> ReadyFleet:
    return ReadyFleet()
