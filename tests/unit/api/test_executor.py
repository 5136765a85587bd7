"""The executor: what concurrent.futures promises, held by the standard library's and by ours."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from skyward.api.calls import compute
from skyward.api.executor import PoolExecutor
from skyward.errors import ConfigurationError, PoolStateError, RemoteTraceback, SerializationError
from skyward.submission import Invocation
from skyward.testing.in_process import InProcessSubmitter

gates: dict[str, threading.Event] = {}
passed: list[str] = []


def pass_gate(name: str) -> str:
    assert sys.modules[__name__].gates[name].wait(timeout=30)  # the function is a copy, the gates must not be
    return name


def fail_or_pass_gate(name: str) -> None:
    if name == "fail":
        raise KeyError(name)
    sys.modules[__name__].passed.append(pass_gate(name))


def fail(text: str) -> None:
    raise KeyError(text)


def invert(number: int) -> float:
    return 1 / number


class Bulky:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.fixture
def submitter() -> Iterator[InProcessSubmitter]:
    with InProcessSubmitter(workers=2) as submitter:
        yield submitter


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gates["it"] = threading.Event()
    passed.clear()
    yield gates["it"]
    gates["it"].set()


class ExecutorContract:
    """What any executor of two workers does."""

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        raise NotImplementedError

    def test_gives_the_result(self, executor: Executor) -> None:
        assert executor.submit(divmod, 7, 2).result() == (3, 1)
        assert executor.submit(int, "ff", base=16).result() == 255

    def test_gives_the_exception(self, executor: Executor) -> None:
        future = executor.submit(fail, "gone")
        assert isinstance(future.exception(), KeyError)
        with pytest.raises(KeyError, match="gone"):
            future.result()

    @pytest.mark.parametrize("chunksize", [1, 3])
    def test_map_keeps_no_result_alive_that_it_has_given(self, executor: Executor, chunksize: int) -> None:
        results = executor.map(Bulky, range(6), chunksize=chunksize)
        given = [weakref.ref(next(results)) for _ in range(3)]
        gc.collect()
        assert [reference() for reference in given] == [None] * 3
        assert [result.number for result in results] == [3, 4, 5]

    def test_an_exception_that_is_returned_is_a_value(self, executor: Executor) -> None:
        assert isinstance(executor.submit(ValueError, "value").result(), ValueError)

    def test_callback_is_called_once(self, executor: Executor) -> None:
        called: list[Future[int]] = []
        with executor:
            future = executor.submit(abs, -1)
            future.add_done_callback(called.append)
        assert called == [future]

    def test_as_completed_gives_each_once(self, executor: Executor) -> None:
        futures = [executor.submit(abs, -number) for number in range(20)]
        assert sorted(future.result() for future in as_completed(futures)) == list(range(20))

    def test_wait_splits_done_from_not_done(self, executor: Executor, gate: threading.Event) -> None:
        slow, quick = executor.submit(pass_gate, "it"), executor.submit(abs, -1)
        outcome = wait([slow, quick], return_when="FIRST_COMPLETED")
        assert (outcome.done, outcome.not_done) == ({quick}, {slow})
        gate.set()

    def test_a_queued_call_can_be_cancelled_and_a_running_one_not(
        self, executor: Executor, gate: threading.Event
    ) -> None:
        futures = [executor.submit(pass_gate, "it") for _ in range(3)]
        assert futures[2].cancel()
        assert wait_until_running(futures[0])
        assert not futures[0].cancel()
        gate.set()
        assert futures[0].result() == "it"
        with pytest.raises(CancelledError):
            futures[2].result()

    def test_map_keeps_the_order(self, executor: Executor) -> None:
        assert list(executor.map(pow, range(10), [2] * 8)) == [number**2 for number in range(8)]

    @pytest.mark.parametrize("chunksize", [1, 3, 100])
    def test_map_in_chunks_gives_the_same(self, executor: Executor, chunksize: int) -> None:
        assert list(executor.map(pow, range(10), range(10), chunksize=chunksize)) == [n**n for n in range(10)]

    def test_map_of_nothing(self, executor: Executor) -> None:
        assert list(executor.map(abs, [])) == []

    def test_map_raises_where_the_call_failed(self, executor: Executor) -> None:
        results = executor.map(invert, [2, 1, 0, 1])
        assert [next(results), next(results)] == [0.5, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)
        assert list(results) == []

    def test_map_drops_what_is_queued_when_a_call_fails(self, executor: Executor, gate: threading.Event) -> None:
        results = executor.map(fail_or_pass_gate, ["fail", *["it"] * 10])
        with pytest.raises(KeyError):
            next(results)
        gate.set()
        executor.shutdown()
        assert len(passed) <= 2

    def test_map_raises_when_the_time_is_up(self, executor: Executor, gate: threading.Event) -> None:
        results = executor.map(pass_gate, ["it"], timeout=0.01)
        with pytest.raises(TimeoutError):
            list(results)
        gate.set()

    def test_leaving_waits_for_the_calls(self, executor: Executor) -> None:
        with executor:
            futures = [executor.submit(abs, -1) for _ in range(20)]
        assert all(future.done() for future in futures)

    def test_takes_no_calls_after_shutdown(self, executor: Executor) -> None:
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(RuntimeError):
            executor.submit(abs, 1)
        with pytest.raises(RuntimeError):
            executor.map(abs, [1])

    def test_shutdown_can_drop_what_is_queued(self, executor: Executor, gate: threading.Event) -> None:
        futures = [executor.submit(pass_gate, "it") for _ in range(5)]
        assert all(wait_until_running(future) for future in futures[:2])
        executor.shutdown(wait=False, cancel_futures=True)
        assert [future.cancelled() for future in futures] == [False, False, True, True, True]
        gate.set()
        assert [future.result() for future in futures[:2]] == ["it", "it"]

    async def test_runs_for_an_event_loop(self, executor: Executor) -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(executor, divmod, 7, 2) == (3, 1)
        assert await asyncio.wrap_future(executor.submit(abs, -1)) == 1


class TestThreadPoolExecutor(ExecutorContract):
    """The control: the contract holds for the standard library."""

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        with ThreadPoolExecutor(2) as executor:
            yield executor


class TestPoolExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, submitter: InProcessSubmitter) -> Iterator[Executor]:
        with PoolExecutor(submitter) as executor:
            yield executor

    def test_takes_a_pending_call(self, executor: PoolExecutor) -> None:
        pending = compute(pow)(2, 5)
        assert executor.submit(pending).result() == 32
        with pytest.raises(ConfigurationError, match=r"pow has its arguments already: submit\(f\(1\)\)"):
            executor.submit(pending, 1)
        with pytest.raises(ConfigurationError, match="submit takes one call: write `batch >> pool`"):
            executor.submit(pending & pending)

    def test_takes_compute_functions(self, executor: PoolExecutor) -> None:
        @compute
        def double(number: int) -> int:
            return 2 * number

        assert executor.submit(double, 4).result() == 8
        assert list(executor.map(double, range(3))) == [0, 2, 4]
        assert list(executor.map(double, range(5), chunksize=2)) == [0, 2, 4, 6, 8]

    def test_chunks_of_a_method_keep_its_object(self, executor: PoolExecutor) -> None:
        assert list(executor.map(Counter(10).plus, range(4), chunksize=3)) == [10, 11, 12, 13]

    async def test_its_futures_can_be_awaited(self, executor: PoolExecutor) -> None:
        assert await executor.submit(abs, -1) == 1
        assert await asyncio.gather(*(executor.submit(abs, -n) for n in range(3))) == [0, 1, 2]

    def test_leaves_the_pool_open(self, submitter: InProcessSubmitter) -> None:
        with PoolExecutor(submitter) as executor:
            executor.submit(abs, -1)
        with PoolExecutor(submitter) as executor:
            assert executor.submit(abs, -2).result() == 2

    def test_says_where_the_next_executor_comes_from(self, executor: PoolExecutor) -> None:
        executor.shutdown()
        with pytest.raises(PoolStateError, match=r"shut down; pool.executor\(\) returns a new one"):
            executor.submit(abs, 1)

    @pytest.mark.parametrize("chunksize", [0, -1])
    def test_a_chunk_holds_something(self, executor: PoolExecutor, chunksize: int) -> None:
        with pytest.raises(ConfigurationError, match="chunksize must be a whole number ≥ 1"):
            executor.map(abs, [1], chunksize=chunksize)

    @pytest.mark.parametrize("chunksize", [1, 2])
    def test_an_error_in_a_map_has_no_frames_of_skyward(self, executor: Executor, chunksize: int) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            list(executor.map(invert, [2, 1, 0, 1], chunksize=chunksize))

        assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}

    def test_map_is_one_submission(self, submitter: InProcessSubmitter) -> None:
        recorder = Recorder(submitter)
        assert list(PoolExecutor(recorder).map(abs, range(10))) == list(range(10))
        assert list(PoolExecutor(recorder).map(abs, range(10), chunksize=4)) == list(range(10))
        assert recorder.submissions == [10, 3]

    def test_an_abandoned_map_drops_what_is_queued(self, submitter: InProcessSubmitter, gate: threading.Event) -> None:
        gates["open"] = threading.Event()
        gates["open"].set()
        recorder = Recorder(submitter)
        results = PoolExecutor(recorder).map(pass_gate, ["open", *["it"] * 6])
        assert next(results) == "open"
        del results
        assert sum(future.cancelled() for future in recorder.futures) >= 4
        gate.set()


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    @compute
    def plus(self, number: int) -> int:
        return self.start + number


class Recorder:
    """Passes calls on and counts them."""

    def __init__(self, submitter: InProcessSubmitter) -> None:
        self.submitter = submitter
        self.submissions: list[int] = []
        self.futures: list[Future[Any]] = []
        self.capacity = submitter.capacity
        self.broadcast_call = submitter.broadcast_call
        self.cancel_calls = submitter.cancel_calls

    def submit_calls(self, calls: Any, *, memo: Any = None) -> Any:
        self.submissions.append(len(calls))
        futures = self.submitter.submit_calls(calls, memo=memo)
        self.futures += futures
        return futures


class TestInProcessSubmitter:
    """The fake behaves as a fleet does, where threads can."""

    def test_arguments_and_results_are_copies(self, submitter: InProcessSubmitter) -> None:
        numbers = np.zeros(1 << 20)

        def fill(array: Any) -> Any:
            array[:] = 1
            return array

        (future,) = submitter.submit_calls([Invocation(fn=fill, args=(numbers,))])
        assert future.result().all()
        assert not numbers.any()
        future.result()[0] = 5

    def test_exceptions_come_with_the_remote_traceback(self, submitter: InProcessSubmitter) -> None:
        (future,) = submitter.submit_calls([Invocation(fn=fail, args=("gone",))])
        error = future.exception()
        assert isinstance(error, KeyError)
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "in fail" in str(error.__cause__)
        assert error.__notes__ == ["raised on in-process-worker_0"]

    def test_what_cannot_be_pickled_fails_before_anything_runs(self, submitter: InProcessSubmitter) -> None:
        ran: list[int] = []
        with pytest.raises(SerializationError):
            submitter.submit_calls([Invocation(fn=ran.append, args=(threading.Lock(),))])
        (future,) = submitter.submit_calls([Invocation(fn=threading.Lock)])
        assert isinstance(future.exception(), SerializationError)

    def test_exiting_ends_neither_worker_nor_test(self, submitter: InProcessSubmitter) -> None:
        exits = submitter.submit_calls([Invocation(fn=exit), Invocation(fn=exit), Invocation(fn=abs, args=(-1,))])
        assert "SystemExit" in str(exits[0].exception())
        assert exits[2].result() == 1

    def test_broadcast_runs_once_per_worker(self, submitter: InProcessSubmitter) -> None:
        assert submitter.capacity == 2
        assert [future.result() for future in submitter.broadcast_call(Invocation(fn=abs, args=(-1,)))] == [1, 1]

    def test_measures_the_calls(self, submitter: InProcessSubmitter) -> None:
        (future,) = submitter.submit_calls([Invocation(fn=abs, args=(-1,))])
        future.result()
        assert 0 < (future.worker_seconds or 0) < 10

    def test_cancelled_calls_are_over_at_once(self, submitter: InProcessSubmitter, gate: threading.Event) -> None:
        futures = submitter.submit_calls([Invocation(fn=pass_gate, args=("it",))] * 3)
        assert wait_until_running(futures[0])
        submitter.cancel_calls(futures)
        submitter.cancel_calls(futures)
        assert all(isinstance(outcome(future), CancelledError) for future in futures)
        gate.set()

    def test_a_closed_one_takes_nothing_and_leaves_nothing_pending(self) -> None:
        with ExitStack() as stack:
            submitter = stack.enter_context(InProcessSubmitter(workers=1))
            futures = submitter.submit_calls([Invocation(fn=abs, args=(-1,))] * 50)
        assert all(future.done() for future in futures)
        with pytest.raises(PoolStateError, match="closed"):
            submitter.submit_calls([])


def outcome(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:
        return error


def wait_until_running(future: Future[Any]) -> bool:
    """Whether the future runs within a while."""
    pause = threading.Event()
    return any(future.running() or pause.wait(0.01) for _ in range(1000))
