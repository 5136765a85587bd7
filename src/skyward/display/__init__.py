"""Display of an open pool: a subscriber to its events that writes to standard error, or to a notebook's cells."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TextIO

from skyward import events as ev
from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.display.notebook import Notebook, NotebookScreen, running_notebook
from skyward.display.screens import Layout, Line, LiveScreen, PlainScreen, Screen, Tone
from skyward.display.surface import PoolTag, Surface, join_surface
from skyward.display.tables import FleetLoad
from skyward.display.words import (
    Work,
    duration,
    launch_words,
    line_text,
    open_words,
    short_place,
    step_name,
    summary_words,
    work_name,
)
from skyward.errors import ConfigurationError
from skyward.events.bus import EventBus
from skyward.events.lines import is_handled
from skyward.events.works import CALL_CANCELLED
from skyward.wire.terminal import cleaned, harmless

__all__ = ["Display", "DisplayKind", "PoolTag", "open_display", "parse_display"]

_VISIBLE_AFTER_S: Final = 1.0
_LOAD_EVERY_S: Final = 30.0
# A call that holds the interpreter's lock is killed a second after the others; the link may be slow too.
_ONE_CANCELLATION_S: Final = 5.0

_STEPS: Final[dict[type[ev.SkywardEvent], str]] = {
    ev.InfraCreating: "preparing",
    ev.InfraCreated: "prepared: {e.region}",
    ev.InstanceProvisioned: "instance {e.instance_id} runs",
    ev.BootstrapStarting: "bootstrap starts",
    ev.BootstrapCompleted: "bootstrap done",
    ev.PoolStopping: "closing",
    ev.InstanceStopping: "terminating instance {e.instance_id}",
}
_LEVEL_TONES: Final = {"WARNING": Tone.WARNING, "ERROR": Tone.ERROR, "CRITICAL": Tone.ERROR}
_WARNINGS: Final[dict[type[ev.SkywardEvent], str]] = {
    ev.WorkerLost: "worker {e.worker} lost: {e.reason}{e.outlook}",
    ev.NodeUnreachable: "unreachable, reconnecting; its calls continue: {e.reason}",
    ev.NodeReachable: "reachable again after {e.seconds:.0f} s",
    ev.Notice: "note: {e.message}",
}


class DisplayKind(enum.StrEnum):
    """Amount of information that a pool displays."""

    LOG = "log"
    """A line for each step and each line that a call prints; load and cost; bars for work that takes over a second."""
    SPINNER = "spinner"
    """As ``LOG``, with one changing line instead of the steps."""
    QUIET = "quiet"
    """Nothing; failures are raised."""


def parse_display(kind: str) -> DisplayKind:
    """Return the display kind of that name.

    Raises:
        ConfigurationError: no such kind exists; the message lists the kinds.
    """
    try:
        return DisplayKind(kind)
    except ValueError:
        allowed = ", ".join(repr(str(known)) for known in DisplayKind)
        raise ConfigurationError(f"display must be one of {allowed}, got {kind!r}") from None


def open_display(
    kind: str,
    bus: EventBus,
    stream: TextIO | None = None,
    *,
    tag: PoolTag | None = None,
    clock: Clock = SYSTEM_CLOCK,
    wall: Callable[[], float] = time.time,
) -> Display:
    """Show the events of ``bus`` until the display is closed.

    Args:
        kind: a :class:`DisplayKind` or its value.
        bus: the pool's event bus.
        stream: the output; if None, the cells of the notebook that runs here, else ``sys.stderr``. Only a terminal
            gets colours, bars, tables and a spinner.
        tag: distinguishes the pool from other pools with the same output.
        clock: clock for durations.
        wall: returns seconds since the epoch, for the time at the beginning of each line.

    Raises:
        ConfigurationError: no such kind exists; the message lists the kinds.
    """
    notebook = running_notebook() if stream is None else None
    stream = stream or sys.stderr
    return Display(parse_display(kind), bus, stream, tag or PoolTag(), notebook=notebook, clock=clock, wall=wall)


class Display:
    """Display of a pool's events. Close the bus before the display, so that all events are shown."""

    def __init__(
        self,
        kind: DisplayKind,
        bus: EventBus,
        stream: TextIO | None,
        tag: PoolTag,
        *,
        notebook: Notebook | None = None,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._pool_id = tag.pool_id
        self._notebook = notebook
        self._clock = clock
        self._nodes: dict[str, int] = {}
        self._works: dict[str, Work] = {}
        self._load = FleetLoad()
        self._next_load_s: float | None = None
        self._first_s: float | None = None
        self._restarting: dict[tuple[str, int], str] = {}
        self._next_cancellation_s = 0.0
        self._bootstrapping = 0
        self._started: ev.PoolStarted | None = None
        self._stopped: ev.PoolStopped | None = None
        self._cost: ev.CostFinal | None = None
        self._unsubscribe: Callable[[], None] | None = None
        if kind is not DisplayKind.QUIET:
            self._surface = join_surface(stream, tag)
            self._screen = self._open_screen(self._surface, tag, wall)
            self._unsubscribe = bus.subscribe(None, self._show)

    def _open_screen(self, surface: Surface, tag: PoolTag, wall: Callable[[], float]) -> Screen:
        if self._notebook is not None:
            return NotebookScreen(self._notebook, Layout(surface, tag, wall), self._load, clock=self._clock)
        if surface.stream.isatty():
            return LiveScreen(surface, tag, self._load, clock=self._clock, wall=wall)
        return PlainScreen(surface, tag, clock=self._clock, wall=wall)

    def close(self) -> None:
        """Stop the display, and write the closing summary if the pool opened or was closed. Idempotent."""
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._unsubscribe = None
        self._screen.close()
        if event := self._started or self._stopped:
            lived_s = self._clock.elapsed() - (self._first_s or 0.0)
            self._say(event, summary_words(self._started, lived_s, self._stopped, self._cost), Tone.STEP)
        self._surface.leave()

    def _show(self, event: ev.SkywardEvent) -> None:
        self._remember(event)
        match event:
            case ev.LogLine():
                self._show_line(event)
            case ev.Progress():
                self._advance(event)
            case ev.InstanceLaunching():
                self._step(event, launch_words(event))
            case ev.BootstrapProgress():
                self._step(event, f"bootstrap: {step_name(event.step)}")
            case ev.PoolStarted():
                self._step(event, open_words(event, self._pool_id))
            case ev.WorkerRestarting():
                self._show_cancellation(event)
            case ev.WorkerReplaced():
                self._show_replacement(event)
            case ev.Error():
                self._say(event, f"error: {event.message}", Tone.ERROR)
            case ev.InstancePreempted() | ev.TimeoutApproaching():
                self._say(event, _deadline_words(event), Tone.WARNING)
            case _:
                self._show_by_table(event)
        self._count_bootstraps(event)
        self._show_works()
        self._show_load()

    def _show_cancellation(self, event: ev.WorkerRestarting) -> None:
        """Show the end of cancelled calls as one line, however many workers end with them."""
        now_s = self._clock.monotonic()
        if event.reason == CALL_CANCELLED:
            if now_s >= self._next_cancellation_s:
                self._say(None, "call cancelled; worker restarting", Tone.STEP)
            self._next_cancellation_s = now_s + _ONE_CANCELLATION_S

    def _show_line(self, event: ev.LogLine) -> None:
        if is_handled(event):  # the program's own handlers show the record
            return
        tone = _LEVEL_TONES.get(event.level, Tone.OUTPUT)
        source, origin = harmless(short_place(event)), (f"{event.node}/{event.worker}", event.stream)
        for text in line_text(event).split("\n"):
            shown = text if tone is Tone.OUTPUT else cleaned(text, colours=False)
            line = Line(source=source, node=event.node, text=shown, tone=tone, origin=origin, state=event.state)
            self._screen.line(line)

    def _show_replacement(self, event: ev.WorkerReplaced) -> None:
        """Show an intentional restart as one line, after its end; in contrast to a loss, it is no warning."""
        if reason := self._restarting.pop((event.instance_id, event.worker), ""):
            if reason != CALL_CANCELLED:
                self._say(event, f"worker {event.worker} restarted: {reason}", Tone.STEP)
        else:
            self._say(event, f"worker {event.worker} replaced", Tone.WARNING)

    def _show_by_table(self, event: ev.SkywardEvent) -> None:
        if template := _WARNINGS.get(type(event)):
            self._say(event, template.format(e=event), Tone.WARNING)
        elif template := _STEPS.get(type(event)):
            self._step(event, template.format(e=event).removesuffix(": "))

    def _show_works(self) -> None:
        now_s = self._clock.monotonic()
        works = (work for work in self._works.values() if work.progress.ended or work.progress.total)
        self._screen.status([work for work in works if now_s - work.first_s > _VISIBLE_AFTER_S])

    def _show_load(self) -> None:
        """Write load and cost as a line every 30 s while no drawing shows them."""
        now_s = self._clock.monotonic()
        if self._next_load_s is None or now_s < self._next_load_s:
            return
        self._next_load_s = now_s + _LOAD_EVERY_S
        if not self._screen.shows_load and (text := self._load.words(self._clock.elapsed())):
            self._screen.line(self._line(None, text, Tone.STEP))

    def _remember(self, event: ev.SkywardEvent) -> None:
        if self._first_s is None:
            self._first_s = self._clock.elapsed()
        self._load.note(event, self._clock.elapsed())
        match event:
            case ev.InstanceProvisioned():
                self._nodes[event.instance_id] = event.node
            case ev.WorkerRestarting():
                self._restarting[event.instance_id, event.worker] = event.reason
            case ev.WorkerLost():
                self._restarting.pop((event.instance_id, event.worker), None)
            case ev.PoolStarted():
                self._started = event
                self._next_load_s = self._clock.monotonic() + _LOAD_EVERY_S
            case ev.PoolStopping():
                self._next_load_s = None
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
        line = self._line(event, text, Tone.STEP)
        if self._kind is DisplayKind.SPINNER and not isinstance(event, ev.PoolStarted):
            self._screen.phase(line)
        else:
            self._screen.phase(None)
            self._screen.line(line)

    def _advance(self, event: ev.Progress) -> None:
        now_s = self._clock.monotonic()
        before = self._works.get(event.label)
        if before is None or before.progress.ended > event.ended:
            name = harmless(work_name(event.label))
            before = Work(name=name, progress=event, first_s=now_s, first_ended=event.ended)
        work = self._works[event.label] = replace(before, progress=event)
        if not event.over:
            return
        del self._works[event.label]
        self._show_works()  # remove the bar before the line about the end
        if event.ended and now_s - work.first_s > _VISIBLE_AFTER_S:
            self._say(event, work.ended(now_s), Tone.WARNING if event.done < event.ended else Tone.STEP)

    def _say(self, event: ev.SkywardEvent | None, text: str, tone: Tone) -> None:
        for line in text.split("\n"):
            self._screen.line(self._line(event, line, tone))

    def _line(self, event: ev.SkywardEvent | None, text: str, tone: Tone) -> Line:
        instance_id: str | None = getattr(event, "instance_id", None)
        node: int | None = getattr(event, "node", self._nodes.get(instance_id or ""))
        source = f"node {node}" if node is not None else instance_id or "pool"
        shown = text if tone is Tone.OUTPUT else cleaned(text, colours=False)
        return Line(source=harmless(source), node=node, text=shown, tone=tone)


def _deadline_words(event: ev.InstancePreempted | ev.TimeoutApproaching) -> str:
    left = duration(event.seconds_left)
    if isinstance(event, ev.InstancePreempted):
        return f"preempted: the provider takes it back in {left}; a replacement is on its way"
    return f"ends in {left}, when its timeout expires"
