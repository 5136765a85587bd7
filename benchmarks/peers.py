"""Who is compared: each peer with two workers on this machine, used the way its own documentation does."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["CLUSTERS", "PEERS", "WORKERS", "Peer"]

WORKERS = 2


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that is open.

    Attributes:
        call: one call, there and back.
        gather: one function, many arguments; the results in order.
        share: what a peer wants done to a large argument of many calls beforehand.
        joblib: registers the peer with joblib, and returns what its backend is called.
        broadcast: runs a function of no arguments on every worker, where the peer has such a thing.
        loop: the peer's event loop on the client, where it is written in Python.
        fewer: where its calls take long, by which factor it makes fewer of them than the others.
    """

    call: Callable[..., Any]
    gather: Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Sequence[Any]]
    share: Callable[[Any], Any] = _itself
    joblib: Callable[[], str] | None = None
    broadcast: Callable[[Callable[[], Any]], Sequence[Any]] | None = None
    loop: Any = None
    fewer: int = 1


@contextmanager
def skyward(*, nodes: int = 1, workers: int = WORKERS) -> Iterator[Peer]:
    import skyward as sky
    from skyward.base.loop import acquire_loop

    def register() -> str:
        import skyward_joblib  # noqa: F401  # importing it registers the backend

        return "skyward"

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        call = compute(fn)
        return sky.gather(*[call(*each) for each in arguments]) >> pool

    compute = _memoized(sky.compute)
    with sky.ComputePool(provider=sky.Local(), nodes=nodes, concurrency=workers, display="quiet") as pool:
        loop = acquire_loop()
        try:
            yield Peer(
                call=lambda fn, *args: compute(fn)(*args) >> pool,
                gather=gather,
                joblib=register,
                broadcast=lambda fn: compute(fn)() @ pool,
                loop=loop.loop,
            )
        finally:
            loop.release()


@contextmanager
def loky() -> Iterator[Peer]:
    from joblib.externals.loky import get_reusable_executor

    def executor() -> Any:
        return get_reusable_executor(max_workers=WORKERS, timeout=300)

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        submit = executor().submit
        return [future.result() for future in [submit(fn, *each) for each in arguments]]

    yield Peer(call=lambda fn, *args: executor().submit(fn, *args).result(), gather=gather, joblib=lambda: "loky")
    get_reusable_executor(max_workers=WORKERS).shutdown()


@contextmanager
def dask(*, nodes: int = 1, workers: int = WORKERS) -> Iterator[Peer]:
    from distributed import Client, LocalCluster

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return cast("list[Any]", client.gather(client.map(fn, *zip(*arguments, strict=True), pure=False)))

    with (
        LocalCluster(n_workers=nodes * workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield Peer(
            call=lambda fn, *args: client.submit(fn, *args, pure=False).result(),
            gather=gather,
            joblib=lambda: "dask",
            loop=cast("Any", client.loop).asyncio_loop,
        )


@contextmanager
def ray() -> Iterator[Peer]:
    import ray as _ray

    def register() -> str:
        from ray.util.joblib import register_ray

        register_ray()
        return "ray"

    remote = _memoized(_ray.remote)

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return _ray.get([remote(fn).remote(*each) for each in arguments])

    _ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),
    )
    try:
        yield Peer(
            call=lambda fn, *args: _ray.get(remote(fn).remote(*args)), gather=gather, share=_ray.put, joblib=register
        )
    finally:
        _ray.shutdown()


@contextmanager
def ipyparallel() -> Iterator[Peer]:
    import ipyparallel as ipp

    def register() -> str:
        view.register_joblib_backend("ipyparallel")
        return "ipyparallel"

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return view.map_sync(fn, *zip(*arguments, strict=True))

    with ipp.Cluster(n=WORKERS, log_level=40) as client:
        view = client.load_balanced_view()
        yield Peer(call=view.apply_sync, gather=gather, joblib=register)


@contextmanager
def parsl() -> Iterator[Peer]:
    import parsl as _parsl
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider

    app = _memoized(_parsl.python_app)

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return [future.result() for future in [app(fn)(*each) for each in arguments]]

    executor = HighThroughputExecutor(
        max_workers_per_node=WORKERS, provider=LocalProvider(init_blocks=1, max_blocks=1), address="127.0.0.1"
    )
    with _parsl.load(Config(executors=[executor], run_dir=os.path.join(tempfile.gettempdir(), "parsl"))):
        yield Peer(call=lambda fn, *args: app(fn)(*args).result(), gather=gather)


@contextmanager
def hyperqueue(*, programs: bool = False) -> Iterator[Peer]:
    """Its tasks are programs that return nothing; a function's is an interpreter that calls it."""
    from hyperqueue import Job, LocalCluster
    from hyperqueue.cluster import WorkerConfig

    def gather(fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        job = Job(default_workdir=tempfile.gettempdir())
        for each in arguments:
            if programs:
                job.program(["/bin/true"], stdout=None, stderr=None)
            else:
                job.function(fn, args=each, stdout=None, stderr=None)
        client.wait_for_jobs([client.submit(job)])
        return []

    with LocalCluster(os.path.join(tempfile.gettempdir(), "hq"), WorkerConfig(cores=WORKERS)) as cluster:
        client = cluster.client()
        yield Peer(call=lambda fn, *args: gather(fn, [args]), gather=gather, fewer=20 if programs else 100)


def _memoized(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate a function once, as one would at its definition."""
    made: dict[Any, Any] = {}
    return lambda fn: made.get(fn) or made.setdefault(fn, make(fn))


CLUSTERS: dict[str, Callable[..., AbstractContextManager[Peer]]] = {"skyward": skyward, "dask": dask}
"""Peers of any size: ``nodes`` with as many ``workers`` each, which are all the same to Dask's ``LocalCluster``."""

PEERS: dict[str, Callable[[], AbstractContextManager[Peer]]] = {
    "skyward": skyward,
    "loky": loky,
    "dask": dask,
    "ray": ray,
    "ipyparallel": ipyparallel,
    "parsl": parsl,
    "hyperqueue": hyperqueue,
    "hyperqueue, programs": functools.partial(hyperqueue, programs=True),
}
"""Every peer's name, and how it is opened. Its library is imported then, not before."""
