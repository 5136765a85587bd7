"""Workers die in every way there is; calls do not."""

from __future__ import annotations

import builtins
import mmap
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import joblib
import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.errors import WorkerLostError
from skyward_joblib import joblib_backend

KILLS = 26
WINDOW_S = 45.0


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def work(number: int, array: np.ndarray[Any, Any]) -> float:
    time.sleep(0.02)
    return number + float(array[number])


def square_slowly(number: int) -> int:
    time.sleep(0.02)
    return number * number


def open_pool(**options: Any) -> sky.ComputePool:
    return sky.ComputePool(**{"provider": sky.Local(), "nodes": 2, "concurrency": 2, "display": "quiet"} | options)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with open_pool(nodes=1) as pool:
        yield pool


class Load:
    """Calls on a pool, over and over, until told to stop; keeps count of what came back, and whether it was right."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.wrong: list[str] = []
        self.finished = {"gather": 0, "joblib": 0}
        self._pool = pool
        self._stopping = threading.Event()
        self._array = np.arange(300_000, dtype="f8")  # large enough to be a blob
        kinds = (self._gather, self._joblib)
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"

    def _repeat(self, kind: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            with suppress(WorkerLostError):  # after its retries a call may give up, and say so
                kind()

    def _gather(self) -> None:
        results = sky.gather(*[work(n, self._array) for n in range(60)]) >> self._pool
        self._note("gather", results == tuple(2.0 * n for n in range(60)), results)

    def _joblib(self) -> None:
        with joblib_backend(self._pool):
            results = joblib.Parallel()(joblib.delayed(square_slowly)(n) for n in range(60))
        self._note("joblib", results == [n * n for n in range(60)], results)

    def _note(self, kind: str, right: bool, results: object) -> None:
        self.finished[kind] += 1
        if not right:
            self.wrong.append(f"{kind}: {results}")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_calls_survive_the_murder_of_their_workers_and_nothing_is_left_of_the_pool() -> None:
    losses: list[sky.WorkerLost] = []
    instances: set[str] = set()
    pool = open_pool()
    pool.on(sky.WorkerLost, losses.append)
    pool.on(sky.InstanceProvisioned, lambda event: instances.add(event.instance_id))
    with pool:
        traces = processes_of(instances)
        assert len(workers_of(instances)) == 4
        with Load(pool) as load:
            kills = murder(instances, count=KILLS, within_s=WINDOW_S)
        assert len(set(pid() @ pool)) == 4, "every worker is back"
        traces |= processes_of(instances)
    assert kills >= 25
    assert load.wrong == []
    assert min(load.finished.values()) > 3, load.finished
    assert len(losses) >= kills * 0.8, "losses are reported"
    assert all("killed by signal 9" in loss.reason or "gone" in loss.reason for loss in losses)
    assert [process for process in traces if lives(process)] == []
    assert left_in_shared_memory(instances) == []


def processes_of(instances: set[str]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("SKYWARD_INSTANCE") in instances:
                found.add(process)
        except psutil.Error:
            continue
    return found


def workers_of(instances: set[str]) -> list[int]:
    """A worker leads a session of its own, below the node's fork server."""
    found: list[int] = []
    for process in processes_of(instances):
        try:
            parent = process.parent()
            if os.getsid(process.pid) == process.pid and parent and parent.name() == "sky-zygote":
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return sorted(found)


def murder(instances: set[str], *, count: int, within_s: float) -> int:
    """SIGKILL random workers, spread over the time; returns how many died."""
    chance = random.Random(5)
    started = time.monotonic()
    killed = 0
    while killed < count and time.monotonic() - started < within_s:
        time.sleep(chance.uniform(0.4, 1.4) * within_s / count)
        known = workers_of(instances)
        if known:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(known), signal.SIGKILL)
                killed += 1
    return killed


def lives(process: psutil.Process) -> bool:
    """A zombie is dead; process 1 takes its time to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_in_shared_memory(instances: set[str]) -> list[str]:
    return [entry.name for entry in os.scandir("/dev/shm") if any(name in entry.name for name in instances)]


class TestPoison:
    def test_a_call_that_always_kills_its_worker_is_reported_after_its_retries(self, pool: sky.ComputePool) -> None:
        @sky.compute(retries=1)
        def die() -> None:
            os._exit(3)

        with pytest.raises(WorkerLostError, match=r"lost its worker 2 times.*exited with status 3") as caught:
            die() >> pool
        assert caught.value.node == 0
        assert "worker-" in caught.value.log_path

    def test_innocent_calls_beside_it_come_back(self, pool: sky.ComputePool) -> None:
        @sky.compute(retries=2)
        def maybe_die(number: int) -> int:
            if number == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        results = sky.gather(*[maybe_die(n) for n in range(60)], return_exceptions=True) >> pool
        assert isinstance(results[30], WorkerLostError)
        assert [r for n, r in enumerate(results) if n != 30] == [n for n in range(60) if n != 30]

    def test_short_calls_without_retries_run_once_and_few_are_lost_with_their_worker(self, tmp_path: Path) -> None:
        @sky.compute(retries=0)
        def note(number: int, path: str) -> int:
            counts = getattr(builtins, "counts", None)
            if counts is None:  # once per process: a call that opens a file is long enough for all results to leave
                with open(path, "r+b") as file:
                    counts = builtins.counts = mmap.mmap(file.fileno(), 0)  # type: ignore[attr-defined]
            counts[number] += 1
            if number == 200:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        notes = tmp_path / "notes"
        notes.write_bytes(bytes(400))
        with open_pool(nodes=1, concurrency=1) as pool:
            results = sky.gather(*[note(n, str(notes)) for n in range(400)], return_exceptions=True) >> pool
        lost = [number for number, result in enumerate(results) if result != number]
        assert all(isinstance(results[number], WorkerLostError) for number in lost)
        assert 200 in lost
        assert len(lost) <= 5, "calls that had not begun run in the next process"
        assert notes.read_bytes() == bytes([1]) * 400, "each ran once"
        assert re.search(r"lost its worker once.*may have begun.*retries=0", str(results[200]))

    def test_a_crash_in_native_code_is_a_lost_worker(self, pool: sky.ComputePool) -> None:
        @sky.compute(retries=0)
        def crash() -> None:
            import ctypes

            ctypes.string_at(0)

        with pytest.raises(WorkerLostError, match=r"SIGSEGV"):
            crash() >> pool

    def test_a_daemon_that_a_call_forked_does_not_keep_its_dead_workers_place(self, pool: sky.ComputePool) -> None:
        @sky.compute(retries=0)
        def leave_a_daemon_and_die() -> None:
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)
            time.sleep(0.2)
            os._exit(3)

        with pytest.raises(WorkerLostError):
            leave_a_daemon_and_die() >> pool
        assert len(set(pid() @ pool)) == 2

    def test_what_a_call_left_running_ends_with_the_pool(self) -> None:
        @sky.compute
        def leave_a_daemon() -> int:
            import subprocess

            return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

        with open_pool(nodes=1, concurrency=1) as pool:
            daemon = psutil.Process(leave_a_daemon() >> pool)
            assert daemon.is_running()
        assert not lives(daemon)
