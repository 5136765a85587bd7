"""``skyward jobs``, ``result``, ``logs`` and ``cancel`` of jobs whose fleet has ended: what was fetched is here."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward.cli import main
from skyward.errors import ConfigurationError, PoolStateError
from skyward.events import LogLine
from skyward.ledger.job_folders import JobRecord, make_folder
from skyward.shipping.job_file import JobEnd, JobOutcome, outcome_parts
from skyward.shipping.pickling import Packed, pack_result
from skyward.shipping.remote_exceptions import pack_error


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


_moments = itertools.count()


def job(name: str, value: object = None, *, calls: int = 1, fetched: int = 1, fleet: str = "llm") -> None:
    record = JobRecord(
        job=name,
        pool_id="sky-1",
        label="train",
        calls=calls,
        single=calls == 1,
        spawned_at=float(next(_moments)),
        places=("i-0",) * calls,
        runs=(0,) * calls,
    )
    folder = make_folder(fleet, record, [b"call"] * calls)
    for index in range(fetched):
        facts: dict[str, Any] = {"node": 0, "worker": 0, "attempt": 1}
        if isinstance(value, Exception):
            outcome = JobOutcome(end=JobEnd.ERROR, error=pack_error(value), **facts)
        else:
            result = value if isinstance(value, Packed) else pack_result(value, what="it")
            outcome = JobOutcome(end=JobEnd.VALUE, result=result, **facts)
        folder.outcome(index).write_bytes(b"".join(outcome_parts(outcome)))
        line = LogLine(0, "i-0", f"step {index}", 1.0, 0, name)
        folder.output(index).write_text(json.dumps([*vars(line).values()]) + "\n")


def test_jobs_are_listed_within_80_columns() -> None:
    job("run-7", {"loss": 0.1})
    job("sweep-lr", fleet="vision", calls=20, fetched=3)
    job("bad", ValueError("negative"))

    plain = run("jobs")
    listed = json.loads(run("jobs", "llm", "--json").stdout)["jobs"]

    assert [line.split()[:4] for line in plain.stdout.strip().splitlines()[-3:]] == [
        ["run-7", "llm", "finished", "1/1"],
        ["sweep-lr", "vision", "gone", "3/20"],
        ["bad", "llm", "failed", "1/1"],
    ]
    assert max(map(len, plain.stdout.splitlines())) <= 80
    assert [(each["job"], each["state"]) for each in listed] == [("run-7", "finished"), ("bad", "failed")]


def test_no_jobs() -> None:
    assert "no kept fleet 'llm'" in run("jobs", "llm").stderr
    assert "pool.spawn" in run("jobs").stdout


def test_cancelling_a_job_that_is_over_says_so() -> None:
    job("run-7", {"loss": 0.1})

    assert run("cancel", "run-7").stdout == "run-7: was finished already\n"
    assert json.loads(run("cancel", "run-7", "--json").stdout) == {"cancelled": []}


def test_a_result_of_a_class_that_is_not_here_is_no_failure_of_its_job() -> None:
    job("own", Packed(data=b"\x80\x05c__main__\nKept\n."))

    done = run("result", "own")

    assert done.exit_code == 1
    assert "failed" not in done.output
    assert "Read it in a program that defines it" in done.stderr


def test_a_result_is_printed_or_written(tmp_path: Path) -> None:
    job("run-7", {"loss": 0.1})
    job("text", "a line\n")

    assert run("result", "run-7").stdout == "{'loss': 0.1}\n"
    assert json.loads(run("result", "run-7", "--json").stdout)["result"] == {"loss": 0.1}
    assert run("result", "run-7", "--to", "run.pkl").exit_code == 0
    assert pickle.loads((tmp_path / "run.pkl").read_bytes()) == {"loss": 0.1}
    run("result", "text", "--to", "text.txt")
    assert (tmp_path / "text.txt").read_text() == "a line\n"


def test_a_result_that_cannot_be_written_is_an_error_of_the_option() -> None:
    job("run-7", {"loss": 0.1})

    done = run("result", "run-7", "--to", "none/run.pkl")

    assert done.exit_code == 2
    assert "--to: cannot write none/run.pkl: No such file or directory" in done.stderr


def test_a_failed_job_and_a_lost_result_are_failures() -> None:
    job("bad", ValueError("negative"))
    job("late", fetched=0)

    failed, lost = run("result", "bad"), run("result", "late")

    assert (failed.exit_code, failed.stdout) == (1, "job bad failed: ValueError: negative\n")
    assert lost.exit_code == 1
    assert "has ended, and 1 of its 1 results with it" in lost.stderr
    assert "has ended" in run("cancel", "late").stderr


def test_lines_of_a_job_are_kept() -> None:
    job("sweep", 1, calls=3, fetched=3)

    assert [line.rpartition("| ")[2] for line in run("logs", "llm", "sweep").stdout.splitlines()] == [
        "step 0",
        "step 1",
        "step 2",
    ]
    assert run("logs", "llm", "sweep", "-n", "1").stdout.endswith("| step 2\n")
    assert len(json.loads(run("logs", "llm", "sweep", "--json").stdout)["lines"]) == 3
    assert "no job 'none' of the fleet 'llm'" in run("logs", "llm", "none").stderr


def test_a_script_needs_a_kept_pool(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    done = run("run", "train.py", "--on", "llm", "--epochs", "3")

    assert done.exit_code == 2
    assert "no kept fleet 'llm'" in done.stderr


@pytest.mark.parametrize(
    "command",
    ["jobs none", "keep none 1h", "result none", "cancel none", "logs llm none", "logs none run-7", "logs none"],
)
def test_an_unknown_pool_or_job_is_wrong_usage(command: str) -> None:
    job("run-7", {"loss": 0.1})

    done = run(*command.split())

    assert done.exit_code == 2
    assert "Error: Invalid value for" in done.stderr


def test_jobs_of_an_unknown_pool_are_refused() -> None:
    with pytest.raises(PoolStateError, match="no kept fleet 'none'"):
        sky.jobs("none")
    with pytest.raises(ConfigurationError, match="there is no job 'none'; there are none"):
        sky.job("none")
