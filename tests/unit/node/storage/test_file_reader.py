"""The program that lists and reads the files of a working folder, with nothing but the standard library."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from skyward.node.storage.file_reader import listing, piece


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text("no")
    top = tmp_path / "files"
    (top / "models/deep").mkdir(parents=True)
    (top / "a.bin").write_bytes(b"0123456789")
    (top / "models/deep/b.bin").write_bytes(b"")
    (top / ".hidden").touch()
    (top / "inside").symlink_to("a.bin")
    (top / "outside").symlink_to("../secret")
    (top / "folder outside").symlink_to(tmp_path)
    return str(top)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.bin", ["a.bin"]),
        ("**/*.bin", ["a.bin", "models/deep/b.bin"]),
        ("models/", ["models/deep/b.bin"]),
        ("models", ["models/deep/b.bin"]),
        ("inside", ["inside"]),
        (".hid*", [".hidden"]),
        ("models/**", ["models/deep/b.bin"]),
        ("*.csv", []),
    ],
)
def test_patterns_match_files_and_folders_with_all_in_them(folder: str, pattern: str, names: list[str]) -> None:
    found = listing(folder, [pattern])

    assert sorted(found["files"]) == names
    assert found["unmatched"] == ([] if names else [pattern])
    assert found["outside"] == []


def test_a_link_out_of_the_folder_is_named_and_not_read(folder: str) -> None:
    found = listing(folder, ["outside", "folder outside/secret"])

    assert found["files"] == {}
    assert [text.partition(" leads to ")[0] for text in found["outside"]] == ["outside", "folder outside/secret"]
    seen = os.stat(f"{folder}/outside")
    facts = [seen.st_size, seen.st_mtime_ns, seen.st_ino]
    assert piece(folder, "outside", 0, seen.st_size, facts) == {"changed": True}


def test_without_a_match_it_says_what_is_there(folder: str) -> None:
    found = listing(folder, ["*.csv"])
    assert found["there"] == [".hidden", "a.bin", "folder outside", "inside", "models", "outside"]
    assert listing(f"{folder}/none", ["*"])["there"] == []


def test_pieces_are_those_of_the_listed_file(folder: str) -> None:
    facts = listing(folder, ["a.bin"])["files"]["a.bin"]

    assert base64.b64decode(piece(folder, "a.bin", 4, 3, facts)["data"]) == b"456"
    with open(f"{folder}/a.bin", "ab") as file:
        file.write(b"more")
    assert piece(folder, "a.bin", 4, 3, facts) == {"changed": True}
