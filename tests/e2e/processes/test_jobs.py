"""Calls of jobs on a real node: they run without a client, and at most 1 + retries times, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.base.waiting import wait_until
from skyward.distributed.grace import checkpoint_folder
from skyward.errors import CallTimeoutError, WorkerLostError
from skyward.fleet.control_client import ControlClient
from skyward.node.jobs.store import JOBS_FOLDER, JobStore
from skyward.scheduling.certificates import issue
from skyward.shipping.job_file import call_bytes, job_call, outcome_value, read_outcome
from skyward.submission import CallLimits, Invocation
from skyward.wire.control import JobRunning, Message, WorkerRunning
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeReady
from support.nodes import node_config
from support.notes import note

_ADDRESS = "127.83.33.1"
_DEADLINE_S = 60


class JobNode:
    """A node of this machine with two workers, started as programs are on machines.

    Attributes:
        messages: what its supervisor has said to the client.
    """

    def __init__(self, workdir: Path, identity: TlsIdentity) -> None:
        self.messages: list[Message] = []
        self.workdir = workdir
        self.store = JobStore(workdir / JOBS_FOLDER)
        self._config = node_config(
            identity,
            instance_id=f"jobs-{os.getpid()}",
            workdir=str(workdir),
            address=_ADDRESS,
            head=True,
            workers=2,
            keep_s=600.0,
            collect_metrics=False,
        )
        self._identity = identity
        self._control: ControlClient | None = None
        self.ready: NodeReady | None = None

    async def start(self) -> None:
        """Start its supervisor, and connect."""
        argv = [sys.executable, "-m", "skyward.node.supervisor", str(self.workdir)]
        stdin = self._config.to_json().encode()
        started = await asyncio.to_thread(subprocess.run, argv, input=stdin, capture_output=True, check=True)
        self.ready = NodeReady.from_json(started.stdout.decode())
        await self.connect()

    async def connect(self) -> None:
        """Connect to the supervisor."""
        assert self.ready is not None
        self._control = ControlClient(
            self.ready.control, self._identity, on_message=self.messages.append, on_lost=lambda: None
        )
        await self._control.connect(_DEADLINE_S)

    async def leave(self) -> None:
        """Close the connection."""
        assert self._control is not None
        await self._control.close()

    async def kill_supervisor(self) -> None:
        """Kill the supervisor, and wait until everything has ended with it."""
        assert self.ready is not None
        os.kill(self.ready.pid, signal.SIGKILL)
        await self.leave()
        await until(lambda: not self.pids())

    def busy(self) -> list[int]:
        """Return the pids of the workers that run calls of jobs."""
        known = {message.incarnation: message.pid for message in self.messages if isinstance(message, WorkerRunning)}
        return [known[claim.incarnation] for claim in self.store.claims() if claim.incarnation in known]

    async def stop(self) -> None:
        """Have the node end."""
        assert self._control is not None
        await self._control.stop_node(_DEADLINE_S)
        await self._control.close()

    def spawn(self, job: str, *calls: Invocation) -> None:
        """Add calls of a job, and say so."""
        for index, call in enumerate(calls):
            self.store.add(job, index, [call_bytes(job_call(call, name=job))])
        self.store.wake()

    async def value(self, job: str, index: int = 0) -> Any:
        """Wait for a call's outcome; return its value or raise its error."""
        await until(lambda: self.store.states(job)[job][str(index)]["outcome_bytes"] > 0)
        path = self.workdir / JOBS_FOLDER / self.store.states(job)[job][str(index)]["path"]
        return outcome_value(read_outcome(path), where=job)

    def lines(self, job: str, index: int = 0) -> list[str]:
        """Return the lines of a call."""
        return [line.line for line in self.store.lines(job, index, "", 1 << 20)[0]]

    def pids(self) -> set[int]:
        """Return the pids of all its processes."""
        return {process.pid for process in psutil.process_iter() if self._is_own(process)}

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("SKYWARD_INSTANCE") == self._config.instance_id
        except psutil.Error:
            return False


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""

    async def probe() -> bool | None:
        return holds() or None

    await wait_until(probe, deadline_s=_DEADLINE_S, interval_s=0.02, what="it to hold")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[JobNode]:
    async with a_node(tmp_path) as node:
        yield node


@asynccontextmanager
async def a_node(folder: Path) -> AsyncGenerator[JobNode]:
    """Yield a node, and see to its end."""
    node = JobNode(folder / "node", issue())
    try:
        await node.start()
        yield node
        await node.stop()
    finally:
        for pid in node.pids():
            os.kill(pid, signal.SIGKILL)


def runs(path: Path) -> list[int]:
    """Return the pids that left a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def test_calls_of_jobs_run_and_leave_values_errors_and_lines(node: JobNode, tmp_path: Path) -> None:
    def fail() -> None:
        os.write(1, b"from C\n")
        raise LookupError("beta")

    node.spawn("many", *(Invocation(fn=note, args=(str(tmp_path / "ran"),)) for _ in range(20)), Invocation(fn=fail))

    pids = [await node.value("many", index) for index in range(20)]
    with pytest.raises(LookupError, match="beta"):
        await node.value("many", 20)

    assert sorted(pids) == sorted(runs(tmp_path / "ran"))
    assert node.lines("many", 3) == [f"noted by {pids[3]}"]
    assert node.lines("many", 20) == ["from C"]

    def told() -> set[str]:
        return {message.job for message in node.messages if isinstance(message, JobRunning)}

    await until(lambda: told() == {"", *(f"many/{index}" for index in range(21))})


async def test_a_job_goes_on_without_a_client_which_learns_of_it_when_it_comes_back(
    node: JobNode, tmp_path: Path
) -> None:
    node.spawn("long", Invocation(fn=note, args=(str(tmp_path / "ran"), 1.0)))
    await until(lambda: bool(runs(tmp_path / "ran")))
    await node.leave()
    node.messages.clear()

    await node.connect()
    await until(lambda: any(isinstance(message, JobRunning) and message.job == "long/0" for message in node.messages))

    assert [await node.value("long")] == runs(tmp_path / "ran")


async def test_a_killed_worker_uses_up_a_retry_and_leaves_its_last_words(node: JobNode, tmp_path: Path) -> None:
    def die() -> None:
        note(str(tmp_path / "ran"))
        os.write(2, b"half a line, ")
        os.kill(os.getpid(), signal.SIGSEGV)

    node.spawn("dies", Invocation(fn=die, retries=1))

    with pytest.raises(WorkerLostError, match=r"dies lost its worker 2 times.*SIGSEGV"):
        await node.value("dies")
    assert len(runs(tmp_path / "ran")) == 2
    lines = node.lines("dies")
    assert sum(line.startswith("noted by") for line in lines) == 2
    assert sum(line.startswith("half a line, Fatal Python error: Segmentation fault") for line in lines) == 2


async def test_a_run_after_a_loss_goes_on_from_the_checkpoint_of_the_one_before(node: JobNode) -> None:
    def count() -> int:
        step = checkpoint_folder() / "step"
        steps = int(step.read_text()) if step.exists() else 0
        step.write_text(str(steps + 1))
        if steps < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return steps

    node.spawn("counts", Invocation(fn=count, retries=2))

    assert await node.value("counts") == 2


async def test_limits_end_a_call_for_good(node: JobNode) -> None:
    node.spawn("slow", Invocation(fn=time.sleep, args=(60,), limits=CallLimits(timeout_s=0.5)))

    with pytest.raises(CallTimeoutError, match=r"slow ran longer than its timeout of 0\.5 s"):
        await node.value("slow")


def hold(path: str) -> None:
    """Leave a line, and hold the interpreter's lock for ever."""
    note(path)
    re.match(r"(a+)+b", "a" * 100)


CALLS = {"sleeps": Invocation(fn=note, args=(600.0,)), "holds the lock": Invocation(fn=hold)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_running_job_that_is_cancelled_ends_at_once(node: JobNode, tmp_path: Path, call: Invocation) -> None:
    node.spawn("endless", replace(call, args=(str(tmp_path / "ran"), *call.args)))
    await until(lambda: bool(runs(tmp_path / "ran")))
    began_s = time.monotonic()

    assert node.store.cancel("endless", 0)
    node.store.wake()
    with pytest.raises(CancelledError):
        await node.value("endless")

    assert time.monotonic() - began_s < 5
    assert len(runs(tmp_path / "ran")) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_is_killed_at_any_time_no_call_runs_too_often(node: JobNode, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    calls = [Invocation(fn=note, args=(str(tmp_path / f"ran-{index}"), 0.05), retries=index % 3) for index in range(60)]
    node.spawn("many", *calls)

    supervisors = 2
    while node.store.unfinished():
        await asyncio.sleep(dice.uniform(0.0, 0.5))
        if supervisors and dice.random() < 0.2:
            supervisors -= 1
            await node.kill_supervisor()
            await node.start()
        for pid in node.busy():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    states = node.store.states("many")["many"]
    for index, facts in states.items():
        count = len(runs(tmp_path / f"ran-{index}"))
        assert count <= 1 + int(index) % 3
        assert count >= (facts["state"] == "value")
    assert {facts["state"] for facts in states.values()} == {"value", "lost"}, "some were killed, and some were not"


async def test_a_supervisor_that_is_killed_is_followed_by_one_that_runs_its_jobs_again(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        calls = [
            Invocation(fn=note, args=(str(tmp_path / f"ran-{retries}"), 2.0), retries=retries) for retries in (0, 1)
        ]
        node.spawn("long", *calls)
        await until(lambda: all(runs(tmp_path / f"ran-{retries}") for retries in (0, 1)))

        await node.kill_supervisor()
        await node.start()

        with pytest.raises(WorkerLostError, match="started again"):
            await node.value("long", 0)
        assert await node.value("long", 1) == runs(tmp_path / "ran-1")[1]
        assert (len(runs(tmp_path / "ran-0")), len(runs(tmp_path / "ran-1"))) == (1, 2)
