"""Jobs on a node, through its transport and the node's own commands; the test is the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.environment.bootstrap import Environment
from skyward.errors import UnreachableError
from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.fleet.node_jobs import RUNNING, WAITING, JobRefusedError, NodeJobs
from skyward.machine.local import LocalAccess
from skyward.node.jobs.store import JOBS_FOLDER, JobStore
from skyward.shipping.job_file import JobEnd, JobOutcome, call_bytes, job_call, join_calls, outcome_value, read_outcome
from skyward.shipping.pickling import pack_result
from skyward.submission import Invocation


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """The store of a node whose supervisor runs."""
    store = JobStore(tmp_path / "node" / JOBS_FOLDER)
    (tmp_path / "node").mkdir()
    with open(store.open_wake(), "rb", buffering=0):
        yield store


@pytest.fixture
def node(tmp_path: Path) -> NodeJobs:
    access = LocalAccess(address="127.0.0.1", workdir=str(tmp_path / "node"))
    environment = Environment(python=sys.executable, isolated=False)
    return NodeJobs(access.open(), access, environment, instance_id="i-0", node=0)


def calls(*arguments: int) -> memoryview:
    packed = [call_bytes(job_call(Invocation(fn=abs, args=(x,)))) for x in arguments]
    return memoryview(join_calls(enumerate(packed)))


async def test_a_job_from_its_addition_to_its_outcome(node: NodeJobs, store: JobStore, tmp_path: Path) -> None:
    await node.add("run-7", calls(-1, -2))
    claim = store.claim(0, "first")
    assert claim is not None
    states = (await node.states("run-7"))["run-7"]
    assert [states[index].state for index in (0, 1)] == [RUNNING, WAITING]
    assert (states[0].runs, states[0].path, states[1].runs) == (1, "", 0)

    lines = KeptLines(store.output_folder(claim), lambda write: write())
    for text in ("one", "two"):
        lines(LogLine(0, "i-0", text, 1.0, 0, "run-7[0]"))
    lines.close()
    result = pack_result(b"x" * (9 << 20), what="the result")
    store.finish(claim, JobOutcome(end=JobEnd.VALUE, node=0, worker=0, attempt=1, seconds=2.5, result=result))

    said, at, more = await node.output("run-7", 0)
    assert ([line.line for line in said], more) == (["one", "two"], False)
    assert (await node.output("run-7", 0, at))[0] == []
    over = (await node.states())["run-7"][0]
    assert (over.state, over.seconds) == (JobEnd.VALUE, 2.5)
    await node.fetch_outcome(over.path, tmp_path / "outcome")
    assert len(outcome_value(read_outcome(tmp_path / "outcome"), where="")) == 9 << 20

    assert await node.results("run-7", [0]) == {}  # too large for an answer
    await node.cancel("run-7")
    results = await node.results("run-7", [1])
    (tmp_path / "cancelled").write_bytes(results[1][0])
    assert (read_outcome(tmp_path / "cancelled").end, results[1][1]) == (JobEnd.CANCELLED, [])
    assert [call.state for call in (await node.states("run-7"))["run-7"].values()] == [JobEnd.VALUE, JobEnd.CANCELLED]


async def test_a_node_that_has_ended_takes_calls_and_says_that_nobody_runs_them(node: NodeJobs) -> None:
    with pytest.raises(UnreachableError, match="node 0 of its fleet does not run any more"):
        await node.add("run-7", calls(1))
    assert [call.state for call in (await node.states("run-7"))["run-7"].values()] == [WAITING]


@pytest.mark.usefixtures("store")
async def test_refusals_have_a_kind(node: NodeJobs) -> None:
    content = calls(1)
    await node.add("run-7", content)
    await node.add("run-7", content)

    with pytest.raises(JobRefusedError, match="is here already") as refusal:
        await node.add("run-7", calls(1))
    assert refusal.value.kind == "exists"
    assert await node.states("run-8") == {}
    with pytest.raises(JobRefusedError, match="no call 3"):
        await node.output("run-7", 3)
