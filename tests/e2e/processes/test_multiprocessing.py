"""Multiprocessing inside calls: every start method, with functions and classes of this module."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky

METHODS = ["spawn", "forkserver", "fork"]


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        start_callbacks(pool)
        yield pool


@dataclass
class Point:
    x: int
    where: int = 0


def move(point: Point) -> Point:
    return Point(point.x + 1, os.getpid())


def tell(queue: Queue[Any], number: int) -> None:
    queue.put((number, multiprocessing.current_process().daemon))


def lineage(_: int) -> list[tuple[str, int]]:
    """Name and number of threads of each process above this one."""
    return [(each.name(), each.num_threads()) for each in psutil.Process().parents()]


def test_a_call_may_choose_the_start_method(pool: sky.ComputePool) -> None:
    """The first in this file: any use of multiprocessing settles it for the process."""

    @sky.compute
    def choose() -> str:
        multiprocessing.set_start_method("spawn")
        chosen = multiprocessing.get_start_method()
        multiprocessing.set_start_method(None, force=True)
        return chosen

    assert choose() >> pool == "spawn"


@pytest.mark.parametrize("method", METHODS)
def test_an_executor_runs_functions_and_classes_of_the_users_module(pool: sky.ComputePool, method: str) -> None:
    @sky.compute
    def run() -> tuple[list[int], bool, int, int]:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as executor:
            moved = list(executor.map(move, [Point(1), Point(2)]))
            return [each.x for each in moved], type(moved[0]) is Point, moved[0].where, os.getpid()

    xs, same_class, child, worker = run() >> pool

    assert xs == [2, 3]
    assert same_class
    assert child != worker


@pytest.mark.parametrize("method", METHODS)
def test_processes_queues_and_pools_work(pool: sky.ComputePool, method: str) -> None:
    @sky.compute
    def run() -> tuple[Any, Any]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=tell, args=(queue, 7))
        process.start()
        told = queue.get(timeout=60)
        process.join()
        with context.Pool(2) as workers:
            return told, workers.map(abs, [-1, -2])

    assert run() >> pool == ((7, False), [1, 2])


def test_a_fork_server_is_a_program_of_its_own(pool: sky.ComputePool) -> None:
    @sky.compute
    def run() -> list[tuple[str, int]]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as executor:
            return next(iter(executor.map(lineage, [0])))

    (server, threads), (parent, _), *_ = run() >> pool
    assert threads == 1
    assert server != "sky-worker"
    assert parent == "sky-worker"


def test_dasks_scheduler_of_processes_works(pool: sky.ComputePool) -> None:
    @sky.compute
    def run() -> int:
        import dask.bag

        return int(
            dask.bag.from_sequence(range(10), npartitions=2).map(lambda n: n + 1).sum().compute(scheduler="processes")
        )

    assert run() >> pool == 55


def test_modules_that_came_along_reach_child_processes(pool: sky.ComputePool, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "sky_test_helpers.py").write_text("def triple(number):\n    return 3 * number\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    @sky.compute
    def run() -> list[int]:
        import sky_test_helpers  # type: ignore[import-not-found]

        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            return list(executor.map(sky_test_helpers.triple, [1, 2]))

    assert run() >> pool == [3, 6]


def test_closures_over_large_arrays_reach_child_processes(pool: sky.ComputePool) -> None:
    @sky.compute
    def run() -> tuple[float, list[object]]:
        array = np.ones(300_000)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            total = executor.submit(lambda: float(array.sum())).result()
            return total, list(executor.map(type, [None, 1]))

    assert run() >> pool == (300_000.0, [type(None), int])
