"""Clients of a kept fleet that are killed in the middle of whatever they do with it: the next one goes on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.keeper import end_fleet
from skyward.ledger.ledger import Ledger
from support.eventually import eventually

NAME = "llm"
KEEPER_S = 30.0
CALLS = 4

CLIENT = """
import importlib, json, os, signal, sys, threading
import skyward as sky

action, point, nth, delay_s, colour = json.loads(sys.argv[1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

module, _, path = point.partition(":")
owner = importlib.import_module(module)
*parents, verb = path.split(".")
for each in parents:
    owner = getattr(owner, each)
original, seen = getattr(owner, verb), [0]

def instead(*args, **kwargs):
    seen[0] += 1
    if seen[0] == nth:
        if not delay_s:
            die()
        timer = threading.Timer(delay_s, die)
        timer.daemon = True
        timer.start()
    return original(*args, **kwargs)

setattr(owner, verb, instead)

@sky.compute
def nothing():
    pass

if action == "fetch":
    sky.job(colour).result(timeout=60)
    die()
more = {"env": {"COLOUR": colour}} if action == "apply" else {"takeover": action == "takeover"}
with sky.ComputePool(provider=sky.Local(), nodes=2, name="llm", keep="10m", display="quiet", **more) as pool:
    nothing() @ pool
die()
"""

RECORD, NODE, KEPT = "skyward.ledger.fleet_record:FleetFolder", "skyward.fleet.node:Node", "skyward.fleet.kept"
POINTS: Sequence[tuple[str, str, int, float]] = [
    ("apply", f"{NODE}.halt", 2, 0.02),
    ("takeover", f"{RECORD}.request", 1, 0.0),
    ("leave", f"{RECORD}.write", 2, 0.0),
    ("fetch", "skyward.fleet.node_jobs:NodeJobs.results", 1, 0.0),
    ("leave", f"{RECORD}.take_requests", 1, 0.0),
    ("leave", f"{NODE}.resume", 1, 0.0),
    ("leave", f"{NODE}.resume", 2, 0.01),
    ("leave", f"{NODE}.renew_workers", 1, 0.0),
    ("leave", f"{NODE}.renew_workers", 2, 0.02),
    ("leave", "skyward.scheduling.scheduler:Scheduler.attach", 2, 0.0),
    ("leave", f"{KEPT}:FleetKeeping.leave", 1, 0.0),
    ("leave", f"{NODE}.leave", 1, 0.0),
    ("leave", "skyward.ledger.ledger:Ledger.keep_pool", 2, 0.0),
    ("apply", f"{NODE}.halt", 1, 0.0),
    ("apply", "skyward.fleet.node:start_supervisor", 1, 0.0),
    ("apply", "skyward.fleet.node:start_supervisor", 2, 0.05),
    ("apply", f"{KEPT}:FleetKeeping.asked_for", 1, 0.0),
    ("takeover", f"{RECORD}.request", 1, 0.3),
    ("takeover", f"{NODE}.resume", 1, 0.0),
    ("fetch", "skyward.ledger.job_folders:write_private", 1, 0.0),
]


@sky.compute(retries=0)
def note(path: str, number: int) -> int:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    return number


def kept_pool(**options: Any) -> sky.ComputePool:
    given: dict[str, Any] = {"nodes": 2, "name": NAME, "keep": "10m", "display": "quiet"} | options
    return sky.ComputePool(provider=sky.Local(), **given)


@pytest.fixture(autouse=True)
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    instances = {entry.instance_id for entry in Ledger.of_user().entries()}
    asyncio.run(end_fleet(FleetFolder(NAME), Ledger.of_user()))
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert not FleetFolder(NAME).has_keeper()
            assert instances.isdisjoint(map(instance_of, psutil.process_iter()))
    assert Ledger.of_user().open_entries() == ()
    assert FleetFolder(NAME).read() is None


def instance_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SKYWARD_INSTANCE", "")
    except psutil.Error:
        return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("points", [POINTS[:4], pytest.param(POINTS, marks=pytest.mark.full)], ids=("some", "all"))
def test_fleet_goes_on_and_no_result_is_lost_whenever_its_client_is_killed(
    points: Sequence[tuple[str, str, int, float]], tmp_path: Path
) -> None:
    notes = str(tmp_path / "notes")
    for seed, (action, point, nth, delay_s) in enumerate(points):
        with kept_pool(env={"COLOUR": f"{seed}"} if action == "apply" else {}) as pool:
            calls = (note(notes, CALLS * seed + index) for index in range(CALLS))
            job = pool.spawn(sky.gather(*calls), name=f"job-{seed}")
            if action == "apply":  # which is refused while there are jobs
                job.result(timeout=60)
            colour = f"job-{seed}" if action == "fetch" else f"other-{seed}"
            order = json.dumps([action, point, nth, delay_s, colour])
            if action == "takeover":
                killed = run_client(order)
        if action != "takeover":
            killed = run_client(order)
        assert killed.returncode == -9, (point, killed.stderr)
    with kept_pool() as pool:
        assert len(note(os.devnull, 0) @ pool) == 2
        results = [sky.job(f"job-{seed}").result(timeout=60) for seed in range(len(points))]

    assert len(Ledger.of_user().entries()) == 2, "a machine was bought again"
    count = CALLS * len(points)
    assert [number for result in results for number in result] == [*range(count)]
    assert Counter(map(int, Path(notes).read_text().split())) == Counter(range(count))


def run_client(order: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CLIENT, order], timeout=90, check=False, capture_output=True, text=True
    )
