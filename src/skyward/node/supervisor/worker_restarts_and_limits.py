"""Slot of one worker on its node: its processes, one after the other, watched from the start to the end of each."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_result, wait_exponential, wait_random

from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.node.jobs.store import Claim, JobStore, LookForJobs
from skyward.node.plan import NodePlan
from skyward.node.processes import end_of_log, exit_reason, is_stopped, kill_session, rss_bytes
from skyward.node.supervisor.forking import Fork, Zygote
from skyward.node.worker.call_mark import (
    HEEDS,
    JOB,
    WATCHED,
    Overrun,
    blank_mark,
    make_mark,
    mark_path,
    may_run,
    open_mark,
    overrun,
    process_of,
    take_mark,
)
from skyward.node.worker.descriptor_capture import take_last_words
from skyward.node.worker.lane_watchdog import DEAF, DEAF_REASON
from skyward.shipping.job_file import DamagedJobFileError, JobEnd, JobOutcome
from skyward.wire.control import EndComing, JobRunning, Report, RunService, Start, WorkerExit, WorkerRunning
from skyward.wire.printed_lines import LineAssembler

log = logging.getLogger("skyward.node.supervisor.worker_restarts_and_limits")

_PROGRAM = "skyward.node.worker.worker"
_GIB = 1 << 30
_MEMORY_SHARE = 0.95
"""Part of its memory limit at which a worker is killed, before the kernel would kill any process of the machine."""
_EVERY_S = 0.95
"""Least seconds between two looks of which one a second is enough."""
_QUIET_S = 1.0
"""Seconds without calls after which a worker is looked at once a second only."""
_STOPPED_LOOKS = 10
_STOPPED_REASON = f"it was stopped, as by SIGSTOP, for {_STOPPED_LOOKS} s, and was killed"
_LIMIT_EXCEEDED = {False: "ran longer than its timeout", True: "added more to its worker's memory than its limit"}


@dataclass(slots=True, kw_only=True)
class _Process:
    """One process of a worker.

    Attributes:
        incarnation: its id.
        mark_path: file of its mark; see :mod:`~skyward.node.worker.call_mark`.
        mark: that file, mapped; None if there is none.
        running: its report that it accepts calls; None before that.
        job: its report that it runs a call of a job; None while it runs none.
        seen_at: time of the last look of which one a second is enough.
        busy_at: time of the last look at which it ran calls.
        stopped_looks: number of the latest looks, one a second, that found it stopped.
        overrun: limit of a call for which it was killed.
        over_memory: True if it was killed for the worker's memory limit.
        ended_for: reason for which it ends itself; empty if it gave none.
    """

    incarnation: str
    mark_path: str
    mark: memoryview | None
    running: WorkerRunning | None = None
    job: JobRunning | None = None
    seen_at: float = -math.inf
    busy_at: float = -math.inf
    stopped_looks: int = 0
    overrun: Overrun | None = None
    over_memory: bool = False
    ended_for: str = ""
    fork: Fork | None = field(default=None, repr=False)
    _shown: psutil.Process | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        """Its process id; None before it accepts calls."""
        # Calls may begin before its report is read.
        return self.running.pid if self.running is not None else process_of(self.mark)

    def shown(self) -> psutil.Process | None:
        """Return what the system shows of it; None before it accepts calls, or after its end."""
        if self._shown is None and (pid := self.pid) is not None:
            with suppress(psutil.NoSuchProcess):
                self._shown = psutil.Process(pid)  # once: it takes ten times as long as a look at its memory
        return self._shown

    def kill(self) -> None:
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class WorkerSlot:
    """One worker: started as a fork of the zygote, and again, as a new incarnation, whenever it ends.

    Args:
        plan: the node.
        worker: index of the worker on it.
        zygote: process to fork it from.
        jobs: the node's jobs: calls of a process that has ended are released.
        report: called with :class:`WorkerRunning` and :class:`WorkerExit` of each incarnation, and with its calls of
            jobs.
        watch: called when the next look is due at once: calls or tasks may begin, and it was to be a second later.
    """

    def __init__(
        self,
        plan: NodePlan,
        worker: int,
        *,
        zygote: Zygote,
        jobs: JobStore,
        report: Callable[[Report], None],
        watch: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._zygote = zygote
        self._jobs = jobs
        self._report = report
        self._watch = watch
        self._start: Start | None = None
        self._service: RunService | None = None
        self._ends: dict[str, EndComing] = {}
        self._ordered = asyncio.Event()
        self._process: _Process | None = None

    def state(self) -> list[Report]:
        """Return the reports that its present process accepts calls, and runs a call of a job."""
        process = self._process
        return (
            [report for report in (process.running, process.job) if report is not None] if process is not None else []
        )

    @property
    def heeds(self) -> bool:
        """True while its call has handlers that a node which ends waits for."""
        mark = self._process.mark if self._process is not None else None
        return mark is not None and mark[HEEDS] != 0

    def follow(self, order: Start | RunService | EndComing | LookForJobs) -> None:
        """Pass an order on to this worker's process and to its successors. The first :class:`Start` starts it."""
        if order in (self._start, self._service):
            return
        if isinstance(order, Start):
            self._start = order
            self._ordered.set()
        elif isinstance(order, EndComing):
            self._ends[order.kind] = order
        elif isinstance(order, RunService):
            self._service = order
            self._watch()
        if self._process is not None and self._process.fork is not None:
            self._process.fork.send(order)

    def end_cancelled(self) -> None:
        """Kill its process if that runs a call of a job that was cancelled."""
        process = self._process
        if process is None or (pid := process.pid) is None:
            return
        for claim in filter(self._jobs.is_to_end, self._jobs.claims(process.incarnation)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # as in _enforce_limits
                os.kill(pid, signal.SIGKILL if self._jobs.is_to_end(claim) else signal.SIGCONT)

    def kill(self, incarnation: str, *, spare_jobs: bool = False) -> None:
        """Kill its process, unless that is another incarnation by now, or has a job that is to be spared."""
        process = self._process
        if process is None or process.incarnation != incarnation or (pid := process.pid) is None:
            return
        with suppress(ProcessLookupError):
            # Stopped, so that it claims no job between the look and the end.
            os.kill(pid, signal.SIGSTOP)
            is_spared = spare_jobs and self._jobs.claims(incarnation)
            os.kill(pid, signal.SIGCONT if is_spared else signal.SIGKILL)

    async def keep(self) -> None:
        """Run the worker, once it is ordered, until cancelled.

        A process that has accepted calls is followed by another at once; one that could not, after a pause that grows.
        """
        await self._ordered.wait()
        starting = AsyncRetrying(
            retry=retry_if_result(lambda came_up: not came_up) | retry_if_exception_type(),
            wait=wait_exponential(0.1, 2.0) + wait_random(0, 0.1),
        )
        while True:
            await starting(self._live)

    async def _live(self) -> bool:
        """Run one process to its end; return True if it has accepted calls."""
        incarnation = uuid.uuid4().hex
        path = mark_path(self._plan.ready.blob_dir, incarnation)
        make_mark(path)  # before the process: a worker that dies early has begun no call
        self._process = process = _Process(incarnation=incarnation, mark_path=path, mark=open_mark(path))
        try:
            async with self._zygote.fork(_PROGRAM) as fork:
                self._send_orders(fork, process)
                async for report in fork.reports():
                    self._take(report, process)
        except OSError:
            log.exception("worker %d was not started", self._worker)
            raise
        finally:
            self._process = None
            ended = self._settle(process)
        self._report(ended)
        return process.running is not None

    def _take(self, report: Report | str | None, process: _Process) -> None:
        """Take a report of the process: why it ends itself, or, without a text, that it begins to run calls."""
        if report is None:
            self._watch()
        elif isinstance(report, str):
            process.ended_for = report
        else:
            if isinstance(report, WorkerRunning):
                process.running = report
            elif isinstance(report, JobRunning):
                process.job = report if report.job else None
            self._report(report)

    def _send_orders(self, fork: Fork, process: _Process) -> None:
        assert self._start is not None
        env = self._plan.worker_env(self._worker, self._start)
        fork.send((self._plan, self._worker, process.incarnation, env))
        process.fork = fork
        fork.send(*([self._service] if self._service is not None else []), *self._ends.values())

    # --- watching ---------------------------------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Kill the process if it exceeds a limit, or has been stopped for ten seconds.

        Return True if the next look is due in a tenth of a second, False if in a second.

        Args:
            now: the time, in seconds.
        """
        process = self._process
        if process is None or (shown := process.shown()) is None:
            return self._service is not None  # its tasks may begin as soon as the process is up
        if busy := self._may_work(process):
            process.busy_at = now
        due = now - process.seen_at >= _EVERY_S
        if busy or due:
            self._enforce_limits(process, shown)
        if due:
            process.seen_at = now
            process.stopped_looks = process.stopped_looks + 1 if is_stopped(shown) else 0
            if process.stopped_looks >= _STOPPED_LOOKS:  # it serves no calls, and may never be continued
                process.kill()
        return self._needs_watch(process, now)

    def _may_work(self, process: _Process) -> bool:
        return self._service is not None or may_run(process.mark)  # no mark tells of a service's tasks

    def _needs_watch(self, process: _Process, now: float) -> bool:
        watched = now - process.busy_at < _QUIET_S
        if process.mark is not None:
            process.mark[WATCHED] = watched
        return watched or self._may_work(process)  # a call may have begun before the mark said so

    def _enforce_limits(self, process: _Process, shown: psutil.Process) -> None:
        memory_bytes = rss_bytes(shown)
        if memory_bytes > _MEMORY_SHARE * self._plan.memory_limit_bytes:
            process.over_memory = True
            process.kill()
            return
        mark = process.mark
        if mark is None or process.overrun is not None or overrun(mark, lambda: memory_bytes) is None:
            return
        with suppress(ProcessLookupError):
            # Stopped, so that the call cannot end, and the next one begin, between the look and the end.
            os.kill(shown.pid, signal.SIGSTOP)
            process.overrun = overrun(mark, lambda: rss_bytes(shown))
            os.kill(shown.pid, signal.SIGCONT if process.overrun is None else signal.SIGKILL)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _settle(self, process: _Process) -> WorkerExit:
        """End what the process has started; return the report on its end."""
        exit_code = process.fork.exit_code if process.fork is not None else None
        if (pid := process.pid) is not None:
            # A forked child would hold the port that the next incarnation needs: ports are fixed for the node's life.
            kill_session(pid)
        last = take_last_words(Path(self._plan.worker_log(self._worker)), process.mark or blank_mark())
        # One that never accepted calls has printed nothing of theirs: messages of the node say why it did not come up.
        last_words = last.data if pid is not None else end_of_log(self._plan.config.workdir).encode()
        over = process.overrun
        of_job = over is not None and over.position == JOB
        exited = WorkerExit(
            worker=self._worker,
            incarnation=process.incarnation,
            exit_code=exit_code if exit_code is not None and exit_code >= 0 else None,
            signal=-exit_code if exit_code is not None and exit_code < 0 else None,
            reason=self._reason(process, exit_code),
            memory_limit_bytes=self._plan.memory_limit_bytes if process.over_memory else None,
            ended_for=_LIMIT_EXCEEDED[over.of_memory] if over is not None else process.ended_for,
            last_words=last_words.decode("latin-1"),
            last_words_at=last.at,
            omitted_bytes=last.omitted,
            begun=take_mark(process.mark_path),
            overran=over.position if over is not None and not of_job else 0,
            overran_memory=over is not None and over.of_memory,
        )
        release_claims(self._jobs, self._plan, exited.ended_for or exited.reason, ended=exited, overran=of_job)
        return exited

    def _reason(self, process: _Process, exit_code: int | None) -> str:
        if exit_code is None:
            return exit_reason(None)
        if process.stopped_looks >= _STOPPED_LOOKS:
            return _STOPPED_REASON
        if exit_code == DEAF:
            return DEAF_REASON
        if process.over_memory:
            return f"exceeded its memory limit of {self._plan.memory_limit_bytes / _GIB:.1f} GiB"
        return exit_reason(exit_code)


# --- jobs -------------------------------------------------------------------------------------------------------------


def release_claims(
    jobs: JobStore, plan: NodePlan, reason: str, *, ended: WorkerExit | None = None, overran: bool = False
) -> None:
    """End the runs of calls of jobs whose process is dead: they wait for another one, or are over.

    Args:
        jobs: the node's jobs.
        plan: the node.
        reason: why their process ended.
        ended: the report of its end; None releases all claims of the node.
        overran: True if it was killed for a limit of the call.
    """
    try:
        for claim in jobs.claims(ended.incarnation if ended is not None else ""):
            if ended is not None and ended.last_words:
                _keep_last_words(jobs, claim, plan, ended.last_words)
            limit = ("memory" if ended.overran_memory else "time") if overran and ended is not None else ""
            jobs.release(claim, _loss(jobs, claim, plan, reason, limit), final=overran)
    except (OSError, DamagedJobFileError):
        log.exception("calls of jobs could not be released")


def _keep_last_words(jobs: JobStore, claim: Claim, plan: NodePlan, words: str) -> None:
    assembler = LineAssembler("stdout", time.time)
    lines = KeptLines(jobs.output_folder(claim), lambda write: write())
    name = jobs.facts(claim)["name"] or claim.name
    for piece in assembler.feed(words.encode("latin-1")) + assembler.finish():
        lines(LogLine(plan.config.node, plan.config.instance_id, piece.text, piece.timestamp, claim.worker, name))
    lines.close()


def _loss(jobs: JobStore, claim: Claim, plan: NodePlan, reason: str, limit: str) -> JobOutcome:
    """Return the outcome of a call that is not run again; ``limit`` names the one that it exceeded, if it did."""
    facts, node, log_path = jobs.facts(claim), plan.config.node, plan.worker_log(claim.worker)
    name, place = facts["name"] or claim.name, f"on node {node}, worker {claim.worker}"
    times = f"{claim.attempt} times, the last one" if claim.attempt > 1 else "once,"
    message = (
        f"{name} lost its worker {times} {place}: {reason}. It may have begun there, and with "
        f"retries={facts['retries']} is not run again; raise it if another run is safe."
    )
    if limit == "memory":
        message = (
            f"{name} added more than its memory of {facts['memory_bytes'] / _GIB:.3g} GiB to its worker's, {place}, "
            "and was ended with it. It is not run again; raise memory=, or have it take less."
        )
    elif limit:
        message = (
            f"{name} ran longer than its timeout of {facts['timeout_s']:g} s {place}, and was ended with its worker. "
            "It is not run again; raise timeout= if it may take longer."
        )
    return JobOutcome(
        end=JobEnd.TIMEOUT if limit == "time" else JobEnd.LOST,
        node=node,
        worker=claim.worker,
        attempt=claim.attempt,
        seconds=max(0.0, time.time() - claim.since),
        message=f"{message} Its log on the node: {log_path}",
        reason=reason,
        timeout_s=facts["timeout_s"],
        log_path=log_path,
    )
