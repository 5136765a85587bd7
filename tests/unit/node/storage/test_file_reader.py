"""The program that lists and reads the files of a working folder, with nothing but the standard library."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping, Sequence
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
    assert found["left_out"] == {}


def test_a_link_out_of_the_folder_is_named_and_not_read(folder: str) -> None:
    found = listing(folder, ["outside", "folder outside/secret"])

    assert found["files"] == {}
    assert found["unmatched"] == ["outside", "folder outside/secret"]
    secret = os.path.realpath(f"{folder}/outside")
    assert found["left_out"] == dict.fromkeys(found["unmatched"], f"leads to {secret}, out of the folder")
    seen = os.stat(secret)
    facts = [seen.st_size, seen.st_mtime_ns, seen.st_ino, seen.st_mode & 0o777]
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


@pytest.mark.parametrize("kind", ["gone", "pipe", "folder", "parent is a file"])
def test_what_is_no_longer_the_file_has_changed_and_never_blocks(folder: str, kind: str) -> None:
    name = "models/deep/b.bin"
    facts = listing(folder, [name])["files"][name]
    os.unlink(f"{folder}/{name}")
    if kind == "pipe":
        os.mkfifo(f"{folder}/{name}")
    elif kind == "folder":
        os.mkdir(f"{folder}/{name}")
    elif kind == "parent is a file":
        os.rmdir(f"{folder}/models/deep")
        Path(f"{folder}/models/deep").touch()

    assert piece(folder, name, 0, 1, facts) == {"changed": True}


def test_what_is_no_file_is_left_out_by_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(f"{folder}/models")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        found = listing(folder, ["models", "models/pipe"])

    assert found["left_out"] == {"models/pipe": "a named pipe", "models/socket": "a socket"}
    assert (list(found["files"]), found["unmatched"]) == (["models/deep/b.bin"], ["models/pipe"])


def test_folders_are_listed_with_their_modes_and_those_above_a_match(folder: str) -> None:
    os.mkdir(f"{folder}/models/empty")
    for name, mode in (("models", 0o1755), ("models/deep", 0o555), ("models/empty", 0o2700), ("a.bin", 0o6444)):
        os.chmod(f"{folder}/{name}", mode)

    found = listing(folder, ["models", "a.bin"])
    assert found["folders"] == {"models": 0o755, "models/deep": 0o555, "models/empty": 0o700}
    assert found["files"]["a.bin"][3] == 0o444
    assert listing(folder, ["models/deep/*.bin"])["folders"] == {"models": 0o755, "models/deep": 0o555}
    assert listing(folder, ["**"])["folders"].keys() == found["folders"].keys()


@pytest.mark.parametrize(
    ("link", "target", "patterns", "expected"),
    [
        ("models/last", "deep/b.bin", ["models"], ({"models/last": "models/deep/b.bin"}, [], "")),
        ("models/last", "deep", ["models"], ({"models/last": "models/deep"}, [], "")),
        ("models/last", "{top}/models/deep", ["models"], ({"models/last": "models/deep"}, [], "")),
        ("models/deep/up", "..", ["models"], ({"models/deep/up": "models"}, [], "")),
        ("models/top", "..", ["**"], ({"models/top": "."}, ["a.bin", ".hidden"], "")),
        ("models/none", "gone", ["models"], ({"models/none": "models/gone"}, [], "")),
        ("models/a", "../a.bin", ["models"], ({}, ["models/a"], "")),
        ("models/last", "../other", ["models"], ({}, ["models/last/c.bin"], "")),
        ("last", "other", ["last"], ({}, ["last/c.bin"], "")),
        ("last", "other", ["last/*.bin"], ({}, ["last/c.bin"], "")),
        ("last", "other", ["last/*.bin", "last"], ({}, ["last/c.bin"], "")),
        ("last", "other", ["last", "other"], ({"last": "other"}, ["other/c.bin"], "")),
        ("models/up", "..", ["models"], ({}, [], "a link to a folder that it is in")),
        ("models/self", "self", ["models"], ({}, [], "Too many levels of symbolic links")),
        ("models/out", "{top}/../secret", ["models"], ({}, [], "leads to ")),
        ("models/out", "../../gone", ["models"], ({}, [], "leads to ")),
        ("models/out", "/proc", ["models"], ({}, [], "leads to /proc, out of the folder")),
    ],
)
def test_links_to_what_is_fetched_are_links_and_others_bring_what_they_lead_to(
    folder: str, link: str, target: str, patterns: list[str], expected: tuple[Mapping[str, str], Sequence[str], str]
) -> None:
    links, files, left_out = expected
    os.mkdir(f"{folder}/other")
    Path(folder, "other/c.bin").touch()
    for name in ("inside", "outside", "folder outside"):
        os.unlink(f"{folder}/{name}")
    os.symlink(target.format(top=folder), f"{folder}/{link}")

    found = listing(folder, patterns)

    assert found["links"] == links
    assert {*files} <= found["files"].keys()
    assert found["left_out"].get(link, "").startswith(left_out)
    assert [*found["left_out"]] == [link] * bool(left_out)


def test_links_that_lead_to_each_others_folders_end(folder: str) -> None:
    for one, two in (("x", "y"), ("y", "z"), ("z", "x")):
        os.mkdir(f"{folder}/{one}")
        os.symlink(f"../{two}", f"{folder}/{one}/to")

    found = listing(folder, ["x"])

    assert found["folders"].keys() == {"x", "x/to", "x/to/to"}
    assert found["links"] == {"x/to/to/to": "x"}
