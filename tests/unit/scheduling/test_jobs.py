"""What a client does for the jobs of its fleet: hand over, fetch, and run again what a lost node had."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import WorkerLostError
from skyward.fleet.node_jobs import RUNNING, WAITING, JobCallState
from skyward.ledger.job_folders import JobFolder, JobRecord, find_job, job_folders, make_folder
from skyward.market.autoscale import Workload
from skyward.scheduling.jobs import FleetJobs, choose_places, hand_over, kept_lines, runs_used
from skyward.shipping.job_file import call_bytes, job_call, outcome_value, read_call, read_outcome
from skyward.submission import Invocation
from support.job_nodes import StoreNode


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def nodes(tmp_path: Path) -> list[StoreNode]:
    return [StoreNode(name, tmp_path, node) for node, name in enumerate(("i-0", "i-1"))]


def fleet(nodes: list[StoreNode], said: list[str] | None = None, pool_id: str = "sky-1") -> FleetJobs:
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


def repeat(x: int) -> bytes:
    return b"." * 100 * x**2


def job(name: str, *places: str, retries: int = 1, function: Callable[..., object] = double) -> JobFolder:
    calls = [call_bytes(job_call(Invocation(fn=function, args=(i,), retries=retries))) for i in range(len(places))]
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
        (0, JobCallState(state=WAITING), False, 1),
        (0, JobCallState(state=RUNNING, runs=1), False, 1),
        (0, JobCallState(state=RUNNING, runs=2), False, 2),
        (0, JobCallState(state=WAITING, runs=1), False, 2),
        (1, JobCallState(state=RUNNING, runs=2), False, 2),
        (1, None, False, 2),
        (0, JobCallState(state=RUNNING, runs=1), True, 0),
        (1, None, True, 1),
    ],
)
def test_a_lost_node_uses_up_each_run_that_may_have_begun(
    placed: int, seen: JobCallState | None, preempted: bool, used: int
) -> None:
    assert runs_used(placed, seen, preempted=preempted, retries=3) == used


def test_a_preemption_uses_up_the_only_run_of_a_call_without_retries() -> None:
    assert runs_used(0, None, preempted=True, retries=0) == 1


async def test_calls_that_a_node_does_not_have_are_handed_over(nodes: list[StoreNode]) -> None:
    folder = job("run-7", "i-0", "i-1", "i-0")

    await fleet(nodes).look()

    assert nodes[0].states_of() == {0: "waiting", 2: "waiting"}
    assert nodes[1].states_of() == {1: "waiting"}
    assert folder.unfetched() == [0, 1, 2]


async def test_outcomes_and_output_are_fetched_as_calls_end(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", "i-0", "i-1"), fleet(nodes)
    await looked_after.look()
    nodes[1].say(nodes[1].begin("run-7", 1), "one", "two", "three")
    nodes[1].run("run-7", 1)

    await looked_after.look()

    assert folder.unfetched() == [0]
    assert not folder.call(1).exists()
    assert folder.call(0).exists()
    assert [line.line for line in kept_lines(folder.output(1))] == ["one", "two", "three"]


async def test_a_node_is_needed_until_its_outcomes_are_here(nodes: list[StoreNode]) -> None:
    job("run-7", "i-0", "i-1", "i-1")
    looked_after = fleet(nodes)
    counts = [looked_after.unfetched_on(1)]
    await looked_after.look()
    for index in (1, 2):
        nodes[1].run("run-7", index)
        counts.append(looked_after.unfetched_on(1))
        await looked_after.look()
        counts.append(looked_after.unfetched_on(1))

    assert counts == [2, 2, 1, 1, 0]


async def test_many_outcomes_and_large_ones_are_fetched(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", *["i-0"] * 10, function=repeat), fleet(nodes)
    await looked_after.look()
    for index in range(10):
        nodes[0].run("run-7", index)

    await looked_after.look()

    values = [outcome_value(read_outcome(folder.outcome(index)), where="") for index in range(10)]
    assert [len(value) for value in values] == [100 * index**2 for index in range(10)]
    assert not any(folder.call(index).exists() for index in range(10))


async def test_a_call_of_a_lost_node_runs_elsewhere_with_its_run_used_up(nodes: list[StoreNode]) -> None:
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
    assert read_outcome(folder.outcome(0)).attempt == 2
    assert folder.unfetched() == []
    assert said == ["job run-7 runs again from its beginning, as the node was lost"]


async def test_the_checkpoint_of_a_call_is_on_its_next_node_before_the_call_is(
    nodes: list[StoreNode], tmp_path: Path
) -> None:
    said: list[str] = []
    folder, looked_after = job("run-7", "i-0"), fleet(nodes, said)
    await looked_after.look()
    claim = nodes[0].begin("run-7")
    place = Path("checkpoints", read_call(nodes[0].store.call_file(claim)).token, "state")
    (tmp_path / "i-0" / place).parent.mkdir(parents=True)
    (tmp_path / "i-0" / place).write_text("step 40")
    await looked_after.look()
    assert looked_after._copying is not None
    await looked_after._copying
    assert [*folder.checkpoint(0).iterdir()] != []

    del nodes[0]
    await looked_after.look()
    assert said == ["job run-7 runs again from its checkpoint, as the node was lost"]
    assert (tmp_path / "i-1" / place).read_text() == "step 40"
    nodes[0].run("run-7")
    await looked_after.look()
    assert not folder.checkpoint(0).exists(), "the call is over"


async def test_calls_of_a_lost_node_are_spread_over_the_others(nodes: list[StoreNode], tmp_path: Path) -> None:
    said: list[str] = []
    folder, looked_after = job("run-7", "i-0", "i-0", "i-0", "i-1", retries=1), fleet(nodes, said)
    await looked_after.look()
    nodes[0] = StoreNode("i-2", tmp_path, 2)

    await looked_after.look()

    folder.refresh()
    assert folder.record.places == ("i-2", "i-2", "i-1", "i-1")
    assert folder.record.runs == (1, 1, 1, 0)
    assert nodes[0].states_of() == {0: "waiting", 1: "waiting"}
    assert said == ["3 calls of job run-7 run again from its beginning, as the node was lost"]


async def test_a_call_whose_outcome_has_a_copy_does_not_run_again(nodes: list[StoreNode], user_s3: Any) -> None:
    folder, looked_after = job("run-7", "i-0", "i-0", "i-0"), fleet(nodes)
    await looked_after.look()
    folder.write(replace(folder.record, results="s3://kept/out/"))
    for index in (1, 2):
        nodes[0].run("run-7", index)
    outcome = nodes[0].store.outcome("run-7", 2).read_bytes()
    earlier = nodes[0].store.outcome("run-7", 1).read_bytes()
    del nodes[0]

    await looked_after.look()
    assert nodes[0].states_of() == {}, "the bucket cannot be read: which calls are over is unknown"

    user_s3.create_bucket(Bucket="kept")
    for key, body in {"2/end-10": outcome, "2/end-9": earlier, "1/.skyward-part-x": b"", "1/end-": b""}.items():
        user_s3.put_object(Bucket="kept", Key=f"out/sky-1/run-7/{key}", Body=body)
    await looked_after.look()

    assert nodes[0].states_of() == {0: "waiting", 1: "waiting"}
    assert folder.unfetched() == [0, 1]
    assert outcome_value(read_outcome(folder.outcome(2)), where="") == 4
    assert not folder.call(2).exists()


async def test_a_call_without_a_retry_fails_with_its_node(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", "i-0", retries=0), fleet(nodes)
    await looked_after.look()
    del nodes[0]

    await looked_after.look()

    with pytest.raises(WorkerLostError, match=r"job run-7 ended with its node, i-0.*retries=0"):
        outcome_value(read_outcome(folder.outcome(0)), where="")
    assert nodes[0].states_of() == {}


async def test_a_preempted_call_keeps_its_retry(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", "i-0", retries=1), fleet(nodes)
    await looked_after.look()
    looked_after.note_loss("i-0", preempted=True)
    del nodes[0]

    await looked_after.look()

    folder.refresh()
    assert folder.record.runs == (0,)


async def test_a_node_that_does_not_answer_keeps_its_calls(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", "i-0"), fleet(nodes)
    await looked_after.look()
    nodes[0].reachable = False

    await looked_after.look()

    folder.refresh()
    assert folder.record.places == ("i-0",)
    assert nodes[1].states_of() == {}


async def test_a_call_whose_move_was_interrupted_is_handed_over_once(nodes: list[StoreNode]) -> None:
    folder = job("run-7", "i-0")
    folder.move({0: ("i-1", 1)})

    for _ in range(2):
        await fleet(nodes).look()

    assert nodes[0].states_of() == {}
    assert nodes[1].begin("run-7").attempt == 2


async def test_jobs_of_an_earlier_fleet_of_the_name_are_left_alone(nodes: list[StoreNode]) -> None:
    job("run-7", "i-0")

    await fleet(nodes, pool_id="sky-2").look()

    assert nodes[0].states_of() == {}


async def test_handing_over_twice_adds_once(nodes: list[StoreNode]) -> None:
    folder = job("run-7", "i-0")
    reached: Any = nodes

    await hand_over(folder, reached, [0])
    nodes[0].begin("run-7")
    await hand_over(folder, reached, [0])

    assert nodes[0].states_of() == {0: RUNNING}


async def test_a_call_without_a_node_waits_for_one(nodes: list[StoreNode]) -> None:
    folder, looked_after = job("run-7", ""), fleet(nodes)
    there = [*nodes]
    nodes.clear()
    await looked_after.look()
    load = looked_after.added_to(Workload(idle_s={}))
    nodes.append(there[1])

    await looked_after.look()
    await looked_after.look()

    folder.refresh()
    assert (load.calls, folder.record.places, folder.record.runs) == (1, ("i-1",), (0,))
    assert looked_after.added_to(Workload(calls=1, idle_s={0: 5.0, 1: 5.0})) == Workload(
        calls=1, idle_s={0: 5.0, 1: 0.0}
    )


# --- clients that die -------------------------------------------------------------------------------------------------


def dies_at(point: int, act: Callable[[], object]) -> bool:
    """Run ``act`` in a fork that is killed before its file operation number ``point``; return True if it was."""
    pid = os.fork()
    if pid == 0:
        left = point

        def count(event: str, _arguments: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if not left:
                    signal.raise_signal(signal.SIGKILL)

        try:
            sys.addaudithook(count)
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[tuple[int, list[StoreNode]]]:
    """Yield every third point, with the nodes of a fleet of its own."""
    for point in range(1, 1000, step):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / str(point) / "state"))
        yield point, [StoreNode(name, tmp_path / str(point), node) for node, name in enumerate(("i-0", "i-1"))]


def look(nodes: list[StoreNode]) -> None:
    asyncio.run(fleet(nodes).look())


def spawn(nodes: list[StoreNode]) -> None:
    reached: Any = nodes
    asyncio.run(hand_over(job("run-7", "i-0", "i-1", retries=0), reached, [0, 1]))


def test_a_client_that_dies_while_it_spawns_leaves_a_whole_job_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tries, (point, nodes) in enumerate(points(tmp_path, monkeypatch, 2)):
        died = dies_at(point, lambda nodes=nodes: spawn(nodes))
        look(nodes)
        if exists := bool(job_folders("llm")):
            for index in (0, 1):
                nodes[index].run("run-7", index)
            look(nodes)
            assert find_job("run-7").unfetched() == []
        else:
            assert [node.states_of() for node in nodes] == [{}, {}]
            spawn(nodes)  # the name is free
        if not died:
            assert exists
            assert tries > 10
            return


def test_a_client_that_dies_while_it_fetches_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tries, (point, nodes) in enumerate(points(tmp_path, monkeypatch, 3)):
        spawn(nodes)
        for index in (0, 1):
            nodes[index].run("run-7", index)
        died = dies_at(point, lambda nodes=nodes: look(nodes))
        look(nodes)
        folder = find_job("run-7")
        values = [outcome_value(read_outcome(folder.outcome(index)), where="") for index in (0, 1)]
        assert values == [0, 2]
        if not died:
            assert tries > 10
            return


def test_a_client_that_dies_while_it_moves_a_call_moves_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tries, (point, nodes) in enumerate(points(tmp_path, monkeypatch, 2)):
        look_after = [nodes[1], StoreNode("i-2", tmp_path / str(point), 2)]
        reached: Any = nodes
        asyncio.run(hand_over(job("run-7", "i-0", retries=1), reached, [0]))
        died = dies_at(point, lambda nodes=look_after: look(nodes))
        look(look_after)
        assert [node.states_of() for node in look_after] == [{0: "waiting"}, {}]
        assert find_job("run-7").record.runs == (1,)
        if not died:
            assert tries > 5
            return
