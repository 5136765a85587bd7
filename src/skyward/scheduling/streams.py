"""Items of generators and results of calls on their way to the program that iterates over them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final

from skyward.scheduling.calls import LiveCall, RawOutcome, WorkCount
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.wire import messages

_LOOK_S: Final = 5.0  # a wait that lasts longer looks again
_UNREAD_CALLS: Final = 1024
_UNREAD_BYTES: Final = 256 << 20


class Arrivals:
    """Wakes the one thread or coroutine that waits for something to arrive."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] | None = None

    def notify(self) -> None:
        """Wake the waiter, if there is one. On the event loop, after the arrival."""
        wake, self._wake = self._wake, None
        if wake is not None:
            with suppress(RuntimeError):  # the event loop of a coroutine that no longer waits may be closed
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


def nbytes_of(raw: RawOutcome) -> int:
    """Return the size of a result, or of an item of a generator, in bytes."""
    return len(raw.data) + (sum(memoryview(buffer).nbytes for buffer in raw.buffers) if raw.buffers else 0)


def most_unread(capacity: int, *, arrived: int, mean_bytes: float) -> int:
    """Return how many calls may be submitted whose results were not read.

    Args:
        capacity: number of workers.
        arrived: number of results so far.
        mean_bytes: size of a call's arguments and result, on average.
    """
    # Two for each worker, that none is idle. From there on as results come in: what they take is not known before.
    least = 2 * capacity
    most = min(max(_UNREAD_CALLS, 2 * least), least + 2 * arrived)
    return max(least, min(most, int(_UNREAD_BYTES / max(mean_bytes, 1.0))))


class ResultWindow:
    """Calls that were submitted, and results that have arrived, until they are read; calls count from 0.

    Attributes:
        work: counts of the calls.
        calls: the unfinished calls.
        results: the outcomes that were not read, as they came.
        submitted: number of all calls.
        arrived: number of all outcomes.
        read: number of the outcomes that were read.
        arrivals: wakes the reader.
    """

    def __init__(self) -> None:
        self.work = WorkCount()
        self.calls: dict[int, LiveCall] = {}
        self.results: OrderedDict[int, RawOutcome] = OrderedDict()  # in a dict, the first is far behind removed ones
        self.submitted = self.arrived = self.read = 0
        self.arrivals = Arrivals()
        self._argument_bytes = self._result_bytes = 0

    @property
    def unread(self) -> int:
        """Number of calls whose outcome was not read."""
        return self.submitted - self.read

    @property
    def running(self) -> int:
        """Number of calls that are not over."""
        return self.submitted - self.arrived

    @property
    def mean_bytes(self) -> float:
        """Size of a call's arguments and result, on average."""
        return self._argument_bytes / max(self.submitted, 1) + self._result_bytes / max(self.arrived, 1)

    def add(self, calls: Sequence[LiveCall]) -> None:
        """Take in the next calls, before any of them is queued."""
        blobs = {id(blob): blob.view.nbytes for call in calls for blob in call.blobs if not blob.of_function}
        self._argument_bytes += sum(len(call.data) for call in calls) + sum(blobs.values())
        self.calls.update(enumerate(calls, self.submitted))
        self.submitted += len(calls)

    def drop_from(self, number: int) -> None:
        """Forget the calls from this one on, which could not be queued."""
        for late in range(number, self.submitted):
            del self.calls[late]
        self.submitted = number

    def deliver(self, number: int, raw: RawOutcome) -> None:
        """Store the outcome of a call. On the event loop."""
        call = self.calls.pop(number)
        raw.label, raw.number = call.label, call.number
        self._result_bytes += nbytes_of(raw)
        self.results[number] = raw
        self.arrived += 1
        self.arrivals.notify()


class ResultLot:
    """Receiver of the outcomes of those calls of a window that are submitted together.

    Args:
        window: the window.

    Attributes:
        work: counts of the window's calls.
    """

    def __init__(self, window: ResultWindow) -> None:
        self.work = window.work
        self._window = window
        self._first = window.submitted

    def fill(self, calls: Sequence[LiveCall]) -> None:
        """See :meth:`~skyward.scheduling.calls.CallSink.fill`."""
        self._window.add(calls)

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """See :meth:`~skyward.scheduling.calls.CallSink.deliver`."""
        self._window.deliver(self._first + index, raw)
