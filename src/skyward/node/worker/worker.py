"""Worker process: a Dask worker that serves a lane as well."""

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
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import dask.sizeof
import dask.utils
from distributed import Status, Worker

from skyward._concurrency.descriptors import abandon
from skyward._concurrency.linux_parts import open_descriptors
from skyward._concurrency.loop import LoopThread
from skyward._concurrency.waiting import SYSTEM_CLOCK, keep, wait_until
from skyward.node.worker.begun import enter, open_mark
from skyward.node.worker.capture import WorkerLog
from skyward.node.worker.child_processes import call_in_this_process
from skyward.node.worker.lane_server import LaneServer
from skyward.node.worker.watchdog import Watchdog, end_process
from skyward.shipping.definitions import main_of_tasks
from skyward.shipping.graph_modules import MODULES, take_modules
from skyward.wire.dask_parts import BatchedSend, Comm, ThreadPoolExecutor
from skyward.wire.listening import BACKLOG

__all__ = ["LaneWorker"]

log = logging.getLogger("skyward.node.worker.worker")

_beating: ContextVar[BatchedSend | None] = ContextVar("skyward_beating", default=None)
"""Connection to the scheduler to which the present heartbeat belongs."""

_REGISTER_AGAIN_S = 0.5
# Dask's own limit for a reply is half a minute; by then another scheduler may have taken over.
_LOOK_S = 2.0


class LaneWorker(Worker):
    """A :class:`distributed.Worker` that also serves native and joblib calls.

    It takes Worker's own arguments. Its place, incarnation, blob folders and log file come from the environment, which
    the nanny sets before the process starts: processes started by user code need them too.

    Unlike Dask's own worker it outlives its scheduler: its calls go on, and it registers with the next one. A worker
    that has taken part in Dask's work cannot, since its data belongs to the lost scheduler. It asks to be replaced once
    its lane is idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker_log = WorkerLog(Path(os.environ["SKYWARD_WORKER_LOG"]), Path(os.environ["SKYWARD_WORKER_MARK"]))
        worker_log.redirect()
        blob_dirs = os.environ["SKYWARD_BLOB_DIRS"].split(os.pathsep)
        tempfile.tempdir = None  # inherited from the nannies' process; a worker's temporary files belong to its user
        self._serves = False
        super().__init__(*args, **kwargs)
        for name in ("default", "actor"):
            self.executors[name] = _TaskThreadPoolExecutor(self._run_task, f"Dask-{name.title()}-Threads")
        # Every heartbeat estimates sizes by samples; drawn from `random`, they would shift the numbers of seeded code.
        cast("Any", dask.sizeof).random = random.Random()
        main_of_tasks()
        self.lane_loop = LoopThread()
        self.lane = self.lane_loop.call(_make_lane([Path(each) for each in blob_dirs], worker_log, self._task_name))
        self.lane.output.install()
        self._watchdog = Watchdog(self.lane_loop, self.lane.trouble, end=end_process)
        self.lane.runner.memory_limit_bytes = int(self.memory_manager.memory_limit or 0)
        self._lane_address = os.environ["SKYWARD_LANE"]
        self.handlers["follow"] = self._follow
        self.stream_handlers[MODULES] = take_modules
        # Heartbeats bring it to the scheduler, and Dask's dashboard shows it on its page of workers.
        self.metrics["skyward_call"] = lambda _: self.lane.runner.shown()
        # An executor of its own: calls in Dask's would look to the scheduler like tasks that it never sent.
        self.executors["lane"] = ThreadPoolExecutor(1, thread_name_prefix="skyward-lane")
        self.executors["lane"].submit(self._run_calls)
        os.register_at_fork(after_in_child=self._leave_connections)

    async def _register_with_scheduler(self) -> None:
        if not self._serves:  # only at the start, and before the scheduler is found: calls do not need it
            self._serve_lane()
        while True:
            # Dask's own method dials one address for half a minute; by then the scheduler may have another.
            await wait_until(self._finds_scheduler, deadline_s=math.inf, interval_s=0.05, what="a scheduler")
            try:
                return await super()._register_with_scheduler()
            except ValueError as error:  # the name is taken while the scheduler holds on to the lost connection
                log.info("the scheduler does not accept this worker yet: %s", error)
                await SYSTEM_CLOCK.sleep(_REGISTER_AGAIN_S)

    def _task_name(self) -> str:
        """Return the name of the task that this thread runs, as Dask's dashboard shows it; empty if it runs none."""
        key = self.active_threads.get(threading.get_ident())
        return str(cast("Any", dask.utils).key_split(key)) if key is not None else ""

    def _run_task(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.lane.output.restore_streams()
        return call_in_this_process(fn, args, kwargs)

    def _run_calls(self) -> None:
        """Run calls. If the thread itself fails, end this process: the nanny starts another, and the calls move."""
        if sys.version_info < (3, 14):  # as in a main thread, where asyncio.get_event_loop() makes one
            asyncio.set_event_loop(asyncio.new_event_loop())
        try:
            self.lane.runner.work()
        except BaseException:
            log.critical("the thread that runs calls failed", exc_info=True)
            end_process("the thread that runs calls failed")

    def _serve_lane(self) -> None:
        """Accept the client's connections, and read the captured output."""
        self._serves = True
        host, _, port = self._lane_address.rpartition(":")
        tls = cast("ssl.SSLContext", self.security.get_listen_args("worker")["ssl_context"])
        listening = socket.create_server((host, int(port)), backlog=BACKLOG)
        self.lane_loop.spawn(keep(lambda: self.lane.serve(listening, tls), what="accepting the lane"))
        self.lane_loop.spawn(keep(self.lane.watch_output, what="reading the captured output"))
        self._watchdog.start()

    async def handle_scheduler(self, comm: Comm) -> None:
        """Handle the scheduler's messages until its connection is lost, then find the next scheduler."""
        try:
            await self.handle_stream(comm)
        except BaseException:
            await self.close(reason="handling the scheduler's messages failed")
            raise
        if self.status not in (Status.running, Status.paused):
            await self.close(reason="the scheduler closed the connection")
            return
        for name in ("heartbeat", "keep-alive"):  # a scheduler closes workers that it has not registered
            self.periodic_callbacks[name].stop()
        self.batched_stream.abort()
        if self._took_part():
            log.info("the scheduler is gone, and this worker holds its data: waiting to be replaced")
            # Until there is a scheduler, this process serves its lane; a fresh one could do no more.
            await wait_until(self._finds_scheduler, deadline_s=math.inf, interval_s=0.1, what="the next scheduler")
            await cast("Any", self.rpc)(self.nanny).worker_stale()
            return
        log.info("the scheduler is gone; registering with the next one")
        self.batched_stream = BatchedSend(interval="2ms", loop=self.loop)
        await self._register_with_scheduler()

    async def _finds_scheduler(self) -> bool | None:
        """Return True if the present scheduler answers, else None."""
        try:
            async with asyncio.timeout(_LOOK_S):
                await cast("Any", self.scheduler).identity()
        except OSError:
            return None
        return True

    async def heartbeat(self) -> None:
        """Send the scheduler this worker's state."""
        # A late one may reach the next scheduler, which answers that this worker is missing: see close().
        _beating.set(self.batched_stream)
        await super().heartbeat()

    def _took_part(self) -> bool:
        """Return True if this worker ever took part in Dask's work."""
        # Data, actors and shuffles belong to the scheduler that they were made under.
        return bool(self.state.executed_count or self.state.tasks or self.data or self._client)

    def _follow(self, scheduler: str, place: str) -> None:
        """Join another scheduler, or record another size of the fleet."""
        os.environ["SKYWARD_WORKER"] = place
        if scheduler != self.scheduler.address:
            self.scheduler = self.rpc(scheduler)
            if self.batched_stream.comm is not None:
                self.batched_stream.abort()  # a machine that vanished closes no connection

    async def close(self, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        """Close, once the running call has ended."""
        if reason == "worker-heartbeat-missing" and self.status is Status.running:
            # A new scheduler at the old address has not registered this worker: handled like a lost connection, unless
            # the heartbeat belongs to an older connection than the present one.
            if _beating.get() is self.batched_stream:
                self.batched_stream.abort()
            return "OK"
        self._watchdog.stop()
        self.lane_loop.loop.call_soon_threadsafe(self.lane.close)
        return await super().close(*args, reason=reason, **kwargs)

    def _leave_connections(self) -> None:
        """Close this worker's sockets in a forked child."""
        # The child may outlive the worker. The next incarnation needs its ports, and its clients the end of their
        # connections.
        ports = {int(address.rpartition(":")[2]) for address in (self.address, self._lane_address)}
        for descriptor in open_descriptors():
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _port_of(descriptor) in ports:
                    abandon(descriptor)

    def start_http_server(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: distributed's pages have no authentication."""


class _TaskThreadPoolExecutor(ThreadPoolExecutor):
    """Dask's threads for tasks; children that a task forks end with it."""

    # Dask looks for "ThreadPoolExecutor" in the name of the class. It takes others for pools of processes, in which
    # get_worker() and get_client() find nothing.

    def __init__(self, run: Callable[..., Any], prefix: str) -> None:
        super().__init__(1, thread_name_prefix=prefix)
        self._run = run

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return cast("Future[Any]", super().submit(self._run, fn, args, kwargs))


def _port_of(descriptor: int) -> int:
    """Return the local port of an IPv4 socket; 0 for any other socket."""
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        return seen.getsockname()[1] if seen.family == socket.AF_INET else 0


async def _make_lane(blob_dirs: Sequence[Path], worker_log: WorkerLog, task: Callable[[], str]) -> LaneServer:
    begun = open_mark(os.environ["SKYWARD_BEGUN"])
    if begun is not None:
        enter(begun)
    return LaneServer(
        incarnation=os.environ["SKYWARD_INCARNATION"],
        blob_dirs=blob_dirs,
        log=worker_log,
        begun=begun,
        task=task,
    )
