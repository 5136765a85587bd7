"""Nodes with a store of jobs on this disk, and no processes: a test runs the calls when it likes."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyward.errors import UnreachableError
from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.fleet.checkpoints import NodeCheckpoints
from skyward.fleet.node_jobs import JobCallState, JobRefusedError
from skyward.machine.local import LocalAccess
from skyward.node.jobs.store import Claim, JobExistsError, JobStore, UnknownJobError
from skyward.shipping.job_file import JobEnd, JobOutcome, read_call, split_calls
from skyward.shipping.pickling import pack_result, unpack
from skyward.shipping.remote_exceptions import pack_error
from skyward.wire.node_config import CHECKPOINTS

LARGE_BYTES = 1000
"""Size of an outcome above which it does not fit into an answer."""


class StoreNode:
    """A node of a fleet; it is asked what a :class:`~skyward.fleet.node_jobs.NodeJobs` is asked.

    Attributes:
        instance_id: id of its machine.
        node: its rank.
        store: its jobs.
        reachable: False while it does not answer.
    """

    def __init__(self, instance_id: str, folder: Path, node: int = 0) -> None:
        self.instance_id = instance_id
        self.node = node
        self.store = JobStore(folder / instance_id)
        self.reachable = True
        self._folder = folder / instance_id

    # --- its workers ------------------------------------------------------------------------------------------------

    def begin(self, job: str, index: int = 0) -> Claim:
        """Begin a call."""
        others: list[Claim] = []
        while (claim := self.store.claim(0, "worker")) is not None and (claim.job, claim.index) != (job, index):
            others.append(claim)
        for other in others:
            self.store.give_back(other)
        assert claim is not None
        return claim

    def run(self, job: str, index: int = 0) -> None:
        """Run a call to its end, if it has not begun."""
        claims = (claim for claim in self.store.claims() if (claim.job, claim.index) == (job, index))
        claim = next(claims, None) or self.begin(job, index)
        call = read_call(self.store.call_file(claim))
        function = unpack(call.function.data, call.function.buffers)
        args, kwargs = unpack(call.arguments.data, call.arguments.buffers)
        place: dict[str, Any] = {"node": self.node, "worker": 0, "attempt": claim.attempt}
        try:
            result = pack_result(function(*args, **kwargs), what="the result")
            self.store.finish(claim, JobOutcome(end=JobEnd.VALUE, result=result, **place))
        except ValueError as error:
            self.store.finish(claim, JobOutcome(end=JobEnd.ERROR, error=pack_error(error), **place))

    def say(self, claim: Claim, *texts: str) -> None:
        """Print lines in a call that runs."""
        lines = KeptLines(self.store.output_folder(claim), lambda write: write())
        for text in texts:
            lines(LogLine(self.node, self.instance_id, text, 1.0, 0, claim.job))
        lines.close()

    def states_of(self, job: str = "run-7") -> dict[int, str]:
        """Return the states of a job's calls."""
        return {int(index): facts["state"] for index, facts in self.store.states(job).get(job, {}).items()}

    def checkpoints(self) -> NodeCheckpoints:
        """The folder of the checkpoints of its calls."""
        transport = LocalAccess(address="127.0.0.1", workdir=str(self._folder)).open()
        place = str(self._folder / CHECKPOINTS)
        return NodeCheckpoints(
            transport=transport, python=sys.executable, folder=place, instance_id=self.instance_id, node=self.node
        )

    # --- its client -------------------------------------------------------------------------------------------------

    async def add(self, job: str, calls: bytes | memoryview, *, runs: int = 0) -> None:
        self._answer()
        for index, pieces in split_calls(io.BytesIO(calls)):
            try:
                self.store.add(job, index, pieces, runs=runs)
            except JobExistsError as error:
                raise JobRefusedError(str(error), "exists") from error

    async def states(self, *job: str) -> Mapping[str, Mapping[int, JobCallState]]:
        self._answer()
        return {
            name: {int(i): JobCallState.of(facts) for i, facts in calls.items()} for name, calls in self._facts(*job)
        }

    def _facts(self, *job: str) -> Sequence[tuple[str, dict[str, dict[str, object]]]]:
        return [*self.store.states(*job).items()]

    async def output(self, job: str, index: int, at: str = "") -> tuple[Sequence[LogLine], str, bool]:
        self._answer()
        try:
            return self.store.lines(job, index, at, 10)
        except UnknownJobError as error:
            raise JobRefusedError(str(error), "unknown") from error

    async def results(self, job: str, indices: Sequence[int]) -> Mapping[int, tuple[bytes, Sequence[LogLine]]]:
        self._answer()
        results: dict[int, tuple[bytes, Sequence[LogLine]]] = {}
        for index in indices[:3]:
            if (path := self.store.outcome(job, index)).stat().st_size > LARGE_BYTES:
                break
            results[index] = path.read_bytes(), self.store.lines(job, index, "", LARGE_BYTES)[0]
        return results

    async def fetch_outcome(self, name: str, path: Path) -> None:
        self._answer()
        part = path.with_name(".part")
        shutil.copyfile(self._folder / name, part)
        part.rename(path)

    async def cancel(self, job: str) -> None:
        self._answer()
        for index in self.states_of(job):
            self.store.cancel(job, index)

    def _answer(self) -> None:
        if not self.reachable:
            raise UnreachableError(f"{self.instance_id} does not answer")
