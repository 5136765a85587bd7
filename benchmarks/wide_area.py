"""Four hosts behind one line of 50 ms and 100 Mbit/s: Skyward's pool on them, and Dask's ``SSHCluster``."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.far_side import FarSide, far_side
from benchmarks.measured import Measured, seconds_of, timed
from benchmarks.work import nap, nothing, random_bytes, touch_bytes

__all__ = ["DASK", "array", "grid_search", "naps", "open_dask", "round_trip"]

DASK = "dask, SSH"
"""Dask's ``SSHCluster``; its client's connection to the scheduler goes through the line, nothing else does."""

_NODES = 4
_CALLS = 30
_NAPS = 1_000
_NAP_S = 0.01
_ARRAY_BYTES = 100_000_000
_PACKAGES = ("numpy", "scikit-learn", "joblib")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """What is open on the hosts.

    Attributes:
        call: one call, there and back.
        gather: one function, many arguments.
        everywhere: one function of one argument, on every worker.
        joblib: what its backend is called.
    """

    call: Callable[..., Any]
    gather: Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Sequence[Any]]
    everywhere: Callable[[Callable[[Any], Any], Any], Sequence[Any]]
    joblib: str


def round_trip(name: str) -> Measured:
    """One call after the other; the line's own round trip is measured on the same line."""
    with far_side(_NODES) as far, _CLUSTERS[name](far, 1) as cluster:
        for _ in range(_NODES + 1):
            cluster.call(nothing)
        line_s = far.round_trip_s()
        seconds = tuple(seconds_of(lambda: cluster.call(nothing)) for _ in range(_CALLS))
        return Measured(seconds=seconds, figures={"round_trips": median(seconds) / line_s, "line_s": line_s})


def naps(name: str) -> Measured:
    """1,000 calls that do nothing for 10 ms, on four workers."""
    with far_side(_NODES) as far, _CLUSTERS[name](far, 1) as cluster:
        work = [(_NAP_S,)] * _NAPS
        cluster.gather(nap, work[:100])
        measured = timed(lambda: cluster.gather(nap, work), repeats=3)
        ideal_s = _NAPS * _NAP_S / _NODES
        return Measured(seconds=measured.seconds, figures={"times_ideal": median(measured.seconds) / ideal_s})


def array(name: str) -> Measured:
    """100 MB, read by each of two workers on each of four nodes."""
    with far_side(_NODES) as far, _CLUSTERS[name](far, 2) as cluster:
        cluster.everywhere(touch_bytes, random_bytes(1_000_000))
        data = random_bytes(_ARRAY_BYTES)
        before = far.bytes_up()
        seconds = seconds_of(lambda: cluster.everywhere(touch_bytes, data))
        return Measured(seconds=(seconds,), figures={"sent": (far.bytes_up() - before) / _ARRAY_BYTES})


def grid_search(name: str) -> Measured:
    """Run the same search as on one machine, on four workers."""
    from joblib import parallel_config
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    X, y = load_digits(return_X_y=True)
    grid = {"C": [0.1, 1, 10, 100], "gamma": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, "scale"]}
    with far_side(_NODES) as far, _CLUSTERS[name](far, 1) as cluster:

        def fit(rows: int) -> None:
            with parallel_config(cluster.joblib):
                GridSearchCV(SVC(), grid, cv=3, n_jobs=_NODES).fit(X[:rows], y[:rows])

        fit(300)  # imports
        return timed(lambda: fit(len(X)), repeats=1)


# --- who is compared ----------------------------------------------------------------------------------------------


@contextmanager
def _skyward(far: FarSide, concurrency: int) -> Iterator[_Cluster]:
    import skyward as sky
    import skyward_joblib  # noqa: F401  # importing it registers the backend

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        call = sky.compute(fn)
        return sky.gather(*[call(*each) for each in arguments]) >> pool

    provider = sky.SSH(
        hosts=[f"{host}:{port}" for host, port in far.behind],
        user=far.user,
        key_path=far.key_path,
        known_hosts=far.known_hosts,
    )
    image = sky.Image(
        pip=[f"{name}=={importlib.metadata.version(name)}" for name in _PACKAGES],
        env={name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")},
    )
    with sky.ComputePool(
        provider=provider, nodes=_NODES, concurrency=concurrency, image=image, display="quiet"
    ) as pool:
        yield _Cluster(
            call=lambda fn, *args: sky.compute(fn)(*args) >> pool,
            gather=gather,
            everywhere=lambda fn, value: sky.compute(fn)(value) @ pool,
            joblib="skyward",
        )


@contextmanager
def open_dask(far: FarSide, concurrency: int) -> Iterator[_Cluster]:
    """Open Dask's ``SSHCluster`` on the hosts."""
    from distributed import Client, SSHCluster

    # The scheduler has a host of its own address; asyncssh takes each host's port beside it.
    (head, port), *_ = places = [far.hosts[0], *far.hosts]
    login = {"username": far.user, "client_keys": [far.key_path], "known_hosts": far.known_hosts}
    cluster = SSHCluster(
        [host for host, _ in places],
        connect_options=[{**login, "port": port} for _, port in places],
        scheduler_options={"host": head, "port": 0, "dashboard_address": ":0"},
        worker_options={"nthreads": 1, "n_workers": concurrency},
        remote_python=f"env {_inherited()} {sys.executable}",
    )
    with cluster:
        host, port = cast("str", cluster.scheduler_address).removeprefix("tcp://").rsplit(":", 1)
        place = far.lengthen((host, int(port)))
        with Client(f"tcp://{place[0]}:{place[1]}", direct_to_workers=False) as client:
            client.wait_for_workers(len(far.hosts) * concurrency)
            yield _Cluster(
                call=lambda fn, *args: client.submit(fn, *args, pure=False).result(),
                gather=lambda fn, arguments: cast(
                    "list[Any]", client.gather(client.map(fn, *zip(*arguments, strict=True), pure=False))
                ),
                everywhere=lambda fn, value: _everywhere(client, fn, value),
                joblib="dask",
            )


def _inherited() -> str:
    """Where the benchmarks' own modules are, where workers may write, and how many threads libraries may use."""
    settings = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    settings |= {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": tempfile.gettempdir()}
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _everywhere(client: Any, fn: Callable[[Any], Any], value: Any) -> Sequence[Any]:
    """As Dask's documentation has it: scatter first, then refer to it."""
    shared = client.scatter(value, broadcast=True, direct=False)
    workers = client.scheduler_info(n_workers=-1)["workers"]
    futures = [client.submit(fn, shared, workers=[worker], pure=False) for worker in workers]
    return cast("list[Any]", client.gather(futures))


_CLUSTERS: dict[str, Callable[[FarSide, int], AbstractContextManager[_Cluster]]] = {
    "skyward": _skyward,
    DASK: open_dask,
}
