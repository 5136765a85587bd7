"""Folders of pools: private, in use while the pool is open, bounded in number and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyward.ledger import ownership as pool_folder
from skyward.ledger.ownership import PoolFolder, is_in_use, known_folders


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def closed(name: str, *, age: int, size: int = 0) -> None:
    folder = PoolFolder(name)
    (folder.logs / "calls").write_bytes(b"x" * size)
    folder.close()
    os.utime(folder.path, (age, age))


def names() -> list[str]:
    return [path.name for path in known_folders()]


def test_a_folder_is_its_users_only_and_in_use_until_it_is_closed() -> None:
    assert names() == []
    folder = PoolFolder("sky-1")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert is_in_use(folder.path)
    folder.close()
    folder.close()
    assert not is_in_use(folder.path)
    assert names() == ["sky-1"]
    assert not is_in_use(folder.path.parent / "sky-2")


def test_a_folder_that_is_deleted_meanwhile_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        closed(f"sky-{number}", age=number)
    list_folder = os.scandir

    @contextmanager
    def losing_one(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with list_folder(path) as entries:
            found = [*entries]
        Path(found[0].path).rename(path.parent / "gone")
        yield found

    monkeypatch.setattr(os, "scandir", losing_one)
    found = names()
    monkeypatch.undo()
    assert len(found) == 2


def test_the_newest_folders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_folder, "KEPT_POOLS", 2)
    for number in range(1, 4):
        closed(f"sky-{number}", age=number)
    assert names() == ["sky-3", "sky-2"]
    last = PoolFolder("sky-4")
    assert names() == ["sky-4", "sky-3"]
    last.close()


def test_folders_of_open_pools_are_kept_whatever_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_folder, "KEPT_BYTES", 100)
    old = PoolFolder("sky-open")
    os.utime(old.path, (1, 1))
    closed("sky-large", age=2, size=90)
    closed("sky-new", age=3, size=20)
    latest = PoolFolder("sky-latest")
    assert names() == ["sky-latest", "sky-new", "sky-open"]
    old.close()
    latest.close()


def test_checkpoints_of_a_killed_program_are_removed_before_they_cost_others_their_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_folder, "KEPT_BYTES", 100)
    closed("sky-killed", age=2, size=20)
    closed("sky-old", age=1, size=20)
    (killed,) = [path for path in known_folders() if path.name == "sky-killed"]
    for folder in (killed, (open_one := PoolFolder("sky-open")).path):
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "state").write_bytes(b"x" * (1000 if folder == killed else 1))
    PoolFolder("sky-new").close()
    assert {*names()} == {"sky-new", "sky-open", "sky-killed", "sky-old"}
    assert not (killed / "checkpoints").exists()
    assert (open_one.path / "checkpoints" / "state").exists()
    open_one.close()


def test_a_folder_that_is_not_ours_keeps_no_pool_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_folder, "KEPT_POOLS", 1)
    closed("sky-odd", age=1)
    (odd,) = known_folders()
    (odd / "open").unlink()
    (odd / "open").mkdir()  # no process can open it, as those of another user
    os.utime(odd, (1, 1))
    assert not is_in_use(odd)
    PoolFolder("sky-1").close()
    assert names() == ["sky-1"]
