"""The scripts of examples/joblib run unchanged on loky and on a fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "examples/joblib").glob("*.py"))


def printed(script: Path, backend: str, folder: Path) -> str:
    """What the script prints; tasks that never end, and are not consumed while they are made, end in a timeout."""
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", script, backend],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=folder,
    )
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stdout


@pytest.mark.example
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_joblib_example_prints_the_same_on_loky_and_on_a_fleet(script, tmp_path):
    here = printed(script, "loky", tmp_path)
    assert here
    assert printed(script, "skyward", tmp_path) == here


def test_there_are_joblib_examples_of_each_kind():
    assert len(SCRIPTS) >= 5
