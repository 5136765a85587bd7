"""Large arrays: shared by many calls, sent, and brought back."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.measured import Measured, opened, seconds_of, timed
from benchmarks.observe import CELL_VARIABLE, cell_processes, longest_gap, peak_memory, ticking
from benchmarks.peers import CLUSTERS, PEERS, WORKERS, Peer
from benchmarks.work import Model, large, nothing, predict, random_bytes, touch, touch_bytes

__all__ = ["big_argument", "big_result", "gather_shared", "joblib_shared", "kept_model"]

_CALLS = 40
_SHAPE = (50_000, 500)  # of 8 bytes: 200 MB
_BIG = 500_000_000
_MODEL_SHAPE = (1_000, 125_000)  # of 8 bytes: 1 GB
_PREDICTIONS = 100


@opened
def joblib_shared(peer: Peer) -> Measured:
    """40 tasks that share an array of 200 MB."""
    from joblib import Parallel, delayed, parallel_config

    def run(array: Any) -> None:
        with parallel_config(peer.joblib()):
            Parallel(n_jobs=WORKERS)(delayed(touch)(array, i) for i in range(_CALLS))

    return _shared(run)


@opened
def gather_shared(peer: Peer) -> Measured:
    """40 calls that share an array of 200 MB."""

    def run(array: Any) -> None:
        shared = peer.share(array)
        peer.gather(touch, [(shared, i) for i in range(_CALLS)])

    return _shared(run)


def _shared(run: Callable[[Any], None]) -> Measured:
    """Time later runs with the array; look at the memory in the first ones, where looking disturbs nothing."""
    import numpy as np

    run(np.ones((100, _CALLS)))  # imports are done, workers are there
    array = np.random.default_rng(0).random(_SHAPE)
    with peak_memory(cell_processes(os.environ[CELL_VARIABLE], os.getpid())) as peak:
        first = seconds_of(lambda: run(array))
        run(array)
    later = tuple(seconds_of(lambda: run(array)) for _ in range(3))
    return Measured(seconds=later, figures={"copies": peak.extra_bytes / array.nbytes, "first_s": first})


@opened
def big_result(peer: Peer) -> Measured:
    """Measure a result of 500 MB, until all of it can be read; the time to make it is taken off."""
    import numpy as np  # noqa: F401  # not part of the time

    def fetch(size: int) -> float:
        started = time.perf_counter()
        array, making = peer.call(large, size)
        touch_bytes(array)
        return time.perf_counter() - started - making

    return _travelling(peer, lambda size: lambda: fetch(size))


@opened
def big_argument(peer: Peer) -> Measured:
    """Measure an argument of 500 MB, until the call has read all of it."""

    def prepare(size: int) -> Callable[[], float]:
        array = random_bytes(size)
        return lambda: seconds_of(lambda: peer.call(touch_bytes, array))

    return _travelling(peer, prepare)


def _travelling(peer: Peer, prepare: Callable[[int], Callable[[], float]]) -> Measured:
    for _ in range(WORKERS):
        prepare(1_000_000)()
    peer.call(nothing)
    seconds: list[float] = []
    stalls: dict[str, float] = {}
    for _ in range(3):
        send = prepare(_BIG)
        with ticking(peer.loop) as here, _ticking_there(peer) as there:
            seconds.append(send())
        for name, gaps in (("client_stall_s", here), ("worker_stall_s", there)):
            if gaps:
                stalls[name] = max(stalls.get(name, 0.0), *gaps)
    return Measured(seconds=tuple(seconds), figures=stalls | {"mb_per_s": _BIG / 1e6 / median(seconds)})


def kept_model(name: str) -> Measured:
    """Call a worker that keeps a model of 1 GB: the first call reads it from a file."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.npy")
        np.save(path, np.random.default_rng(0).random(_MODEL_SHAPE))
        with _keeper(name, path) as call:
            first = seconds_of(lambda: call(0))
            warm = timed(lambda: [call(row) for row in range(_PREDICTIONS)], repeats=3, calls=_PREDICTIONS)
    return Measured(seconds=warm.seconds, figures={"first_s": first, "first ÷ warm": first / median(warm.seconds)})


@contextmanager
def _keeper(name: str, path: str) -> Iterator[Callable[[int], float]]:
    """One worker that has worked: an actor of Ray's, elsewhere the only one."""
    if name != "ray":
        with CLUSTERS[name](workers=1) as peer:
            peer.call(nothing)
            yield lambda row: peer.call(predict, path, row)
        return
    import ray

    with PEERS["ray"]() as peer:
        peer.call(nothing)
        actor = ray.remote(Model).remote(path)
        yield lambda row: ray.get(actor.predict.remote(row))


@contextmanager
def _ticking_there(peer: Peer) -> Iterator[list[float]]:
    gaps: list[float] = []
    if peer.broadcast is None:
        yield gaps
        return
    peer.broadcast(_start_ticker)
    yield gaps
    gaps.extend(peer.broadcast(_stop_ticker))


_tickers: list[tuple[threading.Event, Future[float]]] = []
"""On a worker: the ticker that runs."""


def _start_ticker() -> None:
    """On a worker: measure the gaps of the event loop of its lane from now on."""
    from skyward.base.loop import LoopThread

    (lane,) = (thread for thread in gc.get_objects() if isinstance(thread, LoopThread))
    over = threading.Event()
    _tickers.append((over, asyncio.run_coroutine_threadsafe(longest_gap(over), lane.loop)))


def _stop_ticker() -> float:
    """On a worker: the longest gap."""
    over, future = _tickers.pop()
    over.set()
    return future.result()
