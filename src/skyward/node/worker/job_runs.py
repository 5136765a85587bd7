"""Calls of jobs in one worker: claimed in the node's folder, where their lines and outcomes go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from skyward.events import LogLine
from skyward.events.log_files import KeptLines, record_line
from skyward.node.jobs.store import JOBS_FOLDER, Claim, JobStore
from skyward.node.plan import NodePlan
from skyward.shipping.job_file import JobCall, JobEnd, JobOutcome, read_call
from skyward.shipping.pickling import Packed
from skyward.shipping.remote_exceptions import pack_error
from skyward.wire.control import JobRunning
from skyward.wire.messages import LogPiece, PackedError
from skyward.wire.printed_lines import Reassembler

log = logging.getLogger("skyward.node.worker.job_runs")


class WorkerJobs:
    """The node's jobs, as one worker runs them: one call at a time.

    Args:
        plan: the node.
        worker: index of the worker on it.
        incarnation: id of this process.
        report: tells the client that a call runs, and that it does no more.
        end_process: ends this process, with a reason for the client.
    """

    def __init__(
        self,
        plan: NodePlan,
        worker: int,
        incarnation: str,
        report: Callable[[JobRunning], None],
        end_process: Callable[[str], NoReturn],
    ) -> None:
        self._config = plan.config
        self._store = JobStore(Path(plan.config.workdir, JOBS_FOLDER), plan.config.results_folder)
        self._worker = worker
        self._incarnation = incarnation
        self._report = report
        self._end_process = end_process
        self._name = ""
        self._lines: KeptLines | None = None
        self._joined = Reassembler()

    def look_again(self) -> None:
        """See :meth:`~skyward.node.jobs.store.JobStore.look_again`. Thread-safe."""
        self._store.look_again()

    def claim(self) -> Claim | None:
        """Claim a call that waits; None if there is none, or the folder cannot be used."""
        try:
            return self._store.claim(self._worker, self._incarnation)
        except OSError:
            log.exception("the node's jobs cannot be read")
            return None

    def begin(self, claim: Claim) -> None:
        """Tell the client that a call is about to run."""
        self._name = claim.name
        self._lines = KeptLines(self._store.output_folder(claim), lambda write: write())
        self._report(JobRunning(worker=self._worker, incarnation=self._incarnation, job=claim.name))

    def read(self, claim: Claim) -> JobCall:
        """Return a claimed call.

        Raises:
            DamagedJobFileError: its file holds none.
        """
        call = read_call(self._store.call_file(claim))
        self._name = call.name or claim.name
        return call

    def keep_lines(self, pieces: Sequence[LogPiece]) -> None:
        """Keep what the call prints; dropped once it is over."""
        for line in filter(None, map(self._joined.add, pieces)):
            self._keep(
                LogLine(
                    self._config.node,
                    self._config.instance_id,
                    line.text,
                    line.timestamp,
                    self._worker,
                    self._name,
                    line.stream,
                    state=line.state,
                )
            )

    def keep_record(self, values: Mapping[str, Any]) -> None:
        """Keep what the call logs."""
        self._keep(record_line(values, self._config.node, self._worker, self._config.instance_id, self._name))

    def _keep(self, line: LogLine) -> None:
        if self._lines is not None:
            self._lines(line)

    def end(self, claim: Claim, result: Packed | PackedError, seconds: float) -> None:
        """Store the outcome of the call.

        Raises:
            OSError: it cannot be stored, and neither can the reason.
        """
        if self._lines is not None:  # before the outcome is there: its reader has all lines then
            self._lines.close()
        try:
            self._finish(claim, result, seconds)
        except OSError as error:
            error.add_note(f"the result of {claim.name} could not be stored on node {self._config.node}")
            self._finish(claim, pack_error(error), seconds)
        self._report(JobRunning(worker=self._worker, incarnation=self._incarnation, job=""))

    def _finish(self, claim: Claim, result: Packed | PackedError, seconds: float) -> None:
        failed = isinstance(result, PackedError)
        outcome = JobOutcome(
            end=JobEnd.ERROR if failed else JobEnd.VALUE,
            node=self._config.node,
            worker=self._worker,
            attempt=claim.attempt,
            seconds=seconds,
            result=None if failed else result,
            error=result if failed else None,
        )
        if not self._store.finish(claim, outcome):
            log.warning("run %d of %s was given up before it ended", claim.attempt, claim.name)

    def renew(self, claim: Claim, why: str) -> NoReturn:
        """Give a call back that has not begun, and end this process, as it needs a fresh one."""
        if self._lines is not None:
            self._lines.close()
        self._store.give_back(claim)
        self._end_process(f"{claim.name} needed a fresh process: {why}")
