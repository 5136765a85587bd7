"""Nannies of a node, one per worker, their process, and the fork server that starts the workers."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import dask.config as dask_config
from distributed import Nanny, Status
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential, wait_random
from tornado.ioloop import PeriodicCallback

from skyward._concurrency.linux_parts import wait_for_end
from skyward.node.processes import (
    close_all_but,
    close_on_exec,
    end_all,
    exit_reason,
    is_stopped,
    kill_session,
    name_process,
    rss_bytes,
)
from skyward.node.program import Program, read_plan, run_program
from skyward.node.supervisor.plan import NodePlan
from skyward.node.supervisor.proc_entry import fits, show_arguments
from skyward.node.worker.begun import Overrun, make_mark, mark_path, open_mark, overrun, process_of, take_mark
from skyward.node.worker.capture import take_last_words
from skyward.node.worker.child_processes import allow_multiprocessing
from skyward.node.worker.watchdog import DEAF, DEAF_REASON
from skyward.node.worker.worker import LaneWorker
from skyward.wire.control import Report, Start, WorkerExit, WorkerRunning, WorkerStale
from skyward.wire.dask_parts import CommClosedError, keep_own_fork_server
from skyward.wire.security import PoolSecurity

__all__ = ["SlotNanny", "keep_slots", "main", "start_worker", "worker_exit"]

log = logging.getLogger("skyward.node.worker.nannies")

_GIB = 1 << 30
_LIMITS_MS = 100
_STOPPED_MS = 1000
_STOPPED_LOOKS = 10
_LOG_BYTES = 2000
_STOPPED_REASON = f"it was stopped, as by SIGSTOP, for {_STOPPED_LOOKS} s, and was killed"
_LIMIT_EXCEEDED = {False: "ran longer than its timeout", True: "added more to its worker's memory than its limit"}
# Seconds that the supervisor and the zygote may take to end once the supervisor's connection has closed: it closes its
# connections a moment before it ends, and a zygote that lives ends the node's processes itself (docs/decisions/003).
_DEATH_S = 1.0
_END_S = 15.0


def start_worker(**kwargs: Any) -> LaneWorker:
    """Return the worker of a fresh process, which becomes the leader of a session."""
    # Its calls' children belong to the session and are killed with the worker (docs/decisions/003).
    os.setsid()
    name_process("worker")
    close_on_exec()  # multiprocessing hands pipes over, which Python leaves open in programs that calls start
    if "numpy.random" in sys.modules:
        # Forked with the fork server's state, every worker would draw the same numbers.
        sys.modules["numpy.random"].seed()
    if files := os.environ.get("SKYWARD_FILES"):
        os.makedirs(files, mode=0o700, exist_ok=True)
        os.chdir(files)
        if files in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            sys.path.insert(0, files)
    worker = LaneWorker(**kwargs)
    allow_multiprocessing()
    return worker


def worker_exit(worker: int, incarnation: str, exit_code: int, memory_limit_bytes: int | None) -> WorkerExit:
    """Return the report on a process that ended; ``memory_limit_bytes`` only if exceeding it was the reason."""
    if exit_code == DEAF:
        reason = DEAF_REASON
    elif memory_limit_bytes is not None:
        reason = f"exceeded its memory limit of {memory_limit_bytes / _GIB:.1f} GiB"
    else:
        reason = exit_reason(exit_code)
    return WorkerExit(
        worker=worker,
        incarnation=incarnation,
        exit_code=exit_code if exit_code >= 0 else None,
        signal=-exit_code if exit_code < 0 else None,
        reason=reason,
        memory_limit_bytes=memory_limit_bytes,
    )


class SlotNanny(Nanny):
    """Dask's nanny of one worker. Every process that it starts is a new incarnation, and every end is reported."""

    def __init__(self, plan: NodePlan, worker: int, order: Start, report: Callable[[Report], None]) -> None:
        self._slot = worker
        self._report = report
        self._worker_address = plan.ready.workers[worker]
        self._incarnation = ""
        self._begun_mark = ""
        self._mark: memoryview | None = None
        self._overrun: Overrun | None = None
        self._stopped_looks = 0
        self._pid: int | None = None
        self._ended_for = ""
        self._plan = plan
        config = plan.config
        super().__init__(
            order.scheduler,
            nthreads=1,
            name=f"node{config.node}-worker{worker}",
            host=config.binds_to,
            port=plan.nanny_ports[worker],
            worker_port=int(self._worker_address.rpartition(":")[2]),
            contact_address=self._worker_address,
            protocol="tls",
            security=PoolSecurity(config.identity),
            local_directory=plan.worker_folder,
            memory_limit=str(plan.memory_limit_bytes),
            resources=plan.resources(worker),
            env=plan.worker_env(worker, order),
            worker_class=start_worker,
        )
        self._address = f"tls://{config.address}:{plan.nanny_ports[worker]}"  # as told to the scheduler
        self.handlers["worker_stale"] = self._worker_stale
        self.periodic_callbacks["limits"] = PeriodicCallback(self._enforce_limits, _LIMITS_MS)
        self.periodic_callbacks["stopped"] = PeriodicCallback(self._end_stopped, _STOPPED_MS)

    async def start_unsafe(self) -> SlotNanny:
        """Start the first process, even if the scheduler ends meanwhile: the worker finds the next one by itself."""
        try:
            await super().start_unsafe()
        except CommClosedError:  # the last step of Dask's nanny is a report to the scheduler
            if self.process is None or self.process.status is not Status.running:
                raise
            log.info("the scheduler ended while worker %d started", self._slot)
            self.start_periodic_callbacks()
        return self

    def follow(self, order: Start) -> None:
        """Pass the scheduler and the fleet's size in ``order`` to this worker and to its successors."""
        self.scheduler_addr = order.scheduler
        self.scheduler = self.rpc(order.scheduler)
        self.env |= self._plan.worker_env(self._slot, order)
        if self.process is not None:
            self.process.worker_kwargs["scheduler_ip"] = order.scheduler
            self._ongoing_background_tasks.call_soon(self._tell_worker)

    async def _tell_worker(self) -> None:
        # To its own address, which is fixed: Dask has one only after the registration, which may need this message.
        worker = cast("Any", self.rpc(self._plan.here(self._worker_address)))
        with suppress(OSError):  # no process at the moment: the next one gets both from this nanny
            await worker.follow(scheduler=self.scheduler_addr, place=self.env["SKYWARD_WORKER"])

    def _worker_stale(self) -> None:
        self._report(WorkerStale(worker=self._slot, incarnation=self._incarnation))

    async def instantiate(self) -> Status:
        """Start the worker process under a new incarnation, unless there is one."""
        if self.process is not None and self.process.status in (Status.starting, Status.running):
            return await super().instantiate()
        self._incarnation = self.env["SKYWARD_INCARNATION"] = uuid.uuid4().hex
        self._pid = None
        self._begun_mark = mark_path(self._plan.ready.blob_dir, self._incarnation)
        self.env["SKYWARD_BEGUN"] = self._begun_mark
        self._overrun = None
        self._stopped_looks = 0
        make_mark(self._begun_mark)  # before the process: a worker that dies early has begun no call
        self._mark = open_mark(self._begun_mark)
        for watch in (self.periodic_callbacks["limits"], self.periodic_callbacks["stopped"]):
            if not watch.is_running():  # calls may begin before Dask starts them
                watch.start()
        status = await super().instantiate()
        if self.process is not None and self.process.pid is not None:
            self._pid = self.process.pid
            self._report(
                WorkerRunning(
                    worker=self._slot,
                    incarnation=self._incarnation,
                    pid=self._pid,
                    address=self._worker_address,
                )
            )
        return status

    def _enforce_limits(self) -> None:
        """Kill the worker if its call exceeds a limit of its own."""
        mark, pid = self._mark, self._process_id
        if mark is None or pid is None or self._overrun is not None:
            return
        if overrun(mark, lambda: rss_bytes(pid)) is None:
            return
        with suppress(ProcessLookupError):
            # Stopped, so that the call cannot end, and the next one begin, between the look and the end.
            os.kill(pid, signal.SIGSTOP)
            self._overrun = overrun(mark, lambda: rss_bytes(pid))
            os.kill(pid, signal.SIGCONT if self._overrun is None else signal.SIGKILL)

    def _end_stopped(self) -> None:
        """Kill a worker that has been stopped for ten looks: it serves no calls, and may never be continued."""
        pid = self._process_id
        self._stopped_looks = self._stopped_looks + 1 if pid is not None and is_stopped(pid) else 0
        if pid is not None and self._stopped_looks >= _STOPPED_LOOKS:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def _process_id(self) -> int | None:
        """Id of the worker's process; None before that accepts calls."""
        return self._pid or process_of(self._mark)

    async def kill(self, timeout: float = 5, reason: str = "nanny-kill") -> None:  # noqa: ASYNC109 - Dask's signature
        """End the process for Dask's ``restart``; the report on its end has that reason."""
        self._ended_for = "Dask restarted it"
        try:
            await super().kill(timeout=timeout, reason=reason)
        finally:
            self._ended_for = ""

    def _on_worker_exit_sync(self, exitcode: int) -> None:
        over_limit = self._pid is not None and self.memory_manager._last_terminated_pid == self._pid  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        limit = self.memory_manager.memory_limit if over_limit else None
        if (pid := self._process_id) is not None:
            # A forked child would hold the port that the next incarnation needs: ports are fixed for the node's life.
            kill_session(pid)
        left = take_last_words(Path(self._plan.worker_log(self._slot)), Path(self._plan.worker_mark(self._slot)))
        # One that never accepted calls has printed nothing of theirs: its own messages say why it did not come up.
        last_words = left.data if pid is not None else _end_of(self._plan.worker_log(self._slot))
        ended = worker_exit(self._slot, self._incarnation, exitcode, limit)
        over, self._mark = self._overrun, None
        self._report(
            replace(
                ended,
                reason=_STOPPED_REASON if self._stopped_looks >= _STOPPED_LOOKS else ended.reason,
                ended_for=_LIMIT_EXCEEDED[over.of_memory] if over is not None else self._ended_for,
                overran=over.position if over is not None else 0,
                overran_memory=over is not None and over.of_memory,
                last_words=last_words.decode("latin-1"),
                last_words_at=left.at,
                omitted_bytes=left.omitted,
                begun=take_mark(self._begun_mark),
            )
        )
        super()._on_worker_exit_sync(exitcode)


def _end_of(log_file: str) -> bytes:
    try:
        return Path(log_file).read_bytes()[-_LOG_BYTES:]
    except OSError:
        return b""


class _NannyClosedError(Exception):
    """Final end of a nanny, such as that of Dask's when a worker dies while it starts."""


class _Slot:
    """Slot of one worker, in which a nanny is kept running under the latest order."""

    def __init__(self, program: Program, worker: int, order: Start) -> None:
        self._program = program
        self._worker = worker
        self._order = order
        self._nanny: SlotNanny | None = None

    async def keep(self) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(), wait=wait_exponential(0.1, 1.0) + wait_random(0, 0.1)
        ):
            with attempt:
                self._nanny = SlotNanny(self._program.plan, self._worker, self._order, self._program.report)
                async with self._nanny:
                    await self._nanny.finished()
                raise _NannyClosedError(f"nanny of worker {self._worker} closed")

    def follow(self, order: Start) -> None:
        self._order = order
        if self._nanny is not None:
            self._nanny.follow(order)


def _leave_them_to_their_threads() -> None:
    return None


async def keep_slots(program: Program) -> None:
    """Wait for the scheduler's address, then keep a nanny running for every worker; never returns."""
    order = await _next_order(program)
    # The fork server runs already, with less preloaded than distributed would put there: see _start_fork_server.
    keep_own_fork_server()
    # To start a process, multiprocessing polls all others, each of which has a thread that waits for it. A fork server
    # sends an exit code once, and the second reader takes it for 255 (multiprocessing/popen_forkserver.py).
    multiprocessing.process._cleanup = _leave_them_to_their_threads  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
    dask_config.set({"distributed.worker.daemon": False, "distributed.worker.multiprocessing-method": "forkserver"})
    slots = [_Slot(program, worker, order) for worker in range(program.plan.config.workers)]
    async with asyncio.TaskGroup() as tasks:
        for slot in slots:
            tasks.create_task(slot.keep())
        while True:
            order = await _next_order(program)
            for slot in slots:
                slot.follow(order)


async def _next_order(program: Program) -> Start:
    order = await program.commands.get()
    if not isinstance(order, Start):
        raise TypeError(f"the only command is Start, got {order!r}")
    return order


def main(commands: TextIO, reports: TextIO) -> None:
    """Run the node's nannies until the supervisor closes its end of ``commands``."""
    zygote = os.getppid()
    plan = read_plan(commands)
    _start_fork_server()
    run_program(
        keep_slots,
        plan,
        commands,
        reports,
        on_end=lambda: _end_after(plan.ready.pid, zygote, plan.config.instance_id),
    )


def _end_after(supervisor: int, zygote: int, instance_id: str) -> None:
    """End the node's processes if both the supervisor and the zygote, which does so otherwise, were killed."""
    if wait_for_end(supervisor, within_s=_DEATH_S) and wait_for_end(zygote, within_s=_END_S):
        asyncio.run(end_all(instance_id))


def _start_fork_server() -> None:
    """Start multiprocessing's fork server and resource tracker as forks. Call before the process has threads."""
    # By itself multiprocessing starts a new program, which would import distributed again: 0.6 to 0.75 s of processor
    # time (docs/decisions/010). It still does if this server ends. The tracker, 50 ms as a program (016), is a fork
    # only if it can show the arguments by which kill_all() spares it.

    def fork(path: bytes, argv: Sequence[str], kept: Sequence[int]) -> int:
        is_tracker = "resource_tracker" in argv[argv.index("-c") + 1]
        if is_tracker and not fits(argv):
            return stock(path, argv, kept)
        pid = os.fork()
        if pid == 0:
            starting.spawnv_passfds = stock  # workers inherit this: the fork servers of user code stay programs
            _run_code(argv, kept, role="tracker" if is_tracker else "forkserver")
        return pid

    multiprocessing.get_context("forkserver").set_forkserver_preload(["skyward.node.worker.worker"])
    starting = cast("Any", util)
    stock, starting.spawnv_passfds = starting.spawnv_passfds, fork
    try:
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    finally:
        starting.spawnv_passfds = stock


def _run_code(argv: Sequence[str], kept: Sequence[int], *, role: str) -> NoReturn:
    """Run multiprocessing's code for a new program in this process, with no descriptors except ``kept``."""
    status = 1
    try:
        name_process(role)
        if role == "tracker":
            show_arguments(argv, os.getcwd())
        close_all_but({0, 1, 2, *kept})
        # Both belong to the parent process, and the first is locked; user code may start its own.
        cast("Any", forkserver)._forkserver.__init__()  # noqa: SLF001
        cast("Any", resource_tracker)._resource_tracker.__init__()  # noqa: SLF001
        sys.argv = list(argv[argv.index("-c") :])  # in 3.14.8 arguments follow the fork server's code, which reads them
        exec(argv[argv.index("-c") + 1])  # noqa: S102  # "from multiprocessing.forkserver import main; main(…)"
        status = 0
    except SystemExit:
        status = 0
    except BaseException:  # past the fork nobody else would report it
        log.exception("the %s failed", role)
    finally:
        os._exit(status)
