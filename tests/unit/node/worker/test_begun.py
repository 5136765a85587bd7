"""The mark of the last call begun outlives its process, and never denies a call."""

from __future__ import annotations

from pathlib import Path

from skyward.node.worker.begun import make_mark, open_mark, take_mark


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
