"""Items of a lane: short lists for msgpack on the wire, frozen records on either side of it.

Each record states its layout by its fields: the list is its kind followed by its fields in order. Items are decoded
once, by :func:`to_worker` or :func:`to_client`, where they leave the link.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, get_args

from skyward.wire.log_pieces import LogPiece

Item = Sequence[Any]
"""Element of a lane's stream: a list that msgpack can encode; it begins with a :class:`Kind`."""

_HEAD_BYTES = 64
"""Approximate size of an item besides its pickles."""


class Kind(enum.IntEnum):
    """First element of every item on the wire. The record of the same purpose describes the rest."""

    FUNCTION = 1
    """To the worker: :class:`StoreFunction`."""
    CALLS = 2
    """To the worker: :class:`RunCalls`."""
    CANCEL = 3
    """To the worker: :class:`CancelCalls`."""
    REVOKE = 4
    """To the worker: :class:`RevokeCalls`."""
    SPECIAL = 5
    """To the worker: :class:`RunSpecialCall`."""
    MET = 6
    """To the worker: :class:`GangAddresses`."""
    FORGET = 7
    """To the worker: :class:`ForgetFunctions`."""
    LEVELS = 8
    """To the worker: :class:`SetLevels`."""
    SOURCES = 9
    """To the worker: :class:`StoreSources`."""
    CHUNK = 11
    """To the client: :class:`ResultChunk`."""
    RESULT = 12
    """To the client: :class:`CallResult`."""
    LINES = 13
    """To the client: :class:`PrintedLines`."""
    EVENT = 14
    """To the client: :class:`EmittedEvent`."""
    REVOKED = 15
    """To the client: :class:`RevokedCalls`."""
    MISSING = 16
    """To the client: :class:`MissingBlobs`."""
    RESULTS = 17
    """To the client: :class:`SmallResults`."""
    MEET = 18
    """To the client: :class:`GangAddress`."""
    SPENT = 19
    """To the client: :class:`SpentProcess`."""
    RECORD = 20
    """To the client: :class:`LoggedRecord`."""


class WirePart:
    """Record inside an item: a list of its fields on the wire."""

    __slots__ = ()

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """Source of a module.

    Attributes:
        name: full name.
        text: source text; empty for a package without ``__init__.py``, and for a compiled module.
        is_package: True if it has submodules.
        origin: path at its origin, for tracebacks; empty if it has none.
        edition_ns: time at which this text was first seen there, in ns since the epoch; the latest edition counts.
        files: other files in the folder of a project's first package, by their path in it, or a compiled module's file.
    """

    name: str
    text: str
    is_package: bool
    origin: str
    edition_ns: int
    files: tuple[tuple[str, bytes], ...] = field(default=(), compare=False, repr=False)

    @property
    def is_namespace(self) -> bool:
        """Whether it is a package without ``__init__.py``."""
        return self.is_package and not self.text and not self.origin.endswith(".py")

    @property
    def is_compiled(self) -> bool:
        """Whether it is a compiled module, whose file is in ``files``."""
        return not self.is_package and bool(self.files)


@dataclass(frozen=True, slots=True)
class PackedError(WirePart):
    """Pickled exception of a worker.

    Attributes:
        type_name: qualified name of its class.
        message: its text.
        traceback: text of the worker's traceback.
        pickled: the exception itself; empty if it cannot be rebuilt elsewhere.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Payload(WirePart):
    """A pickle on the wire: inline, or as blobs where it is large.

    Attributes:
        data: the pickle, if it is small.
        data_blob: id of its blob, if it is large.
        buffer_blobs: ids of the blobs of its out-of-band buffers.
    """

    data: bytes = b""
    data_blob: str = ""
    buffer_blobs: tuple[str, ...] = ()

    @property
    def blobs(self) -> tuple[str, ...]:
        """Ids of all blobs of the payload."""
        return (self.data_blob, *self.buffer_blobs) if self.data_blob else self.buffer_blobs

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Payload:
        """Return the payload in a list from msgpack."""
        data, data_blob, buffer_blobs = wire
        return cls(data, data_blob, tuple(buffer_blobs))


@dataclass(frozen=True, slots=True)
class CallHeader(WirePart):
    """Facts about one call for :class:`~skyward.distributed.runtime.CallContext`, and its limits.

    Attributes:
        gang: True for a call of a gang.
        trace: the client's trace context; empty without telemetry.
        timeout_s: seconds that the call may take from its beginning; 0 is no limit.
        memory_bytes: memory that the call may add to its worker's; 0 is no limit.
    """

    world: int = 1
    rank: int = 0
    seed: int = 0
    head_port: int = 0
    nodes: int = 0
    local_rank: int = 0
    gang: bool = False
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome(WirePart):
    """The end of a call.

    Attributes:
        seconds: duration of the call on its worker.
        data: the result's pickle, if it is small and there was no error.
        part_bytes: sizes of the parts that came as chunks: the pickle's buffers; the pickle itself comes first if
            ``data`` is empty.
        error: the exception; None if the call returned.
    """

    seconds: float
    data: bytes = b""
    part_bytes: tuple[int, ...] = ()
    error: PackedError | None = None

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        return [self.seconds, self.data, self.part_bytes, self.error and self.error.to_wire()]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Outcome:
        """Return the outcome in a list from msgpack."""
        seconds, data, part_bytes, error = wire
        return cls(seconds, data, tuple(part_bytes), PackedError(*error) if error else None)


def _size_of(wire: Any) -> int:
    match wire:
        case bytes() | str():
            return len(wire)
        case list() | tuple():
            return sum(map(_size_of, cast("Sequence[Any]", wire)))
        case dict():
            return _size_of([*cast("dict[str, Any]", wire).items()])
        case _:
            return 8


class LaneItem:
    """Record of one item of a lane."""

    __slots__ = ()
    KIND: ClassVar[Kind]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return _HEAD_BYTES + _size_of(self.to_wire())

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        values = [getattr(self, name) for name in self.__slots__]
        return [self.KIND, *(value.to_wire() if isinstance(value, WirePart) else value for value in values)]


@dataclass(frozen=True, slots=True)
class StoreFunction(LaneItem):
    """Function for later calls; sent before its first call, and again after :class:`ForgetFunctions`."""

    # Calls name it by its id: pickling it each time cost more than the rest of a small call (decision 006).
    KIND: ClassVar = Kind.FUNCTION
    function_id: str
    payload: Payload
    label: str

    @classmethod
    def from_wire(cls, function_id: str, payload: Sequence[Any], label: str) -> StoreFunction:
        """Return the record of a list's fields."""
        return cls(function_id, Payload.from_wire(payload), label)


@dataclass(frozen=True, slots=True)
class StoreSources(LaneItem):
    """Sources of modules that calls after it need; sent once per edition, and taken between calls."""

    KIND: ClassVar = Kind.SOURCES
    sources: Sequence[ModuleSource]

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        return [Kind.SOURCES, [_wire_of(each) for each in self.sources]]

    @classmethod
    def from_wire(cls, sources: Sequence[Sequence[Any]]) -> StoreSources:
        """Return the record of a list's fields."""
        return cls([*map(_source, sources)])


def _wire_of(source: ModuleSource) -> list[Any]:
    # Paths as bytes: their names need not be UTF-8.
    files = [(os.fsencode(path), data) for path, data in source.files]
    return [source.name, source.text, source.is_package, os.fsencode(source.origin), source.edition_ns, files]


def _source(wire: Sequence[Any]) -> ModuleSource:
    name, text, is_package, origin, edition_ns, files = wire
    whole = tuple((os.fsdecode(path), data) for path, data in files)
    return ModuleSource(
        name=name, text=text, is_package=is_package, origin=os.fsdecode(origin), edition_ns=edition_ns, files=whole
    )


@dataclass(frozen=True, slots=True)
class ForgetFunctions(LaneItem):
    """Functions that no later call names; calls that wait keep them."""

    # The client decides, not the worker: so no call can name a function that its worker has dropped.
    KIND: ClassVar = Kind.FORGET
    function_ids: Sequence[str]


@dataclass(slots=True)
class RunCalls(LaneItem):
    """Calls of one function with small arguments.

    Attributes:
        position: position of the first call among all calls sent to the worker's place.
        final: whether the calls may not run again once begun.
        pickles: arguments, one pickle per call.
    """

    # Not frozen, as every round trip makes four of these and SmallResults: 1.6 µs more than bare lists, not 4.4 µs.
    KIND: ClassVar = Kind.CALLS
    function_id: str
    # The worker stores the position of each call before it runs it. After a loss, calls above it move for free, without
    # a retry. The result of a final call leaves the worker before the next call begins (decision 014).
    position: int
    final: bool
    call_ids: Sequence[int]
    pickles: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(map(len, self.pickles)) + _HEAD_BYTES

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        # Written out, as is that of SmallResults: the loop over the fields costs more, once in every round trip.
        return [Kind.CALLS, self.function_id, self.position, self.final, self.call_ids, self.pickles]


@dataclass(frozen=True, slots=True)
class RunSpecialCall(LaneItem):
    """Call with large arguments, or with a header; its position and finality are as in :class:`RunCalls`."""

    KIND: ClassVar = Kind.SPECIAL
    function_id: str
    position: int
    final: bool
    call_id: int
    payload: Payload
    header: CallHeader

    @classmethod
    def from_wire(cls, *fields: Any) -> RunSpecialCall:
        """Return the record of a list's fields."""
        *plain, payload, header = fields
        return cls(*plain, payload=Payload.from_wire(payload), header=CallHeader(*header))


@dataclass(frozen=True, slots=True)
class CancelCalls(LaneItem):
    """Calls to drop; one that runs ends with its worker."""

    KIND: ClassVar = Kind.CANCEL
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RevokeCalls(LaneItem):
    """Calls to give back, unless they have begun."""

    KIND: ClassVar = Kind.REVOKE
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GangAddresses(LaneItem):
    """Texts that all calls of a gang have sent as :class:`GangAddress`, by rank."""

    # Through the client: the lanes are authenticated, and no port is needed to agree on ports (decision 013).
    KIND: ClassVar = Kind.MET
    call_id: int
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class ResultChunk(LaneItem):
    """Piece of a large result.

    Attributes:
        part: index in :attr:`Outcome.part_bytes`.
        part_bytes: size of the whole part.
        offset: offset of the piece in the part.
    """

    # In pieces, so that small results of other calls pass between them and never wait for a large one (decision 002).
    KIND: ClassVar = Kind.CHUNK
    call_id: int
    part: int
    part_bytes: int
    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        """Size of the piece, in bytes: the unit of the session's credit."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class CallResult(LaneItem):
    """End of a call that failed, or whose result is large; sent after the call's chunks and lines."""

    KIND: ClassVar = Kind.RESULT
    call_id: int
    outcome: Outcome

    @classmethod
    def from_wire(cls, call_id: int, outcome: Sequence[Any]) -> CallResult:
        """Return the record of a list's fields."""
        return cls(call_id, Outcome.from_wire(outcome))


@dataclass(slots=True)
class SmallResults(LaneItem):
    """Small results of calls that succeeded, in the order in which they ended.

    Attributes:
        seconds: durations of the calls on the worker.
        pickles: the results.
    """

    # Not frozen: see RunCalls.
    KIND: ClassVar = Kind.RESULTS
    call_ids: Sequence[int]
    seconds: Sequence[float]
    pickles: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(map(len, self.pickles)) + _HEAD_BYTES

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        return [Kind.RESULTS, self.call_ids, self.seconds, self.pickles]


@dataclass(frozen=True, slots=True)
class PrintedLines(LaneItem):
    """Lines that a call printed.

    Attributes:
        call_id: the call; 0 for output between calls.
        pieces: the lines.
        log_end: offset in the worker's log; captured output before it has been sent. 0 gives no offset.
    """

    # Without log_end, the supervisor's report of a dead worker's last output would repeat lines (decision 015).
    KIND: ClassVar = Kind.LINES
    call_id: int
    pieces: Sequence[LogPiece]
    log_end: int

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(len(piece.text) for piece in self.pieces) + _HEAD_BYTES

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        lines = [[piece.stream, piece.text, piece.partial, piece.timestamp, piece.writer] for piece in self.pieces]
        for line, piece in zip(lines, self.pieces, strict=True):
            if piece.state or piece.task:
                line += [piece.state, piece.task]
        return [Kind.LINES, self.call_id, lines, self.log_end]

    @classmethod
    def from_wire(cls, call_id: int, lines: Sequence[Sequence[Any]], log_end: int) -> PrintedLines:
        """Return the record of a list's fields."""
        return cls(call_id, [*_pieces(lines)], log_end)


def _pieces(lines: Sequence[Sequence[Any]]) -> Iterator[LogPiece]:
    for stream, text, partial, timestamp, writer, *rest in lines:
        piece = LogPiece(text=text, partial=partial, stream=stream, timestamp=timestamp, writer=writer)
        yield replace(piece, state=rest[0], task=rest[1]) if rest else piece


@dataclass(frozen=True, slots=True)
class LoggedRecord(LaneItem):
    """Record of :mod:`logging` made in a call.

    Attributes:
        call_id: the call; 0 for none.
        task: name of the Dask task, if a task made it.
        values: its attributes, with simple values only.
    """

    KIND: ClassVar = Kind.RECORD
    call_id: int
    task: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EmittedEvent(LaneItem):
    """Event that user code emitted, pickled."""

    KIND: ClassVar = Kind.EVENT
    call_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RevokedCalls(LaneItem):
    """Calls that will not run on this worker."""

    KIND: ClassVar = Kind.REVOKED
    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MissingBlobs(LaneItem):
    """Call that did not run, because these blobs are not on the node."""

    KIND: ClassVar = Kind.MISSING
    call_id: int
    blob_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class GangAddress(LaneItem):
    """Text of one call of a gang for the others; the call waits for :class:`GangAddresses`."""

    KIND: ClassVar = Kind.MEET
    call_id: int
    text: str


@dataclass(frozen=True, slots=True)
class SpentProcess(LaneItem):
    """Request to replace the worker's process.

    Attributes:
        call_ids: calls that have not begun, and need a fresh process.
        why: the reason.
    """

    # After a failure the process of a gang's rank is replaced too: nothing is taken down in it (decision 013).
    KIND: ClassVar = Kind.SPENT
    call_ids: Sequence[int]
    why: str


@dataclass(frozen=True, slots=True)
class SetLevels(LaneItem):
    """Levels of the client's loggers, by name; the root's as ``""``."""

    KIND: ClassVar = Kind.LEVELS
    levels: Mapping[str, int]


ToWorker = (
    StoreFunction
    | StoreSources
    | ForgetFunctions
    | RunCalls
    | RunSpecialCall
    | CancelCalls
    | RevokeCalls
    | GangAddresses
    | SetLevels
)
"""Records that the client sends."""
ToClient = (
    ResultChunk
    | CallResult
    | SmallResults
    | PrintedLines
    | LoggedRecord
    | EmittedEvent
    | RevokedCalls
    | MissingBlobs
    | GangAddress
    | SpentProcess
)
"""Records that the worker sends."""


def _decoders(records: Any) -> dict[Kind, Callable[..., Any]]:
    return {record.KIND: getattr(record, "from_wire", record) for record in get_args(records)}


_TO_WORKER = _decoders(ToWorker)
_TO_CLIENT = _decoders(ToClient)


def to_worker(item: Item) -> ToWorker:
    """Return the record of an item from the client.

    Raises:
        KeyError: the kind is unknown.
        TypeError: the number of fields is wrong.
    """
    return _TO_WORKER[item[0]](*item[1:])


def to_client(item: Item) -> ToClient:
    """Return the record of an item from a worker.

    Raises:
        KeyError: the kind is unknown.
        TypeError: the number of fields is wrong.
    """
    return _TO_CLIENT[item[0]](*item[1:])


def answered_calls(item: Item) -> Sequence[int]:
    """Return the ids of the calls that an item from a worker decides on; printed lines and events decide nothing."""
    # Takes the item as received, not its record: the calls of an item that cannot be decoded have to fail, too.
    match item[0]:
        case Kind.RESULTS | Kind.REVOKED | Kind.SPENT:
            return item[1]
        case Kind.RESULT | Kind.CHUNK | Kind.MISSING | Kind.MEET:
            return (item[1],)
        case _:
            return ()
