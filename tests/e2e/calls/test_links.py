"""A lost link is not a lost worker: calls go on, results are kept, nothing runs twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.scheduling.worker_link import WorkerLink


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        yield pool


def lanes_of(pool: sky.ComputePool) -> list[WorkerLink]:
    assert pool._running is not None
    return list(pool._running.scheduler.links.values())


def cut(pool: sky.ComputePool) -> None:
    """Reset the TCP connections of all lanes, as a Wi-Fi that is gone for a moment does."""

    async def abort() -> None:
        for lane in lanes_of(pool):
            lane.cut()

    assert pool._running is not None
    pool._running.loop.call(abort())


@sky.compute
def leave_a_mark(folder: str, number: int) -> bytes:
    with Path(folder, str(number)).open("a") as file:
        file.write("x")
    time.sleep(0.01)
    print(f"line {number}")
    return bytes([number % 256]) * (3 << 20 if number % 50 == 0 else 10)


def test_calls_whose_links_are_cut_again_and_again_run_exactly_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    lines: list[str] = []
    losses: list[sky.WorkerLost] = []
    pool.on(sky.LogLine, lambda event: lines.append(event.line))
    pool.on(sky.WorkerLost, losses.append)
    futures = [pool.submit(leave_a_mark, str(tmp_path), n) for n in range(200)]
    cuts = 0
    while not all(future.done() for future in futures):
        cut(pool)
        cuts += 1
        time.sleep(0.15)
    assert cuts >= 5
    assert [future.result()[:1] for future in futures] == [bytes([n % 256]) for n in range(200)]
    assert {mark.stat().st_size for mark in tmp_path.iterdir()} == {1}
    assert len(list(tmp_path.iterdir())) == 200
    assert losses == []
    deadline = time.monotonic() + 10
    while len(lines) < 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(lines) == sorted(f"line {n}" for n in range(200))


@sky.compute
def mixed_items(most: int) -> Iterator[bytes]:
    for number in range(most):
        if number % 50 == 0:
            time.sleep(0.02)
        yield number.to_bytes(4, "big") + bytes(3 << 20 if number % 100 == 99 else 0)


def test_items_of_a_stream_whose_links_are_cut_again_and_again_come_once_and_in_order(pool: sky.ComputePool) -> None:
    numbers: list[int] = []
    for item in mixed_items(3000) >> pool:
        if len(numbers) % 300 == 299:
            cut(pool)
        numbers.append(int.from_bytes(item[:4], "big"))
    assert numbers == [*range(3000)]


def test_a_call_that_runs_while_the_link_is_down_keeps_its_result(pool: sky.ComputePool) -> None:
    future = pool.submit(time.sleep, 0.5)
    cut(pool)
    assert future.result(30) is None
