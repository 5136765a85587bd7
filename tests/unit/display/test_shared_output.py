"""What the process prints while a display writes to the same place: each on lines of its own, whatever is drawn."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pyte
import pytest

from skyward.display import PoolTag
from skyward.events import CostUpdate, InfraCreating, LogLine, Metrics, NodeUnreachable, PoolStarted, Progress
from support.displays import Show, Terminal, shown

ROWS, COLUMNS = 40, 100


def line(text: str, node: int = 0) -> LogLine:
    return LogLine(node, f"i-{node}", text, 0.0)


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(ROWS))


def one_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One terminal for all that is written; made in the test itself, as pytest's capture starts anew there."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


@contextmanager
def with_a_bar(terminal: Terminal) -> Generator[Show]:
    with shown("log", terminal) as show:
        show(Progress("gather", 0, 8))
        show(Progress("gather", 6, 8), after_s=2)
        yield show


def screen_of(written: str) -> list[str]:
    """The rows that a terminal shows, without the time of day, down to the cursor."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display]
    return [row[9:] if row[2:3] == row[5:6] == ":" else row for row in rows[: last_of(rows) + 1]]


def last_of(rows: list[str]) -> int:
    return max((index for index, row in enumerate(rows) if row), default=-1)


def test_a_workers_line_is_not_glued_to_the_interpreters_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with shown("log", terminal) as show:
        show(line("before"))
        io.StringIO.write(terminal, ">>> ")  # as readline does, past the stream
        show(line("one"))
        show(line("two"))
        print("mine")
        show(line("three"))
    assert screen_of(terminal.getvalue()) == [
        "node 0  │ before",
        ">>>",
        "node 0  │ one",
        "node 0  │ two",
        "mine",
        "node 0  │ three",
    ]


def test_prints_stay_above_the_bar_and_no_bar_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        print("first")
        print("second", file=sys.stderr)
        rows = screen_of(terminal.getvalue())
        assert rows[:2] == ["first", "second"]
        assert "gather 6/8" in rows[2]
        show(Progress("gather", 8, 8), after_s=1)
        print("third")
    assert screen_of(terminal.getvalue()) == ["first", "second", "pool    │ gather 8/8 in 3.0 s · 2.7/s", "third"]


def test_line_that_is_unfinished_when_a_display_comes_is_neither_wiped_nor_glued_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = one_terminal(monkeypatch)
    print("before ... ", end="", flush=True)
    with shown("log", terminal) as show:
        show(line("hello"))
    assert screen_of(terminal.getvalue()) == ["before ...", "node 0  │ hello"]


@pytest.mark.parametrize("bar", [False, True])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_unfinished_line_on_a_terminal_stays_whole_below_the_lines_of_calls(
    monkeypatch: pytest.MonkeyPatch, stream: str, *, bar: bool
) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) if bar else shown("log", terminal) as show:
        show(line("first"))
        print("loading ... ", end="", flush=True, file=getattr(sys, stream))
        show(line("hello"), line("again", 1))
        assert screen_of(terminal.getvalue())[-1] == "loading ..."
        print("done")
    assert screen_of(terminal.getvalue()) == [
        *("node 0  │ first", "node 0  │ hello", "node 1  │ again", "loading ... done")
    ]


def test_bar_of_the_process_itself_stays_below_the_lines_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with shown("log", terminal) as show:
        show(line("first"))
        for percent in (10, 50, 100):
            print(f"\r{percent}%|{'#' * (percent // 10)}", end="", flush=True, file=sys.stderr)
            show(line(f"at {percent}"))
        print(file=sys.stderr)
    assert screen_of(terminal.getvalue()) == [
        *("node 0  │ first", "node 0  │ at 10", "node 0  │ at 50", "node 0  │ at 100", "100%|##########")
    ]


def test_unfinished_line_that_cannot_be_moved_is_ended_before_the_line_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = one_terminal(monkeypatch)
    with shown("log", terminal) as show:
        show(line("first"))
        print("x" * 150, end="", flush=True)
        show(line("hello"))
        print()
        print("next")
    assert screen_of(terminal.getvalue()) == [*("node 0  │ first", "x" * 100, "x" * 50, "node 0  │ hello", "next")]


def test_line_printed_in_two_writes_and_a_line_of_a_call_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    terminal.write_through = True  # type: ignore[attr-defined] # as under `python -u`
    with shown("log", terminal) as show:
        show(line("first"))
        sys.stdout.write("gather  the mean of 8 is 3.1401")
        show(line("156801 of 200000 points are inside"))
        sys.stdout.write("\n")
        print("after")
    assert screen_of(terminal.getvalue()) == [
        *("node 0  │ first", "node 0  │ 156801 of 200000 points are inside"),
        *("gather  the mean of 8 is 3.1401", "after"),
    ]


def test_text_held_back_is_shown_when_the_display_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal):
        print("unfinished", end="")
    assert screen_of(terminal.getvalue()) == ["unfinished"]


def test_handler_that_kept_the_stream_writes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    handler = logging.StreamHandler(sys.stderr)
    with with_a_bar(terminal):
        handler.emit(logging.makeLogRecord({"msg": "careful"}))
        rows = screen_of(terminal.getvalue())
        assert rows[0] == "careful"
        assert "gather 6/8" in rows[1]


def test_text_that_comes_past_the_streams_is_kept_above_the_next_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        io.StringIO.write(terminal, "from C, as long as the bar, so that all of what was drawn is written over it\n")
        show(Progress("gather", 7, 8))
        rows = screen_of(terminal.getvalue())
        assert rows[0].startswith("from C, as long as the bar")
        assert "gather 7/8" in rows[1]


def test_streams_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal):
        assert "write" in vars(terminal)
    assert "write" not in vars(terminal)
    assert "flush" not in vars(terminal)
    print("late")
    assert terminal.getvalue().endswith("late\n")


def test_replacement_that_was_there_before_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    copied: list[str] = []
    terminal.write = copied.append  # type: ignore[method-assign, assignment] # as IPython does for the time of a cell
    with shown("log", terminal) as show:
        show(line("hello"))
        print("inside")
    print("after")
    assert "".join(copied).endswith("inside\nafter\n")


def test_stdout_in_a_file_stays_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown("spinner", stderr) as show:
        show(InfraCreating())
        print("result")
    assert stdout.getvalue() == "result\n"
    assert "result" not in stderr.getvalue()


class NotebookStream(io.TextIOBase):
    """A stream that sends text elsewhere, as those of a notebook do; it is no file."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)

    def fileno(self) -> int:
        return 2  # ipykernel gives the number of the stream that it has replaced


def test_streams_of_a_notebook_are_left_alone_and_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = NotebookStream(), NotebookStream()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with with_a_bar(stderr) as show:  # type: ignore[arg-type]
        print("result", end="")
        show(line("\x1b[31mhello\x1b[0m"))
        assert "write" not in vars(stdout)
        assert "write" not in vars(stderr)
    assert "".join(stdout.texts) == "result"
    assert "\x1b" not in "".join(stderr.texts)
    assert "".join(stderr.texts).endswith("node 0  │ hello\n")


# Pipes


@contextmanager
def one_pipe() -> Generator[list[str]]:
    """Both streams on one pipe, as after ``2>&1 |``; gives the lines that came out of it, at the end."""
    rows: list[str] = []
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as reader:
        with (
            open(writing, "w", encoding="utf-8") as stdout,
            open(os.dup(writing), "w", encoding="utf-8", buffering=1) as stderr,
            redirect_stdout(stdout),
            redirect_stderr(stderr),
        ):
            yield rows
        rows += [row[9:] if row[2:3] == row[5:6] == ":" else row for row in reader.read().splitlines()]


def test_lines_in_one_pipe_keep_their_order_and_their_ends() -> None:
    with one_pipe() as rows, shown("log", sys.stderr) as show:  # type: ignore[arg-type]
        print("first")
        show(line("hello"))
        print("loading ... ", end="", flush=True)
        show(line("again"))
        print("\nafter")
        print("held ... ", end="")
        show(line("last"))
        print("done")
    assert rows == [
        *("first", "node 0  │ hello", "loading ... ", "node 0  │ again", "after", "node 0  │ last", "held ... done")
    ]


def test_stdout_on_another_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as stdout, open(tmp_path / "err", "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with shown("log", stderr) as show:  # type: ignore[arg-type]
            print("unfinished", end="", flush=True)
            show(line("hello"))
            assert "write" not in vars(stdout)
    assert (tmp_path / "out").read_text() == "unfinished"
    assert (tmp_path / "err").read_text(encoding="utf-8")[9:] == "node 0  │ hello\n"


def test_forked_child_writes_past_the_display() -> None:
    with one_pipe() as rows, shown("log", sys.stderr) as show:  # type: ignore[arg-type]
        show(line("hello"))
        print("of the parent", end="")
        child = os.fork()
        if not child:
            print("of the child", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    assert rows == ["node 0  │ hello", "of the child", "of the parent"]


# Several pools


LOCAL, OTHER_LOCAL, AWS = PoolTag(provider="local"), PoolTag(provider="local", made=1), PoolTag(provider="aws", made=2)


def test_lines_say_which_pool_once_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with shown("log", terminal, LOCAL) as first:
        first(line("alone"))
        with shown("log", terminal, OTHER_LOCAL) as second, shown("log", terminal, AWS) as third:
            first(InfraCreating(), line("one"))
            second(InfraCreating(), line("two"))
            third(InfraCreating(), line("three"))
    assert screen_of(terminal.getvalue()) == [
        "node 0  │ alone",
        "local 1 │ preparing",
        "local 1 node 0 │ one",
        "local 2        │ preparing",
        "local 2 node 0 │ two",
        "aws            │ preparing",
        "aws node 0     │ three",
    ]


def test_pools_one_after_the_other_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    for tag in (LOCAL, OTHER_LOCAL):
        with shown("log", terminal, tag) as show:
            show(line("hello"))
    assert screen_of(terminal.getvalue()) == ["node 0  │ hello"] * 2


def test_drawings_of_several_pools_stand_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with shown("spinner", terminal, LOCAL) as first, shown("spinner", terminal, OTHER_LOCAL) as second:
        first(InfraCreating())
        second(PoolStarted(), line("hello"), Progress("fits", 0, 10))
        second(Progress("fits", 5, 10), after_s=2)
        rows = screen_of(terminal.getvalue())
        assert rows[1] == "local 2 node 0 │ hello"
        assert "pool: preparing" in rows[2]
        assert "fits 5/10" in rows[3]
        first.display.close()
        assert "fits 5/10" in screen_of(terminal.getvalue())[2]
    assert "local 2        │ closed after 2.0 s" in screen_of(terminal.getvalue())[-1]


# Load and cost


def metrics(node: int, cpu: float, gpu: float | None = None) -> Metrics:
    return Metrics(f"i-{node}", node, cpu, 50.0, 12_288.0, 24_576.0, gpu, *((20_480.0, 81_920.0, 61.4) if gpu else ()))


def test_terminal_shows_a_table_of_the_nodes_and_the_cost_below_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        show(metrics(0, 87.4, 93.0), metrics(1, 5.0), CostUpdate(60, 0.4201, 3.6, 2, 0))
        show(Progress("gather", 7, 8), after_s=10)
        rows = screen_of(terminal.getvalue())
        assert "gather 7/8" in rows[0]
        assert rows[1:] == [
            "node 0  cpu 87 %  memory 12.0 of 24.0 GiB  gpu 93 %  gpu memory 20.0 of 80.0 GiB  61 °C",
            "node 1  cpu 5 %   memory 12.0 of 24.0 GiB",
            "$0.43 so far, $3.60/h",
        ]
        print("above")
        assert screen_of(terminal.getvalue())[0] == "above"
        show(Progress("gather", 8, 8))
    assert screen_of(terminal.getvalue()) == ["above", "pool    │ gather 8/8 in 12 s · 40/min"]


def test_table_of_many_nodes_ends_with_a_summary_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        show(*(metrics(node, node) for node in range(20)), Progress("gather", 7, 8))
        rows = screen_of(terminal.getvalue())
    assert [row.partition("  ")[0] for row in rows[1:9]] == [f"node {node}" for node in range(8)]
    assert rows[9:] == ["12 more: cpu 8-19 %, memory 50 %"]


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_load_and_cost_are_a_line_every_half_minute_where_nothing_draws_them(
    monkeypatch: pytest.MonkeyPatch, stream_type: type[io.StringIO]
) -> None:
    stream = stream_type()
    with shown("log", stream) as show:
        show(PoolStarted(2, 2), CostUpdate(60, 1.0, 3.6, 2, 0))
        for second in range(70):
            show(metrics(0, second), metrics(1, 5.0, 93.0), after_s=1)
    assert [row for row in screen_of(stream.getvalue()) if "cpu" in row] == [
        "pool    │ cpu 5-29 %, memory 50 %, gpu 93 %, gpu memory 25 %, $1.03 so far, $3.60/h",
        "pool    │ cpu 5-59 %, memory 50 %, gpu 93 %, gpu memory 25 %, $1.06 so far, $3.60/h",
    ]


def test_load_is_no_line_before_the_pool_is_open_nor_when_quiet() -> None:
    stream, quiet = io.StringIO(), io.StringIO()
    with shown("log", stream) as show, shown("quiet", quiet) as show_quietly:
        show(metrics(0, 1.0))
        show(metrics(0, 1.0), after_s=60)
        show_quietly(PoolStarted(), metrics(0, 1.0))
        show_quietly(metrics(0, 1.0), after_s=60)
    assert stream.getvalue() == quiet.getvalue() == ""


def test_load_of_a_pool_that_costs_nothing_has_no_price() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(PoolStarted(), CostUpdate(60, 0.0, 0.0, 0, 2), metrics(0, 12.0))
        show(CostUpdate(90, 0.0, 0.0, 0, 2), after_s=30)
    assert screen_of(stream.getvalue())[1] == "pool    │ cpu 12 %, memory 50 %"


def test_node_that_is_gone_counts_no_more() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(PoolStarted(), metrics(0, 12.0), metrics(1, 90.0), NodeUnreachable("i-1", 1, "lost"))
        show(metrics(0, 12.0), after_s=30)
    assert screen_of(stream.getvalue())[-2] == "pool    │ cpu 12 %, memory 50 %"
