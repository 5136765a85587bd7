"""Results in memory that a worker shares: how long it stays the client's, and when it may be written again."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest

from skyward.scheduling import mapped_results
from skyward.scheduling.mapped_results import MappedResults
from skyward.wire.messages import ReleaseSegments


class Lane:
    """Receives what is released."""

    def __init__(self) -> None:
        self.released: list[ReleaseSegments] = []

    def send(self, item: ReleaseSegments) -> None:
        self.released.append(item)


@pytest.fixture
def lane() -> Lane:
    return Lane()


@pytest.fixture
def results(lane: Lane, tmp_path: Path) -> MappedResults:
    (tmp_path / "one").write_bytes(b"ab".ljust(64, b"-") + b"cdef".ljust(64, b"-") + b"x" * 100)
    return MappedResults(str(tmp_path), lane.send)


def test_parts_are_writable_and_their_file_stays_as_it_is(results: MappedResults, tmp_path: Path) -> None:
    first, second = results.open("one", [2, 4])
    second[0] = ord("z")
    assert (bytes(first), bytes(second)) == (b"ab", b"zdef")
    assert (tmp_path / "one").read_bytes()[64:68] == b"cdef"


def test_a_segment_is_released_with_the_last_view_of_it(results: MappedResults, lane: Lane) -> None:
    first, second = results.open("one", [2, 4])
    part = second[1:]
    del first, second
    gc.collect()
    assert not lane.released
    assert bytes(part) == b"def"
    del part
    gc.collect()
    assert lane.released == [ReleaseSegments(["one"], reusable=True)]


def test_a_segment_that_a_forked_child_may_read_is_not_written_again(results: MappedResults, lane: Lane) -> None:
    parts = results.open("one", [6])
    if (child := os.fork()) == 0:
        del parts
        gc.collect()
        os._exit(len(lane.released))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del parts
    later = results.open("one", [6])
    del later
    gc.collect()
    assert lane.released == [ReleaseSegments(["one"], reusable=False), ReleaseSegments(["one"], reusable=True)]


def test_views_outlive_the_lane_and_do_not_keep_it(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc".ljust(64, b"-"))
    lane = Lane()
    (part,) = MappedResults(str(tmp_path), lane.send).open("one", [3])
    released = lane.released
    del lane
    gc.collect()
    (tmp_path / "one").unlink()
    assert bytes(part) == b"abc"
    del part
    gc.collect()
    assert not released


@pytest.mark.parametrize("name", ["missing", "../other/one"])
def test_a_segment_that_is_not_there_is_an_error_and_released(
    results: MappedResults, lane: Lane, tmp_path: Path, name: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/one").write_bytes(b"secret")
    (tmp_path / "one").unlink()
    with pytest.raises(FileNotFoundError, match="cannot be mapped"):
        results.open(name, [3])
    assert lane.released == [ReleaseSegments([name], reusable=True)]


def test_a_client_without_descriptors_gets_an_error(results: MappedResults) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        results.open("one", [6])
    except OSError as error:
        refused = error
    else:
        raise AssertionError("it was opened")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "Too many open files" in str(refused)


@pytest.mark.parametrize("most_mappings", [1, 0], ids=["mapped", "copied"])
def test_a_segment_that_is_too_short_is_an_error(
    results: MappedResults, lane: Lane, most_mappings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_results, "_MOST_MAPPINGS", most_mappings)
    with pytest.raises(OSError, match="cannot be mapped"):
        results.open("one", [1 << 20])
    assert lane.released == [ReleaseSegments(["one"], reusable=True)]


def test_results_beyond_the_bound_of_mappings_are_copied_and_hold_no_descriptor(
    results: MappedResults, lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_results, "_MOST_MAPPINGS", 1)
    mapped = results.open("one", [2, 4])
    descriptors = len(os.listdir("/proc/self/fd"))
    copied = results.open("one", [2, 4])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert lane.released == [ReleaseSegments(["one"], reusable=True)]
    (tmp_path / "one").write_bytes(bytes(200))  # as the worker may from now on
    copied[0][0] = ord("z")
    assert [bytes(part) for part in copied] == [b"zb", b"cdef"]
    del mapped
    gc.collect()
    later = results.open("one", [2])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    del later
