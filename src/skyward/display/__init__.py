"""Display of an open pool: a subscriber to its events that writes to standard error, or to a notebook's cells."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TextIO

from skyward import events as ev
from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.display.notebook import Notebook, NotebookScreen, running_notebook
from skyward.display.screens import Line, LiveScreen, Screen, Tone
from skyward.display.shared_output import PoolTag, join_surface
from skyward.display.tables import FleetLoad
from skyward.display.words import (
    Work,
    deadline_words,
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
from skyward.events.log_files import is_handled
from skyward.wire.terminal import harmless

__all__ = ["Display", "DisplayKind", "PoolTag", "parse_display"]

_VISIBLE_AFTER_S: Final = 1.0
_LOAD_EVERY_S: Final = 30.0
# A call that holds the interpreter's lock is killed a second after the others; the link may be slow too.
_ONE_CANCELLATION_S: Final = 5.0

_LEVEL_TONES: Final = {"WARNING": Tone.WARNING, "ERROR": Tone.ERROR, "CRITICAL": Tone.ERROR}
_TEXTS: Final[dict[type[ev.SkywardEvent], tuple[Tone, Callable[[Any], str]]]] = {
    ev.InfraCreating: (Tone.STEP, lambda _: "preparing"),
    ev.InfraCreated: (Tone.STEP, lambda e: f"prepared: {e.region}".removesuffix(": ")),
    ev.InstanceLaunching: (Tone.STEP, launch_words),
    ev.InstanceProvisioned: (Tone.STEP, lambda e: f"instance {e.instance_id} runs"),
    ev.BootstrapStarting: (Tone.STEP, lambda _: "bootstrap starts"),
    ev.BootstrapProgress: (Tone.STEP, lambda e: f"bootstrap: {step_name(e.step)}"),
    ev.BootstrapCompleted: (Tone.STEP, lambda _: "bootstrap done"),
    ev.PoolStopping: (Tone.STEP, lambda _: "closing"),
    ev.InstanceStopping: (Tone.STEP, lambda e: f"terminating instance {e.instance_id}"),
    ev.WorkerLost: (Tone.WARNING, lambda e: f"worker {e.worker} lost: {e.reason}{e.outlook}"),
    ev.NodeUnreachable: (Tone.WARNING, lambda e: f"unreachable, reconnecting; its calls continue: {e.reason}"),
    ev.NodeReachable: (Tone.WARNING, lambda e: f"reachable again after {e.seconds:.0f} s"),
    ev.InstancePreempted: (Tone.WARNING, deadline_words),
    ev.TimeoutApproaching: (Tone.WARNING, deadline_words),
    ev.Notice: (Tone.WARNING, lambda e: f"note: {e.message}"),
    ev.Error: (Tone.ERROR, lambda e: f"error: {e.message}"),
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


class Display:
    """Display of the events of ``bus``, until it is closed. Close the bus first, so that all events are shown.

    Args:
        kind: the amount of information.
        bus: the pool's event bus.
        stream: the output; if None, the cells of the notebook that runs here, else ``sys.stderr``. Only a terminal
            gets colours, bars, tables and a spinner.
        tag: distinguishes the pool from other pools with the same output.
        notebook: the notebook to write to; by default the running one, if no stream is given.
        clock: clock for durations.
        wall: returns seconds since the epoch, for the time at the beginning of each line.
    """

    def __init__(
        self,
        kind: DisplayKind,
        bus: EventBus,
        stream: TextIO | None = None,
        *,
        tag: PoolTag | None = None,
        notebook: Notebook | None = None,
        clock: Clock = SYSTEM_CLOCK,
        wall: Callable[[], float] = time.time,
    ) -> None:
        tag = tag or PoolTag()
        self._kind = kind
        self._pool_id = tag.pool_id
        self._clock = clock
        self._nodes: dict[str, int] = {}
        self._works: dict[str, Work] = {}
        self._load = FleetLoad()
        self._next_load_s: float | None = None
        self._opened_s = clock.elapsed()
        self._restarting: dict[tuple[str, int], str] = {}
        self._next_cancellation_s = 0.0
        self._bootstrapping = 0
        self._started: ev.PoolStarted | None = None
        self._stopped: ev.PoolStopped | None = None
        self._cost: ev.CostFinal | None = None
        self._unsubscribe: Callable[[], None] | None = None
        if kind is DisplayKind.QUIET:
            return
        notebook = notebook or (running_notebook() if stream is None else None)
        surface = self._surface = join_surface(stream or sys.stderr, tag)
        make = partial(NotebookScreen, notebook=notebook) if notebook else LiveScreen if surface.is_terminal else Screen
        self._screen = make(surface=surface, tag=tag, load=self._load, clock=clock, wall=wall)
        self._unsubscribe = bus.subscribe(None, self._show)

    def close(self) -> None:
        """Stop the display, and write the closing summary if the pool opened or was closed. Idempotent."""
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._unsubscribe = None
        self._screen.close()
        if event := self._started or self._stopped:
            lived_s = self._clock.elapsed() - self._opened_s
            self._say(event, summary_words(self._started, lived_s, self._stopped, self._cost), Tone.STEP)
        self._surface.leave()

    def _show(self, event: ev.SkywardEvent) -> None:
        self._remember(event)
        match event:
            case ev.LogLine():
                self._show_line(event)
            case ev.Progress():
                self._advance(event)
            case ev.PoolStarted():
                self._step(event, open_words(event, self._pool_id))
            case ev.WorkerRestarting() if event.reason == ev.CALL_CANCELLED:
                self._show_cancellation()
            case ev.WorkerReplaced():
                self._show_replacement(event)
            case _ if text := _TEXTS.get(type(event)):
                tone, words = text
                if tone is Tone.STEP:
                    self._step(event, words(event))
                else:
                    self._say(event, words(event), tone)
            case _:
                pass
        if isinstance(event, ev.BootstrapCompleted) and not self._bootstrapping:
            self._step(None, "waiting for the workers")
        self._show_works()
        self._show_load()

    def _remember(self, event: ev.SkywardEvent) -> None:
        self._load.note(event, self._clock.elapsed())
        match event:
            case ev.InstanceLaunching():
                self._bootstrapping += event.count
            case ev.InstanceProvisioned():
                self._nodes[event.instance_id] = event.node
            case ev.BootstrapCompleted():
                self._bootstrapping -= 1
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

    def _show_line(self, event: ev.LogLine) -> None:
        if is_handled(event):  # the program's own handlers show the record
            return
        tone = _LEVEL_TONES.get(event.level, Tone.OUTPUT)
        source, origin = harmless(short_place(event)), (f"{event.node}/{event.worker}", event.stream)
        for text in line_text(event).split("\n"):
            line = Line(source=source, node=event.node, text=text, tone=tone, origin=origin, state=event.state)
            self._screen.line(line)

    def _show_cancellation(self) -> None:
        """Show the end of cancelled calls as one line, however many workers end with them."""
        now_s = self._clock.monotonic()
        if now_s >= self._next_cancellation_s:
            self._say(None, "call cancelled; worker restarting", Tone.STEP)
        self._next_cancellation_s = now_s + _ONE_CANCELLATION_S

    def _show_replacement(self, event: ev.WorkerReplaced) -> None:
        """Show an intentional restart as one line, after its end; in contrast to a loss, it is no warning."""
        if reason := self._restarting.pop((event.instance_id, event.worker), ""):
            if reason != ev.CALL_CANCELLED:
                self._say(event, f"worker {event.worker} restarted: {reason}", Tone.STEP)
        else:
            self._say(event, f"worker {event.worker} replaced", Tone.WARNING)

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
        return Line(source=harmless(source), node=node, text=text, tone=tone)
