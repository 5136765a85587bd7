"""What travels on a lane: small lists for msgpack on the wire, frozen dataclasses on either side of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallHeader", "Kind", "Outcome", "Payload"]


class Kind(enum.IntEnum):
    """First element of every item. The layouts are in the docstrings."""

    FUNCTION = 1
    """To the worker: ``[FUNCTION, function_id, payload, label]``; before its first call, and again after ``FORGET``."""
    CALLS = 2
    """To the worker: ``[CALLS, function_id, position, final, [call_id, …], [pickle, …]]``: calls with small arguments.

    ``position`` is that of the first one among all calls sent there; ``final`` ones do not run again once begun.
    """
    CANCEL = 3
    """To the worker: ``[CANCEL, [call_id, …]]``; those that wait are dropped, one that runs ends with its worker."""
    REVOKE = 4
    """To the worker: ``[REVOKE, [call_id, …]]``; those that wait are given back."""
    SPECIAL = 5
    """To the worker: ``[SPECIAL, function_id, position, final, call_id, payload, header]``: any other call."""
    MET = 6
    """To the worker: ``[MET, call_id, [text, …]]``: what the calls of a gang have told each other, by rank."""
    FORGET = 7
    """To the worker: ``[FORGET, [function_id, …]]``: functions that no later call names; those that wait keep them."""
    CHUNK = 11
    """To the client: ``[CHUNK, call_id, part, part_bytes, offset, bytes]``: a piece of a large result."""
    RESULT = 12
    """To the client: ``[RESULT, call_id, outcome]``; after the chunks and lines of its call."""
    RESULTS = 17
    """To the client: ``[RESULTS, [call_id, …], [seconds, …], [pickle, …]]``: small results of calls that succeeded."""
    LINES = 13
    """To the client: ``[LINES, call_id, [[stream, text, partial, timestamp, writer], …], log_end]``; call 0 is none.

    All output captured before the offset ``log_end`` of the worker's log has been sent up to now; 0 gives no offset.
    """
    EVENT = 14
    """To the client: ``[EVENT, call_id, pickle]``: an event that user code emitted."""
    REVOKED = 15
    """To the client: ``[REVOKED, [call_id, …]]``: calls that will not run on this worker."""
    MISSING = 16
    """To the client: ``[MISSING, call_id, [blob_id, …]]``: the call did not run, for want of these blobs."""
    MEET = 18
    """To the client: ``[MEET, call_id, text]``: what a call of a gang tells the others; it waits for ``MET``."""
    SPENT = 19
    """To the client: ``[SPENT, [call_id, …], why]``: the process is to be replaced; these calls have not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A pickle on the wire: inline, or as blobs where it is large.

    Attributes:
        data: the pickle, if it is small.
        data_blob: its blob, if it is not.
        buffer_blobs: the blobs of its out-of-band buffers.
    """

    data: bytes = b""
    data_blob: str = ""
    buffer_blobs: tuple[str, ...] = ()

    @property
    def blobs(self) -> tuple[str, ...]:
        """Every blob it needs."""
        return (self.data_blob, *self.buffer_blobs) if self.data_blob else self.buffer_blobs

    def to_wire(self) -> list[Any]:
        """For msgpack."""
        return [self.data, self.data_blob, self.buffer_blobs]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Payload:
        """From msgpack."""
        return cls(data=wire[0], data_blob=wire[1], buffer_blobs=tuple(wire[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeader:
    """Facts about one call for :class:`~skyward.distributed.runtime.CallContext`; and whether it is one of a gang."""

    world: int = 1
    rank: int = 0
    seed: int = 0
    head_port: int = 0
    nodes: int = 0
    local_rank: int = 0
    gang: bool = False

    def to_wire(self) -> list[Any]:
        """For msgpack."""
        return [self.world, self.rank, self.seed, self.head_port, self.nodes, self.local_rank, self.gang]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> CallHeader:
        """From msgpack."""
        world, rank, seed, head_port, nodes, local_rank, gang = wire
        return cls(
            world=world,
            rank=rank,
            seed=seed,
            head_port=head_port,
            nodes=nodes,
            local_rank=local_rank,
            gang=gang,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended.

    Attributes:
        seconds: what it took on its worker.
        data: the result's pickle, if it is small and there was no error.
        part_bytes: sizes of the parts that came as chunks: the pickle's buffers; the pickle itself comes first if
            ``data`` is empty.
        error: None, or the exception: class name, message, traceback, pickle.
    """

    seconds: float
    data: bytes = b""
    part_bytes: tuple[int, ...] = ()
    error: tuple[str, str, str, bytes] | None = field(default=None)

    def to_wire(self) -> list[Any]:
        """For msgpack."""
        return [self.seconds, self.data, self.part_bytes, self.error]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Outcome:
        """From msgpack."""
        seconds, data, part_bytes, error = wire
        return cls(seconds=seconds, data=data, part_bytes=tuple(part_bytes), error=tuple(error) if error else None)
