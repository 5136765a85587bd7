"""The mark of the last call begun outlives its process, and never denies a call."""

from __future__ import annotations

import os
from pathlib import Path

from skyward.node.worker.call_mark import (
    Overrun,
    arm,
    disarm,
    enter,
    make_mark,
    mark_path,
    open_mark,
    overrun,
    paused,
    process_of,
    take_mark,
)


def test_a_mark_is_read_once_after_its_process_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "begun")
    make_mark(path)
    mark = open_mark(path)
    assert mark is not None
    mark[0] = 1 << 40
    assert take_mark(path) == 1 << 40
    assert take_mark(path) is None


def test_a_process_that_began_nothing_left_zero(tmp_path: Path) -> None:
    make_mark(str(tmp_path / "begun"))
    assert take_mark(str(tmp_path / "begun")) == 0


def test_a_mark_that_cannot_be_used_is_removed(tmp_path: Path) -> None:
    (tmp_path / "begun").write_bytes(b"short")
    assert open_mark(str(tmp_path / "begun")) is None
    assert take_mark(str(tmp_path / "begun")) is None


def test_where_no_mark_can_be_made_there_is_none(tmp_path: Path) -> None:
    make_mark(str(tmp_path / "absent" / "begun"))
    assert open_mark(str(tmp_path / "absent" / "begun")) is None


def test_the_process_is_known_from_the_moment_it_may_accept_calls(tmp_path: Path) -> None:
    path = mark_path(str(tmp_path), "a")
    make_mark(path)
    mark = open_mark(path)
    assert mark is not None
    assert process_of(mark) is None
    enter(mark)
    assert process_of(mark) == os.getpid()
    assert process_of(None) is None


def opened(tmp_path: Path, position: int) -> memoryview:
    path = str(tmp_path / "begun")
    make_mark(path)
    mark = open_mark(path)
    assert mark is not None
    mark[0] = position
    return mark


def test_a_call_that_is_too_late_is_found_until_it_is_over(tmp_path: Path) -> None:
    mark = opened(tmp_path, position=7)
    assert overrun(mark, lambda: 0) is None
    arm(mark, timeout_s=1e-9, memory_bytes=0)
    assert overrun(mark, lambda: 1 << 60) == Overrun(position=7, of_memory=False)
    disarm(mark)
    assert overrun(mark, lambda: 0) is None
    assert take_mark(str(tmp_path / "begun")) == 7


def test_memory_counts_from_the_beginning_of_the_call(tmp_path: Path) -> None:
    mark = opened(tmp_path, position=7)
    arm(mark, timeout_s=0, memory_bytes=1 << 20)
    most = mark[3]
    assert most > 2 << 20
    assert overrun(mark, lambda: most) is None
    assert overrun(mark, lambda: most + 1) == Overrun(position=7, of_memory=True)


def test_limits_beyond_all_clocks_and_memories_are_none(tmp_path: Path) -> None:
    mark = opened(tmp_path, position=7)
    arm(mark, timeout_s=1e30, memory_bytes=1 << 70)
    assert overrun(mark, lambda: 1 << 60) is None


def test_a_call_without_limits_is_never_found(tmp_path: Path) -> None:
    mark = opened(tmp_path, position=7)
    arm(mark, timeout_s=0, memory_bytes=0)
    assert overrun(mark, lambda: 1 << 60) is None


def test_time_in_which_a_call_waits_for_others_is_not_its_own(tmp_path: Path) -> None:
    mark = opened(tmp_path, position=7)
    arm(mark, timeout_s=1e-9, memory_bytes=0)
    deadline = mark[2]
    with paused(mark):
        assert overrun(mark, lambda: 0) is None
    assert mark[2] > deadline
    assert overrun(mark, lambda: 0) == Overrun(position=7, of_memory=False)
