"""The worker process: a Dask worker with a lane beside it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import socket
import ssl
import stat
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import dask.sizeof
from distributed import Status, Worker
from distributed.batched import BatchedSend
from distributed.comm.core import Comm
from distributed.threadpoolexecutor import ThreadPoolExecutor

from skyward._concurrency.forking import abandon
from skyward._concurrency.loop import LoopThread
from skyward._concurrency.recurring import keep
from skyward._concurrency.waiting import SYSTEM_CLOCK, wait_until
from skyward.node.worker.begun import open_mark
from skyward.node.worker.capture import WorkerLog
from skyward.node.worker.child_processes import call_in_this_process
from skyward.node.worker.lane_server import LaneServer
from skyward.wire.listening import BACKLOG

__all__ = ["LaneWorker"]

log = logging.getLogger("skyward.node.worker.worker")

_beating: ContextVar[BatchedSend | None] = ContextVar("skyward_beating", default=None)
"""The connection that the heartbeat under way belongs to."""

_REGISTER_AGAIN_S = 0.5
_LOOK_S = 2.0


class LaneWorker(Worker):
    """A :class:`distributed.Worker` that also serves native and joblib calls.

    It takes Worker's own arguments. Its place, incarnation, blob folders and log file come from the environment that
    the nanny sets before the process starts, since whatever user code starts needs them too. Lane calls run in an
    executor of their own: sharing Dask's hides them from the scheduler.

    It outlives its scheduler, which Dask's own worker does not: its calls go on, and it registers with the next one. If
    it has taken part in Dask's work it cannot, for what it holds belongs to a scheduler that is no more: then it asks
    to be replaced once its lane is idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker_log = WorkerLog(Path(os.environ["SKYWARD_WORKER_LOG"]), Path(os.environ["SKYWARD_WORKER_MARK"]))
        worker_log.redirect()
        blob_dirs = os.environ["SKYWARD_BLOB_DIRS"].split(os.pathsep)
        tempfile.tempdir = None  # the nannies' own; temporary files of a worker are its user's
        self._serves = False
        super().__init__(*args, **kwargs)
        for name in ("default", "actor"):
            self.executors[name] = _TaskThreadPoolExecutor(1, thread_name_prefix=f"Dask-{name.title()}-Threads")
        # Every heartbeat estimates sizes by samples, which must not come from what user code has seeded.
        cast("Any", dask.sizeof).random = random.Random()
        self.lane_loop = LoopThread()
        self.lane = self.lane_loop.call(_make_lane([Path(folder) for folder in blob_dirs], worker_log))
        self.lane.output.install()
        self._lane_address = os.environ["SKYWARD_LANE"]
        self.handlers["follow"] = self._follow
        self.executors["lane"] = ThreadPoolExecutor(1, thread_name_prefix="skyward-lane")
        self.executors["lane"].submit(self._run_calls)
        os.register_at_fork(after_in_child=self._leave_connections)

    async def _register_with_scheduler(self) -> None:
        if not self._serves:  # the first time; the scheduler may not be there, and calls do not need it
            self._serve_lane()
        while True:
            # Dask's own dials one address for half a minute; the scheduler may be at another by then.
            await wait_until(self._finds_scheduler, deadline_s=math.inf, interval_s=0.05, what="a scheduler")
            try:
                return await super()._register_with_scheduler()
            except ValueError as error:  # it still holds on to the connection that was lost: our name is taken
                log.info("the scheduler does not take this worker yet: %s", error)
                await SYSTEM_CLOCK.sleep(_REGISTER_AGAIN_S)

    def _run_calls(self) -> None:
        """Run calls; if the thread itself fails, end this process: the nanny starts another, and the calls move."""
        try:
            self.lane.runner.work()
        except BaseException:
            log.critical("the thread that runs calls failed, and this worker ends with it", exc_info=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def _serve_lane(self) -> None:
        """Take calls."""
        self._serves = True
        host, _, port = self._lane_address.rpartition(":")
        tls = cast("ssl.SSLContext", self.security.get_listen_args("worker")["ssl_context"])
        listening = socket.create_server((host, int(port)), backlog=BACKLOG)
        self.lane_loop.spawn(keep(lambda: self.lane.serve(listening, tls), what="accepting the lane"))
        self.lane_loop.spawn(keep(self.lane.watch_output, what="reading the captured output"))

    async def handle_scheduler(self, comm: Comm) -> None:
        """Hear the scheduler until its connection is lost, then find the next one."""
        try:
            await self.handle_stream(comm)
        except BaseException:
            await self.close(reason="what the scheduler said failed")
            raise
        if self.status not in (Status.running, Status.paused):
            await self.close(reason="the scheduler closed the connection")
            return
        for name in ("heartbeat", "keep-alive"):  # a scheduler that does not know us would have us close
            self.periodic_callbacks[name].stop()
        self.batched_stream.abort()
        if self._took_part():
            log.info("the scheduler is gone, and what was done for it is in the way: waiting to be replaced")
            # Started anew while there is no scheduler, a process would be of less use than this one is.
            await wait_until(self._finds_scheduler, deadline_s=math.inf, interval_s=0.1, what="the next scheduler")
            await cast("Any", self.rpc)(self.nanny).worker_stale()
            return
        log.info("the scheduler is gone; registering with the next one")
        self.batched_stream = BatchedSend(interval="2ms", loop=self.loop)
        await self._register_with_scheduler()

    async def _finds_scheduler(self) -> bool | None:
        """Whether the scheduler that counts at the moment answers."""
        try:
            async with asyncio.timeout(_LOOK_S):
                await cast("Any", self.scheduler).identity()
        except OSError:
            return None
        return True

    async def heartbeat(self) -> None:
        """Tell the scheduler of this worker. One that the last scheduler did not hear may reach the next one."""
        _beating.set(self.batched_stream)
        await super().heartbeat()

    def _took_part(self) -> bool:
        """Whether anything of Dask's work was ever here. Data, actors and shuffles belong to their scheduler."""
        return bool(self.state.executed_count or self.state.tasks or self.data or self._client)

    def _follow(self, scheduler: str, place: str) -> None:
        """There is another scheduler, or the fleet has another size."""
        os.environ["SKYWARD_WORKER"] = place
        if scheduler != self.scheduler.address:
            self.scheduler = self.rpc(scheduler)
            if self.batched_stream.comm is not None:
                self.batched_stream.abort()  # its machine may have vanished without a word

    async def close(self, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        """Close, once the call that runs has ended."""
        if reason == "worker-heartbeat-missing" and self.status is Status.running:
            # A new scheduler at the old address: as if the connection was lost, unless there is another by now.
            if _beating.get() is self.batched_stream:
                self.batched_stream.abort()
            return "OK"
        self.lane_loop.loop.call_soon_threadsafe(self.lane.close)
        return await super().close(*args, reason=reason, **kwargs)

    def _leave_connections(self) -> None:
        """In a forked child: it may outlive this worker, and would keep its ports and its clients' connections open."""
        ports = {int(address.rpartition(":")[2]) for address in (self.address, self._lane_address)}
        for descriptor in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _port_of(descriptor) in ports:
                    abandon(descriptor)

    def start_http_server(self, *_args: Any, **_kwargs: Any) -> None:
        """Serve no HTTP: distributed's pages have no authentication."""


class _TaskThreadPoolExecutor(ThreadPoolExecutor):
    """Dask's threads for tasks; children that a task forks end with it.

    The name matters: Dask takes an executor whose class is not called ThreadPoolExecutor for a pool of processes, in
    which ``get_worker`` and ``get_client`` find nothing.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return cast("Future[Any]", super().submit(call_in_this_process, fn, args, kwargs))


def _port_of(descriptor: int) -> int:
    """The local port of an IPv4 socket; 0 of another one."""
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        return seen.getsockname()[1] if seen.family == socket.AF_INET else 0


async def _make_lane(blob_dirs: Sequence[Path], worker_log: WorkerLog) -> LaneServer:
    return LaneServer(
        incarnation=os.environ["SKYWARD_INCARNATION"],
        blob_dirs=blob_dirs,
        log=worker_log,
        begun=open_mark(os.environ["SKYWARD_BEGUN"]),
    )
