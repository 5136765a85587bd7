"""The copy of a call's checkpoint is whole, whatever happens to its node while it is made, and goes to the next one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.errors import SkywardError, UnreachableError
from skyward.fleet.checkpoints import CheckpointCopy, NodeCheckpoints
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport
from skyward.scheduling.checkpoints import Checkpoint

NAME = "0123456789abcdef" * 2


class WatchedTransport(LocalTransport):
    """A transport to a machine, where something happens before each piece of a file is read, and each file is put.

    Attributes:
        read: names of the files of which pieces were read.
        put_paths: paths of the files that were put.
        meddle: what happens.
    """

    def __init__(self, access: LocalAccess) -> None:
        super().__init__(access)
        self.read: list[str] = []
        self.put_paths: list[str] = []
        self.meddle: Callable[[], object] = lambda: None

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        order = json.loads(bytes(stdin)) if stdin else {}
        if order.get("verb") == "piece":
            self.meddle()
            self.read.append(order["name"])
        return await super().run(argv, env=env, stdin=stdin, timeout_s=timeout_s)

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        self.meddle()
        await super().put(data, path, mode=mode)
        self.put_paths.append(path)


class FakeNode:
    """A node on this machine, of which a checkpoint needs only the files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.linked = rank, True
        self.access = LocalAccess(address="127.0.0.1", workdir=str(folder))
        self.transport = WatchedTransport(self.access)
        self.place = folder / "checkpoints" / NAME

    def checkpoints(self) -> NodeCheckpoints:
        return NodeCheckpoints(
            transport=self.transport,
            python=sys.executable,
            folder=f"{self.access.workdir}/checkpoints",
            instance_id=f"machine-{self.rank}",
            node=self.rank,
        )

    def write(self, step: int) -> None:
        """Write the checkpoint of a step, beside one that stays as it is."""
        folder = self.place / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "state").write_text(str(step))
        (folder / ".hidden").touch(mode=0o640)
        (self.place / "config").touch()
        (self.place / "latest").unlink(missing_ok=True)
        (self.place / "latest").symlink_to(folder.name)


class Copied:
    """A checkpoint of a call on the first of three nodes."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second, self.third = (FakeNode(folder / f"node-{rank}", rank) for rank in range(3))
        self.here, self.troubles = folder / "here", list[str]()
        self.checkpoint = Checkpoint(NAME, self.seen(self.first), self.here, report=self.troubles.append)

    @staticmethod
    def seen(node: FakeNode) -> Any:
        return node

    async def refresh(self) -> None:
        self.checkpoint.refresh()
        while (task := self.checkpoint._fetching) is not None and not task.done():
            await task

    async def move(self, node: FakeNode) -> int:
        return await self.checkpoint.move(self.seen(node))

    async def drop(self, *, stays_on_node: bool) -> None:
        self.checkpoint.drop(stays_on_node=stays_on_node)
        assert self.checkpoint._removal is not None
        await self.checkpoint._removal

    def copies(self) -> list[Path]:
        return [*self.here.glob(f"{NAME}-*/*")]


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def content(folder: Path) -> dict[str, str | int]:
    """Return what is in a folder: text and mode of files, targets of links."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else f"{path.read_text()} {path.stat().st_mode & 0o777:o}"
        for path in paths
    }


async def test_a_checkpoint_goes_on_to_each_next_node_as_it_is(copied: Copied) -> None:
    copied.first.write(10)
    await copied.refresh()
    copied.first.linked = False
    assert await copied.move(copied.second) == 3
    assert content(copied.second.place) == content(copied.first.place)
    copied.second.write(20)
    written = content(copied.second.place)
    assert await copied.move(copied.third) == 5, "it was fetched from a node that still answers"
    assert content(copied.third.place) == written
    assert not copied.second.place.exists()
    assert copied.checkpoint.is_on(copied.seen(copied.third))
    await copied.drop(stays_on_node=False)
    assert [*copied.here.iterdir()] == []
    assert copied.third.place.exists(), "its worker removes it"


async def test_a_call_that_ends_with_its_worker_leaves_nothing_on_its_node(copied: Copied) -> None:
    copied.first.write(10)
    await copied.refresh()
    await copied.drop(stays_on_node=True)
    assert not copied.first.place.exists()
    assert [*copied.here.iterdir()] == []


async def test_another_process_goes_on_with_a_copy_and_leaves_what_was_cut_off(copied: Copied, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    copied.first.write(10)
    await CheckpointCopy(NAME, folder).fetch(copied.first.checkpoints())
    (folder / "2.part" / NAME / "step-20").mkdir(parents=True)
    again = CheckpointCopy(NAME, folder)
    assert await again.put(copied.second.checkpoints()) == 3
    assert content(copied.second.place) == content(copied.first.place)
    copied.second.write(20)
    await again.fetch(copied.second.checkpoints())
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert content(folder / "2" / NAME) == content(copied.second.place)


async def test_only_what_has_changed_is_fetched_also_after_a_move(copied: Copied) -> None:
    copied.first.write(10)
    await copied.refresh()
    copied.first.transport.read.clear()
    copied.first.write(20)
    await copied.refresh()
    assert copied.first.transport.read == [f"{NAME}/step-20/state"]
    await copied.move(copied.second)
    await copied.refresh()
    assert copied.second.transport.read == []
    assert len(copied.copies()) == 1, "the one before is removed"


async def test_a_copy_during_which_the_content_changes_leaves_the_last_one_whole(copied: Copied) -> None:
    copied.first.write(10)
    await copied.refresh()
    copied.first.write(20)
    copied.first.transport.meddle = lambda: (copied.first.place / "step-20" / "state").write_text("20" * 9)
    await copied.refresh()
    assert copied.troubles == []
    copied.first.linked = False
    assert await copied.move(copied.second) == 3
    assert (copied.second.place / "latest" / "state").read_text() == "10"


async def test_a_checkpoint_that_is_replaced_all_the_time_is_copied_as_it_was_at_one_moment(copied: Copied) -> None:
    copied.first.write(10)
    steps = iter(range(11, 100))

    def rename_another() -> None:
        part = copied.first.place / "part"
        part.write_text(str(next(steps)))
        part.rename(copied.first.place / "step-10" / "state")

    copied.first.transport.meddle = rename_another
    await copied.refresh()
    assert copied.troubles == []
    assert [path.name for path in copied.first.place.parent.iterdir()] == [NAME], "no snapshot stays"
    copied.first.linked = False
    assert await copied.move(copied.second) == 3
    assert (copied.second.place / "latest" / "state").read_text() == "10"


async def test_a_disk_without_links_is_read_in_place(copied: Copied, tmp_path: Path) -> None:
    copied.first.write(10)
    (copied.first.place.parent / f".{NAME}").touch()  # nothing can be made there
    await copied.refresh()
    assert len(copied.copies()) == 1


async def test_one_that_can_never_be_copied_is_reported_once(copied: Copied) -> None:
    copied.first.write(10)
    sizes = iter(range(1, 100))
    copied.first.transport.meddle = lambda: (copied.first.place / "step-10" / "state").write_text("1" * next(sizes))
    for _ in range(5):
        await copied.refresh()
    (trouble,) = copied.troubles
    assert "changed while it was read, twice" in trouble
    assert copied.copies() == []


async def test_a_call_that_lost_its_node_before_the_first_copy_begins_with_an_empty_folder(copied: Copied) -> None:
    copied.second.write(10)  # left from an earlier run there
    copied.first.linked = False
    assert await copied.move(copied.second) == 0
    assert not copied.second.place.exists()


async def test_a_node_that_takes_no_content_keeps_none_of_it(copied: Copied) -> None:
    def fail() -> None:
        if copied.second.transport.put_paths:
            raise OSError(28, "No space left on device")

    copied.first.write(10)
    await copied.refresh()
    copied.second.transport.meddle = fail
    with pytest.raises(OSError, match="No space left"):
        await copied.move(copied.second)
    assert not copied.second.place.exists()
    assert copied.checkpoint.is_on(copied.seen(copied.first))
    assert await copied.move(copied.third) == 3


async def test_a_move_to_a_node_that_hangs_gives_way_to_the_next(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        began.set()
        await asyncio.Event().wait()

    copied.first.write(10)
    await copied.refresh()
    monkeypatch.setattr(copied.second.transport, "put", hang)
    waiting = asyncio.ensure_future(copied.move(copied.second))
    await began.wait()
    assert await copied.move(copied.third) == 3
    assert await asyncio.gather(waiting, return_exceptions=True) != [3]
    assert copied.checkpoint.is_on(copied.seen(copied.third))


async def test_a_node_that_is_lost_while_it_is_asked_keeps_no_call_waiting(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied.first.write(10)
    await copied.refresh()

    async def lose(*_: object, **__: object) -> Completed:
        copied.first.linked = False
        raise UnreachableError("the machine is gone")

    monkeypatch.setattr(copied.first.transport, "run", lose)
    assert await copied.move(copied.second) == 3


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 32, NAME + "\n"])
def test_a_worker_that_names_another_folder_is_refused(name: str, tmp_path: Path) -> None:
    node: Any = SimpleNamespace()
    with pytest.raises(ValueError, match="is no name of a checkpoint"):
        Checkpoint(name, node, tmp_path, report=print)


async def test_a_command_that_fails_on_the_node_is_an_error(copied: Copied) -> None:
    copied.first.write(10)
    await copied.refresh()
    Path(copied.second.access.workdir).mkdir()
    (Path(copied.second.access.workdir) / "checkpoints").touch()
    with pytest.raises(SkywardError, match=r"mkdir on node 1 failed: .*[Nn]ot a directory"):
        await copied.move(copied.second)
