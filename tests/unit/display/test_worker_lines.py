"""Lines of workers: their place, records with their level, and progress bars that stay in one row of a terminal."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pyte
import pytest

from skyward.events import LogLine, PoolStarted
from support.displays import Terminal, shown


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger ``app``, without the handlers of the test runner."""
    logger = logging.getLogger("app")
    logger.propagate = False
    yield logger
    logger.handlers.clear()
    logger.propagate = True


def line(text: str, *, worker: int = 1, call: str = "train#3", stream: str = "stdout", state: bool = False) -> LogLine:
    return LogLine(0, "i-0", text, 0.0, worker, call, stream, state=state)


def bar(text: str, **place: object) -> LogLine:
    return line(text, stream="stderr", state=True, **place)  # type: ignore[arg-type]


def record(text: str) -> LogLine:
    return LogLine(0, "i-0", text, 0.0, 1, "train#3", level="WARNING", logger="app")


def rows(stream: io.StringIO) -> list[str]:
    """The rows that a terminal shows, without the time of day."""
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", row.rstrip()) for row in screen.display if row.strip()]


def test_a_line_begins_with_the_time_and_its_place() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(line("epoch 1"))
        show(line("long", call="a_function_with_a_very_long_name#12"))
        show(line("between", call=""))
    assert re.match(r"\d\d:\d\d:\d\d 0/1 train#3 │ epoch 1\n", stream.getvalue())
    assert [row.partition(" │ ")[0].strip() for row in rows(stream)] == [
        "0/1 train#3",
        "0/1 a_function_with_a_..#12",
        "0/1",
    ]


def test_a_record_shows_its_level_and_logger_and_each_of_its_lines(logger: logging.Logger) -> None:
    logger.handlers.clear()  # pytest's, which it adds to loggers that do not propagate
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(record("it failed\nZeroDivisionError"))
    assert rows(stream) == ["0/1 train#3 │ WARNING app: it failed", "0/1 train#3 │ ZeroDivisionError"]


def test_a_record_that_a_handler_here_shows_is_not_displayed_again(logger: logging.Logger) -> None:
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(record("it failed"))
        show(line("printed"))
    assert rows(stream) == ["0/1 train#3 │ printed"]


def test_on_a_terminal_a_bar_stays_in_one_row_below_the_lines() -> None:
    terminal = Terminal()
    with shown("log", terminal) as show:
        show(PoolStarted(1, 2))
        for percent in range(0, 50, 10):
            show(bar(f"{percent}%"), after_s=1)
            show(line(f"at {percent}"))
        show(bar("half", worker=0, call="train#2"))
        assert rows(terminal)[1:] == [
            *(f"0/1 train#3 │ at {percent}" for percent in range(0, 50, 10)),
            "0/1 train#3 │ 40%",
            "0/0 train#2 │ half",
        ]
        show(line("100%", stream="stderr"))
        assert rows(terminal)[-2:] == ["0/1 train#3 │ 100%", "0/0 train#2 │ half"]
        show(line("another call", worker=0, call="train#4"))
        assert rows(terminal)[-1] == "0/0 train#4 │ another call"


def test_a_bar_that_is_not_drawn_again_disappears() -> None:
    terminal = Terminal()
    with shown("log", terminal) as show:
        show(bar("50%"))
        assert rows(terminal) == ["0/1 train#3 │ 50%"]
        show(line("later", worker=0), after_s=60)
        assert rows(terminal) == ["0/0 train#3 │ later"]


def test_in_a_pipe_each_state_is_a_line() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(bar("10%"))
        show(bar("20%"))
    assert rows(stream) == ["0/1 train#3 │ 10%", "0/1 train#3 │ 20%"]
