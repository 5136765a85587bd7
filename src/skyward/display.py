"""What a pool shows while it works: a subscriber to its events that writes to stderr."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Final, Protocol, TextIO, cast

from skyward import events as ev
from skyward._event_bus import EventBus
from skyward._region import REDRAW_EVERY_S, Region, SafeStream
from skyward._waiting import SYSTEM_CLOCK, Clock
from skyward.errors import ConfigurationError

__all__ = ["Display", "DisplayKind", "open_display", "parse_display"]

_VISIBLE_AFTER_S: Final = 1.0
_PLAIN_PROGRESS_EVERY_S: Final = 10.0
_BAR_WIDTH: Final = 30
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NODE_COLOURS: Final = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta", "bright_green")

_STEPS: Final[dict[type[ev.SkywardEvent], str]] = {
    ev.InfraCreating: "preparing",
    ev.InfraCreated: "prepared: {e.region}",
    ev.InstanceLaunching: "launching {nodes} on {e.provider}: {e.instance_type}",
    ev.InstanceProvisioned: "instance {e.instance_id} runs",
    ev.BootstrapStarting: "bootstrap starts",
    ev.BootstrapProgress: "bootstrap: {e.step}",
    ev.BootstrapCompleted: "bootstrap done",
    ev.PoolStarted: "open (nodes: {e.nodes}, workers: {e.workers})",
    ev.PoolStopping: "closing",
    ev.InstanceStopping: "terminating instance {e.instance_id}",
}
_WARNINGS: Final[dict[type[ev.SkywardEvent], str]] = {
    ev.WorkerLost: "worker {e.worker} lost: {e.reason}",
    ev.WorkerReplaced: "worker {e.worker} replaced",
    ev.NodeUnreachable: "cannot be reached; its calls go on, waiting for it: {e.reason}",
    ev.NodeReachable: "is back after {e.seconds:.0f} s",
    ev.InstancePreempted: "is taken back by its provider in {e.seconds_left:.0f} s; another takes its place",
    ev.TimeoutApproaching: "ends in {e.seconds_left:.0f} s: its timeout is nearly used up",
    ev.Notice: "note: {e.message}",
}

_CONTROLS: Final = (*range(9), *range(10, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_DIRECTIONS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HARMLESS: Final = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *_DIRECTIONS)}


class DisplayKind(enum.StrEnum):
    """How much a pool shows."""

    LOG = "log"
    """A line for each step and for each line that a call prints; a bar for work that takes longer than a second."""
    SPINNER = "spinner"
    """One moving line instead of the steps; else as ``LOG``."""
    QUIET = "quiet"
    """Nothing at all; what fails is raised."""


def parse_display(kind: str) -> DisplayKind:
    """The kind that ``kind`` names.

    Raises:
        ConfigurationError: there is no such kind.
    """
    try:
        return DisplayKind(kind)
    except ValueError:
        allowed = ", ".join(repr(str(known)) for known in DisplayKind)
        raise ConfigurationError(f"display must be one of {allowed}, got {kind!r}") from None


def open_display(kind: str, bus: EventBus, stream: TextIO | None = None, *, clock: Clock = SYSTEM_CLOCK) -> Display:
    """Show what ``bus`` carries, until the display is closed.

    Args:
        kind: a :class:`DisplayKind` or its value.
        bus: the pool's events.
        stream: where to; ``sys.stderr`` when None. Only a terminal gets colours, bars and a spinner.
        clock: the time.

    Raises:
        ConfigurationError: there is no such kind.
    """
    parsed = parse_display(kind)
    safe = SafeStream(None if parsed is DisplayKind.QUIET else stream or sys.stderr)
    screen = _LiveScreen(safe, clock) if safe.isatty() else _PlainScreen(safe, clock)
    return Display(parsed, bus, screen, clock)


class _Tone(enum.Enum):
    """What a line is, hence how it looks on a terminal."""

    STEP = "dim"
    """What the pool does."""
    OUTPUT = ""
    """What a call printed."""
    WARNING = "yellow"
    """Something was lost, or will be."""
    ERROR = "bold red"
    """Something went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    source: str
    node: int | None = None
    text: str
    tone: _Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    label: str
    done: int
    total: int | None
    first_s: float
    first_done: int

    def bar(self, blocks: str) -> str:
        """A bar in the two characters ``blocks``, full and empty; nothing while the total is unknown."""
        if not self.total:
            return ""
        full = _BAR_WIDTH * self.done // self.total
        return blocks[0] * full + blocks[1] * (_BAR_WIDTH - full) + " "

    def count(self, now_s: float) -> str:
        """``3/10, 2.5/s``, at the rate since the first event of this work."""
        of = "" if self.total is None else f"/{self.total}"
        return f"{self.done}{of}, {(self.done - self.first_done) / max(now_s - self.first_s, 1e-3):.1f}/s"


class _Screen(Protocol):
    """Where lines go. All of it is called from one thread at a time."""

    def line(self, line: _Line) -> None:
        """Add a line."""
        ...

    def phase(self, line: _Line | None) -> None:
        """Say what the pool is about now, in a line that changes where there can be one; None: nothing."""
        ...

    def status(self, works: Sequence[_Work]) -> None:
        """Show how far ``works`` are."""
        ...

    def close(self) -> None:
        """Leave nothing but the lines."""
        ...


class Display:
    """Shows a pool's events. Close the bus first, so that nothing is on its way any more."""

    def __init__(self, kind: DisplayKind, bus: EventBus, screen: _Screen, clock: Clock) -> None:
        self._kind = kind
        self._screen = screen
        self._clock = clock
        self._nodes: dict[str, int] = {}
        self._works: dict[str, _Work] = {}
        self._first_s: float | None = None
        self._bootstrapping = 0
        self._started: ev.PoolStarted | None = None
        self._stopped: ev.PoolStopped | None = None
        self._cost: ev.CostFinal | None = None
        self._unsubscribe = None if kind is DisplayKind.QUIET else bus.subscribe(None, self._show)

    def close(self) -> None:
        """Stop showing, and write the closing summary if the pool ever opened. Idempotent."""
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._unsubscribe = None
        self._screen.close()
        if self._started:
            lived_s = self._clock.elapsed() - (self._first_s or 0.0)
            self._say(self._started, _summary(self._started, lived_s, self._stopped, self._cost), _Tone.STEP)

    def _show(self, event: ev.SkywardEvent) -> None:
        self._remember(event)
        match event:
            case ev.LogLine():
                self._say(event, event.line, _Tone.OUTPUT)
            case ev.Progress():
                self._advance(event)
            case ev.Error():
                self._say(event, f"error: {event.message}", _Tone.ERROR)
            case _ if template := _WARNINGS.get(type(event)):
                self._say(event, template.format(e=event), _Tone.WARNING)
            case _ if template := _STEPS.get(type(event)):
                self._step(event, template.format(e=event, nodes=_nodes(event)).removesuffix(": "))
            case _:
                pass
        self._count_bootstraps(event)
        self._show_works()

    def _show_works(self) -> None:
        now_s = self._clock.monotonic()
        works = (work for work in self._works.values() if work.done or work.total)
        self._screen.status([work for work in works if now_s - work.first_s > _VISIBLE_AFTER_S])

    def _remember(self, event: ev.SkywardEvent) -> None:
        if self._first_s is None:
            self._first_s = self._clock.elapsed()
        match event:
            case ev.InstanceProvisioned():
                self._nodes[event.instance_id] = event.node
            case ev.PoolStarted():
                self._started = event
            case ev.PoolStopped():
                self._stopped = event
            case ev.CostFinal():
                self._cost = event
            case _:
                pass

    def _count_bootstraps(self, event: ev.SkywardEvent) -> None:
        match event:
            case ev.InstanceLaunching():
                self._bootstrapping += event.count
            case ev.BootstrapCompleted():
                self._bootstrapping -= 1
                if not self._bootstrapping:
                    self._step(None, "waiting for the workers")
            case _:
                pass

    def _step(self, event: ev.SkywardEvent | None, text: str) -> None:
        line = self._line(event, text, _Tone.STEP)
        if self._kind is DisplayKind.SPINNER and not isinstance(event, ev.PoolStarted):
            self._screen.phase(line)
        else:
            self._screen.phase(None)
            self._screen.line(line)

    def _advance(self, event: ev.Progress) -> None:
        now_s = self._clock.monotonic()
        work = self._works.get(event.label)
        if work is None or work.done > event.done:
            work = _Work(label=event.label, done=0, total=None, first_s=now_s, first_done=event.done)
        work = replace(work, done=event.done, total=event.total)
        self._works[event.label] = work
        if event.done != event.total:
            return
        del self._works[event.label]
        self._show_works()  # first the bar goes, then the line says how it ended
        if event.done and now_s - work.first_s > _VISIBLE_AFTER_S:
            self._say(event, f"{work.label}: {work.count(now_s)}", _Tone.STEP)

    def _say(self, event: ev.SkywardEvent, text: str, tone: _Tone) -> None:
        for line in text.split("\n"):
            self._screen.line(self._line(event, line, tone))

    def _line(self, event: ev.SkywardEvent | None, text: str, tone: _Tone) -> _Line:
        instance_id: str | None = getattr(event, "instance_id", None)
        node: int | None = getattr(event, "node", self._nodes.get(instance_id or ""))
        source = f"node {node}" if node is not None else instance_id or "pool"
        return _Line(source=_harmless(source), node=node, text=_harmless(text), tone=tone)


def _harmless(text: str) -> str:
    """The text with control characters, tabs excepted, made visible."""
    return text.translate(_HARMLESS)


def _nodes(event: ev.SkywardEvent) -> str:
    count: int = getattr(event, "count", 0)
    return f"{count} node{'' if count == 1 else 's'}"


def _summary(started: ev.PoolStarted, lived_s: float, stopped: ev.PoolStopped | None, cost: ev.CostFinal | None) -> str:
    parts = [f"nodes: {started.nodes}", f"workers: {started.workers}"]
    if stopped:
        parts.append(f"calls: {stopped.calls}")
    if cost:
        parts.append(f"cost: ${cost.total_cost:.2f}")
    if cost and cost.savings_vs_ondemand > 0:
        parts.append(f"saved by spot: ${cost.savings_vs_ondemand:.2f}")
    return f"closed after {lived_s:.1f} s ({', '.join(parts)})"


class _PlainScreen:
    """Plain lines, for files and pipes."""

    def __init__(self, stream: SafeStream, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._next_progress_s = 0.0

    def line(self, line: _Line) -> None:
        self._stream.write(f"{line.source:<7} {self._stream.rule} {line.text}\n")
        self._stream.flush()

    def phase(self, line: _Line | None) -> None:
        if line:
            self.line(line)

    def status(self, works: Sequence[_Work]) -> None:
        now_s = self._clock.monotonic()
        begun = [work for work in works if work.done]
        if not begun or now_s < self._next_progress_s:
            return
        self._next_progress_s = now_s + _PLAIN_PROGRESS_EVERY_S
        for work in begun:
            text = _harmless(f"{work.label}: {work.count(now_s)}")
            self.line(_Line(source="pool", text=text, tone=_Tone.STEP))

    def close(self) -> None:
        pass


class _LiveScreen:
    """Coloured lines, and below them a spinner and bars while there is something to show in them."""

    def __init__(self, stream: SafeStream, clock: Clock) -> None:
        from rich.console import Console

        self._rule = stream.rule
        self._blocks, self._frames = ("█░", _FRAMES) if stream.unicode else ("#-", "-\\|/")
        self._clock = clock
        self._console = Console(file=cast("IO[str]", stream), force_terminal=True)
        self._region = Region(stream, self._render)
        self._phase = ""
        self._works: tuple[_Work, ...] = ()

    def line(self, line: _Line) -> None:
        from rich.text import Text

        colour = "bold" if line.node is None else _NODE_COLOURS[line.node % len(_NODE_COLOURS)]
        text = Text.assemble((f"{line.source:<7}", colour), f" {self._rule} ", (line.text, line.tone.value))
        self._region.add_line(lambda: self._console.print(text, soft_wrap=True))

    def phase(self, line: _Line | None) -> None:
        self._phase = f"{line.source}: {line.text}" if line else ""

    def status(self, works: Sequence[_Work]) -> None:
        self._works = tuple(works)
        if self._phase or works:
            self._region.show()
        else:
            self._region.close()

    def close(self) -> None:
        self._region.close()

    def _render(self, width: int) -> list[str]:
        """What changes; called several times a second, by several threads."""
        from rich.text import Text

        now_s = self._clock.monotonic()
        frame = self._frames[int(now_s / REDRAW_EVERY_S) % len(self._frames)]
        lines = [f"{work.bar(self._blocks)}{_harmless(work.label)}: {work.count(now_s)}" for work in self._works]
        texts = [Text(line) for line in ([f"{frame} {self._phase}"] if self._phase else []) + lines]
        for text in texts:
            text.truncate(width)
        return [text.plain for text in texts]
