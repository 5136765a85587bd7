"""Who is compared: each peer with two workers on this machine, used the way its own documentation does."""

from __future__ import annotations

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
    """

    call: Callable[..., Any]
    gather: Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Sequence[Any]]
    share: Callable[[Any], Any] = _itself
    joblib: Callable[[], str]
    broadcast: Callable[[Callable[[], Any]], Sequence[Any]] | None = None
    loop: Any = None


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
}
"""Every peer's name, and how it is opened. Its library is imported then, not before."""
