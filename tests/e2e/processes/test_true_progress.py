"""Every line of progress on a real pool, against the truth: calls begin and end when the test lets them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

PATIENCE_S = 60


@sky.compute
def train(number: int, stage: str, fate: str = "") -> int:
    """Begin visibly, wait for the test, and meet a fate."""
    folder = Path(stage)
    (folder / f"began-{number}").touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.01)
    if fate == "fail":
        raise ValueError("loss is NaN")
    if fate == "die":
        (folder / f"go-{number}").unlink()
        os.kill(os.getpid(), 9)
    return number


class Stage:
    """A folder that calls wait in, and the progress that the pool publishes meanwhile."""

    def __init__(self, pool: sky.ComputePool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self.told: list[sky.Progress] = []
        self._arriving: queue.SimpleQueue[sky.Progress] = queue.SimpleQueue()

    def hear(self, event: sky.Progress) -> None:
        self._arriving.put(event)

    def release(self, *numbers: int) -> None:
        for number in numbers:
            (self.folder / f"go-{number}").touch()

    def until(self, wanted: sky.Progress) -> None:
        """Wait for an event; every one on the way has to be possible."""
        while True:
            event = self._arriving.get(timeout=PATIENCE_S)
            assert event.total == wanted.total
            assert event.ended + event.running <= (event.total or 0)
            assert event.running <= 2
            assert not self.told or event.ended >= self.told[-1].ended
            self.told.append(event)
            if event == wanted:
                return
            assert not event.over, f"{event} is the end, {wanted} was expected"


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as pool:
        start_callbacks(pool)
        yield pool


@pytest.fixture
def stage(pool: sky.ComputePool, tmp_path: Path) -> Stage:
    stage = Stage(pool, tmp_path)
    pool.on(sky.Progress, stage.hear)
    return stage


def test_a_failing_batch(stage: Stage) -> None:
    calls = [train(n, str(stage.folder), "fail" if n == 2 else "") for n in range(5)]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: sky.gather(*calls) >> stage.pool)
        stage.until(sky.Progress("train", 0, 5, running=2))
        stage.release(0)
        stage.until(sky.Progress("train", 1, 5, running=2))
        stage.release(2)
        stage.until(sky.Progress("train", 1, 5, failed=1, cancelled=3))
        with pytest.raises(ValueError, match="loss is NaN") as caught:
            running.result(PATIENCE_S)
    stage.release(1, 3, 4)  # the running ones go on
    assert any("index 2 of 5 calls: train(2, " in note for note in caught.value.__notes__)
    snapshot = stage.pool.snapshot()
    assert snapshot.failed == 1
    assert snapshot.last_failure.endswith("ValueError: loss is NaN")


def test_a_lost_worker_puts_its_call_back_into_the_queue(stage: Stage) -> None:
    calls = [train(n, str(stage.folder), "die" if n == 0 else "") for n in range(2)]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: (sky.gather(*calls, return_exceptions=True) >> stage.pool)[1])
        stage.until(sky.Progress("train", 0, 2, running=2))
        stage.release(0)
        wait_for(lambda: not (stage.folder / "go-0").exists())
        stage.until(sky.Progress("train", 0, 2, running=2))  # on the replacement
        stage.release(1)
        stage.until(sky.Progress("train", 1, 2, running=1))
        for _ in range(3):  # the other runs that its retries allow
            stage.release(0)
            wait_for(lambda: not (stage.folder / "go-0").exists())
        stage.until(sky.Progress("train", 1, 2, failed=1))
        assert running.result(PATIENCE_S) == 1


def test_cancelled_calls(stage: Stage) -> None:
    futures: list[Any] = [stage.pool.submit(train, n, str(stage.folder)) for n in range(5)]
    stage.until(sky.Progress("train", 0, 5, running=2))
    stage.release(0)
    stage.until(sky.Progress("train", 1, 5, running=2))
    stage.pool.cancel_calls(futures)
    stage.until(sky.Progress("train", 1, 5, cancelled=4))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)
