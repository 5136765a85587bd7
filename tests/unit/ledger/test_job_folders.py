"""Folders of jobs: names, and what an earlier fleet of the same name has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.ledger.job_folders import JobRecord, checked_job_name, find_job, job_folders, job_name_of, make_folder

RECORD = JobRecord(
    job="run-7", pool_id="sky-1", label="train", calls=1, single=True, spawned_at=1.0, places=("i-0",), runs=(0,)
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", ["run-7", "a", "7", "lr_0.01", "x" * 64])
def test_names(name: str) -> None:
    assert checked_job_name(name) == name


@pytest.mark.parametrize("name", ["", " a", "a b", "a/b", "..", ".a", "-a", "é", "x" * 65, 7, None])
def test_odd_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigurationError, match="name must be up to 64 letters"):
        checked_job_name(name)


@pytest.mark.parametrize("label", ["train", "pkg.Model.train", "<lambda>", "über", "x" * 100, "train.py"])
def test_made_names_are_names_and_begin_with_the_function(label: str) -> None:
    assert checked_job_name(job_name_of(label)) != job_name_of(label)


def test_a_name_is_taken_once_in_its_fleet() -> None:
    make_folder("llm", RECORD, [b"1"])

    with pytest.raises(ConfigurationError, match=r"the fleet 'llm' has a job 'run-7' already"):
        make_folder("llm", replace(RECORD, label="other"), [b"2"])

    assert find_job("run-7").record.label == "train"
    assert [path.name for path in find_job("run-7").path.parent.iterdir()] == ["run-7"]


def test_two_fleets_may_have_jobs_of_one_name() -> None:
    for fleet in ("llm", "vision"):
        make_folder(fleet, RECORD, [b"1"])

    with pytest.raises(ConfigurationError, match="'llm', 'vision'"):
        find_job("run-7")
    assert find_job("run-7", "vision").fleet == "vision"


def test_a_later_fleet_of_the_name_leaves_the_results_of_the_earlier_one() -> None:
    make_folder("llm", RECORD, [b"1"]).outcome(0).write_bytes(b"result")

    make_folder("llm", replace(RECORD, pool_id="sky-2", spawned_at=2.0), [b"2"])

    assert [folder.record.job for folder in job_folders("llm")] == ["run-7.sky-1", "run-7"]
    assert find_job("run-7.sky-1").outcome(0).read_bytes() == b"result"
    assert find_job("run-7").record.pool_id == "sky-2"


def test_files_are_their_users_only() -> None:
    folder = make_folder("llm", RECORD, [b"1"])

    assert folder.call(0).stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o077 == 0


def test_an_unknown_job_names_the_latest() -> None:
    make_folder("llm", RECORD, [b"1"])

    with pytest.raises(ConfigurationError, match="no job 'run-8'; the latest are run-7"):
        find_job("run-8")
