"""Opening and closing, interrupted everywhere: nothing is left, and no call waits for ever."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.errors import PoolStateError, SkywardError
from skyward.ledger.ledger import Ledger
from skyward.scheduling.calls import LiveCall
from skyward.scheduling.scheduler import Scheduler


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of any node of this test, no open ledger entry, no blob folder."""
    yield
    assert processes_of_nodes() == []
    assert not Ledger.of_user().open_entries()
    assert [name for name in os.listdir("/dev/shm") if any(instance in name for instance in started)] == []


started: set[str] = set()


def processes_of_nodes() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKYWARD_INSTANCE") in started and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def new_pool(**options: object) -> sky.ComputePool:
    pool = sky.ComputePool(**{"provider": sky.Local(), "display": "quiet"} | options)  # type: ignore[arg-type]
    pool.on(sky.InstanceProvisioned, lambda event: started.add(event.instance_id))
    return pool


@sky.compute
def double(number: int) -> int:
    return 2 * number


@sky.compute
def fail() -> None:
    raise ZeroDivisionError


def press_ctrl_c(after_s: float) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize(
    "after_s", [0.4, *(pytest.param(after_s, marks=pytest.mark.full) for after_s in (0.05, 0.15, 0.8, 1.2))]
)
def test_ctrl_c_while_opening_leaves_nothing(after_s: float) -> None:
    pool = new_pool(nodes=2)  # what it imports is imported now: an interrupted import leaves its file open
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c(after_s)
        with pool:
            time.sleep(5)


def test_ctrl_c_while_closing_is_heard_after_everything_is_gone() -> None:
    pool = new_pool(nodes=2)
    pool.__enter__()
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c(0.01)
        pool.__exit__(None, None, None)
        time.sleep(5)
    assert not pool.is_active


def test_ctrl_c_while_waiting_ends_the_call_and_the_pool_stays_usable() -> None:
    @sky.compute
    def snooze(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    with new_pool() as pool:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c(0.5)
            snooze(3600) >> pool
        assert time.monotonic() - began < 10
        assert snooze(0) >> pool == 0


def test_ctrl_c_right_after_a_call_was_queued_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(self: Scheduler, *arguments: Any) -> None:
        queue(self, *arguments)
        raise KeyboardInterrupt

    queue = Scheduler._queue
    with new_pool() as pool:
        monkeypatch.setattr(Scheduler, "_queue", enter)
        for operator in (pool.run, pool.broadcast):
            with pytest.raises(KeyboardInterrupt):
                operator(sky.compute(time.sleep)(600))
        monkeypatch.undo()
        assert pool.submit(abs, -1).result(60) == 1


def test_ctrl_c_after_the_first_failure_ends_the_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(self: Scheduler, calls: Sequence[LiveCall], *, kill: bool = True) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    naps = [sky.compute(time.sleep)(600) for _ in range(3)]
    with new_pool() as pool:
        monkeypatch.setattr(Scheduler, "cancel", cancel)
        with pytest.raises(KeyboardInterrupt):
            sky.gather(fail(), *naps) >> pool
        assert pool.submit(abs, -1).result(60) == 1


def test_a_cancelled_async_with_leaves_nothing() -> None:
    async def open_it() -> None:
        async with asyncio.timeout(0.5), new_pool(nodes=2):
            await asyncio.sleep(3)

    with pytest.raises(TimeoutError):
        asyncio.run(open_it())


def test_calls_submitted_while_the_pool_closes_all_end() -> None:
    pool = new_pool()
    futures = []
    closing = threading.Event()

    def submit() -> None:
        while not closing.is_set() or len(futures) < 50:
            try:
                futures.append(pool.submit(abs, -1))
            except PoolStateError:
                return

    with pool:
        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        closing.set()
    for thread in threads:
        thread.join()
    assert wait(futures, timeout=10).not_done == set()
    assert all(isinstance(future.exception(), PoolStateError | None) for future in futures)


def test_a_done_callback_that_never_returns_keeps_no_machine() -> None:
    release = threading.Event()
    try:
        with new_pool() as pool:
            pool.submit(abs, -1).add_done_callback(lambda _: release.wait(60))
            began = time.monotonic()
        assert time.monotonic() - began < 30
        assert processes_of_nodes() == []
    finally:
        release.set()


def test_a_node_that_ends_while_the_pool_opens_is_an_error_that_says_so() -> None:
    began = time.monotonic()
    with (
        pytest.raises(SkywardError, match=r"node 0 is lost|every node of the pool is gone|node 0 ended"),
        new_pool(timeout=1) as pool,
    ):
        time.sleep(3)  # on a quick machine the pool may be open before its second is over
        pool.submit(abs, -1).result()
    assert time.monotonic() - began < 60


def test_an_error_in_the_block_is_the_error_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), new_pool():
        _ = 1 / 0


def test_a_pool_can_be_opened_again() -> None:
    pool = new_pool()
    for _ in range(2):
        with pool:
            assert pool.submit(abs, -1).result() == 1
        assert not pool.is_active


def test_subscribers_have_received_that_the_pool_is_open_when_it_is() -> None:
    called: list[object] = []

    def call_slowly(event: sky.PoolStarted) -> None:
        time.sleep(0.2)
        called.append(pool.submit(abs, -event.nodes).result())

    pool = new_pool()
    pool.on(sky.PoolStarted, call_slowly)
    with pool:
        assert called == [1]


def test_a_pool_that_is_open_cannot_be_opened() -> None:
    with new_pool() as pool, pytest.raises(PoolStateError, match="already open"):
        pool.__enter__()


def test_a_forked_child_has_no_pool_and_leaves_its_parents_alone() -> None:
    with new_pool() as pool:
        child = multiprocessing.get_context("fork").Process(target=_expect_no_pool, args=(pool,))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert double(4) >> pool == 8


def _expect_no_pool(pool: sky.ComputePool) -> None:
    assert not pool.is_active
    with pytest.raises(PoolStateError, match="not open"):
        double(1) >> pool
    pool.__exit__(None, None, None)
