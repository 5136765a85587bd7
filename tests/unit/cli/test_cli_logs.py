"""``skyward logs``: output of calls, while their pool is open, after it, and after its process was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyward.cli import main
from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.ledger import ownership as pool_folder
from skyward.ledger.ownership import PoolFolder


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def answer(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


LINES = [
    LogLine(0, "i-0", "begins", 10.0, worker=0, call="train#0"),
    LogLine(0, "i-0", "red \x1b[31mtext\x1b[2J", 11.0, worker=1, call="train#1", stream="stderr"),
    LogLine(1, "i-1", "two\nlines", 12.0, worker=0, call="train#1", level="WARNING", logger="app"),
    LogLine(1, "i-1", "between calls", 13.0, worker=0),
]


@pytest.fixture
def printed() -> Iterator[KeptLines]:
    folder = PoolFolder("sky-9")
    kept = KeptLines(folder.logs, lambda _: None)
    for line in LINES:
        kept(line)
    kept.write()
    yield kept
    kept.close()
    folder.close()


def shown_lines(*options: str) -> list[str]:
    """The lines without the time."""
    return [line.partition(" ")[2].partition(" ")[2] for line in run("logs", "sky-9", *options).output.splitlines()]


def test_logs_show_the_output_of_calls_with_its_place(printed: KeptLines) -> None:
    assert shown_lines() == [
        "0/0 train#0 | begins",
        "0/1 train#1 | red text",
        "1/0 train#1 | WARNING app: two",
        "1/0 train#1 | lines",
        "1/0 | between calls",
    ]
    document = answer("logs", "sky-9")
    assert document["pool"] == "sky-9"
    assert [LogLine(**line) for line in document["lines"]] == LINES


def test_a_line_with_an_impossible_time_is_shown_still(printed: KeptLines) -> None:
    printed(LogLine(0, "i-0", "lost in time", 1e300, worker=0, call="train#0"))
    printed.write()

    assert shown_lines("--call", "train#0") == ["0/0 train#0 | begins", "0/0 train#0 | lost in time"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--call", "train"], [0, 1, 2]),
        (["--call", "train#1"], [1, 2]),
        (["--node", "1"], [2, 3]),
        (["--node", "0", "--worker", "1"], [1]),
        (["-n", "1"], [3]),
        (["--call", "train", "-n", "2"], [1, 2]),
        (["-n", "0"], []),
    ],
)
def test_logs_of_calls_can_be_chosen(printed: KeptLines, options: list[str], lines: list[int]) -> None:
    assert [LogLine(**line) for line in answer("logs", "sky-9", *options)["lines"]] == [LINES[n] for n in lines]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--call", "fit"], "no line is of a call fit; there are lines of train"),
        (["--node", "7"], "no line is of node 7; there are lines of 0, 1"),
        (["--worker", "7"], "no line is of a worker 7"),
    ],
)
def test_logs_of_calls_that_are_not_there_are_usage_errors(
    printed: KeptLines, options: list[str], message: str
) -> None:
    done = run("logs", "sky-9", *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_logs_of_a_pool_that_is_over_do_not_wait() -> None:
    PoolFolder("sky-8").close()
    done = run("logs", "sky-8", "-f")
    assert (done.exit_code, done.output) == (0, "")
    assert "Pool sky-8 has printed nothing" in run("logs", "sky-8").stderr
    assert "The latest are sky-8" in run("logs", "sky-7").stderr


def test_logs_without_a_pool_name_the_latest_ones() -> None:
    PoolFolder("sky-8").close()
    done = run("logs")
    assert done.exit_code == 2
    assert "name a POOL of this user's ledger. The latest are sky-8" in done.stderr


def test_logs_follow_until_the_process_of_the_pool_is_gone(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.ledger.ownership import PoolFolder
folder = PoolFolder("sky-5")
kept = KeptLines(folder.logs, lambda _: None)
for text in ("first", "last"):
    kept(LogLine(0, "i", text, 1.0, worker=0, call="f#0"))
    kept.write()
    print(text, flush=True)
    sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as client:  # type: ignore[call-overload]
        assert client.stdout.readline() == "first\n"
        follow = [sys.executable, "-m", "skyward", "logs", "sky-5", "--follow"]
        with subprocess.Popen(follow, stdout=subprocess.PIPE, encoding="utf-8") as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline().endswith("0/0 f#0 | first\n")
            client.stdin.write("\n")
            client.stdin.flush()
            assert follower.stdout.readline().endswith("0/0 f#0 | last\n")
            client.stdin.write("\n")
            client.stdin.flush()
            assert follower.wait(60) == 0
    assert answer("logs", "sky-5")["lines"][-1]["line"] == "last"


def test_logs_of_ended_machines_are_those_that_were_copied(printed: KeptLines) -> None:
    place = pool_folder.known_folders()[0] / "system/node-1-i-5"
    place.mkdir(parents=True)
    (place / "worker-0.log").write_text("one\ntwo\n")
    (place / "supervisor.log").write_text("started\n")
    assert run("logs", "sky-9", "--system").output == (
        "node 1 supervisor | started\nnode 1 worker-0 | one\nnode 1 worker-0 | two\n"
    )
    assert run("logs", "sky-9", "--system", "--worker", "0", "-n", "1").output == "node 1 worker-0 | two\n"
    assert run("logs", "sky-9", "--system", "--worker", "0", "-n", "3").output.count("\n") == 2
    assert "the pool had no node 0; it had 1" in run("logs", "sky-9", "--system", "--node", "0").stderr
