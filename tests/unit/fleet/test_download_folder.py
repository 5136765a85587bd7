"""The folder here that receives a node's files: nothing is written outside of it, and nothing over another name's."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest

from skyward.errors import FetchError
from skyward.fleet.download_folder import TargetFolder
from support.users import as_other_user


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mode & 0o7777 for path in folder.rglob("*")}


def receive(folder: TargetFolder, name: str, content: str) -> None:
    """Put a file as a fetch does: under another name, then renamed."""
    path = folder.claim(name)
    part = path.with_name(".part")
    part.write_text(content)
    part.chmod(0o444)
    part.replace(path)
    folder.keep(name)


def test_read_only_folders_are_filled_and_filled_again(tmp_path: Path) -> None:
    there = {"a": 0o555, "a/b": 0o500, "a/b/c": 0o000, "d": 0o711}
    files = ("a/x", "a/b/x", "d/x")
    for content in ("first", "second"):
        with as_other_user(tmp_path):
            folder = TargetFolder(Path("to"))
            assert folder.make_folders(there) == []
            for name in files:
                receive(folder, name, content)
            folder.put_link("a/b/link", "d/x")
            folder.set_modes()

        assert (tmp_path / "to/a/b/link").read_text() == content
        assert modes(tmp_path / "to") == there | dict.fromkeys(files, 0o444) | {"a/b/link": 0o777}
    (tmp_path / "to/a/b/c").chmod(0o700)


@pytest.mark.parametrize(
    ("name", "target", "text"),
    [
        ("l", "a", "a"),
        ("a/l", "b", "../b"),
        ("a/b/l", "a", ".."),
        ("a/l", ".", ".."),
        ("a/l", "a", "."),
        ("l", "...", "..."),
        ("a/b/l", "a/b/x\n", "x\n"),
    ],
)
def test_links_are_relative(name: str, target: str, text: str, tmp_path: Path) -> None:
    folder = TargetFolder(tmp_path)
    folder.make_folders({"a": 0o755, "a/b": 0o755})
    for _ in range(2):
        assert os.readlink(folder.put_link(name, target)) == text


@pytest.mark.parametrize("outside", ["../elsewhere", "{elsewhere}", "a"])
def test_links_that_are_here_are_replaced_and_never_followed(outside: str, tmp_path: Path) -> None:
    elsewhere, to = tmp_path / "elsewhere", tmp_path / "to"
    for each in (elsewhere, to, to / "a"):
        each.mkdir()
        (each / "x").write_text("keep")
    for name in ("d", "a/e", "l", "f"):
        (to / name).symlink_to(outside.format(elsewhere=elsewhere))

    folder = TargetFolder(to)
    assert folder.make_folders({"a": 0o755, "a/e": 0o755, "d": 0o755}) == []
    for name in ("d/x", "a/e/x", "f"):
        receive(folder, name, "new")
    folder.put_link("l", "d/x")

    assert [(to / name).read_text() for name in ("d/x", "a/e/x", "f", "l", "a/x")] == ["new"] * 4 + ["keep"]
    assert (elsewhere / "x").read_text() == "keep"
    assert sorted(os.listdir(elsewhere)) == ["x"]


@pytest.mark.parametrize("here", ["a file", "a link that cannot be replaced"])
def test_nothing_is_written_below_a_folder_that_was_not_made(here: str, tmp_path: Path) -> None:
    to, elsewhere = tmp_path / "to", tmp_path / "elsewhere"
    to.mkdir()
    elsewhere.mkdir(0o777)
    if here == "a file":
        (to / "a").touch()
    else:
        (to / "a").symlink_to(elsewhere)
        to.chmod(0o555)

    with as_other_user(tmp_path):
        folder = TargetFolder(Path("to"))
        first, second = folder.make_folders({"a": 0o755, "a/b": 0o755})

    assert str(first).startswith("folder 'a' was not made")
    assert str(second) == "'a/b' was not fetched, as its folder was not made"
    for name in ("a/x", "a/b/x"):
        with pytest.raises(FetchError, match="its folder was not made"):
            folder.claim(name)


def disk_that_folds(fold: Callable[[str], str]) -> Callable[[Path], Hashable]:
    """Return how a disk looks that takes names for one if ``fold`` makes them equal."""

    def identify(path: Path) -> Hashable:
        entries = {fold(entry.name): entry for entry in path.parent.iterdir()} if path.parent.exists() else {}
        entry = entries.get(fold(path.name))
        return None if entry is None else entry.lstat().st_ino

    return identify


def composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def trimmed(name: str) -> str:
    return name.rstrip(". ")


@pytest.mark.parametrize(
    ("one", "two", "fold"),
    [
        ("A", "a", str.casefold),
        ("Stra\u00dfe", "STRASSE", str.casefold),
        ("\u00e9", "e\u0301", composed),
        ("a", "a. ", trimmed),
    ],
)
def test_names_that_are_one_to_the_disk_are_an_error_that_names_both(
    one: str, two: str, fold: Callable[[str], str], tmp_path: Path
) -> None:
    folder = TargetFolder(tmp_path, disk_that_folds(fold))
    folder.make_folders({"deep": 0o755})
    (tmp_path / one).write_text("of an earlier fetch")
    for name in (one, f"deep/{one}"):
        receive(folder, name, "first")

    for name, other in ((two, one), (f"deep/{two}", f"deep/{one}")):
        with pytest.raises(FetchError) as raised:
            receive(folder, name, "second")
        assert repr(name) in str(raised.value)
        assert repr(other) in str(raised.value)
        with pytest.raises(FetchError, match="the same name"):
            folder.put_link(name, other)
        assert (tmp_path / other).read_text() == "first"
    receive(folder, one, "again")


def test_folders_that_are_one_to_the_disk_are_not_merged(tmp_path: Path) -> None:
    folder = TargetFolder(tmp_path, disk_that_folds(str.casefold))

    (error,) = folder.make_folders({"Run": 0o755, "run": 0o555})

    assert "'run' was not fetched" in str(error)
    assert "'Run'" in str(error)
    with pytest.raises(FetchError, match="its folder was not made"):
        folder.claim("run/x")


def test_names_that_differ_to_the_disk_are_all_fetched(tmp_path: Path) -> None:
    folder = TargetFolder(tmp_path)
    for name in ("A", "a", "\u00e9", "e\u0301"):
        receive(folder, name, name)
    assert all((tmp_path / name).read_text() == name for name in ("A", "a", "\u00e9", "e\u0301"))
