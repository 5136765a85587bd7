"""Files of nodes that are about to end, and files that have no room here."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.environment.image import Image
from skyward.errors import FetchError, UnreachableError
from skyward.events import Notice
from skyward.fleet.node_files import NodeFile, NodeListing
from skyward.fleet.outputs import Outputs, fetch_files
from skyward.request.request import parse_request


class Files:
    """Files of a node, of which some cannot be read."""

    left_out: Mapping[str, str] = {}

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    async def matching(self, patterns: list[str]) -> NodeListing:
        """All of them, for any pattern."""
        files = tuple(NodeFile(name=name, facts=(size, 0, 0, 0o644)) for name, size in self.sizes.items())
        unmatched = () if files else tuple(patterns)
        return NodeListing(
            files=files, folders={}, links={}, left_out=self.left_out, unmatched=unmatched, there=(), others=0
        )

    async def fetch(self, file: NodeFile, path: Path) -> None:
        """Write it, unless its name says that the link breaks."""
        if file.name == "broken":
            raise UnreachableError("no answer")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class Node(SimpleNamespace):
    """A node with such files, which sets ``stopped`` when it is stopped."""

    def __init__(self, rank: int, files: Files, *, linked: bool = True) -> None:
        super().__init__(
            rank=rank, linked=linked, lanes=("lane",), instance=SimpleNamespace(id=f"i-{rank}"), stopped=asyncio.Event()
        )
        self.working_files = lambda: files

    async def stop(self, timeout_s: float) -> None:
        self.stopped.set()


node: Any = Node


async def test_files_without_room_here_are_refused_before_any_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    with pytest.raises(FetchError, match=r"the files have 10\.0 GB, and .* has room for 3\.0 GB only"):
        await fetch_files([node(0, Files(large=10**10))], ["*"], tmp_path / "to", apart=False)
    assert not (tmp_path / "to").exists()


async def test_outputs_are_as_complete_as_possible_and_a_notice_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    published: list[Any] = []
    outputs = Outputs(parse_request(image=Image(outputs=["*"])), "sky-1", published.append)
    monkeypatch.chdir("/")
    gone = node(1, Files(never=1), linked=False)
    nodes = [node(0, Files(a=1, broken=2, later=4)), gone, node(2, Files()), node(3, Files(never=1), linked=False)]
    await outputs.rescue_and_stop(nodes)

    assert all(each.stopped.is_set() for each in nodes)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "outputs/sky-1/0/a"
    ]
    assert published == [
        Notice("outputs of nodes 1, 3 are lost: gone before their end", "i-1"),
        Notice(
            f"outputs in {tmp_path}/outputs/sky-1: 0/a (7 B); broken (2 B) of node 0 was not fetched: no answer; "
            "nor were 1 more of node 0"
        ),
    ]


async def test_what_is_left_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = Files(a=1)
    files.left_out = {"run\n1/socket": "a socket"}
    published: list[Any] = []
    outputs = Outputs(parse_request(image=Image(outputs=["*"])), "sky-1", published.append)
    await outputs.rescue_and_stop([node(0, files)])

    left_out = r"'run\n1/socket' on node 0 (a socket)"
    assert [each.message for each in published] == [
        f"outputs in {tmp_path}/outputs/sky-1: 0/a (1 B); left out: {left_out}"
    ]
    assert (await fetch_files([node(0, files)], ["*"], tmp_path, apart=False)).left_out == [left_out]
    files.sizes = {}
    with pytest.raises(FetchError, match=r"no file matches 'run\*'.*Left out: .*a socket.*Have a call copy"):
        await fetch_files([node(0, files)], ["run*"], tmp_path, apart=False)


async def test_without_outputs_nothing_is_asked() -> None:
    published = list[Any]()
    bare = node(0, Files(a=1))
    del bare.working_files
    await Outputs(parse_request(), "sky-1", published.append).rescue_and_stop([bare])
    assert published == []
    assert bare.stopped.is_set()


async def test_a_node_stops_as_soon_as_its_own_files_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = node(0, Files(a=1))

    class Slow(Files):
        async def fetch(self, file: NodeFile, path: Path) -> None:
            await first.stopped.wait()
            await super().fetch(file, path)

    published: list[Any] = []
    outputs = Outputs(parse_request(image=Image(outputs=["*"])), "sky-1", published.append)
    await asyncio.wait_for(outputs.rescue_and_stop([first, node(1, Slow(b=1))]), 30)
    assert [each.message for each in published] == [f"outputs in {tmp_path}/outputs/sky-1: 0/a, 1/b (2 B)"]


class Endless(Files):
    """Files that never come."""

    async def fetch(self, file: NodeFile, path: Path) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


@pytest.mark.parametrize(("max_cost", "longest"), [(None, 600), (1.0, 30)])
async def test_outputs_delay_the_end_of_a_bill_no_longer_than_this(
    max_cost: float | None, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, asked, published = asyncio.timeout, list[float | None](), list[Any]()

    def at_once(longest_s: float | None) -> asyncio.Timeout:
        asked.append(longest_s)
        return timeout(0)

    monkeypatch.setattr(asyncio, "timeout", at_once)
    request = parse_request(image=Image(outputs=["*"]), max_cost=max_cost)
    await Outputs(request, "sky-1", published.append).rescue_and_stop([node(0, Endless(a=1))])

    assert asked == [longest]
    assert published[0].message == f"no outputs were fetched; outputs of node 0 are incomplete after {longest} s"
