"""Lines of a display, and its screens: plain lines for files and pipes, colours and drawings for terminals."""

from __future__ import annotations

import enum
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from skyward.base.waiting import Clock
from skyward.display.shared_output import REDRAW_EVERY_S, PoolTag, Surface
from skyward.display.tables import FleetLoad
from skyward.display.words import Work
from skyward.wire.terminal import cleaned, harmless

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_PROGRESS_EVERY_S: Final = 10.0
_BAR_WIDTH: Final = 30
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NODE_COLOURS: Final = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta", "bright_green")
_IN_ASCII: Final = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "°": "", "·": "-"})
_STATE_S: Final = 15.0
"""Seconds after which a state that was not replaced is no longer drawn: its call may be over."""
_MOST_STATES: Final = 10


class Tone(enum.Enum):
    """Kind of a line; the value is its style on a terminal."""

    STEP = "dim"
    """A step of the pool."""
    OUTPUT = ""
    """A line that a call printed, in its own colours."""
    WARNING = "yellow"
    """A loss, or an expected loss."""
    ERROR = "bold red"
    """A failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        source: the node or instance that the line is about, else ``"pool"``.
        node: the rank of that node, which selects the colour; None for other lines.
        text: the text, which may hold control sequences.
        tone: the kind of the line.
        origin: worker and stream that printed it; empty for other lines.
        state: True for a state that the next line of its origin replaces, where the output can change.
    """

    source: str
    node: int | None = None
    text: str
    tone: Tone
    origin: tuple[str, str] = ("", "")
    state: bool = False

    def shown(self, *, colours: bool = False) -> str:
        """Return the text without control characters; with its colours (SGR) if wanted and if a call printed it."""
        return cleaned(self.text, colours=colours and self.tone is Tone.OUTPUT)


@dataclass(eq=False, kw_only=True)
class Screen:
    """Plain lines, for files and pipes; the base of screens with drawings. Used by one thread at a time.

    Attributes:
        surface: the output.
        tag: distinguishes the pool from others of this surface.
        load: load and cost of the pool, for drawings.
        clock: clock for durations.
        wall: returns seconds since the epoch.
    """

    surface: Surface
    tag: PoolTag
    load: FleetLoad
    clock: Clock
    wall: Callable[[], float]
    _next_progress_s: float = 0.0
    _phase: str = ""
    _works: Sequence[Work] = ()

    @property
    def shows_load(self) -> bool:
        """True while load and cost are drawn, so that they need no line."""
        return False

    def line(self, line: Line) -> None:
        """Add a line."""
        self.surface.add_line(self._whole(line))

    def phase(self, line: Line | None) -> None:
        """Show the current phase, as a changing line where there are drawings; None removes it."""
        if line:
            self.line(line)

    def status(self, works: Sequence[Work]) -> None:
        """Show the progress of ``works``: here, at most one line per piece of work every 10 s."""
        now_s = self.clock.monotonic()
        begun = [work for work in works if work.progress.ended]
        if not begun or now_s < self._next_progress_s:
            return
        self._next_progress_s = now_s + _PLAIN_PROGRESS_EVERY_S
        for work in begun:
            self.line(Line(source="pool", text=work.ongoing(now_s), tone=Tone.STEP))

    def close(self) -> None:
        """Remove all drawings; lines remain."""

    @property
    def _pool(self) -> str:
        """The pool's name; empty if it is the only pool."""
        return harmless(self.surface.name_of(self.tag))

    def _columns(self, line: Line, *, colours: bool = False) -> Sequence[str]:
        """Return time, source and text of a line, in characters that the stream can encode."""
        source = " ".join(filter(None, (self._pool, line.source if line.source != "pool" or not self._pool else "")))
        width = self.surface.source_width = max(self.surface.source_width, len(source))
        now = time.strftime("%H:%M:%S", time.localtime(self.wall()))
        return now, f"{source:<{width}}", self._encodable(line.shown(colours=colours))

    def _whole(self, line: Line, *, colours: bool = False) -> str:
        now, source, text = self._columns(line, colours=colours)
        return f"{now} {source} {self.surface.stream.rule} {text}"

    def _encodable(self, text: str) -> str:
        return text if self.surface.stream.unicode else text.translate(_IN_ASCII)


class _State(NamedTuple):
    """Drawn line of a progress bar, the place that printed it, and the end of its validity."""

    text: str
    source: str
    until_s: float


@dataclass(eq=False, kw_only=True)
class LiveScreen(Screen):
    """Coloured lines; below them, during provisioning and work, a spinner, bars and a table of the nodes."""

    _states: dict[tuple[str, str], _State] = field(default_factory=dict[tuple[str, str], _State])
    _table: Sequence[str] = ()
    _table_of: object = None

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(file=io.StringIO(), force_terminal=True)

    @property
    def shows_load(self) -> bool:
        """See :attr:`Screen.shows_load`."""
        return bool(self._phase or self._works)

    def line(self, line: Line) -> None:
        """See :meth:`Screen.line`."""
        from rich.text import Text

        if self._states or line.state:
            self._replace_state(line)
        if line.state:
            return
        now, source, text = self._columns(line, colours=True)
        colour = "bold" if line.node is None else _NODE_COLOURS[line.node % len(_NODE_COLOURS)]
        shown = Text.from_ansi(text) if "\x1b" in text else Text(text, line.tone.value)
        rule = f" {self.surface.stream.rule} "
        whole = Text.assemble((now, "dim"), " ", (source, colour), rule, shown)
        with self._console.capture() as capture:
            self._console.print(whole, soft_wrap=True, end="")
        self.surface.add_line(capture.get())

    def _replace_state(self, line: Line) -> None:
        """Replace the state of the line's origin; states of its worker's earlier calls go."""
        worker, _ = line.origin
        states = {
            origin: state
            for origin, state in self._states.items()
            if origin != line.origin and (origin[0] != worker or state.source == line.source)
        }
        if line.state:
            states[line.origin] = _State(self._whole(line), line.source, self.clock.monotonic() + _STATE_S)
        self._states = states  # another one, as other threads draw the last one

    def phase(self, line: Line | None) -> None:
        """See :meth:`Screen.phase`."""
        self._phase = f"{line.source}: {line.shown()}" if line else ""

    def status(self, works: Sequence[Work]) -> None:
        """See :meth:`Screen.status`."""
        self._works = works
        if self.shows_load or self._states:
            self.surface.show(self._render)
        else:
            self.surface.hide(self._render)

    def close(self) -> None:
        """See :meth:`Screen.close`."""
        self._phase, self._works, self._states = "", (), {}
        self.surface.hide(self._render)

    def _render(self, width: int) -> list[str]:
        """Return the lines of the drawing; called several times a second, by several threads."""
        from rich.text import Text

        now_s = self.clock.monotonic()
        blocks, frames = ("█░", _FRAMES) if self.surface.stream.unicode else ("#-", "-\\|/")
        lines = [state.text for state in self._states.values() if now_s < state.until_s][-_MOST_STATES:]
        if self._phase:
            lines.append(f"{frames[int(now_s / REDRAW_EVERY_S) % len(frames)]} {self._phase}")
        lines += [f"{progress_bar(work, blocks, width)}{self._encodable(work.ongoing(now_s))}" for work in self._works]
        texts = [Text(line) for line in lines]
        for text in texts:
            text.truncate(width)
        return [*(text.plain for text in texts), *(self._load_lines(width) if self.shows_load else ())]

    def _load_lines(self, width: int) -> Sequence[str]:
        rows = [(self._prefixed(first), *others) for first, *others in self.load.rows()]
        footer = [self._prefixed(line) for line in self.load.footer(self.clock.elapsed())]
        if (width, rows, footer) != self._table_of:
            self._table, self._table_of = _table(rows, footer, width), (width, rows, footer)
        return self._table

    def _prefixed(self, cell: str) -> str:
        return f"{self._pool} {cell}".lstrip()


def progress_bar(work: Work, blocks: str, width: int = 4 * _BAR_WIDTH) -> str:
    """Return the bar of a piece of work with a trailing space, drawn with two characters; empty for a single call.

    It takes a quarter of ``width`` at most: a failing batch's words have 52 columns, and the end is the time left.
    """
    total = work.progress.total
    if not total or total == 1:
        return ""
    size = min(_BAR_WIDTH, width // 4)
    full = size * work.progress.ended // total
    return blocks[0] * full + blocks[1] * (size - full) + " "


def _table(rows: Sequence[Sequence[str]], footer: Sequence[str], width: int) -> list[str]:
    """Return the lines of a table in the terminal's colours."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(cell, "dim", no_wrap=True) for cell in row))
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with console.capture() as capture:
        for part in ([table] if rows else []) + [Text(line, "dim", no_wrap=True) for line in footer]:
            console.print(part)
    return capture.get().splitlines()
