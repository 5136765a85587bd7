"""Connection of a Dask cluster object to its pool's scheduler, renewed when the scheduler is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator
from contextlib import suppress
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import dask.config
from distributed import Security, Status
from tornado.ioloop import IOLoop, PeriodicCallback

from skyward.errors import ConfigurationError, PoolStateError, UnreachableError
from skyward.submission import SchedulerInfo
from skyward.wire.dask_parts import Cluster, Comm, check_parts, get_versions, rpc
from skyward.wire.dask_parts import SchedulerInfo as DaskSchedulerInfo
from skyward_dask.clients import NO_DIRECT_ACCESS, admit_by_address, check_versions, refuse_past_tunnel
from skyward_dask.pool_handle import PoolHandle, PoolLike
from skyward_dask.settings import seconds

__all__ = ["ConnectedCluster"]

_ATTEMPT_S = 15.0
"""Seconds for one attempt to reach a new scheduler, before its address is requested again."""

_REPLACED_S = 120.0
"""Seconds for which a new client waits for a scheduler that is being replaced."""

# A scheduler reports its workers to a single cluster object, the last one that connected.
_reported_to: WeakKeyDictionary[PoolLike, int] = WeakKeyDictionary()

_logger = logging.getLogger("skyward.dask")


class ConnectedCluster(Cluster):
    """Cluster object with a connection to its pool, from start to close; without scaling and presentation.

    Dask's objects are used on the event loop only. The pool, whose methods may block, is used in the caller's thread
    or, asynchronously, in a worker thread.
    """

    def __init__(
        self,
        holding: PoolHandle,
        *,
        name: str | None,
        asynchronous: bool,
        loop: IOLoop | None,
        quiet: bool,
        scheduler_sync_interval: Any,
    ) -> None:
        check_parts()
        interval_s = seconds("scheduler_sync_interval", scheduler_sync_interval)
        super().__init__(
            asynchronous=asynchronous,
            loop=loop,
            quiet=quiet,
            name=name,
            scheduler_sync_interval=cast("Any", interval_s),
        )
        self._holding = holding
        self._own_name: str = self.name
        self.security: Security | None = None
        self._starting = asyncio.Lock()
        self._releasing = asyncio.Lock()
        self._connected = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        """The cluster's name, quoted, for messages."""
        return repr(cast("object", self.name))

    @property
    def known_workers(self) -> dict[str, dict[str, Any]]:
        """The scheduler's information about each worker, by address."""
        return cast("dict[str, dict[str, Any]]", self.scheduler_info["workers"])

    @property
    def pool(self) -> PoolLike:
        """The pool, which runs native and joblib calls as well as Dask's tasks."""
        return self._holding.pool

    def _start_here(self) -> None:
        """Open the pool in this thread, then connect on a separate event loop."""
        try:
            self._holding.open()
            self._loop_runner.start()
            self.sync(self._connect)
        except BaseException:
            self.close()
            raise

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ready().__await__()

    async def _ready(self) -> Self:
        """Start the cluster if necessary; wait for the next scheduler while one is being replaced."""
        async with self._starting:
            if self.status == Status.created:
                await self._start_async()
        if self.status != Status.running:
            raise PoolStateError(f"the cluster {self.label} is {self.status.name}; make another one")
        await self._confirm()
        if not self._connected.is_set():
            try:
                await asyncio.wait_for(self._connected.wait(), _REPLACED_S)
            except TimeoutError:
                raise UnreachableError(
                    f"waited {_REPLACED_S:g} s for the scheduler of the cluster {self.label} to be replaced"
                ) from None
        return self

    async def _confirm(self) -> None:
        """Detect a replacement of the scheduler at once, instead of at the next periodic check."""
        try:
            scheduler = await asyncio.to_thread(self._scheduler)
        except PoolStateError:
            self._connected.clear()
        else:
            if scheduler.address != self.scheduler_address:
                self._connected.clear()

    async def _start_async(self) -> None:
        self.status = Status.starting
        try:
            await self._holding.open_async()
            if self.status != Status.starting:
                raise PoolStateError(f"the cluster {self.label} was closed while it started")
            await self._connect()
        except BaseException:
            await self._release()
            await self._holding.close_async()
            raise

    async def _connect(self) -> None:
        await self._join(await asyncio.to_thread(self._scheduler))
        await self._check()
        admit_by_address(self)
        self._following = asyncio.create_task(self._follow())

    def _scheduler(self) -> SchedulerInfo:
        return self.pool.scheduler

    async def _join(self, scheduler: SchedulerInfo) -> None:
        """Connect to ``scheduler`` and make it the cluster's."""
        self.security = scheduler.security
        self.scheduler_comm = rpc(
            scheduler.address, timeout=_ATTEMPT_S, connection_args=scheduler.security.get_connection_args("client")
        )
        await super()._start()
        _reported_to[self.pool] = id(self)
        self.name = self._own_name  # Dask adopts the name of the cluster that was connected to this scheduler before
        self._connected.set()

    async def _check(self) -> None:
        """Refuse nodes with other versions, and direct connections past a tunnel."""
        workers = await self.scheduler_comm.broadcast(msg={"op": "versions", "packages": []}, on_error="ignore")
        scheduler = await self.scheduler_comm.versions(packages=[])
        check_versions({"client": get_versions(), "scheduler": scheduler, "workers": workers})
        own = cast("str", self.scheduler_info["address"]).rpartition("://")[2]
        if await asyncio.to_thread(self.pool.forward, own) == own:
            return
        refuse_past_tunnel(self)
        if dask.config.get("distributed.client.direct-to-workers", default=None):
            raise ConfigurationError(f"distributed.client.direct-to-workers {NO_DIRECT_ACCESS}")

    async def _follow(self) -> None:
        while self.status == Status.running:
            watching = self._watch_worker_status_task
            assert watching is not None
            await asyncio.wait([watching], timeout=self._sync_interval)
            try:
                await self._look_for_scheduler(lost=watching.done())
            except Exception as error:
                if not self.pool.is_active:
                    self._log("the pool was closed, and so was the cluster")
                    await self._release()
                    return
                _logger.debug("could not find the scheduler of %s", self.label, exc_info=error)
                await self._pause()

    async def _look_for_scheduler(self, *, lost: bool) -> None:
        scheduler = await asyncio.to_thread(self._scheduler)
        if not lost and scheduler.address == self.scheduler_address:
            if _reported_to.get(self.pool) != id(self):
                self.scheduler_info = DaskSchedulerInfo(cast("Any", await self.scheduler_comm.identity()))
            self._connected.set()
            return
        self._connected.clear()
        await self._leave()
        joining = asyncio.create_task(self._join(scheduler))
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                while not (await asyncio.wait([joining], timeout=self._sync_interval))[0]:
                    if (await asyncio.to_thread(self._scheduler)).address != scheduler.address:
                        return
            joining.result()
        finally:
            await _end(joining)
        self._log(f"connected to the scheduler at {scheduler.address}")

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove" or msg in self.known_workers:  # the last refresh may have removed it already
            super()._update_worker_status(op, msg)

    async def _pause(self) -> None:
        """Wait for the sync interval. No one completes the future, so only the timeout ends the wait."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), self._sync_interval)

    async def _leave(self) -> None:
        """Disconnect from a scheduler that may be gone, and therefore without a goodbye message."""
        for callback in cast("dict[str, PeriodicCallback]", self.periodic_callbacks).values():
            callback.stop()
        await _end(self._sync_cluster_info_task)
        if self._watch_worker_status_comm is not None:
            self._watch_worker_status_comm.abort()
        if self._watch_worker_status_task is not None:
            await asyncio.wait([self._watch_worker_status_task])
        for comm in list(cast("dict[Comm, bool]", self.scheduler_comm.comms)):
            comm.abort()
        await self.scheduler_comm.close_rpc()

    async def _release(self) -> None:
        """Disconnect, and set the status of Dask's cluster object to closed. Idempotent."""
        async with self._releasing:
            if self.status == Status.closed:
                return
            self.status = Status.closing
            if self._following is not asyncio.current_task():
                await _end(self._following)
            with suppress(OSError):
                await super()._close()
            self.status = Status.closed

    async def _close(self) -> None:
        await self._release()
        await self._holding.close_async()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Close the connection, and the pool if the cluster owns it. Idempotent.

        Args:
            timeout: limit for the disconnection, in seconds; the end of the pool's machines is not limited.

        Returns:
            None; in asynchronous use an awaitable.
        """
        if self.asynchronous:
            return super().close(timeout)
        try:
            if self._loop_runner.is_started() and self.status != Status.closed:
                self.sync(self._release, callback_timeout=timeout)
        finally:
            self.status = Status.closed
            self._holding.close()
            self._loop_runner.stop()
        return None


async def _end(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
