"""What a call means, on a real pool of this machine."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, as_completed, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.errors import PoolStateError, RemoteError, RemoteTraceback, SerializationError
from skyward.submission import Invocation

WORKERS = 4


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, concurrency=2, display="quiet", env={"GREETING": 'say "hi"\n$HOME'}
    ) as pool:
        start_callbacks(pool)
        yield pool


class FinickyError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def fail(number: int) -> None:
    raise LookupError(f"number {number}")


@sky.compute
def snooze(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def test_a_call_runs_in_another_process(pool: sky.ComputePool) -> None:
    assert pid() >> pool != os.getpid()


def test_a_broadcast_runs_once_on_every_worker_in_order(pool: sky.ComputePool) -> None:
    @sky.compute
    def place() -> tuple[int, int, bool]:
        info = sky.instance_info()
        return info.node, info.worker, info.is_head

    assert place() @ pool == ((0, 0, True), (0, 1, False), (1, 0, False), (1, 1, False))
    assert len(set(pid() @ pool)) == WORKERS


def test_parallel_calls_come_back_in_the_order_they_were_written(pool: sky.ComputePool) -> None:
    delays = [0.3, 0.2, 0.1, 0.0]
    assert sky.gather(*[snooze(delay, delay) for delay in delays]) >> pool == tuple(delays)
    a, b, c = (snooze(0.1, 1) & snooze(0.0, "two") & snooze(0.05, 3.0)) >> pool
    assert (a, b, c) == (1, "two", 3.0)


def test_gather_of_nothing_is_nothing(pool: sky.ComputePool) -> None:
    assert sky.gather() >> pool == ()


def test_ten_thousand_calls_all_come_back(pool: sky.ComputePool) -> None:
    @sky.compute
    def square(x: int) -> int:
        return x * x

    assert sky.gather(*[square(x) for x in range(10_000)]) >> pool == tuple(x * x for x in range(10_000))


def test_broadcasts_and_single_calls_of_several_threads_do_not_mix(pool: sky.ComputePool) -> None:
    @sky.compute
    def echo(x: str) -> str:
        return x

    wrong: list[Any] = []

    def work(name: str) -> None:
        for turn in range(20):
            tag = f"{name}-{turn}"
            if echo(tag) @ pool != (tag,) * WORKERS or echo(tag) >> pool != tag:
                wrong.append(tag)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_exception_keeps_its_type_and_tells_where_it_was_raised(pool: sky.ComputePool) -> None:
    with pytest.raises(LookupError, match="number 7") as caught:
        fail(7) >> pool
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)
    assert any("node" in note and "worker" in note for note in caught.value.__notes__)


def test_an_exception_with_a_finicky_init_comes_back(pool: sky.ComputePool) -> None:
    @sky.compute
    def raise_finicky() -> None:
        raise FinickyError(code=4)

    with pytest.raises(FinickyError) as caught:
        raise_finicky() >> pool
    assert caught.value.code == 4


def test_a_returned_exception_is_a_value(pool: sky.ComputePool) -> None:
    @sky.compute
    def give() -> Exception:
        return ValueError("kept")

    assert str(give() >> pool) == "kept"


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_exits_does_not_end_its_worker_or_the_client(pool: sky.ComputePool, ending: BaseException) -> None:
    @sky.compute
    def leave() -> None:
        raise ending

    before = set(pid() @ pool)
    with pytest.raises(RemoteError, match=type(ending).__name__):
        leave() >> pool
    assert set(pid() @ pool) == before


def test_the_first_failure_of_a_gather_is_raised_at_once(pool: sky.ComputePool) -> None:
    started = time.monotonic()
    with pytest.raises(LookupError):
        sky.gather(*[snooze(1.5) for _ in range(3)], fail(1), *[snooze(1.5) for _ in range(20)]) >> pool
    assert time.monotonic() - started < 1.4
    assert snooze(0.0, "usable") >> pool == "usable"


def test_exceptions_may_be_asked_for_as_values(pool: sky.ComputePool) -> None:
    first, second = sky.gather(fail(1), snooze(0.0, 2), return_exceptions=True) >> pool
    assert isinstance(first, LookupError)
    assert second == 2


def test_arguments_may_be_anything(pool: sky.ComputePool) -> None:
    @sky.compute
    def describe(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return [type(arg).__name__ for arg in args], {name: type(value).__name__ for name, value in kwargs.items()}

    args, kwargs = describe([1], {"a": 1}, np.zeros(3), lambda: 1, items=[2], table={}, array=np.zeros(2)) >> pool
    assert args == ["list", "dict", "ndarray", "function"]
    assert kwargs == {"items": "list", "table": "dict", "array": "ndarray"}


def test_a_large_argument_may_be_written_to_without_others_seeing_it(pool: sky.ComputePool) -> None:
    @sky.compute
    def increment(array: np.ndarray[Any, Any]) -> float:
        array += 1
        return float(array.sum())

    array = np.zeros(1_000_000)
    assert sky.gather(*[increment(array) for _ in range(8)]) >> pool == (1_000_000.0,) * 8
    assert array.sum() == 0


def test_a_changed_array_is_shipped_anew(pool: sky.ComputePool) -> None:
    @sky.compute
    def total(array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    array = np.zeros(1_000_000)
    assert total(array) >> pool == 0
    array[:] = 1
    assert total(array) >> pool == 1_000_000


@pytest.mark.full
def test_a_result_of_200_megabytes_arrives_writable(pool: sky.ComputePool) -> None:
    @sky.compute
    def ones() -> np.ndarray[Any, Any]:
        return np.ones(25_000_000)

    array = ones() >> pool
    array[0] = 2
    assert array.sum() == 25_000_001


def test_a_result_is_what_it_was_when_its_call_returned(pool: sky.ComputePool) -> None:
    @sky.compute
    def refill(number: int) -> np.ndarray[Any, Any]:
        array = vars(sys).setdefault("array_of_the_test", np.zeros(500_000))
        array[:] = number
        print(f"refilled with {number}")
        return array

    lines: list[str] = []
    pool.on(sky.LogLine, lambda event: lines.append(event.line))
    results = sky.gather(*[refill(number) for number in range(40)]) >> pool
    assert [(result.min(), result.max()) for result in results] == [(number, number) for number in range(40)]
    pool.submit(abs, 1).result()
    assert {f"refilled with {number}" for number in range(40)} <= set(lines)


def test_large_bytes_that_many_calls_share_are_kept_once(pool: sky.ComputePool) -> None:
    data = os.urandom(1000) * 20_000
    before = psutil.Process().memory_info().rss
    futures = pool.submit_calls([Invocation(fn=len, args=(data,)) for _ in range(40)])
    grown = psutil.Process().memory_info().rss - before
    assert all(future.result() == len(data) for future in futures)
    assert grown < 20 * len(data)


def test_large_bytes_travel_both_ways(pool: sky.ComputePool) -> None:
    data = os.urandom(1000) * 20_000
    assert (snooze(0.0, data) >> pool) == data


@pytest.mark.full
def test_small_calls_pass_large_results(pool: sky.ComputePool) -> None:
    @sky.compute
    def big() -> bytes:
        return b"x" * 300_000_000

    large = pool.submit(big)
    small = [snooze(0.0, n) >> pool for n in range(20)]
    assert small == list(range(20))
    assert len(large.result()) == 300_000_000


def test_the_environment_is_there_for_subprocesses_too(pool: sky.ComputePool) -> None:
    @sky.compute
    def ask() -> tuple[str, str]:
        code = "import os, skyward as sky; print(os.environ['GREETING'], sky.instance_info().node)"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return os.environ["GREETING"], shown.stdout

    greeting, shown = ask() >> pool
    assert greeting == 'say "hi"\n$HOME'
    assert shown.startswith(greeting)


def test_shard_gives_each_worker_its_part_and_a_single_call_everything(pool: sky.ComputePool) -> None:
    @sky.compute
    def part(items: list[int]) -> list[int]:
        return sky.shard(items)

    parts = part(list(range(10))) @ pool
    assert sum(parts, []) == list(range(10))
    assert {len(one) for one in parts} == {2, 3}
    assert part([1, 2, 3]) >> pool == [1, 2, 3]


def test_a_shuffled_shard_agrees_between_workers(pool: sky.ComputePool) -> None:
    @sky.compute
    def part(items: list[int]) -> list[int]:
        return sky.shard(items, shuffle=True)

    first, second = (part(list(range(40))) @ pool for _ in range(2))
    assert sorted(sum(first, [])) == list(range(40))
    assert first != second


class TestFutures:
    def test_results_come_as_completed(self, pool: sky.ComputePool) -> None:
        futures = {pool.submit(snooze, delay, delay): delay for delay in (0.4, 0.0, 0.2)}
        assert [future.result() for future in as_completed(futures)] == [0.0, 0.2, 0.4]

    def test_wait_returns_with_the_first_exception(self, pool: sky.ComputePool) -> None:
        futures = [pool.submit(snooze, 2.0), pool.submit(fail, 1)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION, timeout=10)
        assert [type(future.exception()) for future in done] == [LookupError]
        pool.cancel_calls(futures)

    def test_map_keeps_the_order(self, pool: sky.ComputePool) -> None:
        assert list(pool.map(pow, range(5), [2] * 5)) == [0, 1, 4, 9, 16]

    def test_a_result_that_the_executor_has_given_lives_as_its_user_wants(self, pool: sky.ComputePool) -> None:
        gone = threading.Event()
        results = pool.executor().map(np.ones, [10, 20])
        gc.collect()
        gc.disable()  # a cycle would keep it alive until the collector runs
        try:
            weakref.finalize(next(results), gone.set)
            assert gone.wait(timeout=10)
        finally:
            gc.enable()

    def test_the_executor_is_one_of_the_standard_library(self, pool: sky.ComputePool) -> None:
        with pool.executor() as executor:
            assert list(executor.map(abs, [-1, 2])) == [1, 2]
        assert pool.is_active

    def test_a_future_is_awaited_in_asyncio(self, pool: sky.ComputePool) -> None:
        async def both() -> list[Any]:
            return await asyncio.gather(pool.submit(snooze, 0.1, 1), pool.submit(pow, 2, 5))

        assert asyncio.run(both()) == [1, 32]

    def test_an_awaited_failure_is_raised(self, pool: sky.ComputePool) -> None:
        async def failing() -> None:
            await pool.submit(fail, 3)

        with pytest.raises(LookupError, match="number 3"):
            asyncio.run(failing())

    def test_a_queued_call_can_be_cancelled(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def wait_for(mark: Path) -> None:
            while not mark.exists():
                time.sleep(0.01)

        blocking = [pool.submit(wait_for, tmp_path / "go") for _ in range(WORKERS)]
        queued = pool.submit(snooze, 0.0, "never")
        while not all(future.running() for future in blocking):
            time.sleep(0.01)
        assert queued.cancel()
        (tmp_path / "go").touch()
        with pytest.raises(CancelledError):
            queued.result()
        assert wait(blocking, timeout=10).not_done == set()

    def test_a_running_call_can_be_ended_and_its_worker_comes_back(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def stay(mark: Path) -> None:
            mark.touch()
            time.sleep(3600)

        before = set(pid() @ pool)
        endless = pool.submit(stay, tmp_path / "begun")
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        pool.cancel_calls([endless])
        with pytest.raises(CancelledError):
            endless.result(timeout=10)
        after = set(pid() @ pool)
        assert len(after) == WORKERS
        assert len(before - after) == 1


class TestSerialization:
    def test_an_unpicklable_argument_is_named(self, pool: sky.ComputePool) -> None:
        with pytest.raises(SerializationError, match=r"argument 1 of .*snooze.*\['lock'\] cannot be pickled"):
            snooze(0.0, {"lock": threading.Lock()}) >> pool

    def test_an_unpicklable_function_is_named(self, pool: sky.ComputePool) -> None:
        lock = threading.Lock()

        @sky.compute
        def guarded() -> object:
            return lock

        with pytest.raises(SerializationError, match=r"guarded.*its variable 'lock'"):
            guarded() >> pool

    def test_an_unpicklable_result_is_named(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def generate() -> Any:
            return (n for n in range(3))

        with pytest.raises(SerializationError, match=r"the result of .*generate cannot be pickled"):
            generate() >> pool

    def test_a_pool_is_refused_as_an_argument(self, pool: sky.ComputePool) -> None:
        with pytest.raises(ValueError, match="pool"):
            snooze(0.0, pool) >> pool

    def test_a_pool_hidden_in_a_closure_is_refused(self, pool: sky.ComputePool) -> None:
        with pytest.raises(ValueError, match="a pool cannot be sent to a worker"):
            pool.submit(lambda: pool.capacity)

    def test_a_pool_used_inside_a_call_is_refused(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def nest() -> None:
            with sky.ComputePool(provider=sky.Local()):
                pass

        with pytest.raises(PoolStateError, match="inside a call"):
            nest() >> pool

    def test_functions_of_every_kind_can_be_sent(self, pool: sky.ComputePool) -> None:
        class Adder:
            def __init__(self, n: int) -> None:
                self.n = n

            def add(self, x: int) -> int:
                return self.n + x

        assert pool.submit(Adder(3).add, 4).result() == 7
        assert pool.submit(functools.partial(pow, 2), 3).result() == 8
        assert pool.submit(lambda x: x + 1, 1).result() == 2


def test_user_exceptions_are_retried_only_where_asked(pool: sky.ComputePool, tmp_path: Any) -> None:
    marks = tmp_path / "marks"

    @sky.compute(retries=3, retry=(OSError,))
    def flaky(path: str) -> int:
        with open(path, "a") as file:
            file.write("x")
        count = os.path.getsize(path)
        if count < 3:
            raise OSError("not yet")
        return count

    assert flaky(str(marks)) >> pool == 3


def test_a_pool_that_is_not_open_says_so() -> None:
    closed = sky.ComputePool(provider=sky.Local())
    with pytest.raises(PoolStateError, match="with"):
        pid() >> closed
    assert not closed.is_active
    assert closed.instance_count == 0
