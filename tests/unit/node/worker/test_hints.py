"""Hints at the folder of a relative path, and at the thread of calls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.node.worker.hints import add_hints


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


def with_handler() -> None:
    with asyncio.Runner() as runner:
        runner.get_loop().add_signal_handler(signal.SIGUSR1, print)


def with_loop() -> None:
    asyncio.get_event_loop()


@pytest.mark.parametrize(
    "act",
    [
        lambda: signal.signal(signal.SIGALRM, print),
        lambda: signal.set_wakeup_fd(-1),
        with_handler,
        with_loop,
        thrown(RuntimeError("this application must be started in the main thread")),
    ],
)
def test_a_need_of_the_main_thread_is_answered_with_other_ways(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        (note,) = threads.submit(notes_of, act).result()
    assert note.startswith("a call runs in a thread of its worker")
    assert all(way in note for way in ("timeout=", "asyncio.run()", "multiprocessing"))
