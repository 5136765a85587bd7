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
    """The calls of one broadcast, by rank. Belongs to the event loop.

    None of them is ever run again alone: what the others have done with its predecessor would be lost on it.

    Attributes:
        calls: the calls.
        failed: whether one of them has failed, and so all.
        raised: ids of those that raised something, which may be no more than an echo of what another one died of.
    """

    def __init__(self, calls: Sequence[LiveCall]) -> None:
        self.calls = tuple(calls)
        self.failed = False
        self.raised: set[int] = set()
        self._said: dict[int, str] = {}
        for call in self.calls:
            call.gang = self

    def hear(self, rank: int, text: str) -> list[str] | None:
        """What one tells the others; returns what all of them have told, by rank, once the last one has.

        One that begins anew, in a fresh process, tells again: what it said before counts no more.
        """
        self._said[rank] = text
        if len(self._said) < len(self.calls):
            return None
        said, self._said = self._said, {}
        return [said[rank] for rank in range(len(self.calls))]

    def fail(self) -> bool:
        """One has failed; returns whether it is the first one."""
        first, self.failed = not self.failed, True
        return first


@dataclass(slots=True, kw_only=True)
class Incoming:
    """Chunks, lines and events of a call, until its outcome."""

    _parts: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    _lines: Reassembler = field(default_factory=Reassembler)
    _no_memory: OSError | MemoryError | None = None

    def add_chunk(self, chunk: ResultChunk) -> None:
        """Store a piece of a large result. Without memory for the result, drop this piece and all that follow."""
        if self._no_memory is not None:
            return
        part = self._parts.get(chunk.part)
        try:
            if part is None:
                part = self._parts[chunk.part] = _own_memory(chunk.part_bytes)
        except (OSError, MemoryError) as error:
            self._parts.clear()
            self._no_memory = error
            return
        part[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def outcome(self, outcome: Outcome, worker: WorkerId) -> RawOutcome:
        """The end of the call."""
        if outcome.error is not None:
            return RawOutcome(error=outcome.error, seconds=outcome.seconds, worker=worker)
        if self._no_memory is not None:
            too_large = _too_large(sum(outcome.part_bytes), worker, self._no_memory)
            return RawOutcome(error=too_large, seconds=outcome.seconds, worker=worker)
        parts = [self._parts[index] for index in range(len(outcome.part_bytes))]
        data = outcome.data or parts.pop(0)
        return RawOutcome(data=data, buffers=tuple(parts), seconds=outcome.seconds, worker=worker)

    def events(self, item: PrintedLines | EmittedEvent, *, node: int, instance_id: str) -> Iterator[SkywardEvent]:
        """The events in an item of lines, or of an event that user code emitted."""
        if isinstance(item, EmittedEvent):
            yield _event(item.data, instance_id)
            return
        for piece in item.pieces:
            line = self._lines.add(piece)
            if line is not None:
                yield LogLine(node, instance_id, line.text, line.timestamp)


def _own_memory(size: int) -> memoryview:
    """Memory that no forked child shares, in large pages where there are any: those cost a fraction of the faults."""
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
    except BaseException as error:  # a value in it may be of a class that is not here, or exit when it is rebuilt
        return Error(
            f"an event that a call emitted cannot be rebuilt here: {type(error).__name__}: {error}", instance_id
        )


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall(CallState):
    """A call that is not over: what to send, whom to tell.

    Attributes:
        parcel: what travels.
        sink: who waits for it.
        index: its number there.
        header: what it may know of itself; None for a call that is alone.
        callbacks: those in force where the call was made; they hear of its lines and events.
        incoming: what came of it so far, if anything did.
        gang: those it runs together with.
        renewals: how many processes were replaced because it could not begin in them.
        held: blobs that lie on its worker's node because of it.
        shipping: what puts them there at the moment.
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
        """Where to put what comes of it before its outcome."""
        if self.incoming is None:
            self.incoming = Incoming()
        return self.incoming

    def let_go(self) -> None:
        """The call is on no worker now: its blobs may go, and what ships it there is in vain."""
        if self.held:
            for stored in self.held:
                stored.users -= 1
            self.held = ()
        self.shipping = None


class CallTable:
    """Finds calls by id, and completes each exactly once. Belongs to the event loop.

    Attributes:
        ended: how many calls have ended so far, failed ones included.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._calls: dict[int, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self._calls.values()))

    def add(self, calls: Iterable[LiveCall]) -> None:
        """New calls."""
        for call in calls:
            self._calls[call.id] = call

    def get(self, call_id: int) -> LiveCall | None:
        """The call, unless it is over."""
        return self._calls.get(call_id)

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """The call is over; who waits for it is told, unless that was done before."""
        if self._calls.pop(call.id, None) is not None:
            self.ended += 1
            call.let_go()
            call.sink.deliver(call.index, raw)

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is no more: what it held of its calls, and had sent of their results, counts no more."""
        for call in self._calls.values():
            if call.worker == worker_id:
                call.let_go()
                call.incoming = None
