"""Blobs as a worker maps them: what a call wrote or kept never shows in the next one."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from skyward.node.worker.mapped_blobs import MappedBlobs

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="mappings are kept where the kernel tells of writes")


@pytest.fixture
def blobs(tmp_path: Path) -> MappedBlobs:
    for name in ("a", "b"):
        np.arange(100_000.0).tofile(tmp_path / name)
    return MappedBlobs([tmp_path / "elsewhere", tmp_path])


def array(view: memoryview) -> np.ndarray:
    return np.frombuffer(view)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@linux_only
def test_a_mapping_that_was_only_read_serves_the_next_call(blobs: MappedBlobs) -> None:
    (view,) = blobs.map(["a"])
    first = address(view)
    assert array(view).sum() == np.arange(100_000.0).sum()
    del view
    (again,) = blobs.map(["a"])
    assert address(again) == first
    assert array(again)[7] == 7


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_what_a_call_wrote_is_gone_in_the_next_one(blobs: MappedBlobs, place: int) -> None:
    (view,) = blobs.map(["a"])
    array(view)[place] = -1
    del view
    (again,) = blobs.map(["a"])
    assert array(again)[place] == place


def test_kernel_that_counts_no_faults_is_not_relied_on(blobs: MappedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.node.worker.mapped_blobs._page_faults", lambda: 0)
    blobs = MappedBlobs(blobs._folders)
    array(blobs.map(["a"])[0])[5] = -1
    assert array(blobs.map(["a"])[0])[5] == 5


def test_what_a_call_still_holds_is_not_shared_with_the_next_one(blobs: MappedBlobs) -> None:
    held = array(blobs.map(["a"])[0])
    other = array(blobs.map(["a"])[0])
    held[3] = -1
    assert other[3] == 3
    other[4] = -1
    assert held[4] == 4


def test_two_arguments_of_equal_content_are_two_arrays(blobs: MappedBlobs) -> None:
    for _ in range(2):
        one, two = map(array, blobs.map(["a", "a"]))
        one[0] = -1
        assert two[0] == 0
        del one, two


@linux_only
def test_only_the_last_calls_mappings_are_kept(blobs: MappedBlobs) -> None:
    def mapped() -> str:
        return Path("/proc/self/maps").read_text()

    folder = str(blobs._folders[1])
    blobs.map(["a"])
    assert f"{folder}/a" in mapped()
    blobs.map(["b"])
    assert f"{folder}/a" not in mapped()
    assert f"{folder}/b" in mapped()


def test_a_blob_that_is_not_here_is_named(blobs: MappedBlobs) -> None:
    assert blobs.missing(["a", "c"]) == ["c"]
    with pytest.raises(FileNotFoundError, match="c"):
        blobs.map(["c"])


@linux_only
def test_mappings_are_let_go(blobs: MappedBlobs) -> None:
    blobs.map(["a"])
    assert blobs.holds_any
    blobs.let_go()
    assert not blobs.holds_any
    assert f"{blobs._folders[1]}/a" not in Path("/proc/self/maps").read_text()


def test_a_blob_that_goes_at_the_last_moment_is_named(blobs: MappedBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "_find", lambda _: Path("/nowhere/at/all"))
    with pytest.raises(FileNotFoundError, match=r"^a$"):
        blobs.map(["a"])
