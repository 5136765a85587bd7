"""Dask's own work on the pool: graphs, and graphs beside native calls."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import psutil

from benchmarks.measured import Measured, seconds_of, timed
from benchmarks.peers import WORKERS
from benchmarks.work import nothing

__all__ = ["CLUSTERS", "aggregation", "beside_calls", "client_map", "first_result", "reduction", "shuffle"]

_MAPPED = 1_500
_GROUPS = 1_000
_CALLS = 10_000
_REPEATS = 3
_PARTITIONS = 16
_SHUFFLED_SHARE = 1 / 128
"""Of the machine's memory: 200 MB of 24 GiB."""
_REDUCED_SHARE = 1 / 16
"""Of the machine's memory: 1.6 GB of 24 GiB."""
_ROW_BYTES = 32
_WIDTH = 1_000


# --- clusters -----------------------------------------------------------------------------------------------------


@contextmanager
def _skyward() -> Iterator[Any]:
    import skyward as sky
    from skyward_dask import SkywardCluster

    with SkywardCluster(provider=sky.Local(), nodes=1, concurrency=WORKERS, display="quiet") as cluster:
        yield cluster


@contextmanager
def _local(**options: Any) -> Iterator[Any]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, **options) as cluster:
        yield cluster


CLUSTERS = {"skyward": _skyward, "dask": _local, "dask, TLS": functools.partial(_local, security=True)}


def _with_client(measure: Callable[[Any], Measured]) -> Callable[[str], Measured]:
    """Let ``measure`` find a client of the peer's cluster, whose workers are there."""

    @functools.wraps(measure)
    def with_open_client(name: str) -> Measured:
        from distributed import Client

        with CLUSTERS[name]() as cluster, Client(cluster) as client:
            client.wait_for_workers(WORKERS)
            return measure(client)

    return with_open_client


# --- rows ---------------------------------------------------------------------------------------------------------


def first_result(name: str) -> Measured:
    """From before the imports to the first result of a client's task."""
    started = time.perf_counter()
    from distributed import Client

    with CLUSTERS[name]() as cluster, Client(cluster) as client:
        client.submit(nothing, pure=False).result()
        seconds = time.perf_counter() - started
    return Measured(seconds=(seconds,))


@_with_client
def client_map(client: Any) -> Measured:
    """1,500 tasks that do nothing, until their results are here."""

    def run(tasks: int) -> None:
        client.gather(client.map(nothing, range(tasks), pure=False))

    run(200)
    return timed(lambda: run(_MAPPED), repeats=_REPEATS)


@_with_client
def shuffle(client: Any) -> Measured:
    """Rows find the partition that their key belongs to; the rows are in the workers' memory before."""
    frame, rows = _rows(client)

    def run(shift: int) -> None:
        moved = frame.assign(key=frame["key"] + shift).shuffle("key", npartitions=_PARTITIONS)
        lengths = client.compute(moved.map_partitions(len)).result()
        assert sum(lengths) == rows

    return _repeated(run, megabytes=rows * _ROW_BYTES / 1e6)


@_with_client
def aggregation(client: Any) -> Measured:
    """Compute the means of 1,000 groups of rows; the rows are in the workers' memory before."""
    frame, rows = _rows(client)

    def run(shift: int) -> None:
        means = client.compute(frame.assign(key=(frame["key"] + shift) % _GROUPS).groupby("key").mean()).result()
        assert means.shape == (_GROUPS, 3)

    return _repeated(run, megabytes=rows * _ROW_BYTES / 1e6)


@_with_client
def reduction(client: Any) -> Measured:
    """Compute the spread around the mean of every column; the array is in the workers' memory before."""
    array = _array(client)
    return _repeated(lambda shift: _reduce(client, array, shift), megabytes=array.nbytes / 1e6)


@_with_client
def beside_calls(client: Any) -> Measured:
    """Run the reduction and 10,000 no-op native calls: each alone, then both at once."""
    import skyward as sky

    array, call, pool = _array(client), sky.compute(nothing), client.cluster.pool
    shifts = iter(range(1_000))

    def graph() -> None:
        _reduce(client, array, next(shifts))

    def calls() -> None:
        sky.gather(*[call(i) for i in range(_CALLS)]) >> pool

    graph()
    calls()
    rounds = [(seconds_of(graph), seconds_of(calls), *_at_once(graph, calls)) for _ in range(_REPEATS)]
    return Measured(
        seconds=tuple(max(each[2:]) for each in rounds),
        figures={
            "graph_alone_s": median(alone for alone, _, _, _ in rounds),
            "calls_alone_s": median(alone for _, alone, _, _ in rounds),
            "graph, at once ÷ alone": median(together / alone for alone, _, together, _ in rounds),
            "calls, at once ÷ alone": median(together / alone for _, alone, _, together in rounds),
            "both, at once ÷ in turn": median(max(each[2:]) / sum(each[:2]) for each in rounds),
        },
    )


# --- their work ---------------------------------------------------------------------------------------------------


def _repeated(run: Callable[[int], None], **figures: float) -> Measured:
    """Every repeat has a number of its own, so that nothing can be left from the one before."""
    run(0)
    seconds = tuple(seconds_of(functools.partial(run, number)) for number in range(1, _REPEATS + 1))
    return Measured(seconds=seconds, figures=figures)


def _at_once(*works: Callable[[], None]) -> list[float]:
    """How long each takes if they start together."""
    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(seconds_of, works))


def _frame(number: int, *, rows: int) -> Any:
    """Return a partition with random keys; a row is 32 bytes."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(number)
    return pd.DataFrame({"key": random.integers(1_000_000, size=rows), **{name: random.random(rows) for name in "xyz"}})


def _rows(client: Any) -> tuple[Any, int]:
    """Return a data frame, and the number of its rows."""
    from dask.dataframe import from_map

    rows = int(psutil.virtual_memory().total * _SHUFFLED_SHARE) // _ROW_BYTES // _PARTITIONS
    frame = client.persist(from_map(_frame, range(_PARTITIONS), rows=rows, meta=_frame(0, rows=1)))
    _wait(frame)
    return frame, rows * _PARTITIONS


def _array(client: Any) -> Any:
    from dask import array as da

    rows = int(psutil.virtual_memory().total * _REDUCED_SHARE) // (8 * _WIDTH)
    array = client.persist(da.random.default_rng(0).random((rows, _WIDTH), chunks=(rows // 32, _WIDTH)))
    _wait(array)
    return array


def _reduce(client: Any, array: Any, shift: int) -> None:
    spread = client.compute(((array + shift - array.mean(axis=0)) ** 2).sum(axis=0)).result()
    assert spread.shape == (_WIDTH,)


def _wait(collection: Any) -> None:
    from distributed import wait

    wait(collection)
