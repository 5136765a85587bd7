"""Generators on a real pool: items as they come, back-pressure, and no work that nothing reads."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import skyward as sky
from support.eventually import eventually


def wait_for(is_so: Callable[[], bool]) -> None:
    for attempt in eventually(10):
        with attempt:
            assert is_so()


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as pool:
        yield pool


@sky.compute
def count(most: int) -> Iterator[int]:
    yield from range(most)


@sky.compute
def noted(folder: Path, most: int) -> Iterator[int]:
    try:
        with (folder / "made").open("wb", buffering=0) as made:
            for number in range(most):
                made.write(b".")
                yield number
    finally:
        (folder / "closed").touch()


@sky.compute(retries=1)
def die_after(folder: Path, most: int) -> Iterator[int]:
    with (folder / "runs").open("a") as runs:
        runs.write("x")
    yield from range(most)
    (folder / "part").write_text(str(os.getpid()))
    (folder / "part").rename(folder / "pid")
    time.sleep(60)


def test_items_arrive_before_the_last_is_made(pool: sky.ComputePool, tmp_path: Path) -> None:
    with noted(tmp_path, 10**9) >> pool as numbers:
        assert [next(numbers) for _ in range(5000)] == [*range(5000)]
    wait_for((tmp_path / "closed").exists)


def test_a_consumer_that_stops_reading_stops_the_generator(pool: sky.ComputePool, tmp_path: Path) -> None:
    numbers = noted(tmp_path, 10**9) >> pool
    assert next(numbers) == 0
    wait_for(lambda: (tmp_path / "made").stat().st_size == 1024)
    assert [next(numbers) for _ in range(3000)] == [*range(1, 3001)]


def test_every_worker_has_a_stream_of_its_own(pool: sky.ComputePool) -> None:
    first, second = count(3) @ pool
    assert list(zip(first, second, strict=True)) == [(0, 0), (1, 1), (2, 2)]


def test_large_items_are_what_they_were_when_they_were_yielded(pool: sky.ComputePool) -> None:
    @sky.compute
    def arrays() -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        array = np.zeros(1 << 18, dtype=np.int64)
        for number in range(40):
            array[:] = number
            yield array

    assert [int(array.sum()) >> 18 for array in arrays() >> pool] == [*range(40)]


def test_async_for(pool: sky.ComputePool) -> None:
    async def read() -> list[int]:
        return [number async for number in count(2000) >> pool]

    assert asyncio.run(read()) == [*range(2000)]


def test_an_error_in_the_middle_comes_after_the_items_before_it(pool: sky.ComputePool) -> None:
    @sky.compute
    def fails() -> Iterator[int]:
        yield 1
        raise LookupError("in the middle")

    numbers = fails() >> pool
    assert next(numbers) == 1
    with pytest.raises(LookupError, match="in the middle"):
        next(numbers)
    assert list(numbers) == []


def sleep() -> None:
    time.sleep(600)


def hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


@pytest.mark.parametrize("work", [sleep, hold_the_interpreter])
def test_a_generator_that_does_not_yield_again_is_ended(pool: sky.ComputePool, work: Callable[[], None]) -> None:
    @sky.compute
    def stuck() -> Iterator[int]:
        yield os.getpid()
        work()

    pid = next(stuck() >> pool)
    wait_for(lambda: not psutil.pid_exists(pid))
    assert list(count(3) >> pool) == [0, 1, 2]


def test_a_loss_after_the_first_item_repeats_none(pool: sky.ComputePool, tmp_path: Path) -> None:
    numbers = die_after(tmp_path, 2) >> pool
    assert [next(numbers), next(numbers)] == [0, 1]
    wait_for((tmp_path / "pid").exists)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(sky.WorkerLostError, match="Some of its items may have arrived, so it is not run again"):
        next(numbers)
    assert (tmp_path / "runs").read_text() == "x"


def test_a_loss_before_the_first_item_uses_up_a_retry(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=1)
    def late() -> Iterator[int]:
        runs = tmp_path / "runs"
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        if runs.read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        yield from range(3)

    assert list(late() >> pool) == [0, 1, 2]
    assert (tmp_path / "runs").read_text() == "xx"


def test_the_time_of_the_reader_does_not_count_against_the_timeout(pool: sky.ComputePool) -> None:
    for warm in count(1) @ pool:  # the import of this module on a new worker is a call's own time
        assert list(warm) == [0]
    numbers = count(3000).options(timeout=2) >> pool
    assert next(numbers) == 0
    time.sleep(3)
    assert sum(1 for _ in numbers) == 2999


def test_a_generator_learns_of_its_timeout_where_it_yields(pool: sky.ComputePool) -> None:
    @sky.compute(timeout=20, grace=19)
    def graced() -> Iterator[int]:
        try:
            for number in itertools.count():
                time.sleep(0.01)
                yield number
        except sky.TimeLimit:
            yield -1

    *numbers, last = graced() >> pool
    assert numbers == [*range(len(numbers))]
    assert last == -1


def test_a_child_that_a_generator_forks_sends_nothing(pool: sky.ComputePool) -> None:
    @sky.compute
    def forks() -> Iterator[int]:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        yield from range(3)

    assert list(forks() >> pool) == [0, 1, 2]


@sky.compute
def square(number: int) -> int:
    return number * number


def test_any_number_of_calls_is_made_while_their_results_are_read(pool: sky.ComputePool) -> None:
    results = sky.gather(map(square, itertools.count()), stream=True) >> pool
    assert [next(results) for _ in range(20_000)] == [number * number for number in range(20_000)]
    assert pool.snapshot().queued <= 1024
    results.close()
    assert square(3) >> pool == 9


def test_map_over_an_iterator_is_read_as_results_are_read(pool: sky.ComputePool) -> None:
    numbers = itertools.count()
    assert [*itertools.islice(pool.map(square, numbers, chunksize=5), 12)] == [number * number for number in range(12)]
    assert next(numbers) <= 5 * 1024


def test_a_stream_of_results_that_is_left_leaves_no_work_behind(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=0)
    def stay(number: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    results = sky.gather(map(stay, range(10)), stream=True, ordered=False) >> pool
    wait_for(lambda: len([*tmp_path.iterdir()]) == 2)
    results.close()
    wait_for(lambda: not any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir()))
    assert square(4) >> pool == 16


def test_it_has_no_single_result(pool: sky.ComputePool) -> None:
    for run in (lambda: pool.submit(count, 3), lambda: sky.gather(count(3)) >> pool, lambda: pool.map(count, [3])):
        with pytest.raises(sky.ConfigurationError, match=r"count is a generator: count\(\.\.\.\) >> pool"):
            run()
