"""A cluster's pool: owned, with the lifetime of the cluster, or borrowed, and left open."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, cast

from skyward.api.pool import ComputePool
from skyward.errors import ConfigurationError, PoolStateError
from skyward.request.checks import option_names, refuse_unknown
from skyward.submission import ElasticFleet

__all__ = ["BorrowedPool", "OwnablePool", "OwnedPool", "PoolHandle", "PoolLike", "make_pool_handle"]


class PoolLike(ElasticFleet, Protocol):
    """Interface of a pool that a cluster needs."""

    @property
    def is_active(self) -> bool:
        """True while the pool is open."""
        ...


class OwnablePool(PoolLike, Protocol):
    """Pool that a cluster can open and close."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> object: ...

    async def __aenter__(self) -> object: ...


class PoolHandle(Protocol):
    """Lifecycle of a cluster's pool, usable from any thread; closing is idempotent."""

    @property
    def pool(self) -> PoolLike:
        """The pool."""
        ...

    def open(self) -> None:
        """Open the pool. Blocks."""
        ...

    async def open_async(self) -> None:
        """Open the pool without blocking the event loop."""
        ...

    def close(self) -> None:
        """Close the pool. Blocks until it is closed, also if another thread is closing it."""
        ...

    async def close_async(self) -> None:
        """Close the pool without blocking the event loop."""
        ...


class BorrowedPool:
    """Pool that was opened outside of the cluster, and stays open."""

    def __init__(self, pool: PoolLike) -> None:
        self.pool = pool

    def open(self) -> None:
        """Check that the pool is open.

        Raises:
            PoolStateError: the pool is not open.
        """
        if not self.pool.is_active:
            raise PoolStateError(
                "the pool is not open: make the cluster inside `with ComputePool(...) as pool:`, "
                "or pass the pool's parameters to SkywardCluster, which then opens its own pool"
            )

    async def open_async(self) -> None:
        """See :meth:`open`."""
        self.open()

    def close(self) -> None:
        """Leave the pool open."""

    async def close_async(self) -> None:
        """Leave the pool open."""


class _ConnectedPool(ComputePool):
    """Pool whose nodes reach each other, as Dask's workers have to; else it does not open, and no node is added."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._request = replace(self._request, one_network=True)


class OwnedPool:
    """Pool that the cluster opens and closes."""

    def __init__(self, pool: OwnablePool) -> None:
        self.pool: PoolLike = pool
        self._pool = pool
        self._lock = threading.Lock()
        self._opened = False

    def open(self) -> None:
        """See :meth:`PoolHandle.open`."""
        self._pool.__enter__()
        self._opened = True

    async def open_async(self) -> None:
        """See :meth:`PoolHandle.open_async`."""
        await self._pool.__aenter__()
        self._opened = True

    def close(self) -> None:
        """See :meth:`PoolHandle.close`."""
        with self._lock:
            if self._opened:
                self._opened = False
                self._pool.__exit__(None, None, None)

    async def close_async(self) -> None:
        """See :meth:`PoolHandle.close_async`."""
        await asyncio.to_thread(self.close)


_ELSEWHERE = {
    "n_workers": "nodes= is the number of machines, concurrency= the number of workers on each",
    "workers": "nodes= is the number of machines, concurrency= the number of workers on each",
    "processes": "workers are always processes; concurrency= is their number on each node",
    "threads_per_worker": "a worker runs one Dask task at a time; concurrency= is the number of workers on each node",
    "nthreads": "a worker runs one Dask task at a time; concurrency= is the number of workers on each node",
    "memory_limit": "workers share their node's memory; memory= selects machines with enough of it",
    "dashboard_address": "cluster.dashboard_link starts the dashboard, at an address of its own",
    "security": "every pool has its own certificates",
    "shutdown_on_close": "a cluster's pool ends with it; open a ComputePool yourself and pass it, and it stays open",
    "shutdown_scheduler": "a cluster's pool ends with it; open a ComputePool yourself and pass it, and it stays open",
}


def make_pool_handle(pool: object, params: dict[str, Any], cluster: type[object]) -> PoolHandle:
    """Return a handle of the pool passed, or of a new pool with these parameters, which is not opened yet.

    Raises:
        ConfigurationError: neither or both were given, or a parameter is wrong.
        TypeError: neither a pool nor the class of the cluster has such a parameter.
    """
    if pool is not None:
        if params:
            raise ConfigurationError(
                f"{', '.join(params)}: an open pool has its parameters already; pass either a pool or parameters"
            )
        if not all(hasattr(type(pool), name) for name in ("scheduler", "scale", "forward", "is_active")):
            raise ConfigurationError(f"pool must be an open ComputePool, got {type(pool).__name__}")
        return BorrowedPool(cast("PoolLike", pool))
    for name in params.keys() & _ELSEWHERE.keys():
        raise TypeError(f"{cluster.__name__} has no option {name!r}: {_ELSEWHERE[name]}")
    refuse_unknown(cluster.__name__, params, option_names(cluster, ComputePool))
    if "provider" not in params:
        raise ConfigurationError(
            "provider is missing: name the source of the machines, such as provider=sky.Local(), or pass a pool"
        )
    return OwnedPool(cast("OwnablePool", _ConnectedPool(**params)))
