"""Clients of a kept fleet that are killed in the middle of whatever they do with it: the next one goes on."""

from __future__ import annotations

import json
import os
import random
import secrets
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
from skyward.ledger.ledger import Ledger
from support.eventually import eventually
from support.kept import KEEPER_S, end_kept_fleet

NAME = "llm"
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
VERBS: Sequence[tuple[str, str, int]] = [
    ("apply", f"{NODE}.halt", 2),
    ("apply", "skyward.fleet.node:start_supervisor", 2),
    ("apply", f"{KEPT}:FleetKeeping.asked_for", 1),
    ("apply", f"{RECORD}.write", 2),
    ("takeover", f"{RECORD}.request", 1),
    ("takeover", f"{NODE}.resume", 2),
    ("takeover", f"{NODE}.renew_workers", 2),
    ("leave", f"{RECORD}.write", 2),
    ("leave", f"{RECORD}.take_requests", 1),
    ("leave", f"{NODE}.resume", 2),
    ("leave", f"{NODE}.renew_workers", 2),
    ("leave", "skyward.scheduling.scheduler:Scheduler.attach", 2),
    ("leave", f"{KEPT}:FleetKeeping.leave", 1),
    ("leave", f"{NODE}.leave", 2),
    ("leave", "skyward.ledger.ledger:Ledger.keep_pool", 2),
    ("fetch", "skyward.fleet.node_jobs:NodeJobs.results", 1),
    ("fetch", "skyward.ledger.job_folders:write_private", 4),
]
"""What a client does, a verb of it, and how often it comes to that."""
ACTIONS = ("leave", "apply", "takeover", "fetch")
SEED = int(os.environ.get("SKYWARD_TEST_SEED") or secrets.randbelow(1 << 32))


def kill_points(seed: int, count: int) -> list[tuple[str, str, int, float]]:
    """Return kill points: at the ``nth`` time of a verb, at once or up to 0.3 s later; one of each action first."""
    dice = random.Random(seed)
    firsts = [dice.choice([verb for verb in VERBS if verb[0] == action]) for action in ACTIONS]
    chosen = [*dice.sample(firsts, len(firsts)), *dice.choices(VERBS, k=count)][:count]
    return [(act, verb, dice.randint(1, most), dice.choice((0.0, dice.uniform(0, 0.3)))) for act, verb, most in chosen]


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
    end_kept_fleet(NAME)
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert instances.isdisjoint(map(instance_of, psutil.process_iter()))
    assert Ledger.of_user().open_entries() == ()
    assert FleetFolder(NAME).read() is None


def instance_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SKYWARD_INSTANCE", "")
    except psutil.Error:
        return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "count"), [(33, 4), pytest.param(SEED, 20, marks=pytest.mark.full)], ids=("4", "20"))
def test_fleet_goes_on_and_no_result_is_lost_whenever_its_client_is_killed(
    seed: int, count: int, tmp_path: Path
) -> None:
    print(f"the same points again: SKYWARD_TEST_SEED={seed}")
    points = kill_points(seed, count)
    notes = str(tmp_path / "notes")
    for number, (action, point, nth, delay_s) in enumerate(points):
        with kept_pool(env={"COLOUR": f"{number}"} if action == "apply" else {}) as pool:
            each = (note(notes, CALLS * number + index) for index in range(CALLS))
            job = pool.spawn(sky.gather(*each), name=f"job-{number}")
            if action == "apply":  # which is refused while there are jobs
                job.result(timeout=60)
            colour = f"job-{number}" if action == "fetch" else f"other-{number}"
            order = json.dumps([action, point, nth, delay_s, colour])
            if action == "takeover":
                killed = run_client(order)
        if action != "takeover":
            killed = run_client(order)
        assert killed.returncode == -9, (points[number], killed.stderr)
    with kept_pool() as pool:
        assert len(note(os.devnull, 0) @ pool) == 2
        results = [sky.job(f"job-{number}").result(timeout=60) for number in range(count)]

    assert len(Ledger.of_user().entries()) == 2, "a machine was bought again"
    calls = [*range(CALLS * count)]
    assert [value for result in results for value in result] == calls
    assert Counter(map(int, Path(notes).read_text().split())) == Counter(calls)


def run_client(order: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CLIENT, order], timeout=90, check=False, capture_output=True, text=True
    )
