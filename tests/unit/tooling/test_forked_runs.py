"""A test run in several forked processes has the results of one in a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked_runs import wanted

TESTS = Path(__file__).parents[2]

OUTCOMES = """
import os, pytest
from pathlib import Path

collected_in = os.getpid()

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    Path(__file__).with_suffix(".closed").touch(exist_ok=False)

def test_passes(shared):
    assert shared == os.getpid() != collected_in

def test_fails():
    print("printed by", "one that fails")
    assert 1 == 2

def test_skips():
    pytest.skip("for a reason")

@pytest.mark.xfail(strict=True)
def test_expected():
    assert False

def test_subtests(subtests):
    for number in range(2):
        with subtests.test("part", number=number):
            assert number == 0

def test_is_in_a_process_of_its_file(shared):
    assert shared == os.getpid()
"""

DIES = """
import os

def test_before():
    pass

def test_dies():
    os._exit(3)

def test_after():
    pass
"""

FAILS_AND_DIES = """
import os
import pytest

@pytest.fixture
def dying():
    yield
    os._exit(3)

def test_fails(dying):
    raise AssertionError("the reason")
"""

ENDS_BADLY = """
import os

collected_in = os.getpid()

def pytest_unconfigure(config):
    assert os.getpid() == collected_in
"""


IDLE = """
import forked_runs

class Processors:
    idle = 100.0

    @classmethod
    def cpu_times_percent(cls):
        return cls

forked_runs.psutil = Processors
"""

WAITS = """
import time
from pathlib import Path

def test_meets_the_other():
    Path(__file__).with_suffix(".begun").touch()
    deadline = time.monotonic() + 60
    while len(list(Path(__file__).parent.glob("*.begun"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "forked_runs", "-q", "-ra", "--processes", "2", *arguments]
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout


def test_every_outcome_is_reported_and_a_death_fails_the_test_under_way_only(tmp_path: Path) -> None:
    for name, text in (("a", OUTCOMES), ("b", OUTCOMES), ("c", DIES)):
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    code, said = run(tmp_path)
    assert code == 1, said
    closing = said.splitlines()[-1]
    for counted in ("5 failed", "8 passed", "2 skipped", "2 xfailed"):
        assert counted in closing, said
    assert said.count("printed by one that fails") == 2
    assert "FAILED test_c.py::test_dies - process" in said
    assert len(list(tmp_path.glob("*.closed"))) == 2


def test_a_failure_is_told_even_if_the_process_dies_before_the_test_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(FAILS_AND_DIES, encoding="utf-8")
    code, said = run(tmp_path)
    assert code == 1, said
    assert "AssertionError: the reason" in said
    assert "FAILED test_a.py::test_fails - process" in said


def test_a_run_that_is_to_stop_at_a_failure_does(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(OUTCOMES, encoding="utf-8")
    code, said = run(tmp_path, "-x")
    assert code == 1, said
    assert "stopping after" in said, said  # how many ran depends on when the process that runs them learns of it


def test_an_error_at_the_end_of_a_process_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ENDS_BADLY, encoding="utf-8")
    (tmp_path / "test_a.py").write_text("def test_passes(): pass", encoding="utf-8")
    code, said = run(tmp_path)
    assert code == 1, said
    assert "1 passed, 1 error" in said.splitlines()[-1], said


@pytest.mark.parametrize(
    ("running", "idle", "expected"),
    [(5, 60.0, 6), (10, 60.0, 10), (8, 15.0, 8), (8, 0.0, 7), (5, 0.0, 5), (3, 0.0, 3)],
    ids=["more", "no more than that", "enough", "fewer", "no fewer than that", "the last files"],
)
def test_processes_are_as_many_as_keep_the_processors_busy(running: int, idle: float, expected: int) -> None:
    assert wanted(running, idle=idle, least=5, most=10) == expected


def test_a_process_is_started_while_processors_idle(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(IDLE, encoding="utf-8")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(WAITS, encoding="utf-8")
    for name in ("c", "d"):
        (tmp_path / f"test_{name}.py").write_text("def test_passes(): pass", encoding="utf-8")
    code, said = run(tmp_path, "--processes", "1", "--at-most", "2")
    assert code == 0, said
    assert "4 passed" in said.splitlines()[-1], said
