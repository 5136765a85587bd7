"""Lines of calls in files: as they arrive, together, bounded, and read while they are written."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.events import LogLine, Notice
from skyward.events.bus import EventBus
from skyward.events.log_files import KeptLines, KeptReader


def line(text: str) -> LogLine:
    return LogLine(0, "i-1", text, 1.5, worker=1, call="train#3", stream="stderr", level="INFO", logger="app")


@pytest.fixture
def later() -> list[Callable[[], object]]:
    return []


@pytest.fixture
def kept(tmp_path: Path, later: list[Callable[[], object]]) -> Iterator[KeptLines]:
    kept = KeptLines(tmp_path, later.append, file_bytes=1000)
    yield kept
    kept.close()


def texts(reader: KeptReader) -> list[str]:
    return [event.line for event in reader.news()]


def test_lines_are_written_together_and_read_as_they_were(
    kept: KeptLines, later: list[Callable[[], object]], tmp_path: Path
) -> None:
    reader = KeptReader(tmp_path)
    lines = [line("plain"), line('"quoted"\ttab, \u00fc, \x1b[1m')]
    for each in lines:
        kept(each)
    assert texts(reader) == []
    (write,) = later
    write()
    assert list(reader.news()) == lines
    assert list(reader.news()) == []
    kept(line("\udc80 is no character"))
    later[1]()
    assert texts(reader) == ["\udc80 is no character"]


def test_the_newest_are_kept_and_a_reader_follows_into_the_next_file(
    kept: KeptLines, later: list[Callable[[], object]], tmp_path: Path
) -> None:
    reader = KeptReader(tmp_path)
    seen: list[str] = []
    for number in range(40):
        kept(line(f"{number:02d}" * 10))
        later[-1]()
        seen += texts(reader)
    assert seen == [f"{number:02d}" * 10 for number in range(40)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    left = texts(KeptReader(tmp_path))
    assert left == seen[-len(left) :]
    assert len(left) > 10


def test_a_line_that_was_cut_is_left_out(kept: KeptLines, tmp_path: Path) -> None:
    kept(line("whole"))
    kept.write()
    with (tmp_path / "calls-000000.jsonl").open("ab") as file:
        file.write(b'[0,"i-1","cu\n{}\n[0,"i-1","no end yet"')
    assert texts(KeptReader(tmp_path)) == ["whole"]


@pytest.mark.parametrize(
    "output",
    [
        [""] * 400,
        ["\0" * 900],
        ["a" * 5000],
        ["\udc80" * 700, "\u65e5" * 700],
        ["x", "\x1b[31m" * 900, "y"] * 3,
        [f"{number}" for number in range(300)] * 3,
    ],
    ids=["empty lines", "zeros", "one long line", "characters of many bytes", "escapes", "tiny lines"],
)
@pytest.mark.parametrize("together", [True, False])
def test_what_is_kept_is_bounded_by_its_bytes_on_the_disk(
    kept: KeptLines, tmp_path: Path, output: list[str], together: bool
) -> None:
    for text in output:
        kept(line(text))
        if not together:
            kept.write()
    kept.write()

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    left = texts(KeptReader(tmp_path))
    assert left
    assert all(
        text == whole or text.endswith("[the rest of this line is not kept]")
        for text, whole in zip(reversed(left), reversed(output), strict=False)
    )


def test_a_reader_from_the_end_yields_whole_lines_and_goes_on_with_what_is_new(tmp_path: Path) -> None:
    kept = KeptLines(tmp_path, lambda _: None, file_bytes=8000)
    for number in range(150):
        kept(line(f"{number}" * (number % 7)))
    kept.write()
    whole = [*KeptReader(tmp_path).news()]
    assert len(list(tmp_path.iterdir())) == 2
    with max(tmp_path.iterdir()).open("ab") as file:
        file.write(b'[0,"i-1","no end yet')
    reader = KeptReader(tmp_path)

    assert [*itertools.islice(reader.backwards(), 3)] == whole[:-4:-1]
    assert [*KeptReader(tmp_path).backwards()] == whole[::-1]
    with max(tmp_path.iterdir()).open("ab") as file:
        file.write(b'",1.5]\n')
    assert texts(reader) == ["no end yet"]
    kept.close()


def test_a_full_disk_ends_the_keeping_and_nothing_else(
    kept: KeptLines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "calls-000001.jsonl").mkdir()  # stands for any failure
    for number in range(40):
        kept(line(f"{number:02d}" * 10))
        kept.write()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no longer kept" in record.message


class TestRecorder:
    def test_has_a_line_before_publishing_returns_and_writes_it_before_the_result(
        self, kept: KeptLines, tmp_path: Path
    ) -> None:
        bus, stuck = EventBus(), threading.Event()
        bus.subscribe(Notice, lambda _: stuck.wait(20) and None)
        bus.recorder = kept
        bus.publish(Notice("blocks the event thread"))
        bus.publish(line("one"))
        assert texts(KeptReader(tmp_path)) == []
        waiting = threading.Thread(target=bus.delivery())
        waiting.start()
        reader = KeptReader(tmp_path)
        deadline = time.monotonic() + 10
        while not (found := texts(reader)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == ["one"]
        stuck.set()
        waiting.join(10)
        bus.close()

    def test_lines_without_a_subscriber_cost_the_event_thread_nothing(self, kept: KeptLines) -> None:
        bus = EventBus()
        bus.recorder = kept
        bus.publish(line("one"))
        assert [thread for thread in threading.enumerate() if thread.name == "skyward-events"] == []
        bus.close()

    def test_takes_nothing_more_once_closed(self, kept: KeptLines, later: list[Callable[[], object]]) -> None:
        kept.close()
        kept(line("late"))
        assert later == []


class TestDelivery:
    def test_waits_for_lines_that_were_published_before(self) -> None:
        bus, seen, go = EventBus(), list[LogLine](), threading.Event()

        def slow(event: LogLine) -> None:
            go.wait(10)
            seen.append(event)

        bus.subscribe(LogLine, slow)
        bus.publish(line("one"))
        shown = bus.delivery()
        threading.Timer(0.05, go.set).start()
        shown()
        assert seen == [line("one")]
        shown()
        bus.close()
        bus.delivery()()

    def test_does_not_wait_in_a_subscriber(self) -> None:
        bus, passed = EventBus(), threading.Event()

        def wait_for_itself(_: LogLine) -> None:
            bus.delivery()()
            passed.set()

        bus.subscribe(LogLine, wait_for_itself)
        bus.publish(line("one"))
        assert passed.wait(2)
        bus.close()

    def test_does_not_wait_for_one_that_is_stuck(self) -> None:
        bus, go = EventBus(patience_s=0.02), threading.Event()
        bus.subscribe(LogLine, lambda _: go.wait(20) and None)
        bus.publish(line("one"))
        bus.delivery()()
        assert not go.is_set()
        go.set()
        bus.close()
