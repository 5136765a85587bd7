"""A job as any program of its user sees it: state, result, output, end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyward.api.jobs import Job, JobState
from skyward.errors import PoolStateError, SerializationError
from skyward.ledger.job_folders import JobFolder, JobRecord, make_folder
from skyward.scheduling import jobs as looked_after
from skyward.scheduling.jobs import FleetJobs
from skyward.shipping.job_file import call_bytes, job_call
from skyward.submission import Invocation
from support.job_nodes import StoreNode


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def node(tmp_path: Path) -> StoreNode:
    return StoreNode("i-0", tmp_path)


def double(x: int) -> int:
    if x < 0:
        raise ValueError("negative")
    return 2 * x


class Fleet:
    """A fleet that a program reads from its record."""

    def __init__(self, *nodes: StoreNode) -> None:
        self.nodes = nodes

    @asynccontextmanager
    async def reach(self, _: JobFolder) -> AsyncGenerator[Sequence[Any]]:
        yield self.nodes


def spawned(node: StoreNode, *arguments: int, gather: bool = False, return_exceptions: bool = False) -> Job:
    calls = [call_bytes(job_call(Invocation(fn=double, args=(x,)))) for x in arguments]
    record = JobRecord(
        job="run-7",
        pool_id="sky-1",
        label="double",
        calls=len(calls),
        single=not gather,
        return_exceptions=return_exceptions,
        spawned_at=1.0,
        places=(node.instance_id,) * len(calls),
        runs=(0,) * len(calls),
    )
    folder = make_folder("llm", record, calls)
    for index, content in enumerate(calls):
        node.store.add("run-7", index, [content])
    return Job(folder, Fleet(node).reach)


def test_states_of_one_call(node: StoreNode) -> None:
    job = spawned(node, 21)
    states = [job.state]
    node.begin("run-7")
    states.append(job.state)
    node.run("run-7")
    states.append(job.state)

    assert states == [JobState.WAITING, JobState.RUNNING, JobState.FINISHED]


def test_a_result_is_read_as_often_as_one_likes_and_after_the_fleet(node: StoreNode) -> None:
    job = spawned(node, 21)
    node.run("run-7")

    assert [job.result(), job.result()] == [42, 42]

    later = Job(job._folder, Fleet().reach)
    assert (later.result(), later.state) == (42, JobState.FINISHED)


def test_a_gather_has_a_tuple_and_counts(node: StoreNode) -> None:
    job = spawned(node, 1, 2, 3, gather=True)
    node.run("run-7", 1)
    node.begin("run-7", 2)

    progress = job.progress
    assert (progress.done, progress.running, progress.total, progress.failed) == (1, 1, 3, 0)
    assert job.state is JobState.RUNNING
    for index in (0, 2):
        node.run("run-7", index)
    assert job.result() == (2, 4, 6)


def test_what_a_call_raised_is_raised_here(node: StoreNode) -> None:
    job = spawned(node, -1)
    node.run("run-7")

    with pytest.raises(ValueError, match="negative"):
        job.result()
    assert job.state is JobState.FAILED


def test_exceptions_of_a_gather_are_values_where_it_was_made_so(node: StoreNode) -> None:
    job = spawned(node, 1, -1, gather=True, return_exceptions=True)
    for index in (0, 1):
        node.run("run-7", index)

    value, error = job.result()
    assert value == 2
    assert isinstance(error, ValueError)


def test_a_wait_ends_with_its_timeout_and_the_job_goes_on(node: StoreNode) -> None:
    job = spawned(node, 1)
    node.begin("run-7")

    with pytest.raises(TimeoutError, match=r"job run-7 is not over after 0 s; it goes on"):
        job.result(timeout=0)
    assert job.state is JobState.RUNNING


def test_a_result_that_went_with_its_fleet_is_said(node: StoreNode) -> None:
    later = Job(spawned(node, 1, 2, gather=True)._folder, Fleet().reach)

    assert later.state is JobState.GONE
    with pytest.raises(PoolStateError, match="has ended, and 2 of its 2 results with it"):
        later.result()
    with pytest.raises(PoolStateError, match="has ended"):
        later.cancel()


def test_a_job_of_an_open_pool_that_has_no_node_now_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = FleetJobs("llm", "sky-1", nodes=list, present=list, publish=print)
    monkeypatch.setitem(looked_after._attached, "llm", attached)
    job = Job(spawned(StoreNode("", tmp_path), 1)._folder, Fleet().reach)

    assert job.state is JobState.WAITING
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(timeout=0)


class Joining:
    """Nodes of an open pool, of which none is there at first."""

    def __init__(self, attached: FleetJobs, nodes: list[StoreNode]) -> None:
        self.attached = attached
        self.nodes = nodes

    @asynccontextmanager
    async def reach(self, _: JobFolder) -> AsyncGenerator[Sequence[Any]]:
        yield [*self.nodes]


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Joining:
    nodes: list[Any] = []
    attached = FleetJobs(
        "llm",
        "sky-1",
        nodes=lambda: [*nodes],
        present=lambda: [node.instance_id for node in nodes],
        publish=print,
    )
    monkeypatch.setitem(looked_after._attached, "llm", attached)
    return Joining(attached, nodes)


def test_following_waits_for_the_first_node_and_goes_on_there(joining: Joining, tmp_path: Path) -> None:
    job = Job(spawned(StoreNode("", tmp_path), 1)._folder, joining.reach)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(line.line for line in job.logs(follow=True)))
    follower.start()
    node = StoreNode("i-0", tmp_path)
    joining.nodes.append(node)
    asyncio.run(joining.attached.look())  # which gives the node the call
    node.say(node.begin("run-7"), "one")
    node.run("run-7")
    follower.join(30)

    assert lines == ["one"]
    assert job.result() == 2


def test_calls_that_have_no_node_yet_are_cancelled(joining: Joining, tmp_path: Path) -> None:
    job = Job(spawned(StoreNode("", tmp_path), 1, 2, gather=True)._folder, joining.reach)
    job.cancel()
    joining.nodes.append(StoreNode("i-0", tmp_path))
    asyncio.run(joining.attached.look())

    assert job.state is JobState.CANCELLED
    assert joining.nodes[0].states_of() == {}
    with pytest.raises(concurrent.futures.CancelledError):
        job.result()


def test_calls_that_have_got_a_node_since_are_cancelled_there(joining: Joining, tmp_path: Path) -> None:
    job = Job(spawned(StoreNode("", tmp_path), 1)._folder, joining.reach)
    node = StoreNode("i-0", tmp_path)
    joining.nodes.append(node)
    asyncio.run(joining.attached.look())
    job.cancel()

    assert node.states_of() == {0: "cancelled"}


def test_a_node_that_does_not_answer_is_no_end(node: StoreNode, caplog: pytest.LogCaptureFixture) -> None:
    job = spawned(node, 1)
    node.reachable = False

    assert job.state is JobState.UNREACHABLE
    for _ in range(2):
        with pytest.raises(TimeoutError, match="it goes on"):
            job.result(timeout=0)
    (record,) = caplog.records
    assert "its nodes i-0 do not answer; if they are lost, the next program that opens the pool 'llm'" in record.message


def test_a_cancelled_job(node: StoreNode) -> None:
    job = spawned(node, 1)

    job.cancel()
    job.cancel()

    assert job.state is JobState.CANCELLED
    with pytest.raises(concurrent.futures.CancelledError):
        job.result()


def test_lines_come_in_order_from_the_node_and_from_here(node: StoreNode) -> None:
    job = spawned(node, 1)
    node.say(node.begin("run-7"), *(f"step {number}" for number in range(5)))

    from_node = [line.line for line in job.logs()]
    node.run("run-7")
    job.result()
    later = Job(job._folder, Fleet().reach)

    assert from_node == [line.line for line in later.logs()] == [f"step {number}" for number in range(5)]
    assert [line.line for line in later.logs(follow=True)] == from_node


def test_following_ends_with_the_job(node: StoreNode) -> None:
    job = spawned(node, 1)
    claim = node.begin("run-7")
    node.say(claim, "one")
    lines = job.logs(follow=True)

    first = next(lines).line
    node.say(claim, "two")
    node.run("run-7")

    assert [first, *(line.line for line in lines)] == ["one", "two"]


def test_following_may_be_given_up(node: StoreNode) -> None:
    job = spawned(node, 1)
    node.say(node.begin("run-7"), "one")

    lines = job.logs(follow=True)
    next(lines)
    lines.close()  # type: ignore[attr-defined]


def test_a_class_that_this_program_lacks_is_named(node: StoreNode) -> None:
    module = ModuleType("train_of_yesterday")
    exec("class Model:\n    pass\n", vars(module))
    sys.modules["train_of_yesterday"] = module
    job = spawned(node, 1)
    from skyward.shipping.job_file import JobEnd, JobOutcome
    from skyward.shipping.pickling import Packed

    data = b"\x80\x05ctrain_of_yesterday\nModel\n."
    result = Packed(data=data)
    outcome = JobOutcome(end=JobEnd.VALUE, node=0, worker=0, attempt=1, result=result)
    node.store.finish(node.begin("run-7"), outcome)
    del sys.modules["train_of_yesterday"]

    with pytest.raises(SerializationError, match=r"job run-7 refers to .*'train_of_yesterday'.*such as that of double"):
        job.result()
