"""Files of a node, fetched in pieces: whole or not at all, also if they change meanwhile."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import FetchError
from skyward.fleet import node_files
from skyward.fleet.node_files import NodeFile, NodeFiles
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport


class Meddled(LocalTransport):
    """A transport to a machine where something happens before each piece is read.

    Attributes:
        meddle: what happens.
    """

    meddle: Callable[[], object] = staticmethod(lambda: None)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """Let it happen, then run the command."""
        if b'"piece"' in bytes(stdin):
            self.meddle()
        return await super().run(argv, env=env, stdin=stdin, timeout_s=timeout_s)


@pytest.fixture
def transport(tmp_path: Path) -> Meddled:
    return Meddled(LocalAccess(address="127.0.0.1", workdir=str(tmp_path / "node")))


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "node/files"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def files(transport: Meddled, there: Path, monkeypatch: pytest.MonkeyPatch) -> NodeFiles:
    monkeypatch.setattr(node_files, "_PIECE_BYTES", 1000)
    return NodeFiles(transport, python=sys.executable, folder=str(there), node=3)


async def test_a_large_file_comes_in_pieces_and_whole(files: NodeFiles, there: Path, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    (there / "a.bin").write_bytes(content)
    (there / "empty").touch()
    here = tmp_path / "here/deep"
    here.mkdir(parents=True)
    for file in (await files.matching(["*"])).files:
        await files.fetch(file, here / file.name)

    assert (here / "a.bin").read_bytes() == content
    assert sorted(path.name for path in here.iterdir()) == ["a.bin", "empty"]


NAMES = [
    *(b"x" * 250, b"x" * 255, "ü".encode() * 127, b".x", b"a b\t'", b"-rf", b" a ", b"a\nb", b"\xff\xfe", b"a\\b"),
    *(b"*", b"**", b"a[1]?", b"[!a]", b"~", b"$HOME", "é".encode(), "e\u0301".encode(), b"\x1b[31m", b"a..", b"..."),
]


async def test_names_of_any_length_and_bytes_come_with_their_modes(
    files: NodeFiles, there: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for number, name in enumerate(NAMES):
        path = there / os.fsdecode(name)
        path.write_bytes(name)
        path.chmod(0o7400 | number)  # of all kinds
    for file in (await files.matching(["*", ".*"])).files:
        os.utime(there / file.name, (1, 1))  # so that it is listed again, by this name alone
        await files.fetch(file, here / file.name)

    assert sorted(os.listdir(os.fsencode(here))) == sorted(NAMES)
    assert all((here / os.fsdecode(name)).read_bytes() == name for name in NAMES)
    assert [(here / os.fsdecode(name)).stat().st_mode & 0o7777 for name in NAMES] == [
        0o400 | number for number in range(len(NAMES))
    ]


async def test_a_file_that_changes_once_is_fetched_again(
    files: NodeFiles, transport: Meddled, there: Path, tmp_path: Path
) -> None:
    (there / "a.log").write_bytes(b"before")
    (file,) = (await files.matching(["a.log"])).files
    (there / "a.log").write_bytes(b"after it")
    await files.fetch(file, tmp_path / "a.log")

    assert (tmp_path / "a.log").read_bytes() == b"after it"


async def test_a_file_that_changes_all_the_time_is_an_error_and_leaves_nothing(
    files: NodeFiles, transport: Meddled, there: Path, tmp_path: Path
) -> None:
    def grow() -> None:
        with (there / "a.log").open("ab") as file:
            file.write(b"more")

    grow()
    (file,) = (await files.matching(["a.log"])).files
    transport.meddle = grow
    (tmp_path / "here").mkdir()
    with pytest.raises(FetchError, match=r"a\.log on node 3 changed while it was read, twice"):
        await files.fetch(file, tmp_path / "here/a.log")
    assert list((tmp_path / "here").iterdir()) == []

    transport.meddle = lambda: (there / "a.log").unlink(missing_ok=True)
    (file,) = (await files.matching(["a.log"])).files
    with pytest.raises(FetchError, match="was removed while it was read"):
        await files.fetch(file, tmp_path / "here/a.log")


async def test_a_node_in_another_locale_takes_names_as_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(LocalTransport):
        async def run(self, argv: Sequence[str], **options: Any) -> Completed:
            asked.append(await super().run([*argv[:-1], "import sys; print(sys.flags.utf8_mode)"], timeout_s=60))
            return await super().run(argv, **options)

    asked: list[Completed] = []
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # C would be UTF-8 to Python by itself, and few machines have others
    reader = NodeFiles(
        Asking(LocalAccess(address="127.0.0.1", workdir=str(tmp_path))), python=sys.executable, folder=".", node=3
    )
    await reader.matching(["*"])
    assert [done.stdout for done in asked] == ["1\n"]


class Lying(LocalTransport):
    """A transport to a machine that answers as it likes.

    Attributes:
        answers: its answers, by verb.
    """

    answers: Mapping[str, object] = {}

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """Answer without running anything."""
        return Completed(exit_code=0, stdout=json.dumps(self.answers[json.loads(bytes(stdin))["verb"]]), stderr="")


BIN = {"a.bin": [1, 2, 3, 0o644]}


@pytest.mark.parametrize(
    "lie",
    [
        *(
            {"files": {name: [1, 2, 3, 0o644]}}
            for name in ("../a.bin", "/etc/a.bin", "conftest.py", ".a.bin", "a\0.bin")
        ),
        *({"files": {name: [1, 2, 3, 0o644]}} for name in ("", ".", "./a.bin", "deep//a.bin", "deep/a.bin")),
        *({"files": BIN, "folders": {name: 0o755}} for name in ("..", "/etc", "deep", ".", "a.bin")),
        {"files": {"x": [1, 2, 3, 0o644], "x/a.bin": [1, 2, 3, 0o644]}},
        *({"files": BIN, "links": {name: "a.bin"}} for name in ("../b.bin", "b", "a.bin")),
        *({"files": BIN, "links": {"b.bin": target}} for target in ("..", "/etc/passwd", "../x", "x/../../y", "")),
    ],
    ids=repr,
)
async def test_a_node_cannot_choose_the_names_of_files_here(lie: Mapping[str, object], tmp_path: Path) -> None:
    liar = Lying(LocalAccess(address="127.0.0.1", workdir=str(tmp_path)))
    files = NodeFiles(liar, python="python", folder="files", node=3)
    nothing = {"left_out": {}, "unmatched": [], "there": [], "all": 0}
    liar.answers = {"listing": {"files": {}, "folders": {}, "links": {}, **nothing, **lie}}

    with pytest.raises(FetchError, match=r"node 3 names a (file that was not asked for|link that leads out)"):
        await files.matching(["*.bin"])


@pytest.mark.parametrize("sent", [b"", b"ab", b"abcd"])
async def test_a_piece_of_another_size_is_an_error_and_leaves_nothing(sent: bytes, tmp_path: Path) -> None:
    liar = Lying(LocalAccess(address="127.0.0.1", workdir=str(tmp_path)))
    files = NodeFiles(liar, python="python", folder="files", node=3)
    (tmp_path / "here").mkdir()
    liar.answers = {"piece": {"data": base64.b64encode(sent).decode()}}

    with pytest.raises(FetchError, match=r"sent . bytes of a\.bin where 3 were due"):
        await files.fetch(NodeFile(name="a.bin", facts=(3, 0, 0, 0o644)), tmp_path / "here/a.bin")
    assert list((tmp_path / "here").iterdir()) == []
