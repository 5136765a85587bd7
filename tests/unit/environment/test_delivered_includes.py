"""Files of an image on their way into a node's folder."""

from __future__ import annotations

import asyncio
import os
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from skyward.environment.image import Image
from skyward.environment.includes_and_volumes import deliver_includes
from skyward.errors import BootstrapError, UnreachableError
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport


class Node(LocalTransport):
    """A node of this machine, whose link drops as often as the test says, after the command has run."""

    def __init__(self, folder: Path, drops: int = 0) -> None:
        super().__init__(LocalAccess(address="127.0.0.1", workdir=str(folder / "node")))
        self.files = folder / "node" / "files"
        self.drops = drops

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        completed = await super().run(argv, env=env, stdin=stdin, timeout_s=timeout_s)
        if self.drops:
            self.drops -= 1
            raise UnreachableError("the link is down")
        return completed

    async def take(self, *includes: str, python: str = sys.executable) -> None:
        image = Image(includes=includes)
        await deliver_includes(image, self, folder=str(self.files), python=python, node=1)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "pkg" / "a.sh").write_text("echo 1")
    (project / "pkg" / "a.sh").chmod(0o750)
    (project / "pkg" / "b").symlink_to("a.sh")
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize(
    ("name", "mode", "arrives"),
    [
        ("a.sh", 0o755, 0o755),
        ("a.sh", 0o640, 0o640),
        ("a.sh", 0o444, 0o444),
        ("a.sh", 0o6775, 0o775),
        ("a.sh", 0o400, 0o400),
        (".", 0o700, 0o700),
        (".", 0o3555, 0o755),
    ],
)
async def test_files_arrive_as_they_were_and_folders_can_be_written(
    name: str, mode: int, arrives: int, tmp_path: Path, project: Path
) -> None:
    node = Node(tmp_path)
    (project / "pkg" / name).chmod(mode)

    await node.take("pkg")

    arrived = node.files / "pkg"
    assert (arrived / "b").read_text() == "echo 1"
    assert (arrived / "b").readlink() == Path("a.sh")
    assert (arrived / name).stat().st_mode & 0o7777 == arrives


async def test_a_read_only_file_of_a_former_attempt_is_replaced_not_opened(tmp_path: Path, project: Path) -> None:
    node = Node(tmp_path)
    (project / "pkg" / "a.sh").chmod(0o444)
    await node.take("pkg")
    os.link(node.files / "pkg" / "a.sh", tmp_path / "former")
    (project / "pkg" / "a.sh").write_text("echo 2")

    await node.take("pkg")

    assert ((node.files / "pkg" / "a.sh").read_text(), (tmp_path / "former").read_text()) == ("echo 2", "echo 1")


async def test_files_are_read_anew_each_time(tmp_path: Path, project: Path) -> None:
    node = Node(tmp_path)
    await node.take("pkg")
    (project / "pkg" / "a.sh").write_text("echo 2")

    await node.take("pkg")

    assert (node.files / "pkg" / "a.sh").read_text() == "echo 2"


async def test_nodes_that_are_prepared_at_the_same_time_get_one_archive(tmp_path: Path, project: Path) -> None:
    (project / "pkg" / "data").write_bytes(os.urandom(8 << 20))
    nodes = [Node(tmp_path / f"{number}") for number in range(8)]

    tracemalloc.start()
    await asyncio.gather(*(node.take("pkg") for node in nodes))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    data = (project / "pkg" / "data").read_bytes()
    assert all((node.files / "pkg" / "data").read_bytes() == data for node in nodes)
    assert most < 8 << 20


async def test_a_link_that_drops_costs_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, drops=2)

    await node.take("pkg")

    assert (node.files / "pkg" / "a.sh").read_text() == "echo 1"


async def test_nothing_included_is_nothing_done(tmp_path: Path) -> None:
    node = Node(tmp_path, drops=1)

    await node.take()

    assert (node.drops, node.files.exists()) == (1, False)


async def test_a_folder_that_cannot_be_written_is_an_error_with_what_was_said(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.files.parent.mkdir()
    node.files.touch()

    with pytest.raises(BootstrapError, match=r"cannot be unpacked into .*/files of node 1") as raised:
        await node.take("pkg")

    assert raised.value.step == "skyward"
    assert "Error" in raised.value.log_tail


async def test_files_that_have_gone_since_they_were_checked_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(BootstrapError, match=r"cannot be sent to node 1: includes\[0\] \('gone'\) does not exist"):
        await Node(tmp_path).take("gone")
