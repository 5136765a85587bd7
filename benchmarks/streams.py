"""Streams of a million items, and of a million calls: what one costs, and whether memory stays as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil

from benchmarks.measured import Measured
from benchmarks.observe import CELL_VARIABLE, cell_processes, processor_time
from benchmarks.peers import WORKERS
from benchmarks.work import count, nothing

if TYPE_CHECKING:
    import skyward as sky

__all__ = ["calls", "items"]

_COUNT = 1_000_000
_LOOK_EVERY = 20_000
_WARM = 50_000
"""Items after which memory should grow no more."""


def items(_: str) -> Measured:
    """A generator of a million numbers."""
    import skyward as sky

    numbers = sky.compute(count)
    return _read(lambda pool: numbers(_COUNT) >> pool)


def calls(_: str) -> Measured:
    """A million no-ops, made while their results are read."""
    import skyward as sky

    call = sky.compute(nothing)
    return _read(lambda pool: sky.gather(map(call, range(_COUNT)), stream=True) >> pool)


def _read(begin: Callable[[sky.ComputePool], sky.Stream[object]]) -> Measured:
    import skyward as sky

    with sky.ComputePool(provider=sky.Local(), concurrency=WORKERS, display="quiet") as pool:
        node = cell_processes(os.environ[CELL_VARIABLE], os.getpid())
        with processor_time() as used:
            started = time.perf_counter()
            stream = begin(pool)
            next(stream)
            first_s = time.perf_counter() - started
            client, workers = zip(*_memory(stream, node), strict=True)
            seconds = time.perf_counter() - started
    return Measured(
        seconds=(seconds,),
        figures={
            "first_item_s": first_s,
            "client_growth_mb": (max(client) - min(client)) / 1e6,
            "node_growth_mb": (max(workers) - min(workers)) / 1e6,
            **{f"{who}_cpu_us": spent / _COUNT * 1e6 for who, spent in used.items()},
        },
    )


def _memory(stream: Iterator[object], node: list[psutil.Process]) -> Iterator[tuple[int, int]]:
    """Read a stream to its end; yield the memory of this process and of the node's, in bytes, now and then."""
    for number, _ in enumerate(stream):
        if number >= _WARM and number % _LOOK_EVERY == 0:
            yield psutil.Process().memory_info().rss, sum(process.memory_info().rss for process in node)
