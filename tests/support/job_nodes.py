"""Nodes that keep jobs in memory, and run a call when the test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from skyward.errors import UnreachableError
from skyward.events import LogLine
from skyward.fleet.node_jobs import RUNNING, UNFINISHED, WAITING, CallState, JobRefusedError
from skyward.shipping.job_file import JobEnd, JobOutcome, outcome_parts, read_call, split_calls
from skyward.shipping.pickling import pack_result, unpack
from skyward.shipping.remote_exceptions import pack_error


class MemoryNode:
    """A node of a fleet; what is asked of it is what a :class:`~skyward.fleet.node_jobs.NodeJobs` is asked."""

    def __init__(self, instance_id: str, folder: Path, node: int = 0) -> None:
        self.instance_id = instance_id
        self.node = node
        self.reachable = True
        self.begun: list[tuple[str, int]] = []
        self.runs: dict[tuple[str, int], int] = {}
        self.known: dict[tuple[str, int], str] = {}
        self.lines: dict[tuple[str, int], list[LogLine]] = {}
        self._folder = folder / instance_id

    def begin(self, job: str, index: int = 0) -> None:
        self.known[job, index] = RUNNING
        self.runs[job, index] += 1
        self.begun.append((job, index))

    def run(self, job: str, index: int = 0) -> None:
        """Run a call to its end."""
        self.begin(job, index)
        call = read_call(self._file(job, index, "call"))
        function = unpack(call.function.data, call.function.buffers)
        args, kwargs = unpack(call.arguments.data, call.arguments.buffers)
        try:
            result = pack_result(function(*args, **kwargs), what="the result")
            self.end(job, index, JobOutcome(end=JobEnd.VALUE, node=self.node, worker=0, attempt=1, result=result))
        except Exception as error:
            failed = JobOutcome(end=JobEnd.ERROR, node=self.node, worker=0, attempt=1, error=pack_error(error))
            self.end(job, index, failed)

    def end(self, job: str, index: int, outcome: JobOutcome) -> None:
        self._file(job, index, "outcome").write_bytes(b"".join(outcome_parts(outcome)))
        self.known[job, index] = outcome.end

    def say(self, job: str, text: str, index: int = 0) -> None:
        self.lines.setdefault((job, index), []).append(LogLine(self.node, self.instance_id, text, 1.0, 0, job))

    async def add(self, job: str, calls: bytes | memoryview, *, runs: int = 0) -> None:
        self._answer()
        import io

        for index, pieces in split_calls(io.BytesIO(calls)):
            content, path = b"".join(pieces), self._file(job, index, "call")
            if path.exists() and path.read_bytes() != content:
                raise JobRefusedError("there is another", "exists")
            path.write_bytes(content)
            self.known.setdefault((job, index), WAITING)
            self.runs.setdefault((job, index), runs)

    async def states(self, *job: str) -> Mapping[str, Mapping[int, CallState]]:
        self._answer()
        states: dict[str, dict[int, CallState]] = {}
        for (name, index), state in self.known.items():
            if not job or name in job:
                states.setdefault(name, {})[index] = CallState(
                    state=state, runs=self.runs[name, index], path=f"{name}/{index}/outcome"
                )
        return states

    async def output(self, job: str, index: int, at: str = "") -> tuple[Sequence[LogLine], str, bool]:
        self._answer()
        lines = self.lines.get((job, index), [])
        return lines[int(at or 0) :][:2], str(min(int(at or 0) + 2, len(lines))), len(lines) > int(at or 0) + 2

    async def fetch_outcome(self, name: str, path: Path) -> None:
        self._answer()
        path.write_bytes((self._folder / name).read_bytes())

    async def cancel(self, job: str) -> None:
        self._answer()
        for (name, index), state in list(self.known.items()):
            if name == job and state in UNFINISHED:
                outcome = JobOutcome(end=JobEnd.CANCELLED, node=0, worker=0, attempt=0, message="it was cancelled")
                self.end(name, index, outcome)

    def _file(self, job: str, index: int, name: str) -> Path:
        path = self._folder / job / str(index) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _answer(self) -> None:
        if not self.reachable:
            raise UnreachableError(f"{self.instance_id} does not answer")
