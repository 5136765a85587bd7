"""Worker process: calls in its main thread, the lane on a loop thread, and the guest of a service on another."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import pickle
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from skyward.base.descriptors import abandon
from skyward.base.loop import LoopThread
from skyward.base.platform import open_descriptors
from skyward.base.waiting import keep
from skyward.distributed.grace import EndNotice
from skyward.distributed.runtime import enter_task
from skyward.node.jobs.store import LookForJobs
from skyward.node.plan import NodePlan
from skyward.node.processes import close_on_exec, end_with_supervisor, name_process, read_commands
from skyward.node.services import Service, WorkerHost
from skyward.node.worker.call_mark import Mark, blank_mark, enter, mark_path, open_mark
from skyward.node.worker.child_processes import call_in_this_process, prepare_multiprocessing
from skyward.node.worker.descriptor_capture import WorkerLog
from skyward.node.worker.job_runs import WorkerJobs
from skyward.node.worker.lane_server import LaneServer
from skyward.node.worker.lane_watchdog import Watchdog, end_process
from skyward.node.worker.output import CallOutput
from skyward.node.worker.shared_results import SharedResults
from skyward.wire.control import (
    EndComing,
    JobRunning,
    RunService,
    Start,
    SupervisorTrouble,
    WorkerRunning,
    to_frame,
)
from skyward.wire.frames import server_context
from skyward.wire.listening import BACKLOG

log = logging.getLogger("skyward.node.worker.worker")


def main(commands: BufferedReader, reports: TextIO) -> None:
    """In a fork of the zygote: run the worker in the first command until it is killed, or its supervisor ends."""
    zygote = os.getppid()
    plan, number, incarnation, env = pickle.load(commands)
    _become_worker(plan, env)
    Worker(plan, number, incarnation, reports).run(commands, zygote=zygote)


def _become_worker(plan: NodePlan, env: Mapping[str, str]) -> None:
    # Its calls' children belong to the session and are killed with the worker (docs/decisions/003).
    os.setsid()
    name_process("worker")
    close_on_exec()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "numpy.random" in sys.modules:
        # Forked with the zygote's state, every worker would draw the same numbers.
        sys.modules["numpy.random"].seed()
    if files := os.environ.get("SKYWARD_FILES"):
        os.makedirs(files, mode=0o700, exist_ok=True)
        os.chdir(files)
        if files in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            sys.path.insert(0, files)
    prepare_multiprocessing(plan.ready.blob_dir)


class Worker:
    """One worker.

    Args:
        plan: its node.
        number: its index there.
        incarnation: id of this process.
        reports: stream to the supervisor.
    """

    def __init__(self, plan: NodePlan, number: int, incarnation: str, reports: TextIO) -> None:
        self._plan = plan
        self._number = number
        self._incarnation = incarnation
        self._reports = reports
        mark = open_mark(mark_path(plan.ready.blob_dir, incarnation)) or blank_mark()
        worker_log = WorkerLog(Path(plan.worker_log(number)), mark)
        worker_log.redirect()
        self._lane_loop = LoopThread()
        self._lane = self._lane_loop.call(self._open_lane(worker_log, mark))
        self._lane.output.install()
        self._lane.runner.memory_limit_bytes = plan.memory_limit_bytes
        self._lane.runner.jobs = WorkerJobs(plan, number, incarnation, self._report_job, self._end_process)
        host = WorkerHost(
            name=f"node{plan.config.node}-worker{number}",
            address=plan.ready.guests[number],
            bind=plan.config.binds_to,
            identity=plan.config.identity,
            memory_limit_bytes=plan.memory_limit_bytes,
            folder=plan.worker_folder,
            accelerators=plan.accelerators_of(number),
            running_call=self._lane.runner.shown,
            run_task=self._run_task,
            end_process=self._end_process,
        )
        self._guest = _Guest(
            host, self._lane.output, lambda reason: self._report(to_frame(SupervisorTrouble(reason=reason)))
        )
        os.register_at_fork(after_in_child=self._leave_connections)

    async def _open_lane(self, worker_log: WorkerLog, mark: Mark) -> LaneServer:
        enter(mark)
        ready = self._plan.ready
        return LaneServer(
            incarnation=self._incarnation,
            blob_dirs=(Path(ready.blob_dir), Path(ready.blob_dir_disk)),
            checkpoints=Path(self._plan.checkpoints),
            log=worker_log,
            begun=mark,
            ask_for_watch=self._ask_for_watch,
            shared_results=SharedResults(Path(ready.blob_dir), f"result-{self._number}-"),
        )

    def _ask_for_watch(self) -> None:
        with suppress(OSError):  # a call has closed the connection: then the supervisor is told so elsewhere
            self._report(None)

    def run(self, commands: BufferedReader, *, zygote: int) -> None:
        """Accept the client's connections, and run calls in this thread. If that fails, end the process.

        Args:
            commands: stream of the supervisor's orders.
            zygote: pid of this process's parent.
        """
        host, _, port = self._plan.ready.lanes[self._number].rpartition(":")
        listening = socket.create_server((host, int(port)), backlog=BACKLOG)
        tls = server_context(self._plan.config.identity)
        self._lane_loop.spawn(keep(lambda: self._lane.serve(listening, tls), what="accepting the lane"))
        self._lane_loop.spawn(keep(self._lane.watch_output, what="reading the captured output"))
        Watchdog(self._lane_loop, self._lane.trouble, end=end_process).start()
        self._report(to_frame(WorkerRunning(worker=self._number, incarnation=self._incarnation, pid=os.getpid())))
        threading.Thread(target=self._follow, args=(commands, zygote), name="skyward-orders", daemon=True).start()
        try:
            self._lane.runner.work()
        except BaseException:
            log.critical("the thread that runs calls failed", exc_info=True)
            end_process("the thread that runs calls failed")

    def _follow(self, commands: BufferedReader, zygote: int) -> None:
        """Obey the supervisor until it closes the connection."""
        try:
            for command in read_commands(commands):
                match command:
                    case Start() as order:
                        os.environ["SKYWARD_WORKER"] = self._plan.place(self._number, order).to_json()
                    case RunService() as order:
                        self._guest.follow(order)
                    case EndComing() as order:
                        self._lane.runner.grace.announce(EndNotice(kind=order.kind, at=order.at))
                    case LookForJobs():
                        self._lane.runner.look_for_jobs()
                    case unexpected:
                        raise TypeError(f"a worker takes no {unexpected!r}")
        except BaseException:  # user code has closed or replaced the descriptor
            log.critical("the thread that takes the supervisor's orders failed", exc_info=True)
            end_process("the connection to its supervisor was closed")
        config = self._plan.config
        end_with_supervisor(
            self._plan.ready.pid, zygote, instance_id=config.instance_id, folder=self._plan.ready.blob_dir
        )

    def _leave_connections(self) -> None:
        """Close this worker's sockets in a forked child."""
        # The child may outlive the worker. The next incarnation needs its ports, and its clients the end of their
        # connections.
        ready, number = self._plan.ready, self._number
        ports = {int(address.rpartition(":")[2]) for address in (ready.guests[number], ready.lanes[number])}
        for descriptor in open_descriptors():
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _port_of(descriptor) in ports:
                    abandon(descriptor)

    def _run_task(
        self, name: Callable[[], str], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self._lane.output.restore_streams()
        with enter_task(name):
            return call_in_this_process(fn, args, kwargs)

    def _report_job(self, report: JobRunning) -> None:
        self._report(to_frame(report))

    def _end_process(self, reason: str) -> NoReturn:
        try:
            self._report(reason)
        finally:
            os._exit(0)

    def _report(self, report: Any) -> None:
        self._reports.write(f"{json.dumps(report)}\n")


class _GuestLeftError(Exception):
    """The guest has ended by itself, as when the service's process is gone."""


class _Guest:
    """Guest of the service that the client has ordered, run again whenever it ends.

    Args:
        host: its worker.
        output: the worker's output, which must not show the guest's own messages as a call's.
        report: tells the client why a guest cannot join.
    """

    def __init__(self, host: WorkerHost, output: CallOutput, report: Callable[[str], None]) -> None:
        self._host = host
        self._report = report
        self._trouble = ""
        self._output = output
        self._order: RunService | None = None
        self._loop: LoopThread | None = None
        self._stay: asyncio.Task[None] | None = None

    def follow(self, order: RunService) -> None:
        """Join the service at the address in ``order``, after leaving the one before."""
        if order == self._order:
            return
        self._order = order
        if self._loop is None:
            self._loop = LoopThread()
        self._loop.call_soon(self._move)

    def _move(self) -> None:
        order, last = self._order, self._stay
        if order is not None:
            self._output.guest_thread = threading.get_ident()
            self._stay = asyncio.create_task(self._keep(order, last))

    async def _keep(self, order: RunService, last: asyncio.Task[None] | None) -> None:
        if last is not None:  # it holds the port
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)

        async def join() -> None:
            try:
                service = cast("Service", importlib.import_module(order.module))
                await service.join(self._host, order.address)
            except OSError:  # the service's process is gone, and is started again
                raise
            except Exception as error:
                trouble = f"{self._host.name} cannot join {order.name}: {type(error).__name__}: {error}"
                if trouble != self._trouble:
                    self._trouble = trouble
                    self._report(trouble)
                raise
            raise _GuestLeftError(f"it has left {order.address}")

        await keep(join, what=f"the guest of {order.name}")


def _port_of(descriptor: int) -> int:
    """Return the local port of an IPv4 socket; 0 for any other socket."""
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        return seen.getsockname()[1] if seen.family == socket.AF_INET else 0
