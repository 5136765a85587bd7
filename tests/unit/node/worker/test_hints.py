"""Hints at the folder of a relative path, and at the thread of calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward.node.worker.call_runner import add_hints


def notes_of(act: Callable[[], object]) -> list[str]:
    try:
        act()
    except Exception as error:
        add_hints(error)
        return getattr(error, "__notes__", [])
    pytest.fail("it raised nothing")


def thrown(error: Exception, cause: Exception | None = None) -> Callable[[], object]:
    def act() -> None:
        raise error from cause

    return act


@pytest.mark.parametrize("name", ["data/a.csv", b"data/a.csv"])
def test_a_relative_path_is_named_with_its_folder(
    name: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    (note,) = notes_of(lambda: os.stat(name))

    assert note.startswith(f"'data/a.csv' was looked up in {tmp_path} on the node")


@pytest.mark.parametrize(
    "act",
    [
        lambda: os.stat("/nowhere/a.csv"),
        lambda: subprocess.run(["no-such-program"], check=False),
        lambda: os.mkdir("."),
        lambda: os.kill(os.getpid(), 1000),
        thrown(ValueError("no such user")),
        thrown(KeyError("thread")),
    ],
)
def test_other_errors_stay_as_they_are(act: Callable[[], object]) -> None:
    assert notes_of(act) == []


@pytest.mark.parametrize(
    "act",
    [
        thrown(FileNotFoundError("of one's own")),
        thrown(FileNotFoundError("[Errno 2] Unable to open file (unable to open file: name = 'x.h5', errno = 2)")),
        thrown(OSError("[Errno 2] Unable to synchronously open file (unable to open file: name = 'x.h5')")),
        thrown(ValueError("File not found: filepath=model.keras. Please ensure the file is an accessible file")),
        thrown(RuntimeError("Opening model.json failed: No such file or directory")),
        thrown(RuntimeError("loading failed"), FileNotFoundError(2, "No such file or directory", "a.csv")),
        thrown(ExceptionGroup("several", [ValueError("1"), FileNotFoundError(2, "No such file", "a.csv")])),
    ],
)
def test_a_missing_file_is_recognized_without_its_name_and_behind_another_error(
    act: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    (note,) = notes_of(act)

    assert f"was looked up in {tmp_path} on the node" in note
    assert "Image(includes=" in note
