"""Counts of the pieces of work of a pool, and the :class:`~skyward.events.Progress` events that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, count
from typing import Final

from skyward.events import Progress, SkywardEvent

CALL_CANCELLED: Final = "a cancelled call was ended"
"""Reason of a restart of a worker: the end of its process is how a running call ends."""

_SHOWN_AFTER_S: Final = 0.5  # only work that lasts longer publishes progress
_AGAIN_AFTER_S: Final = 1.0  # unchanged progress is published again, so that displays show its age


class WorkCount:
    """Counts of one piece of work: a batch, or the submitted calls of a function until none of them is left.

    Attributes:
        label: label of its calls; ``"calls"`` if they have several.
        left: number of unfinished calls.
        total: number of all its calls.
        silent: True if a front-end publishes the progress itself, in its own units.
        began_s: time of its first call.
    """

    __slots__ = ("_cancelled", "_failed", "began_s", "label", "left", "silent", "total")

    def __init__(self, *, silent: bool = False) -> None:
        self.label = ""
        self.left = 0
        self.silent = silent
        self.began_s = 0.0
        self.total = self._failed = self._cancelled = 0

    def add(self, label: str, calls: int, now: float) -> None:
        """Count new calls."""
        if not self.total:
            self.label, self.began_s = label, now
        elif label != self.label:
            self.label = "calls"
        self.total += calls
        self.left += calls

    def end(self, calls: int, *, failed: bool = False, cancelled: bool = False) -> None:
        """Count calls that are over."""
        self.left -= calls
        if failed:
            self._failed += calls
        elif cancelled:
            self._cancelled += calls

    def progress(self, label: str, running: int) -> Progress:
        """Return the progress, with ``running`` calls on workers."""
        done = self.total - self.left - self._failed - self._cancelled
        return Progress(label, done, self.total, self._failed, min(running, self.left), self._cancelled)


class WorkCounts:
    """Unfinished pieces of work of a pool. Belongs to the event loop.

    Args:
        publish: receiver of the events; must not block.
    """

    def __init__(self, publish: Callable[[SkywardEvent], None]) -> None:
        self._publish = publish
        self._current: dict[WorkCount, None] = {}
        self._streams: dict[tuple[str, bool], WorkCount] = {}
        self._silent: dict[str, int] = {}
        self._shown: dict[WorkCount, tuple[Progress, float]] = {}  # the event, and its time

    def begin(self, work: WorkCount) -> None:
        """Add a piece of work."""
        self._current[work] = None

    def stream(self, name: str, *, silent: bool) -> WorkCount:
        """Return the unfinished work of calls that were submitted under a name; begin it if there is none."""
        work = self._streams.get((name, silent))
        if work is None:
            work = self._streams[name, silent] = WorkCount(silent=silent)
        return work

    def end(self, work: WorkCount) -> None:
        """Remove a piece of work that has no calls left; publish its end if it was shown."""
        self._current.pop(work, None)
        key = (work.label, work.silent)
        if self._streams.get(key) is work:
            del self._streams[key]
        if (shown := self._shown.pop(work, None)) is not None:
            self._publish(work.progress(shown[0].label, 0))

    def look(self, now: float, running: Callable[[], Iterable[WorkCount | None]]) -> None:
        """Publish the progress of work that has taken 0.5 s, where it has changed. Called periodically.

        Args:
            now: the present time, by the clock of the calls.
            running: returns the work of each running call.
        """
        due = [work for work in self._current if now - work.began_s >= _SHOWN_AFTER_S]
        if not due:
            return
        counts = Counter(running())
        # Replaced, never changed: front-ends read it in other threads.
        self._silent = {work.label: counts[work] for work in due if work.silent}
        for work in (work for work in due if not work.silent):
            before, at_s = self._shown.get(work, (None, 0.0))
            event = work.progress(before.label if before else self._free_label(work.label), counts[work])
            if event != before or now - at_s >= _AGAIN_AFTER_S:
                self._shown[work] = event, now
                self._publish(event)

    def completed(self, event: Progress) -> Progress:
        """Return a front-end's event with the calls of its work that ran at the last look. Thread-safe.

        Events of Dask's tasks state themselves what runs.
        """
        left = None if event.total is None else event.total - event.ended
        running = self._silent.get(event.label, event.running)
        return replace(event, running=running if left is None else min(running, left))

    def all(self, running: Iterable[WorkCount | None]) -> tuple[Progress, ...]:
        """Return the progress of all unfinished work that no front-end publishes."""
        counts = Counter(running)
        return tuple(
            work.progress(self._shown[work][0].label if work in self._shown else work.label, counts[work])
            for work in self._current
            if not work.silent
        )

    def _free_label(self, label: str) -> str:
        taken = {event.label for event, _ in self._shown.values()}
        names = chain([label], (f"{label} ({number})" for number in count(2)))
        return next(name for name in names if name not in taken)
