"""Lines of a display, and its screens: plain ones for files and pipes, colours and changing drawings for terminals."""

from __future__ import annotations

import enum
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from skyward._concurrency.waiting import Clock
from skyward.display.surface import REDRAW_EVERY_S, PoolTag, Surface
from skyward.display.tables import FleetLoad
from skyward.display.words import Work
from skyward.wire.terminal import cleaned, harmless

__all__ = ["Layout", "Line", "LiveScreen", "PlainScreen", "Screen", "Tone", "progress_bar"]


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
        text: the text without control characters; with colours (SGR) if a call printed it.
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


_PLAIN_PROGRESS_EVERY_S: Final = 10.0
_BAR_WIDTH: Final = 30
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NODE_COLOURS: Final = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta", "bright_green")
_IN_ASCII: Final = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "°": "", "·": "-"})


_STATE_S: Final = 15.0
"""Seconds after which a state that was not replaced is no longer drawn: its call may be over."""
_MOST_STATES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Drawn line of a progress bar, the place that printed it, and the end of its validity."""

    text: str
    source: str
    until_s: float


class Screen(Protocol):
    """Output for lines and drawings. All methods are called from one thread at a time."""

    def line(self, line: Line) -> None:
        """Add a line."""
        ...

    def phase(self, line: Line | None) -> None:
        """Show the current phase, as a changing line on a terminal; None removes it."""
        ...

    def status(self, works: Sequence[Work]) -> None:
        """Show the progress of ``works``."""
        ...

    @property
    def shows_load(self) -> bool:
        """True while load and cost are drawn, so that they need no line."""
        ...

    def close(self) -> None:
        """Remove all drawings; lines remain."""
        ...


class Layout:
    """Columns of a line: the time, its source, its text."""

    def __init__(self, surface: Surface, tag: PoolTag, wall: Callable[[], float]) -> None:
        self._surface = surface
        self._tag = tag
        self._wall = wall

    @property
    def pool(self) -> str:
        """The pool's name; empty if it is the only pool."""
        return harmless(self._surface.name_of(self._tag))

    def columns(self, line: Line) -> Sequence[str]:
        """Return time, source and text of a line, in characters that the stream can encode."""
        source = " ".join(filter(None, (self.pool, line.source if line.source != "pool" or not self.pool else "")))
        width = self._surface.source_width = max(self._surface.source_width, len(source))
        now = time.strftime("%H:%M:%S", time.localtime(self._wall()))
        return now, f"{source:<{width}}", self.encodable(line.text)

    def encodable(self, text: str) -> str:
        """Return the text in characters that the stream can encode."""
        return text if self._surface.stream.unicode else text.translate(_IN_ASCII)


class PlainScreen:
    """Plain lines, for files and pipes."""

    shows_load = False

    def __init__(self, surface: Surface, tag: PoolTag, *, clock: Clock, wall: Callable[[], float]) -> None:
        self._surface = surface
        self._layout = Layout(surface, tag, wall)
        self._clock = clock
        self._next_progress_s = 0.0

    def line(self, line: Line) -> None:
        """See :meth:`Screen.line`."""
        now, source, text = self._layout.columns(line)
        self._surface.add_line(f"{now} {source} {self._surface.stream.rule} {cleaned(text, colours=False)}")

    def phase(self, line: Line | None) -> None:
        """See :meth:`Screen.phase`."""
        if line:
            self.line(line)

    def status(self, works: Sequence[Work]) -> None:
        """See :meth:`Screen.status`; write at most one line per piece of work every 10 s."""
        now_s = self._clock.monotonic()
        begun = [work for work in works if work.progress.ended]
        if not begun or now_s < self._next_progress_s:
            return
        self._next_progress_s = now_s + _PLAIN_PROGRESS_EVERY_S
        for work in begun:
            self.line(Line(source="pool", text=work.ongoing(now_s), tone=Tone.STEP))

    def close(self) -> None:
        """See :meth:`Screen.close`."""


class LiveScreen:
    """Coloured lines; below them, during provisioning and work, a spinner, bars and a table of the nodes."""

    def __init__(
        self, surface: Surface, tag: PoolTag, load: FleetLoad, *, clock: Clock, wall: Callable[[], float]
    ) -> None:
        from rich.console import Console

        self._surface = surface
        self._layout = Layout(surface, tag, wall)
        self._load = load
        self._clock = clock
        self._blocks, self._frames = ("█░", _FRAMES) if surface.stream.unicode else ("#-", "-\\|/")
        self._console = Console(file=io.StringIO(), force_terminal=True)
        self._phase = ""
        self._works: tuple[Work, ...] = ()
        self._states: dict[tuple[str, str], _State] = {}
        self._table: list[str] = []
        self._table_of: object = None

    @property
    def shows_load(self) -> bool:
        """See :attr:`Screen.shows_load`."""
        return bool(self._phase or self._works)

    def line(self, line: Line) -> None:
        """See :meth:`Screen.line`."""
        from rich.text import Text

        now, source, text = self._layout.columns(line)
        self._replace_state(line, f"{now} {source} {self._surface.stream.rule} {cleaned(text, colours=False)}")
        if line.state:
            return
        colour = "bold" if line.node is None else _NODE_COLOURS[line.node % len(_NODE_COLOURS)]
        text = cleaned(text, colours=True) if line.tone is Tone.OUTPUT else text
        shown = Text.from_ansi(text) if "\x1b" in text else Text(text, line.tone.value)
        rule = f" {self._surface.stream.rule} "
        whole = Text.assemble((now, "dim"), " ", (source, colour), rule, shown)
        with self._console.capture() as capture:
            self._console.print(whole, soft_wrap=True, end="")
        self._surface.add_line(capture.get())

    def _replace_state(self, line: Line, text: str) -> None:
        """Replace the state of the line's origin; states of its worker's earlier calls go."""
        if not (self._states or line.state):
            return
        worker, _ = line.origin
        gone = {key for key, at in self._states.items() if key[0] == worker and (at.source != line.source)}
        states = {key: at for key, at in self._states.items() if key not in (line.origin, *gone)}
        if line.state:
            states[line.origin] = _State(text=text, source=line.source, until_s=self._clock.monotonic() + _STATE_S)
        self._states = states  # another one, as other threads draw the last one

    def phase(self, line: Line | None) -> None:
        """See :meth:`Screen.phase`."""
        self._phase = f"{line.source}: {line.text}" if line else ""

    def status(self, works: Sequence[Work]) -> None:
        """See :meth:`Screen.status`."""
        self._works = tuple(works)
        if self.shows_load or self._states:
            self._surface.show(self._render)
        else:
            self._surface.hide(self._render)

    def close(self) -> None:
        """See :meth:`Screen.close`."""
        self._phase, self._works, self._states = "", (), {}
        self._surface.hide(self._render)

    def _render(self, width: int) -> list[str]:
        """Return the lines of the drawing; called several times a second, by several threads."""
        from rich.text import Text

        now_s = self._clock.monotonic()
        frame = self._frames[int(now_s / REDRAW_EVERY_S) % len(self._frames)]
        works = [
            f"{progress_bar(work, self._blocks, width)}{self._layout.encodable(work.ongoing(now_s))}"
            for work in self._works
        ]
        states = [at.text for at in self._states.values() if now_s < at.until_s][-_MOST_STATES:]
        texts = [Text(line) for line in states + ([f"{frame} {self._phase}"] if self._phase else []) + works]
        for text in texts:
            text.truncate(width)
        return [*(text.plain for text in texts), *(self._load_lines(width) if self.shows_load else ())]

    def _load_lines(self, width: int) -> list[str]:
        rows = [(self._prefixed(first), *others) for first, *others in self._load.rows()]
        footer = [self._prefixed(line) for line in self._load.footer(self._clock.elapsed())]
        if (width, rows, footer) != self._table_of:
            self._table, self._table_of = _table(rows, footer, width), (width, rows, footer)
        return self._table

    def _prefixed(self, cell: str) -> str:
        return f"{self._layout.pool} {cell}".lstrip()


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
