"""Unfinished calls of a pool: their records, their gangs, and the partial results received for them."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from skyward.engine.blobs import Stored
from skyward.engine.dispatch import CallState, WorkerId
from skyward.engine.futures import OutcomeSink, RawOutcome
from skyward.engine.packing import Parcel
from skyward.events import Callback, Error, LogLine, SkywardEvent
from skyward.wire.log_pieces import Reassembler
from skyward.wire.messages import CallHeader, EmittedEvent, Outcome, PrintedLines, ResultChunk

__all__ = ["CallGang", "CallTable", "Incoming", "LiveCall"]


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
    """Chunks and lines of one call, until its outcome."""

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

    def events(self, item: PrintedLines | EmittedEvent, *, node: int, instance_id: str) -> Iterator[SkywardEvent]:
        """Yield the events in an item of printed lines, or the one that user code emitted."""
        if isinstance(item, EmittedEvent):
            yield _event(item.data, instance_id)
            return
        for piece in item.pieces:
            line = self._lines.add(piece)
            if line is not None:
                yield LogLine(node, instance_id, line.text, line.timestamp)


def _own_memory(size: int) -> memoryview:
    """Return private memory for a part of a result."""
    # Large pages, where the kernel has them, cost a fraction of the page faults while a result is copied.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
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
        header: facts about the call for user code; None outside of broadcasts.
        callbacks: callbacks in force where the call was made; they receive its lines and events.
        incoming: the parts received so far; None before the first.
        gang: the gang of the call, if it has one.
        renewals: number of processes replaced because the call could not begin in them.
        held: blobs held on the worker's node for the call.
        shipping: token of the shipment under way; None if there is none.
    """

    parcel: Parcel
    sink: OutcomeSink
    index: int = 0
    header: CallHeader | None = None
    callbacks: tuple[Callback, ...] = ()
    incoming: Incoming | None = None
    gang: CallGang | None = None
    renewals: int = 0
    held: Sequence[Stored] = ()
    shipping: object = None

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


class CallTable:
    """Unfinished calls by id; completes each exactly once. Belongs to the event loop.

    Attributes:
        ended: number of calls that have ended so far, failed ones included.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._calls: dict[int, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self._calls.values()))  # a copy, as completing a call removes it

    def add(self, calls: Iterable[LiveCall]) -> None:
        """Add new calls."""
        for call in calls:
            self._calls[call.id] = call

    def get(self, call_id: int) -> LiveCall | None:
        """Return an unfinished call; None once it is over."""
        return self._calls.get(call_id)

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """Remove a call and deliver its outcome; does nothing for a call that is over already."""
        if self._calls.pop(call.id, None) is not None:
            self.ended += 1
            call.let_go()
            call.sink.deliver(call.index, raw)

    def leave(self, worker_id: WorkerId) -> None:
        """Drop the blobs held and the parts received for the calls of a worker that is gone."""
        for call in self._calls.values():
            if call.worker == worker_id:
                call.let_go()
                call.incoming = None  # half a result: the next run sends all of its own
