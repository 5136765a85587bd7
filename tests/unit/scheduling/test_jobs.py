"""What a client does for the jobs of its fleet: hand over, fetch, and run again what a lost node had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyward.errors import WorkerLostError
from skyward.fleet.node_jobs import RUNNING, WAITING, CallState
from skyward.ledger.job_folders import JobFolder, JobRecord, make_folder
from skyward.scheduling.jobs import FleetJobs, choose_places, hand_over, runs_used
from skyward.shipping.job_file import call_bytes, job_call, outcome_value, read_outcome
from skyward.submission import Invocation
from support.job_nodes import MemoryNode


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def nodes(tmp_path: Path) -> list[MemoryNode]:
    return [MemoryNode(name, tmp_path, node) for node, name in enumerate(("i-0", "i-1"))]


def fleet(nodes: list[MemoryNode], said: list[str] | None = None, pool_id: str = "sky-1") -> FleetJobs:
    reached: Any = nodes
    return FleetJobs(
        "llm",
        pool_id,
        nodes=lambda: [*reached],
        present=lambda: [node.instance_id for node in nodes],
        publish=(said if said is not None else []).append,
    )


def double(x: int) -> int:
    return 2 * x


def job(name: str, *places: str, retries: int = 1) -> JobFolder:
    calls = [call_bytes(job_call(Invocation(fn=double, args=(i,), retries=retries))) for i in range(len(places))]
    record = JobRecord(
        job=name,
        pool_id="sky-1",
        label="double",
        calls=len(places),
        single=len(places) == 1,
        spawned_at=1.0,
        places=places,
        runs=(0,) * len(places),
    )
    return make_folder("llm", record, calls)


@pytest.mark.parametrize(
    ("calls", "load", "places"),
    [
        (3, {"a": 0}, ("a", "a", "a")),
        (4, {"a": 0, "b": 0}, ("a", "b", "a", "b")),
        (3, {"a": 2, "b": 0}, ("b", "b", "a")),
        (1, {"a": 1, "b": 1}, ("a",)),
    ],
)
def test_calls_go_where_the_fewest_wait(calls: int, load: dict[str, int], places: tuple[str, ...]) -> None:
    assert choose_places(calls, load) == places


@pytest.mark.parametrize(
    ("placed", "seen", "preempted", "used"),
    [
        (0, None, False, 1),  # it may have begun
        (0, CallState(state=WAITING), False, 1),
        (0, CallState(state=RUNNING, runs=1), False, 1),
        (0, CallState(state=RUNNING, runs=2), False, 2),
        (0, CallState(state=WAITING, runs=1), False, 2),
        (1, CallState(state=RUNNING, runs=2), False, 2),
        (1, None, False, 2),
        (0, CallState(state=RUNNING, runs=1), True, 0),
        (1, None, True, 1),
    ],
)
def test_a_lost_node_uses_up_each_run_that_may_have_begun(
    placed: int, seen: CallState | None, preempted: bool, used: int
) -> None:
    assert runs_used(placed, seen, preempted=preempted, retries=3) == used


def test_a_preemption_uses_up_the_only_run_of_a_call_without_retries() -> None:
    assert runs_used(0, None, preempted=True, retries=0) == 1


async def test_calls_that_a_node_does_not_have_are_handed_over(nodes: list[MemoryNode]) -> None:
    folder = job("run-7", "i-0", "i-1", "i-0")

    await fleet(nodes).look()

    assert sorted(nodes[0].known) == [("run-7", 0), ("run-7", 2)]
    assert sorted(nodes[1].known) == [("run-7", 1)]
    assert folder.unfetched() == [0, 1, 2]


async def test_outcomes_and_output_are_fetched_as_calls_end(nodes: list[MemoryNode]) -> None:
    folder, looked_after = job("run-7", "i-0", "i-1"), fleet(nodes)
    await looked_after.look()
    for text in ("one", "two", "three"):
        nodes[1].say("run-7", text, 1)
    nodes[1].run("run-7", 1)

    await looked_after.look()

    assert folder.unfetched() == [0]
    assert not folder.call(1).exists()
    assert folder.call(0).exists()
    assert oct(folder.outcome(1).parent.stat().st_mode)[-3:] == "700"


async def test_a_call_of_a_lost_node_runs_elsewhere_with_its_run_used_up(nodes: list[MemoryNode]) -> None:
    said: list[str] = []
    folder, looked_after = job("run-7", "i-0", retries=1), fleet(nodes, said)
    await looked_after.look()
    nodes[0].begin("run-7")
    await looked_after.look()
    del nodes[0]

    await looked_after.look()
    nodes[0].run("run-7")
    await looked_after.look()

    folder.refresh()
    assert folder.record.places == ("i-1",)
    assert nodes[0].runs["run-7", 0] == 2
    assert folder.unfetched() == []
    assert said == ["job run-7 runs again from its beginning: its node, i-0, was lost"]


async def test_a_call_without_a_retry_fails_with_its_node(nodes: list[MemoryNode]) -> None:
    folder, looked_after = job("run-7", "i-0", retries=0), fleet(nodes)
    await looked_after.look()
    del nodes[0]

    await looked_after.look()

    with pytest.raises(WorkerLostError, match=r"job run-7 ended with its node, i-0.*retries=0"):
        outcome_value(read_outcome(folder.outcome(0)), where="")
    assert nodes[0].known == {}


async def test_a_preempted_call_keeps_its_retry(nodes: list[MemoryNode]) -> None:
    folder, looked_after = job("run-7", "i-0", retries=1), fleet(nodes)
    await looked_after.look()
    looked_after.note_preempted("i-0")
    del nodes[0]

    await looked_after.look()

    folder.refresh()
    assert folder.record.runs == (0,)


async def test_a_node_that_does_not_answer_keeps_its_calls(nodes: list[MemoryNode]) -> None:
    folder, looked_after = job("run-7", "i-0"), fleet(nodes)
    await looked_after.look()
    nodes[0].reachable = False

    await looked_after.look()

    folder.refresh()
    assert folder.record.places == ("i-0",)
    assert nodes[1].known == {}


async def test_a_call_whose_move_was_interrupted_is_handed_over_once(nodes: list[MemoryNode]) -> None:
    folder = job("run-7", "i-0")
    folder.move(0, "i-1", 1)

    for _ in range(2):
        await fleet(nodes).look()

    assert nodes[0].known == {}
    assert nodes[1].runs == {("run-7", 0): 1}


async def test_jobs_of_an_earlier_fleet_of_the_name_are_left_alone(nodes: list[MemoryNode]) -> None:
    job("run-7", "i-0")

    await fleet(nodes, pool_id="sky-2").look()

    assert nodes[0].known == {}


async def test_handing_over_twice_adds_once(nodes: list[MemoryNode]) -> None:
    folder = job("run-7", "i-0")
    reached: Any = nodes

    await hand_over(folder, reached, [0])
    nodes[0].begin("run-7")
    await hand_over(folder, reached, [0])

    assert nodes[0].known == {("run-7", 0): RUNNING}
