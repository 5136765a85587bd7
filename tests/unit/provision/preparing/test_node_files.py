"""Files of a node, fetched in pieces: whole or not at all, also if they change meanwhile."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from skyward.errors import FetchError
from skyward.provision.preparing import node_files
from skyward.provision.preparing.node_files import NodeFile, NodeFiles
from skyward.transport.access import LocalAccess
from skyward.transport.base import Completed
from skyward.transport.local_transport import LocalTransport


class Meddled(LocalTransport):
    """A transport to a machine where something happens before each piece is read.

    Attributes:
        meddle: what happens.
    """

    meddle: Callable[[], object] = staticmethod(lambda: None)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        """Let it happen, then run the command."""
        if b'"piece"' in stdin:
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
    for file in (await files.matching(["*"])).files:
        await files.fetch(file, tmp_path / "here/deep" / file.name)

    assert (tmp_path / "here/deep/a.bin").read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "here/deep").iterdir()) == ["a.bin", "empty"]


@pytest.mark.parametrize("name", ["x" * 250, "x" * 255, "ü" * 127, ".x", "a b\t'"])
async def test_a_name_of_any_length_comes(name: str, files: NodeFiles, there: Path, tmp_path: Path) -> None:
    (there / name).write_bytes(b"content")
    (file,) = (await files.matching(["*", ".*"])).files
    await files.fetch(file, tmp_path / "here" / file.name)

    assert [path.name for path in (tmp_path / "here").iterdir()] == [name]


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
    with pytest.raises(FetchError, match=r"a\.log on node 3 changed while it was read, twice"):
        await files.fetch(file, tmp_path / "here/a.log")
    assert list((tmp_path / "here").iterdir()) == []

    transport.meddle = lambda: (there / "a.log").unlink(missing_ok=True)
    (file,) = (await files.matching(["a.log"])).files
    with pytest.raises(FetchError, match="was removed while it was read"):
        await files.fetch(file, tmp_path / "here/a.log")


class Lying(LocalTransport):
    """A transport to a machine that answers as it likes.

    Attributes:
        answers: its answers, by verb.
    """

    answers: Mapping[str, object] = {}

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        """Answer without running anything."""
        return Completed(exit_code=0, stdout=json.dumps(self.answers[json.loads(stdin)["verb"]]), stderr="")


@pytest.mark.parametrize("name", ["../a.bin", "/etc/a.bin", "conftest.py", ".a.bin", "deep/a.bin", "a\0.bin", ""])
async def test_a_node_cannot_choose_the_names_of_files_here(name: str, tmp_path: Path) -> None:
    liar = Lying(LocalAccess(address="127.0.0.1", workdir=str(tmp_path)))
    files = NodeFiles(liar, python="python", folder="files", node=3)
    liar.answers = {"listing": {"files": {name: [1, 2, 3]}, "outside": [], "unmatched": [], "there": [], "all": 0}}

    with pytest.raises(FetchError, match="node 3 names a file that was not asked for"):
        await files.matching(["*.bin"])


@pytest.mark.parametrize("sent", [b"", b"ab", b"abcd"])
async def test_a_piece_of_another_size_is_an_error_and_leaves_nothing(sent: bytes, tmp_path: Path) -> None:
    liar = Lying(LocalAccess(address="127.0.0.1", workdir=str(tmp_path)))
    files = NodeFiles(liar, python="python", folder="files", node=3)
    liar.answers = {"piece": {"data": base64.b64encode(sent).decode()}}

    with pytest.raises(FetchError, match=r"sent . bytes of a\.bin where 3 were due"):
        await files.fetch(NodeFile(name="a.bin", facts=(3, 0, 0)), tmp_path / "here/a.bin")
    assert list((tmp_path / "here").iterdir()) == []
