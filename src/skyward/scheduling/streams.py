"""Items of generators and results of calls on their way to the program that iterates over them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final

from skyward.scheduling.calls import LiveCall, RawOutcome, WorkCount
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.wire import messages

_LOOK_S: Final = 5.0  # a wait that lasts longer looks again


class Arrivals:
    """Wakes the one thread or coroutine that waits for something to arrive."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] | None = None

    def notify(self) -> None:
        """Wake the waiter, if there is one. On the event loop, after the arrival."""
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def wait(self, is_there: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Block until ``is_there`` returns True, or the monotonic clock shows the deadline; return whether it is."""
        signals: SimpleQueue[None] = SimpleQueue()
        while not is_there():
            # First the way to be woken, then a second look: what arrives in between must not be missed.
            self._wake = lambda: signals.put(None)
            if is_there():
                break
            left_s = _LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with suppress(Empty):
                signals.get(timeout=min(left_s, _LOOK_S))
        return True

    async def wait_async(self, is_there: Callable[[], bool]) -> None:
        """Return once ``is_there`` returns True."""
        loop = asyncio.get_running_loop()
        while not is_there():
            woken = asyncio.Event()
            self._wake = lambda woken=woken: loop.call_soon_threadsafe(woken.set)
            if not is_there():
                await woken.wait()


class Inbox:
    """Items of one generator that have arrived and were not read.

    Attributes:
        call: the generator's call; None once it is over.
        worker: the worker that the items came from.
        entries: pickles of small items, outcomes of large ones.
        end: the outcome of the call; None before. All items are in the entries before that is set.
        arrivals: wakes the reader.
    """

    def __init__(self, call: LiveCall) -> None:
        self.call: LiveCall | None = call
        self.worker: WorkerId | None = None
        self.entries: deque[bytes | RawOutcome] = deque()
        self.end: RawOutcome | None = None
        self.arrivals = Arrivals()


class StreamBatch:
    """Receiver of the items of generators, by the index of their calls.

    Attributes:
        work: counts of the calls.
        inboxes: what has arrived of each call.
    """

    def __init__(self) -> None:
        self.work = WorkCount()
        self.inboxes: list[Inbox] = []

    def fill(self, calls: Sequence[LiveCall]) -> None:
        """Take in the calls, before any of them is queued."""
        self.inboxes = [Inbox(call) for call in calls]
        for call in calls:
            call.streams = True
            call.header = replace(call.header or messages.CallHeader(), streams=True)

    def add(self, call: LiveCall, entries: Sequence[bytes | RawOutcome]) -> None:
        """Store items of a call. On the event loop."""
        call.retries = 0  # in another run they would come again
        inbox = self.inboxes[call.index]
        inbox.worker = call.worker
        inbox.entries.extend(entries)
        inbox.arrivals.notify()

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """Store the end of a call. On the event loop."""
        inbox = self.inboxes[index]
        inbox.call, inbox.end = None, raw
        inbox.arrivals.notify()
