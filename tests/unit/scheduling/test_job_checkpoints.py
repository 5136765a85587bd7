"""A job's checkpoint is beside its call, for any client, and goes to the node on which the call runs next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyward.environment.bootstrap import Environment
from skyward.fleet.node_jobs import NodeJobs
from skyward.ledger.job_folders import JobFolder, JobRecord, make_folder
from skyward.machine.local import LocalAccess
from skyward.scheduling.job_checkpoints import JobCheckpoints
from skyward.shipping.job_file import call_bytes, job_call
from skyward.submission import Invocation
from support.clock import FakeClock

CALL = job_call(Invocation(fn=abs, args=(-1,)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record = JobRecord(
        job="run-7", pool_id="sky-1", label="train", calls=1, single=True, spawned_at=1.0, places=("i-0",), runs=(0,)
    )
    return make_folder("llm", record, [call_bytes(CALL)])


class Machine:
    def __init__(self, workdir: Path, rank: int) -> None:
        access = LocalAccess(address="127.0.0.1", workdir=str(workdir))
        environment = Environment(python=sys.executable, isolated=False)
        self.jobs = NodeJobs(access.open(), access, environment, instance_id=f"i-{rank}", node=rank)
        self.state = workdir / "checkpoints" / CALL.token / "state"

    def save(self, step: int) -> None:
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.state.write_text(f"{step:04}")


@pytest.fixture
def machines(tmp_path: Path) -> list[Machine]:
    return [Machine(tmp_path / f"node-{rank}", rank) for rank in range(2)]


async def test_another_client_puts_what_the_last_one_has_copied_onto_the_next_node(
    folder: JobFolder, machines: list[Machine]
) -> None:
    first, second = machines
    first.save(7)
    await JobCheckpoints().refresh(folder, {0: first.jobs})
    assert await JobCheckpoints().put(folder, 0, second.jobs) == "from its checkpoint"
    assert second.state.read_text() == "0007"


async def test_a_checkpoint_is_copied_every_ten_seconds_and_at_once_when_its_node_is_about_to_go(
    folder: JobFolder, machines: list[Machine]
) -> None:
    first, second = machines
    clock = FakeClock()
    checkpoints = JobCheckpoints(clock)
    copied: list[str] = []
    for step, passed_s, leaving in ((1, 0, ""), (2, 5, ""), (3, 5, ""), (4, 1, "i-1"), (5, 1, "i-0")):
        clock.advance(passed_s)
        first.save(step)
        await checkpoints.refresh(folder, {0: first.jobs}, leaving=[leaving])
        await checkpoints.put(folder, 0, second.jobs)
        copied.append(second.state.read_text())
    assert copied == ["0001", "0001", "0003", "0003", "0005"]


async def test_a_call_without_a_checkpoint_or_a_place_for_it_begins_anew(
    folder: JobFolder, machines: list[Machine], tmp_path: Path
) -> None:
    first, second = machines
    checkpoints = JobCheckpoints()
    await checkpoints.refresh(folder, {0: first.jobs})
    assert await checkpoints.put(folder, 0, second.jobs) == "from its beginning"
    first.save(7)
    await checkpoints.refresh(folder, {0: first.jobs}, leaving=["i-0"])
    (tmp_path / "node-1").mkdir(exist_ok=True)
    (tmp_path / "node-1" / "checkpoints").touch()
    how = await checkpoints.put(folder, 0, second.jobs)
    assert how.startswith("without its checkpoint, which could not be put onto node 1: mkdir on node 1 failed")
