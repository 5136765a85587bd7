"""Segments of memory for results that the client maps: what is kept, used again and removed."""

from __future__ import annotations

import mmap
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyward.node.worker import shared_results
from skyward.node.worker.shared_results import SharedResults

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def segments(tmp_path: Path) -> SharedResults:
    return SharedResults(tmp_path, "result-0-")


@pytest.fixture
def little_room() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(byte: bytes, nbytes: int = SIZE) -> memoryview:
    return memoryview(byte * nbytes)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_parts_of_a_result_lie_where_arrays_may_begin(segments: SharedResults, tmp_path: Path) -> None:
    name = segments.store([content(b"a", 10), content(b"b", SIZE)])
    assert (tmp_path / name).read_bytes() == (b"a" * 10).ljust(64, bytes(1)) + b"b" * SIZE


def test_a_segment_is_written_again_only_after_its_release(segments: SharedResults, tmp_path: Path) -> None:
    first, second = segments.store([content(b"a")]), segments.store([content(b"b")])
    segments.release([first, "unknown"], reusable=True)
    assert segments.store([content(b"c", SIZE - 1)]) == first
    assert (tmp_path / first).read_bytes()[: SIZE - 1] == b"c" * (SIZE - 1)
    assert (tmp_path / second).read_bytes() == b"b" * SIZE


def test_a_segment_is_not_used_for_a_result_of_less_than_half_its_size(segments: SharedResults) -> None:
    first = segments.store([content(b"a")])
    segments.release([first], reusable=True)
    assert segments.store([content(b"b", SIZE // 3)]) != first


def test_a_segment_that_another_process_may_read_is_removed(segments: SharedResults, tmp_path: Path) -> None:
    first = segments.store([content(b"a")])
    segments.release([first], reusable=False)
    assert files(tmp_path) == set()
    assert segments.store([content(b"b")]) != first


def test_free_segments_have_a_bound(segments: SharedResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_results, "_FREE_BYTES", 2 * SIZE)
    names = [segments.store([content(b"a")]) for _ in range(3)]
    segments.release(names, reusable=True)
    assert files(tmp_path) == set(names[:2])


def test_free_segments_are_removed_after_a_while(
    segments: SharedResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, free = segments.store([content(b"a")]), segments.store([content(b"b")])
    segments.release([free], reusable=True)
    segments.trim()
    assert files(tmp_path) == {used, free}
    monkeypatch.setattr(shared_results, "_FREE_S", -1.0)
    segments.trim()
    assert files(tmp_path) == {used}


@pytest.mark.parametrize("limit_bytes", [0, 16 * SIZE])
def test_a_segment_beyond_the_bound_of_mappings_is_mapped_again(
    segments: SharedResults, tmp_path: Path, limit_bytes: int
) -> None:
    names = [segments.store([content(b"a")], limit_bytes) for _ in range(2)]
    segments.release(names, reusable=True)
    again = [segments.store([content(byte)], limit_bytes) for byte in (b"b", b"c")]
    assert set(again) == set(names)
    assert [(tmp_path / name).read_bytes() for name in again] == [b"b" * SIZE, b"c" * SIZE]


def test_all_segments_of_the_place_go_with_their_client(segments: SharedResults, tmp_path: Path) -> None:
    for name in ("result-0-of-a-process-before", "result-1-of-another-worker"):
        (tmp_path / name).touch()
    (tmp_path / "result-0-folder-of-a-call").mkdir()
    segments.release([segments.store([content(b"a")])], reusable=True)
    segments.store([content(b"b")])
    segments.clear()
    assert files(tmp_path) == {"result-1-of-another-worker", "result-0-folder-of-a-call"}


@pytest.mark.usefixtures("little_room")
def test_a_result_that_no_file_can_hold_is_not_shared(segments: SharedResults, tmp_path: Path) -> None:
    assert not segments.store([content(b"a")])
    assert files(tmp_path) == set()
    assert segments.store([content(b"a", SIZE - 64)])


def test_a_result_leaves_half_of_the_folders_room_to_others(
    segments: SharedResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=2 * SIZE - 1))
    assert not segments.store([content(b"a")])


@pytest.mark.parametrize("limit_bytes", [0, 1], ids=["stayed mapped", "not mapped"])
def test_a_file_that_user_code_has_removed_is_not_used_again(
    segments: SharedResults, tmp_path: Path, limit_bytes: int
) -> None:
    name = segments.store([content(b"a")], limit_bytes)
    segments.release([name], reusable=True)
    (tmp_path / name).unlink()
    other = segments.store([content(b"b")], limit_bytes)
    assert files(tmp_path) == {other}
    assert (tmp_path / other).read_bytes() == b"b" * SIZE
