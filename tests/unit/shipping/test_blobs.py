from __future__ import annotations

import asyncio
import errno
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from skyward.errors import SkywardError
from skyward.machine.access import Completed
from skyward.shipping.blobs import Blob, NodeBlobs, identify
from skyward.submission import ArgumentMemo

MIB = 1 << 20


@dataclass
class Place:
    blob_dir: str = "/memory"
    blob_dir_disk: str = "/disk"
    blob_budget_bytes: int = 10 * MIB


@dataclass
class FakeNode:
    """A transport that keeps files in a dict."""

    files: dict[str, int] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    removals: int = 0

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        assert isinstance(data, memoryview)
        await asyncio.sleep(0)
        self.puts.append(path)
        self.files[path] = data.nbytes

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        assert argv[:2] == ["rm", "-f"]
        self.removals += 1
        for path in argv[2:]:
            del self.files[path]
        return Completed(exit_code=0, stdout="", stderr="")


def blobs_on(files: FakeNode) -> NodeBlobs:
    return NodeBlobs(cast("Any", SimpleNamespace(ready=Place(), transport=files)))


def blob_of(number: int, mib: int = 4) -> Blob:
    array = np.full(mib * MIB, number, dtype="u1")
    (blob,) = identify([memoryview(array)], ArgumentMemo())
    return blob


def test_equal_content_has_one_name_and_other_content_another() -> None:
    assert blob_of(1).id == blob_of(1).id != blob_of(2).id


def test_a_memo_hashes_an_array_once_and_only_for_its_lifetime() -> None:
    array = np.zeros(2 * MIB, dtype="u1")
    memo = ArgumentMemo()
    (first,) = identify([memoryview(array)], memo)
    array[0] = 1
    assert identify([memoryview(array)], memo)[0] is first
    assert identify([memoryview(array)], ArgumentMemo())[0].id != first.id


def test_read_only_arrays_are_known_to_the_memo_too() -> None:
    array = np.zeros(2 * MIB, dtype="u1")
    array.flags.writeable = False
    memo = ArgumentMemo()
    first, second = identify([memoryview(array), memoryview(array)], memo)
    assert first is second


async def use(blobs: NodeBlobs, *wanted: Blob) -> None:
    blobs.release(await blobs.hold(wanted))


async def test_a_blob_is_put_once_even_when_two_calls_want_it_at_once() -> None:
    node, blob = FakeNode(), blob_of(1)
    blobs = blobs_on(node)
    await asyncio.gather(blobs.hold([blob]), blobs.hold([blob]))
    assert blobs.hold_present([blob]) is not None
    assert node.puts == [f"/memory/{blob.id}"]


async def test_a_blob_on_its_way_is_not_present() -> None:
    blobs, blob = blobs_on(FakeNode()), blob_of(1)
    arriving = asyncio.ensure_future(blobs.hold([blob]))
    await asyncio.sleep(0)
    assert blobs.hold_present([blob]) is None
    await arriving
    assert blobs.hold_present([blob]) is not None


async def test_the_least_recently_used_blob_goes_first() -> None:
    node = FakeNode()
    blobs = blobs_on(node)
    old, used, new = blob_of(1), blob_of(2), blob_of(3)
    for blob in (old, used, old, new):
        await use(blobs, blob)
    assert sorted(node.files) == sorted([f"/memory/{old.id}", f"/memory/{new.id}"])


async def test_small_blobs_are_removed_together() -> None:
    node = FakeNode()
    blobs = blobs_on(node)
    arrays = [np.full(256 << 10, number, dtype="u1") for number in range(80)]
    for blob in identify(map(memoryview, arrays), ArgumentMemo()):
        await use(blobs, blob)
    assert sum(node.files.values()) <= 10 * MIB
    assert 1 <= node.removals <= 20


async def test_blobs_in_use_stay_and_others_go_to_disk() -> None:
    node = FakeNode()
    blobs = blobs_on(node)
    held = [blob_of(1), blob_of(2)]
    await blobs.hold(held)
    await use(blobs, blob_of(3), blob_of(4, mib=20))
    assert blobs.hold_present(held) is not None
    assert {path.split("/")[1] for path in node.files} == {"memory", "disk"}
    assert sum(path.startswith("/memory") for path in node.files) == 2


async def test_the_arguments_of_one_call_do_not_push_each_other_out() -> None:
    node = FakeNode()
    wanted = [blob_of(number) for number in range(4)]
    held = await blobs_on(node).hold(wanted)
    assert len(held) == len(node.files) == 4


async def test_blobs_that_arrive_together_stay_within_the_budget() -> None:
    node = FakeNode()
    blobs = blobs_on(node)
    await asyncio.gather(*(blobs.hold([blob_of(number)]) for number in range(10)))
    assert sum(size for path, size in node.files.items() if path.startswith("/memory")) <= 10 * MIB


async def test_a_forgotten_blob_is_put_again() -> None:
    node, blob = FakeNode(), blob_of(1)
    blobs = blobs_on(node)
    first = await blobs.hold([blob])
    blobs.forget([blob.id])
    second = await blobs.hold([blob])
    blobs.release(first)
    assert second[0].users == 1
    assert len(node.puts) == 2


async def test_an_argument_changed_after_submission_is_an_error() -> None:
    array = np.zeros(2 * MIB, dtype="u1")
    (blob,) = identify([memoryview(array)], ArgumentMemo())
    array[5] = 1
    node = FakeNode()
    with pytest.raises(SkywardError, match="changed after its call was submitted"):
        await blobs_on(node).hold([blob])
    assert node.files == {}


def test_a_memo_keeps_no_array_alive() -> None:
    memo = ArgumentMemo()
    array = np.zeros(2 * MIB, dtype="u1")
    gone = weakref.ref(array)
    identify([memoryview(array)], memo)
    del array
    assert gone() is None


async def test_what_finds_no_room_in_memory_after_all_goes_to_disk() -> None:
    node = FakeNode()
    put = node.put

    async def full_memory(data: memoryview, path: str, *, mode: int = 0o600) -> None:
        if path.startswith("/memory"):
            raise OSError(errno.ENOSPC, "no space left")
        await put(data, path, mode=mode)

    node.put = full_memory  # type: ignore[method-assign, assignment]
    blob = blob_of(1)
    (stored,) = await blobs_on(node).hold([blob])
    assert node.files == {stored.path: 4 * MIB}
    assert (stored.path, stored.in_memory) == (f"/disk/{blob.id}", False)
