"""Hint at the folder of a relative path."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward.node.worker.missing_files import hint_at_folder


def notes_of(act: Callable[[], object]) -> list[str]:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is the parameter
        act()
    hint_at_folder(caught.value)
    return getattr(caught.value, "__notes__", [])


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
        lambda: (_ for _ in ()).throw(FileNotFoundError("of one's own")),
    ],
)
def test_other_errors_stay_as_they_are(act: Callable[[], object]) -> None:
    assert notes_of(act) == []
