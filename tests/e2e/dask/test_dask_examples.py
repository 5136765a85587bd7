"""The scripts about Dask: the same on Dask's own cluster and on a fleet, and beside the other front-ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gallery

pytestmark = [pytest.mark.example, pytest.mark.full, pytest.mark.timeout(150)]


def run(script, *arguments, tmp_path):
    """What the script prints, which is what the gallery shows."""
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", gallery.EXAMPLES / script, *arguments],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "DASK_TEMPORARY_DIRECTORY": str(tmp_path)},
    )
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    gallery.compare(script, completed.stdout, exactly=script != "three_front_ends.py")
    return completed.stdout.splitlines()


@pytest.mark.timeout(290)  # two scripts
def test_arrays_and_frames_print_the_same_on_dasks_own_cluster(tmp_path):
    on_fleet = run("dask/arrays_and_frames.py", "skyward", tmp_path=tmp_path)
    assert len(on_fleet) == 3
    assert run("dask/arrays_and_frames.py", "local", tmp_path=tmp_path) == on_fleet


def test_a_graph_runs_while_the_fleet_grows(tmp_path):
    assert run("dask/delayed.py", tmp_path=tmp_path) == [
        "of 64, a 64",
        "node0-worker0 and node1-worker0 were there in the end",
    ]


def test_three_front_ends_share_one_set_of_workers(tmp_path):
    used = dict(line.split(": ") for line in run("three_front_ends.py", tmp_path=tmp_path))

    assert set(used) == {"scikit-learn", "Dask", "gather"}
    [pids] = set(used.values())
    assert len(pids.split()) == 2
