"""A call that loses its worker or its node continues from its checkpoint; no step is lost but those after it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.events import Error, Notice, SkywardEvent
from skyward.machine.local import LocalTransport

WITHIN_S = 60.0
STEPS = 75
EVERY = 15


@sky.compute(retries=2)
def train(log: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train for some steps, each of which leaves a line in ``log``; every 15th writes a checkpoint."""
    folder = sky.checkpoint_folder()
    found = sorted(path.name for path in folder.rglob("*"))
    state = folder / "latest" / "state"
    begin = int(state.read_text()) if state.exists() else 0
    for step in range(begin, steps):
        with log.open("a") as file:
            file.write(f"{os.getpid()} {sky.instance_info().node} {step}\n")
        time.sleep(0.06)
        if (step + 1) % EVERY == 0:
            place = folder / f"step-{step + 1}"
            place.mkdir()
            (place / "state").write_text(str(step + 1))
            (place / "empty").touch(mode=0o600)
            link = folder / "next"
            link.symlink_to(place.name)
            link.rename(folder / "latest")
    return {"begin": begin, "found": found, "node": sky.instance_info().node, "folder": str(folder)}


def eventually(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def lines(log: Path) -> list[tuple[int, int, int]]:
    rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(int(pid), int(node), int(step)) for pid, node, step in rows if step]


@pytest.fixture(scope="module")
def events() -> list[SkywardEvent]:
    return []


@pytest.fixture(scope="module")
def pool(events: list[SkywardEvent]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, display="quiet", collect_metrics=False, on_event=events.append
    ) as pool:
        yield pool


def check(result: dict[str, Any], log: Path, *, at_least: int) -> None:
    """Each step ran once, but for those after the last checkpoint that was copied."""
    first = lines(log)[0][0]
    done = [step for pid, _, step in lines(log) if pid == first]
    again = [step for pid, _, step in lines(log) if pid != first]
    assert result["begin"] % EVERY == 0
    assert at_least <= result["begin"] <= len(done)
    assert done == list(range(len(done)))
    assert again == list(range(result["begin"], STEPS))
    assert {"latest", "state", "empty", f"step-{result['begin']}"} <= set(result["found"])


def test_a_call_whose_worker_is_killed_continues_where_its_last_checkpoint_is(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    future = pool.submit(train, log)
    pid, *_ = eventually(lambda: next((row for row in lines(log) if row[2] == 20), None))
    os.kill(pid, signal.SIGKILL)
    result = future.result(WITHIN_S)
    check(result, log, at_least=15)
    assert not Path(result["folder"]).exists()


def test_a_call_whose_node_vanishes_continues_on_the_other_node(
    pool: sky.ComputePool, events: list[SkywardEvent], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    future = pool.submit(train, log)
    pid, node, _ = eventually(lambda: next((row for row in lines(log) if row[2] >= 50), None))
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    family = [supervisor.parent(), supervisor, psutil.Process(pid)]
    for process in family:
        if process is not None and process.pid != os.getpid():
            process.suspend()
    for process in family:
        if process is not None and process.pid != os.getpid():
            process.kill()
    result = future.result(WITHIN_S)
    check(result, log, at_least=15)
    if result["node"] != node:
        assert "continues from its checkpoint" in str([event for event in events if isinstance(event, Notice)])


def test_a_checkpoint_that_the_next_node_cannot_take_costs_its_steps_and_not_the_call(
    pool: sky.ComputePool, events: list[SkywardEvent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalTransport.put

    async def refuse(self: LocalTransport, data: Any, path: str, *, mode: int = 0o600) -> None:
        if "/checkpoints/" in path:
            raise OSError(28, "No space left on device")
        await put(self, data, path, mode=mode)

    monkeypatch.setattr(LocalTransport, "put", refuse)
    log = tmp_path / "log"
    future = pool.submit(train, log)
    pid, node, _ = eventually(lambda: next((row for row in lines(log) if row[2] >= 40), None))
    os.kill(pid, signal.SIGKILL)
    result = future.result(WITHIN_S)
    assert (result["begin"], result["node"]) == (0, 1 - node), "the other worker is idle"
    assert "begins without its checkpoint" in str([event for event in events if isinstance(event, Error)])


def test_nothing_of_a_checkpoint_stays_here_after_its_call(pool: sky.ComputePool, tmp_path: Path) -> None:
    assert (train(tmp_path / "log", 7) >> pool)["begin"] == 0
    home = Path.home() / ".local/state/skyward/pools"
    eventually(lambda: [*home.glob("*/checkpoints/*")] == [])
