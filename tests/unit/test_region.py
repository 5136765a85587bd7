"""What the process prints while a display has changing lines at the bottom of the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from skyward.events import InfraCreating, LogLine, Progress
from skyward.testing.displays import Show, Terminal, shown


def line(text: str, node: int = 0) -> LogLine:
    return LogLine(node, f"i-{node}", text, 0.0)


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


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
        assert sys.stdout is not terminal
        yield show


def on_screen(written: str) -> list[str]:
    """The lines that are left of it, for the control sequences that the display uses."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", written):
        if part == "\n":
            row, column = row + 1, 0
            rows.extend([""] * (row + 1 - len(rows)))
        elif part == "\r":
            column = 0
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not part.startswith("\x1b"):
            if column == 100:
                row, column = row + 1, 0
                rows.extend([""] * (row + 1 - len(rows)))
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]


def test_prints_stay_above_the_bar_and_no_bar_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        print("first")
        print("second", file=sys.stderr)
        screen = on_screen(terminal.getvalue())
        assert screen[:2] == ["first", "second"]
        assert "gather: 6/8" in screen[2]
        show(Progress("gather", 8, 8), after_s=1)
        print("third")
    assert on_screen(terminal.getvalue()) == ["first", "second", "pool    │ gather: 8/8, 2.7/s", "third", ""]


def test_unfinished_line_is_neither_wiped_nor_glued_to(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    print("before ... ", end="", flush=True)
    with with_a_bar(terminal) as show:
        assert on_screen(terminal.getvalue())[0] == "before ..."
        print("loading ... ", end="", flush=True)
        show(Progress("gather", 7, 8))
        assert on_screen(terminal.getvalue()) == ["before ...", "loading ..."]
        print("done")
        print("other ... ", end="", flush=True)
        show(line("hello"))
    assert on_screen(terminal.getvalue()) == ["before ...", "loading ... done", "other ...", "node 0  │ hello", ""]


def test_text_held_back_is_shown_when_the_bar_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal):
        print("unfinished", end="")
    assert on_screen(terminal.getvalue()) == ["unfinished"]


def test_streams_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal) as show:
        show(Progress("gather", 8, 8))
        assert sys.stdout is terminal
        assert sys.stderr is terminal
        kept = sys.stdout
    kept.write("late\n")
    assert terminal.getvalue().endswith("late\n")


def test_stream_replaced_meanwhile_is_left_alone_and_never_ours_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    mine = io.StringIO()
    with with_a_bar(terminal) as show:
        ours = sys.stdout
        sys.stdout = mine
        show(Progress("gather", 8, 8))
        assert sys.stdout is mine
        assert sys.stderr is terminal
    sys.stdout = ours
    print("late")
    assert sys.stdout is terminal
    assert terminal.getvalue().endswith("late\n")
    assert mine.getvalue() == ""


def test_stdout_in_a_file_stays_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown("spinner", stderr) as show:
        show(InfraCreating())
        assert sys.stderr is not stderr
        print("result")
    assert stdout.getvalue() == "result\n"
    assert "result" not in stderr.getvalue()


def test_second_pool_writes_above_the_bar_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = one_terminal(monkeypatch)
    with with_a_bar(terminal), shown("spinner", terminal) as second:
        second(InfraCreating(), line("hello"))
        assert on_screen(terminal.getvalue())[0] == "node 0  │ hello"
    assert on_screen(terminal.getvalue()) == ["node 0  │ hello", ""]
    assert sys.stderr is terminal
