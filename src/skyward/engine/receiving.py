"""What a worker sends back about one call, put together."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skyward.engine.dispatch import WorkerId
from skyward.engine.futures import RawOutcome
from skyward.events import Error, LogLine, SkywardEvent
from skyward.wire.log_pieces import LogPiece, Reassembler
from skyward.wire.messages import Kind, Outcome
from skyward.wire.pickling import PackedError
from skyward.wire.session import Item

__all__ = ["Incoming"]


@dataclass(slots=True, kw_only=True)
class Incoming:
    """Chunks, lines and events of a call, until its outcome."""

    _parts: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    _lines: Reassembler = field(default_factory=Reassembler)
    _no_memory: OSError | MemoryError | None = None

    def add_chunk(self, item: Item) -> None:
        """Store a piece of a large result. Without memory for the result, drop this piece and all that follow."""
        if self._no_memory is not None:
            return
        _, _, index, part_bytes, offset, data = item
        part = self._parts.get(index)
        try:
            if part is None:
                part = self._parts[index] = _own_memory(part_bytes)
        except (OSError, MemoryError) as error:
            self._parts.clear()
            self._no_memory = error
            return
        part[offset : offset + len(data)] = data

    def outcome(self, wire: Sequence[Any], worker: WorkerId) -> RawOutcome:
        """The end of the call."""
        outcome = Outcome.from_wire(wire)
        if outcome.error is not None:
            type_name, message, traceback, pickled = outcome.error
            error = PackedError(type_name=type_name, message=message, traceback=traceback, pickled=pickled)
            return RawOutcome(error=error, seconds=outcome.seconds, worker=worker)
        if self._no_memory is not None:
            too_large = _too_large(sum(outcome.part_bytes), worker, self._no_memory)
            return RawOutcome(error=too_large, seconds=outcome.seconds, worker=worker)
        parts = [self._parts[index] for index in range(len(outcome.part_bytes))]
        data = outcome.data or parts.pop(0)
        return RawOutcome(data=data, buffers=tuple(parts), seconds=outcome.seconds, worker=worker)

    def events(self, item: Item, *, node: int, instance_id: str) -> Iterator[SkywardEvent]:
        """The events in an item of lines, or of an event that user code emitted."""
        if item[0] == Kind.EVENT:
            yield _event(item[2], instance_id)
            return
        for stream, text, partial, timestamp, writer in item[2]:
            piece = LogPiece(text=text, partial=partial, stream=stream, timestamp=timestamp, writer=writer)
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
