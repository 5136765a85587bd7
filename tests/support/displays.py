"""A display on a stream of the test's, at a time of the test's."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from skyward.display import Display, DisplayKind, PoolTag
from skyward.events import Callback, SkywardEvent
from skyward.events.bus import EventBus
from support.clock import FakeClock

__all__ = ["InlineBus", "Show", "Terminal", "shown"]


class Terminal(io.StringIO):
    """Keeps what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        """True."""
        return True


class InlineBus(EventBus):
    """Delivers at once, in the publisher's thread, so that a test decides what time it is meanwhile.

    Attributes:
        heard_by: who has subscribed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard_by: list[Callback] = []

    def subscribe(self, event_type: Any, callback: Any) -> Callable[[], None]:
        """Hear every event."""
        self.heard_by.append(callback)
        return self.heard_by.clear

    def publish(self, event: SkywardEvent, also: object = ()) -> None:
        """Have it heard."""
        for callback in self.heard_by:
            callback(event)


class Show:
    """A display on a stream, and the clock it sees, on which the epoch began 100 seconds ago.

    Attributes:
        clock: the time.
        bus: brings it events.
        display: the display.
    """

    def __init__(self, kind: str, stream: io.TextIOBase, tag: PoolTag | None = None) -> None:
        self.clock = FakeClock(100.0)
        self.bus = InlineBus()
        self.display: Any = Display(
            DisplayKind(kind),
            self.bus,
            stream,  # type: ignore[arg-type]
            tag=tag,
            clock=self.clock,
            wall=self.clock.monotonic,
        )

    def __call__(self, *events: SkywardEvent, after_s: float = 0.0) -> None:
        """Events happen, so many seconds later."""
        self.clock.advance(after_s)
        for event in events:
            self.bus.publish(event)


@contextmanager
def shown(kind: str, stream: io.TextIOBase, tag: PoolTag | None = None) -> Generator[Show]:
    """Open a display, and close it at the end."""
    show = Show(kind, stream, tag)
    try:
        yield show
    finally:
        show.display.close()
