"""Jobs on one node, reached through its transport: added, looked at, read and cancelled."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from skyward.base.waiting import NotYet, wait_until
from skyward.environment.bootstrap import Environment
from skyward.errors import FetchError, SkywardError, UnreachableError
from skyward.events import LogLine
from skyward.fleet.checkpoints import NodeCheckpoints
from skyward.fleet.node_files import NodeFiles
from skyward.fleet.template_process import added_packages
from skyward.machine.access import Access, Completed, Transport
from skyward.wire.node_config import CHECKPOINTS

WAITING: Final = "waiting"
RUNNING: Final = "running"
UNFINISHED: Final = frozenset({WAITING, RUNNING})
"""States of a job's call that is not over."""

_AGAIN_S = 0.5
_ANSWER_S = 60.0
_PATIENCE_S = 90.0


class JobRefusedError(SkywardError):
    """A node refused an order about a job.

    Attributes:
        kind: ``"exists"``, ``"unknown"`` or ``"damaged"``.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCallState:
    """State of one call of a job on its node.

    Attributes:
        state: ``"waiting"``, ``"running"``, or how it ended: see :class:`~skyward.shipping.job_file.JobEnd`.
        runs: number of its runs that have begun so far.
        since: time at which the present or last run began, in seconds since the epoch; 0 before the first.
        seconds: duration of that run so far, or in the end.
        path: file of its outcome, below the folder of jobs; empty while it has none.
    """

    state: str
    runs: int = 0
    since: float = 0.0
    seconds: float = 0.0
    path: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Return the state of a node's facts, of which it tells more than these."""
        return cls(**{name: value for name, value in facts.items() if name in cls.__dataclass_fields__})


class NodeJobs:
    """Jobs on one node.

    Every method raises :class:`~skyward.errors.UnreachableError` if the node does not answer for 90 s, and
    :class:`JobRefusedError`. All of them are idempotent.

    Args:
        transport: the transport to the node.
        access: the node's place on its machine.
        environment: interpreter and variables there.
        instance_id: the provider's id of its machine.
        node: the node's rank, for messages.
    """

    def __init__(
        self, transport: Transport, access: Access, environment: Environment, *, instance_id: str, node: int
    ) -> None:
        self.instance_id = instance_id
        self.node = node
        self._transport = transport
        self._environment = environment
        self._workdir = access.workdir
        self._env = dict(environment.env)
        if access.on_this_machine and not environment.isolated:
            self._env |= added_packages(self._env)

    async def add(self, job: str, calls: bytes | memoryview, *, runs: int = 0) -> None:
        """Store calls, of which the first ``runs`` runs are used up; workers begin with them at once.

        Raises:
            UnreachableError: the machine has them, and nothing of its node runs any more.
        """
        answer = await self._ask("add", job, *(("--runs", str(runs)) if runs else ()), stdin=calls)
        if not answer["served"]:
            raise UnreachableError(
                f"job {job}: node {self.node} of its fleet does not run any more; the job waits for the next program "
                "that opens the fleet, and ends if there is none in time (`skyward ls`)"
            )

    async def states(self, *job: str) -> Mapping[str, Mapping[int, JobCallState]]:
        """Return the states of all calls, by job and index; of one ``job`` only, if it is given."""
        answer = await self._ask("states", *job)
        return {
            name: {int(index): JobCallState.of(facts) for index, facts in calls.items()}
            for name, calls in answer["jobs"].items()
        }

    async def output(self, job: str, index: int, at: str = "") -> tuple[Sequence[LogLine], str, bool]:
        """Return lines of a call from ``at`` on, where to go on, and whether there are more now."""
        answer = await self._ask("output", job, str(index), *((at,) if at else ()))
        return [LogLine(*line) for line in answer["lines"]], answer["at"], bool(answer.get("more"))

    async def results(self, job: str, indices: Sequence[int]) -> Mapping[int, tuple[bytes, Sequence[LogLine]]]:
        """Return outcome file and lines of calls that are over: of the first ones, as many as an answer holds."""
        answer = await self._ask("results", job, stdin=json.dumps(list(indices)).encode())
        return {
            int(index): (base64.b64decode(facts["outcome"]), [LogLine(*line) for line in facts["lines"]])
            for index, facts in answer["results"].items()
        }

    async def fetch_outcome(self, name: str, path: Path) -> None:
        """Copy the file of an outcome, :attr:`JobCallState.path`, to ``path``, whole or not at all.

        Raises:
            FetchError: it is not there.
            OSError: there is no room here.
        """
        python, folder = self._environment.python, f"{self._workdir}/jobs"
        files = NodeFiles(self._transport, python=python, folder=folder, node=self.node)
        listing = await files.matching([name])
        if not listing.files:
            raise FetchError(f"the outcome {name} is not on node {self.node}")
        await files.fetch(listing.files[0], path)

    def checkpoints(self) -> NodeCheckpoints:
        """Return the folder of the checkpoints of the node's calls."""
        return NodeCheckpoints(
            transport=self._transport,
            python=self._environment.python,
            folder=f"{self._workdir}/{CHECKPOINTS}",
            instance_id=self.instance_id,
            node=self.node,
        )

    async def cancel(self, job: str) -> None:
        """Cancel the calls of a job that are not over: those that wait get that outcome, running ones are ended."""
        await self._ask("cancel", job)

    async def forget(self, job: str) -> None:
        """Remove a job that is over."""
        await self._ask("forget", job)

    async def _ask(self, *order: str, stdin: bytes | memoryview = b"") -> dict[str, Any]:
        argv = self._environment.command("-m", "skyward.node.jobs", self._workdir, *order)

        async def once() -> Completed | NotYet:
            try:
                return await self._transport.run(argv, env=self._env, stdin=stdin, timeout_s=_ANSWER_S)
            except UnreachableError as error:
                return NotYet(str(error))

        what = f"node {self.node} to answer about its jobs"
        done = await wait_until(once, deadline_s=_PATIENCE_S, interval_s=_AGAIN_S, what=what)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            *_, why = done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"]
            raise UnreachableError(f"node {self.node} cannot say what became of its jobs: {why}") from None
        if "error" in answer:
            raise JobRefusedError(f"node {self.node}: {answer['error']}", str(answer.get("kind", "")))
        return answer
