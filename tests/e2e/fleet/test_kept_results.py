"""Outcomes of jobs that are in a bucket when their node is lost, before any client has fetched them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.job_folders import find_job
from support.eventually import eventually
from support.kept import end_kept_fleet, keeper_process

NAME = "llm"
BUCKET = "skyward-results"

SPAWNER = """
import os, signal, sys, threading
from pathlib import Path
import skyward as sky

folder = Path(sys.argv[1])

@sky.compute(retries=1)
def note(folder, number):
    while not (folder / "gate").exists():
        threading.Event().wait(0.05)
    with open(folder / "ran", "a") as file:
        file.write(f"{number}\\n")
    return number

volume = sky.S3Volume(mount_path=f"{folder}/volume", bucket="skyward-results", prefix="runs/", read_only=False)
options = {"volume": [volume], "results": f"{folder}/volume/results", "display": "quiet"}
with sky.ComputePool(provider=sky.Local(), nodes=2, name="llm", keep="10m", **options) as pool:
    for first in (0, 2):
        pool.spawn(sky.gather(note(folder, first), note(folder, first + 1)), name=f"from-{first}")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    end_kept_fleet(NAME)


@contextmanager
def no_keeper() -> Generator[None]:
    """Stop the fleet's keeper, as on a laptop that sleeps."""
    keeper = keeper_process(NAME)
    keeper.suspend()
    try:
        yield
    finally:
        keeper.resume()


def lose_first_machine() -> str:
    """Kill the programs of the first node, take its disk away, and return its id."""
    record = FleetFolder(NAME).read()
    assert record is not None
    node = record.nodes[0]
    supervisor = psutil.Process(node.ready.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        process.kill()
    assert node.instance.access is not None
    shutil.rmtree(node.instance.access.workdir)
    return node.instance.id


@pytest.mark.timeout(300)
def test_results_of_a_lost_node_are_in_the_bucket_and_its_calls_do_not_run_again(user_s3: Any, tmp_path: Path) -> None:
    user_s3.create_bucket(Bucket=BUCKET)
    killed = subprocess.run([sys.executable, "-c", SPAWNER, str(tmp_path)], check=False, timeout=120)
    assert killed.returncode == -9
    with no_keeper():
        (tmp_path / "gate").touch()
        for attempt in eventually(60.0):
            with attempt:
                stored = user_s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/results/").get("Contents", ())
                assert len(stored) == 4
        assert [find_job(f"from-{first}").unfetched() for first in (0, 2)] == [[0, 1], [0, 1]]

        lost = lose_first_machine()
        assert all(lost in find_job(f"from-{first}").record.places for first in (0, 2))

        assert sky.job("from-0").result(timeout=60) == (0, 1), "read without the fleet's client"
    with sky.attach(NAME, display="quiet", takeover=True) as pool:
        assert sky.job("from-2").result(timeout=60) == (2, 3)
        assert pool.submit(os.getpid).result(timeout=60) > 0
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1", "2", "3"]
