"""Unfinished calls of a pool: their records, their gangs, and the partial results received for them."""

from __future__ import annotations

import itertools
import mmap
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Protocol

from skyward._concurrency.linux_parts import use_large_pages
from skyward.engine.dispatch import CallState, WorkerId
from skyward.engine.futures import OutcomeSink, RawOutcome, call_name, short_label
from skyward.errors import PoolStateError
from skyward.events import Callback, Error, LogLine, SkywardEvent
from skyward.events.lines import record_line
from skyward.events.works import WorkCount, WorkCounts
from skyward.shipping.blobs import Stored
from skyward.shipping.parcels import Parcel
from skyward.wire.log_pieces import Reassembler
from skyward.wire.messages import (
    CallHeader,
    EmittedEvent,
    LoggedRecord,
    Outcome,
    PackedError,
    PrintedLines,
    ResultChunk,
)

__all__ = ["CallGang", "CallNumbers", "CallObserver", "CallTable", "CallTrace", "Incoming", "LiveCall"]

_FAILURE_CHARACTERS = 200


class CallTrace(Protocol):
    """Receiver of what happens to one call. On the loop; must not block or raise."""

    def sent(self, worker: WorkerId) -> None:
        """Take note that the call goes to a worker, the first time or again."""
        ...

    def ended(self, call: LiveCall, raw: RawOutcome) -> None:
        """Take note of the end of the call."""
        ...


class CallObserver(Protocol):
    """Receiver of the calls of a pool."""

    def begin(self, call: LiveCall) -> None:
        """Take note of a new call in the thread that submits it; may set its ``trace`` and ``header``."""
        ...


class CallGang:
    """Calls of one broadcast that begin and fail together, by rank. Belongs to the event loop.

    None of them runs again alone, because the others have already exchanged data with its first run.

    Attributes:
        calls: the calls.
        failed: True once one of them, and so all, have failed.
        raised: ids of the calls that raised; the cause may be the loss of another one.
    """

    def __init__(self, calls: Sequence[LiveCall]) -> None:
        self.calls = tuple(calls)
        self.failed = False
        self.raised: set[int] = set()
        self._addresses: dict[int, str] = {}
        for call in self.calls:
            call.gang = self

    def add_address(self, rank: int, text: str) -> list[str] | None:
        """Store the address of one rank; return all of them, by rank, once the last one has arrived."""
        # Overwrites: a rank that begins again in a fresh process sends the address of that one.
        self._addresses[rank] = text
        if len(self._addresses) < len(self.calls):
            return None
        addresses, self._addresses = self._addresses, {}
        return [addresses[rank] for rank in range(len(self.calls))]

    def fail(self) -> bool:
        """Mark the gang as failed; return True the first time."""
        first, self.failed = not self.failed, True
        return first


@dataclass(slots=True, kw_only=True)
class Incoming:
    """Chunks and lines of one call, until its outcome.

    Attributes:
        shown: see :class:`~skyward.engine.futures.RawOutcome`.
    """

    shown: Callable[[], None] | None = None
    _parts: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    _lines: Reassembler = field(default_factory=Reassembler)
    _no_memory: OSError | MemoryError | None = None

    def add_chunk(self, chunk: ResultChunk) -> None:
        """Store a piece of a large result; without memory for the result, drop it and all later pieces."""
        if self._no_memory is not None:
            return
        part = self._parts.get(chunk.part)
        try:
            if part is None:
                part = self._parts[chunk.part] = _own_memory(chunk.part_bytes)
        except (OSError, MemoryError) as error:
            self._parts.clear()  # their memory is free at once: this result can no longer be completed
            self._no_memory = error
            return
        part[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def outcome(self, outcome: Outcome, worker: WorkerId) -> RawOutcome:
        """Return the outcome of the call, with the parts that arrived as chunks."""
        if outcome.error is not None:
            return RawOutcome(error=outcome.error, seconds=outcome.seconds, worker=worker)
        if self._no_memory is not None:
            too_large = _too_large(sum(outcome.part_bytes), worker, self._no_memory)
            return RawOutcome(error=too_large, seconds=outcome.seconds, worker=worker)
        parts = [self._parts[index] for index in range(len(outcome.part_bytes))]
        data = outcome.data or parts.pop(0)
        return RawOutcome(data=data, buffers=tuple(parts), seconds=outcome.seconds, worker=worker)

    def events(
        self, item: PrintedLines | LoggedRecord | EmittedEvent, *, worker: WorkerId, instance_id: str, call: str = ""
    ) -> Iterator[SkywardEvent]:
        """Yield the events in an item of printed lines, a record's, or the one that user code emitted.

        Args:
            item: the item.
            worker: the worker that sent it.
            instance_id: the machine of that worker.
            call: name of the call; empty for none.
        """
        if isinstance(item, EmittedEvent):
            yield _event(item.data, instance_id)
            return
        if isinstance(item, LoggedRecord):
            yield record_line(item.values, worker.node, worker.worker, instance_id, call or item.task)
            return
        for piece in item.pieces:
            line = self._lines.add(piece)
            if line is not None:
                place = worker.node, instance_id, line.text, line.timestamp, worker.worker
                yield LogLine(*place, call or line.task, line.stream, state=line.state)


def _own_memory(size: int) -> memoryview:
    """Return private memory for a part of a result."""
    # Large pages, where the kernel has them, cost a fraction of the page faults while a result is copied.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    use_large_pages(memory)
    return memoryview(memory)


def _too_large(size: int, worker: WorkerId, cause: OSError | MemoryError) -> MemoryError:
    return MemoryError(
        f"the result of a call that ran on node {worker.node}, worker {worker.worker} has {size / 1e6:,.0f} MB, "
        f"and this process has no memory for it ({cause}): raise its memory limit, drop earlier results, or have "
        "the call return less, for example by writing to a volume"
    )


def _event(data: bytes, instance_id: str) -> SkywardEvent:
    try:
        return pickle.loads(data)
    except BaseException as error:  # a class may be missing here, or raise SystemExit when it is rebuilt
        return Error(
            f"an event that a call emitted cannot be rebuilt here: {type(error).__name__}: {error}", instance_id
        )


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall(CallState):
    """Unfinished call, with its pickles and the receiver of its outcome.

    Attributes:
        parcel: the pickled invocation.
        sink: the receiver of the outcome.
        index: number of the call in the sink.
        number: number of the call among those of its label in the pool, from 0.
        header: facts about the call for user code; None outside of broadcasts and telemetry.
        callbacks: callbacks in force where the call was made; they receive its lines and events.
        incoming: the parts received so far; None before the first.
        gang: the gang of the call, if it has one.
        renewals: number of processes replaced because the call could not begin in them.
        held: blobs held on the worker's node for the call.
        shipping: token of the shipment under way; None if there is none.
        work: the piece of work that it counts for; None while it has not come in.
        trace: receiver of what happens to the call; None without telemetry.
    """

    parcel: Parcel
    sink: OutcomeSink
    index: int = 0
    number: int = 0
    header: CallHeader | None = None
    callbacks: tuple[Callback, ...] = ()
    incoming: Incoming | None = None
    gang: CallGang | None = None
    renewals: int = 0
    held: Sequence[Stored] = ()
    shipping: object = None
    work: WorkCount | None = None
    trace: CallTrace | None = None

    @property
    def name(self) -> str:
        """Name of the call, unique in its pool, such as ``"train#3"``: end of its label, and its number."""
        return call_name(self.parcel.label, self.number)

    def arriving(self) -> Incoming:
        """Return the store of received parts; make it if there is none yet."""
        if self.incoming is None:
            self.incoming = Incoming()
        return self.incoming

    def let_go(self) -> None:
        """Release the call's blobs, and void its shipment: it is on no worker now."""
        if self.held:
            for stored in self.held:
                stored.users -= 1
            self.held = ()
        self.shipping = None


class CallNumbers(dict[str, "itertools.count[int]"]):
    """Counters of calls by label; labels with the same short form share one. Thread-safe."""

    def __missing__(self, label: str) -> itertools.count[int]:
        """Return the counter of a label that is new."""
        short = short_label(label)
        return self.setdefault(label, itertools.count() if short == label else self[short])


class CallTable:
    """Unfinished calls by id; completes each exactly once. Belongs to the event loop.

    Args:
        publish: receiver of progress events; must not block.

    Attributes:
        works: the pieces of work that the calls belong to.
        ended: number of calls that have ended so far, failed and cancelled ones included.
        failed: number of calls that have failed.
        cancelled: number of calls that were cancelled or dropped, or were unfinished when the pool closed.
        last_failure: the latest failure, in words; empty for none.
    """

    def __init__(self, publish: Callable[[SkywardEvent], None]) -> None:
        self.works = WorkCounts(publish)
        self.ended = 0
        self.failed = 0
        self.cancelled = 0
        self.last_failure = ""
        self._calls: dict[int, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self._calls.values()))  # a copy, as completing a call removes it

    def add(self, calls: Iterable[LiveCall], now: float) -> None:
        """Add new calls; one without a piece of work joins the others of its label."""
        for call in calls:
            self._calls[call.id] = call
            parcel, work = call.parcel, call.work
            if work is None:
                name = parcel.work or parcel.label
                work = call.work = self.works.stream(name, silent=bool(parcel.work))
            label, tasks = parcel.work or parcel.label, parcel.tasks
            if work.left and label == work.label:  # here, as it is paid for every call
                work.total += tasks
                work.left += tasks
                continue
            if not work.left:
                self.works.begin(work)
            work.add(label, tasks, now)

    def get(self, call_id: int) -> LiveCall | None:
        """Return an unfinished call; None once it is over."""
        return self._calls.get(call_id)

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """Remove a call and deliver its outcome; does nothing for a call that is over already."""
        if self._calls.pop(call.id, None) is not None:
            self.ended += 1
            if call.held or call.shipping is not None:
                call.let_go()
            if raw.error is not None:
                raw.complete = call.parcel.function.complete
                self._count_failure(call, raw.error)
            elif (work := call.work) is not None:  # here, as it is paid for every call
                work.left -= call.parcel.tasks
                if not work.left:
                    self.works.end(work)
            if call.incoming is not None:
                raw.shown = call.incoming.shown
            if call.trace is not None:
                call.trace.ended(call, raw)
            call.sink.deliver(call.index, raw)

    def _count_failure(self, call: LiveCall, error: PackedError | Exception) -> None:
        cancelled = isinstance(error, CancelledError | PoolStateError)
        self.cancelled += cancelled
        self.failed += not cancelled
        if not cancelled:
            self.last_failure = f"{call.name}: {_in_a_line(error)}"
        if (work := call.work) is not None:
            work.end(call.parcel.tasks, failed=not cancelled, cancelled=cancelled)
            if not work.left:
                self.works.end(work)

    def leave(self, worker_id: WorkerId) -> None:
        """Drop the blobs held and the parts received for the calls of a worker that is gone."""
        for call in self._calls.values():
            if call.worker == worker_id:
                call.let_go()
                call.incoming = None  # half a result: the next run sends all of its own


def _in_a_line(error: PackedError | Exception) -> str:
    kind, text = (
        (error.type_name, error.message) if isinstance(error, PackedError) else (type(error).__name__, str(error))
    )
    first = text.partition("\n")[0][:_FAILURE_CHARACTERS]
    return f"{kind.rpartition('.')[2]}: {first}" if first else kind
