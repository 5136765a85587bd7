"""What a pool shows: plain lines in a pipe, colours and a moving line on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from skyward.display import Display, DisplayKind, PoolTag, parse_display
from skyward.errors import ConfigurationError
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    CostFinal,
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstancePreempted,
    InstanceProvisioned,
    LogLine,
    Metrics,
    NodeReachable,
    NodeUnreachable,
    Notice,
    PoolStarted,
    PoolStopped,
    PoolStopping,
    Progress,
    TimeoutApproaching,
    WorkerLost,
    WorkerReplaced,
    WorkerRestarting,
)
from skyward.events.bus import EventBus
from support.displays import Show, Terminal, shown

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def line(text: str, node: int = 0) -> LogLine:
    return LogLine(node, f"i-{node}", text, 0.0)


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True, scope="module")
def _time_zone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def text_of(stream: io.StringIO) -> str:
    """What was written, without the time of day before each line."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", stream.getvalue(), flags=re.MULTILINE)


STORY = (
    InfraCreating(),
    InfraCreated("eu-west-1"),
    InstanceLaunching(2, "p5", "aws", region="eu-west-1", spot=True, price_per_hour=0.512),
    InstanceProvisioned("i-0", 0, True, "aws"),
    BootstrapProgress("i-0", "deps"),
    PoolStarted(2, 4),
    line("hello", 1),
    WorkerLost(1, 0, "i-1", "killed by SIGKILL"),
    WorkerReplaced(1, 0, "i-1"),
    NodeUnreachable("i-0", 0, "timed out"),
    NodeReachable("i-0", 0, 61.3),
    InstancePreempted("i-0", 0, 119.6),
    TimeoutApproaching("i-0", 360.0),
    Notice("there is no single one"),
    Error("the API says no", "i-0"),
    PoolStopping(),
    CostFinal(0.42, 41.0, 12.0, 2, 0, 1.1),
    PoolStopped(128),
)

PLAIN_STORY = """\
00:01:40 pool    │ preparing
00:01:40 pool    │ prepared: eu-west-1
00:01:40 pool    │ launching 2 nodes on aws: p5 in eu-west-1, spot, $0.512/h each, $1.02/h in all
00:01:40 node 0  │ instance i-0 runs
00:01:40 node 0  │ bootstrap: Python packages
00:01:40 pool    │ open: 2 nodes, 4 workers
00:01:40 node 1  │ hello
00:01:40 node 1  │ worker 0 lost: killed by SIGKILL
00:01:40 node 1  │ worker 0 replaced
00:01:40 node 0  │ unreachable, reconnecting; its calls continue: timed out
00:01:40 node 0  │ reachable again after 61 s
00:01:40 node 0  │ preempted: the provider takes it back in 2 min 0 s; a replacement is on its way
00:01:40 node 0  │ ends in 6 min 0 s, when its timeout expires
00:01:40 pool    │ note: there is no single one
00:01:40 node 0  │ error: the API says no
00:01:40 pool    │ closing
00:02:21 pool    │ closed after 42 s: 2 nodes, 4 workers, 128 calls, cost $0.42, $1.10 saved by spot
"""


def tell(kind: str, stream: io.TextIOBase) -> None:
    with shown(kind, stream) as show:
        show(*STORY[:-1])
        show(STORY[-1], after_s=41.5)


def test_pipe_gets_the_whole_story_in_plain_lines() -> None:
    stream = io.StringIO()
    tell("log", stream)
    assert stream.getvalue() == PLAIN_STORY


@pytest.mark.parametrize("kind", ["log", "spinner"])
def test_the_name_of_a_pool_is_shown_with_the_command_that_takes_it(kind: str) -> None:
    stream = io.StringIO()
    with shown(kind, stream, PoolTag(pool_id="sky-0a1b")) as show:
        show(PoolStarted(1, 2))
    assert stream.getvalue().startswith("00:01:40 pool    │ open: 1 node, 2 workers (skyward logs sky-0a1b)\n")


def test_spinner_in_a_pipe_shows_the_same() -> None:
    stream = io.StringIO()
    tell("spinner", stream)
    assert stream.getvalue() == PLAIN_STORY


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_quiet_shows_nothing(stream_type: type[io.StringIO]) -> None:
    stream = stream_type()
    tell("quiet", stream)
    assert stream.getvalue() == ""


def test_terminal_gets_a_colour_for_each_node() -> None:
    stream = Terminal()
    with shown("log", stream) as show:
        show(line("hello", 0), line("hello", 1))
    first, second = stream.getvalue().rstrip().split("\n")
    assert re.search(r"\x1b\[36mnode 0 ", first)
    assert re.search(r"\x1b\[35mnode 1 ", second)


def test_spinner_shows_the_phase_until_the_pool_is_open() -> None:
    stream = Terminal()
    with shown("spinner", stream) as show:
        show(InstanceProvisioned("i-0", 0, False, "local"))
        assert "node 0: instance i-0 runs" in stream.getvalue()
        show(PoolStarted(1, 1))
        told = stream.getvalue()
        assert told.rfind(SHOW_CURSOR) > told.rfind(HIDE_CURSOR)
        assert "open: 1 node, 1 worker" in told
        assert told.rfind("\x1b[J") < told.rfind("open: 1 node")
        show(line("hello"))
        assert stream.getvalue().endswith("│ hello\n")
    assert "closed after" in stream.getvalue()


def test_failed_opening_has_no_summary() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(InfraCreating())
    assert text_of(stream) == "pool    │ preparing\n"


def test_failed_opening_that_left_nothing_says_so() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(InfraCreating(), PoolStopping())
        show(CostFinal(0.02, 1.0, 12.0, 2, 0, 0.0, {"aws": 0.02}), PoolStopped(0), after_s=2)
    assert text_of(stream).splitlines()[-1] == "pool    │ closed after 2.0 s: never opened, cost $0.02"


def test_summary_has_the_share_of_each_of_several_providers() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(PoolStarted(2, 2), CostFinal(3.2, 9.0, 1.0, 0, 2, 0.0, {"aws": 1.2, "verda": 2.0, "ssh": 0.0}))
    assert text_of(stream).splitlines()[-1].endswith("2 workers, cost $3.20 (aws $1.20, verda $2.00, ssh $0.00)")


def test_summary_leaves_out_what_nobody_said() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(PoolStarted(1, 1))
    assert text_of(stream).splitlines()[-1] == "pool    │ closed after 0.0 s: 1 node, 1 worker"


def test_summary_counts_from_the_first_event() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(InfraCreating())
        show(PoolStarted(1, 1), after_s=4)
        show(PoolStopping(), after_s=0.2)
    assert "closed after 4.2 s" in stream.getvalue()


@pytest.mark.parametrize("kind", ["log", "spinner"])
def test_what_is_waited_for_after_the_last_bootstrap_is_said_once(kind: str) -> None:
    stream = io.StringIO()
    with shown(kind, stream) as show:
        show(InstanceLaunching(2, "p5", "aws"), BootstrapCompleted("i-0"))
        assert "waiting" not in stream.getvalue()
        show(BootstrapCompleted("i-1"), PoolStarted(2, 2))
    assert text_of(stream).splitlines()[2:5] == [
        "i-1     │ bootstrap done",
        "pool    │ waiting for the workers",
        "pool    │ open: 2 nodes, 2 workers",
    ]


def test_restart_on_purpose_is_one_line_and_no_loss() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(*(WorkerRestarting(0, worker, "i-0", "a cancelled call was ended") for worker in (1, 2)))
        show(*(WorkerReplaced(0, worker, "i-0") for worker in (1, 2)))
        show(WorkerLost(0, 1, "i-0", "killed by signal 11 (SIGSEGV)"), WorkerReplaced(0, 1, "i-0"))
    assert text_of(stream).splitlines() == [
        "pool    │ call cancelled; worker restarting",
        "node 0  │ worker 1 lost: killed by signal 11 (SIGSEGV)",
        "node 0  │ worker 1 replaced",
    ]


def test_one_node_is_one_node() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(InstanceLaunching(1, "this machine", "local"))
    assert text_of(stream) == "pool    │ launching 1 node on local: this machine\n"


def test_closed_display_hears_nothing_and_closes_once() -> None:
    stream = io.StringIO()
    show = Show("log", stream)
    show(PoolStarted())
    show.display.close()
    told = stream.getvalue()
    show(line("late"))
    show.display.close()
    assert stream.getvalue() == told


# Progress


def test_work_of_less_than_a_second_is_not_shown() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("gather", 0, 10))
        show(Progress("gather", 10, 10), after_s=0.9)
    assert stream.getvalue() == ""


def test_longer_work_is_shown_in_a_pipe_every_ten_seconds_and_at_its_end() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        for done in range(31):
            show(Progress("gather", done, 30), after_s=0.5)
    assert text_of(stream).splitlines() == [
        "pool    │ gather 3/30 · 2.0/s · 0:14 left",
        "pool    │ gather 23/30 · 2.0/s · 0:04 left",
        "pool    │ gather 30/30 in 15 s · 2.0/s",
    ]


def test_work_of_unknown_size_counts_up() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("joblib", 0))
        show(Progress("joblib", 8), after_s=2)
        show(Progress("joblib", 9, 9), after_s=1)
    assert text_of(stream).splitlines() == [
        "pool    │ joblib 8 done · 4.0/s",
        "pool    │ joblib 9/9 in 3.0 s · 3.0/s",
    ]


def test_rate_leaves_out_what_was_done_before_the_first_event() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("gather", 50, 100))
        show(Progress("gather", 60, 100), after_s=5)
    assert text_of(stream) == "pool    │ gather 60/100 · 2.0/s · 0:20 left\n"


def test_work_given_up_leaves_no_bar() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("gather", 0, 100))
        show(Progress("gather", 7, 100, cancelled=93), after_s=0.5)
        show(line("later"), after_s=60)
    assert text_of(stream) == "node 0  │ later\n"


@pytest.mark.parametrize("total", [None, 10])
def test_pipe_hears_nothing_of_work_of_which_nothing_gets_done(total: int | None) -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("call", 0, total))
        show(Progress("call", 0, total), after_s=20)
        show(Progress("call", 0, 0), after_s=20)
    assert stream.getvalue() == ""


def test_a_failing_batch_has_its_time_left_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with shown("log", stream) as show:
        show(Progress("train", 0, 12))
        show(Progress("train", 3, 12, failed=1, running=2), after_s=11.5)
        assert " train 3/12 · 1 failed · 2 running · 21/min · 0:23 left" in stream.getvalue()


def test_same_label_later_is_new_work() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Progress("gather", 4, 10))
        show(Progress("gather", 0, 10), after_s=60)
        show(Progress("gather", 10, 10), after_s=0.5)
    assert "gather 10/10" not in stream.getvalue()


@pytest.mark.parametrize("kind", ["log", "spinner"])
def test_terminal_shows_a_bar_that_leaves_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    stream = Terminal()
    with shown(kind, stream) as show:
        show(Progress("gather [bold]", 0, 10))
        assert stream.getvalue() == ""
        show(Progress("gather [bold]", 3, 10), after_s=1.5)
        told = stream.getvalue()
        assert "gather [bold]" in told
        assert "3/10 · 2.0/s · 0:04 left" in told
        assert "█" * 9 + "░" * 21 in told
        show(Progress("gather [bold]", 10, 10), after_s=0.5)
    assert "gather [bold] 10/10 in 2.0 s · 5.0/s" in stream.getvalue()
    assert stream.getvalue().rfind(SHOW_CURSOR) > stream.getvalue().rfind(HIDE_CURSOR)


def test_bar_appears_with_the_first_event_after_a_second() -> None:
    stream = Terminal()
    with shown("log", stream) as show:
        show(Progress("gather", 0, 10))
        show(Metrics("i-0", 0, 1.0, 1.0, 1.0, 1.0), after_s=1.5)
        assert "0/10" in stream.getvalue()


# Foreign text and foreign streams


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_remote_text_is_shown_literally(stream_type: type[io.StringIO]) -> None:
    stream = stream_type()
    with shown("log", stream) as show:
        show(line("[bold]x[/bold] :smile: {e} \x07 \u202e \x85 grüße"))
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert text.endswith("node 0  │ [bold]x[/bold] :smile: {e} \\x07 \\u202e \\x85 grüße\n")


def test_colours_of_a_call_pass_on_a_terminal_and_end_with_their_line() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    with shown("log", terminal) as on_terminal, shown("log", pipe) as in_pipe:
        for show in (on_terminal, in_pipe):
            show(line("\x1b[1;31mred \x1b[Kstays\x1b]0;title\x07"), line("plain"))
    first, second = terminal.getvalue().rstrip().split("\n")
    assert "\x1b[1;31mred stays\x1b[0m" in first
    assert "title" not in first
    assert second.endswith("│ plain")
    assert text_of(pipe) == "node 0  │ red stays\nnode 0  │ plain\n"


def test_colours_of_a_call_are_none_where_nobody_wants_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with shown("log", stream) as show:
        show(line("\x1b[31mred\x1b[0m"))
    assert "31m" not in stream.getvalue()


def test_backspaces_and_carriage_returns_edit_the_line() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(line("1/9\b\b\b2/9"), line(" 50%|#####     |\r100%|##########|"))
    assert text_of(stream) == "node 0  │ 2/9\nnode 0  │ 100%|##########|\n"


def test_text_of_several_lines_is_marked_on_each() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(Error("step deps failed\nlast line of the log", "i-9"))
    assert text_of(stream) == "i-9     │ error: step deps failed\ni-9     │ last line of the log\n"


def test_plain_lines_hold_no_control_characters() -> None:
    stream = io.StringIO()
    with shown("spinner", stream) as show:
        show(*STORY, Progress("g", 0, 2))
        show(Progress("g\x1b[2J", 2, 2), Error("\x1b]0;title\x07"), after_s=5)
    assert not CONTROL.search(stream.getvalue())


def test_long_line_on_a_terminal_is_not_wrapped() -> None:
    stream = Terminal()
    with shown("log", stream) as show:
        show(line("x" * 5000))
    assert "x" * 5000 in stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_stream_gets_only_what_its_encoding_has(encoding: str, terminal: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    with shown("spinner", stream) as show:
        show(InfraCreating(), Error("größe \ud800"), Progress("größe", 1, 3))
        show(Progress("größe", 2, 3), after_s=2)
    stream.flush()
    assert ("größe" if encoding == "utf-8" else "gr\\xf6\\xdfe").encode(encoding) in raw.getvalue()
    assert b"\\ud800" in raw.getvalue()


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_stream_closed_midway_breaks_nothing(stream_type: type[io.StringIO], caplog: pytest.LogCaptureFixture) -> None:
    stream = stream_type()
    with caplog.at_level(logging.INFO, logger="skyward"), shown("spinner", stream) as show:
        show(InfraCreating())
        stream.close()
        show(*STORY)
    assert caplog.text == ""


def test_stream_closed_before_breaks_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    tell("log", stream)


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    tell("log", stream)
    assert stream.getvalue() == PLAIN_STORY


def test_output_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    bus = EventBus()
    display = Display(DisplayKind.LOG, bus)
    bus.publish(line("hello"))
    bus.close()
    display.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d node 0  │ hello\n", captured.err)


# Kinds


@pytest.mark.parametrize("kind", ["loud", "", None, 3, []])
def test_unknown_kind_is_an_error_that_lists_the_three(kind: object) -> None:
    with pytest.raises(ConfigurationError, match="display must be one of 'log', 'spinner', 'quiet'"):
        parse_display(kind)  # type: ignore[arg-type]


def test_known_kinds_are_parsed() -> None:
    assert [parse_display(kind) for kind in ("log", "spinner", "quiet")] == list(DisplayKind)


def test_import_loads_neither_rich_nor_anything_heavy() -> None:
    heavy = "('rich', 'numpy', 'tornado')"
    code = f"import sys, skyward.display; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_a_pool_that_ran_no_calls_of_its_own_closes_without_their_number() -> None:
    stream = io.StringIO()
    with shown("log", stream) as show:
        show(PoolStarted(1, 2), PoolStopped(0))
    assert text_of(stream).splitlines()[-1].endswith("1 node, 2 workers")
