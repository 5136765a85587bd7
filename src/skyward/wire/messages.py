"""Items of a lane: short lists for msgpack on the wire, frozen records on either side of it.

Each record states its layout by its fields: the list is its code followed by its fields in order. Items are decoded
once, by :func:`to_worker` or :func:`to_client`, where they leave the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args

Item = Sequence[Any]
"""Element of a lane's stream as received; it begins with the code of a record."""

STREAM_ITEMS, STREAM_BYTES = 1024, 32 << 20
"""Items of a generator that its worker makes before the client has read them: it waits at the first bound it meets."""
TEXTS = "surrogatepass"
"""How texts are encoded: names of files, texts of errors and labels may have lone surrogates."""

_HEAD_BYTES = 64
"""Approximate size of an item besides its pickles."""
_ALIGNMENT = 64
"""Divides the address of each part of a result: the most that vector instructions and Arrow ask for."""


class WirePart:
    """Record inside an item: a list of its fields on the wire."""

    __slots__ = ()

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack, which asks for those of the records in it."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, slots=True)
class ModuleSource(WirePart):
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


StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class LogPiece(WirePart):
    """Printed line, or a piece of a very long one.

    Attributes:
        text: text without the line end; always encodable as UTF-8.
        timestamp: time of its completion, in seconds since the epoch.
        stream: stream to which it was printed.
        partial: True if the line goes on in this stream's next piece.
        writer: number of the call's thread that printed it, from 0.
        state: True for a state of a progress bar, in one line, that will be overwritten.
        task: name of the Dask task that printed it, if one did.
    """

    text: str
    timestamp: float
    stream: StreamName = "stdout"
    partial: bool = False
    writer: int = 0
    state: bool = False
    task: str = ""


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


@dataclass(frozen=True, slots=True)
class CallHeader(WirePart):
    """Facts about one call for :class:`~skyward.distributed.runtime.CallContext`, and its limits.

    Attributes:
        gang: True for a call of a gang.
        trace: the client's trace context; empty without telemetry.
        timeout_s: seconds that the call may take from its beginning; 0 is no limit.
        memory_bytes: memory that the call may add to its worker's; 0 is no limit.
        grace_s: seconds before its timeout at which :class:`~skyward.errors.TimeLimit` is raised in it; 0 raises none.
        checkpoint: name of its folder of checkpoints, from an earlier run; empty for none.
        streams: True if the function is a generator, whose items are sent as they come.
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
    grace_s: float = 0.0
    checkpoint: str = ""
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Outcome(WirePart):
    """The end of a call.

    Attributes:
        seconds: duration of the call on its worker.
        data: the result's pickle, if it is small and there was no error.
        part_bytes: sizes of the parts that came as chunks or in a segment: the pickle's buffers; the pickle itself
            comes first if ``data`` is empty.
        segment: name of the file in memory with those parts, at :func:`places_in_segment`, where the client shares
            it with the worker; empty if they came as chunks.
        error: the exception; None if the call returned.
    """

    seconds: float
    data: bytes = b""
    part_bytes: tuple[int, ...] = ()
    segment: str = ""
    error: PackedError | None = None

    @property
    def shared_bytes(self) -> int:
        """Memory that the client shares with the worker, in bytes."""
        # A worker whose client is away must not fill that, either (docs/decisions/002).
        return sum(self.part_bytes) if self.segment else 0


def places_in_segment(part_bytes: Sequence[int]) -> list[int]:
    """Return the offset of each part of a result in its segment, and the segment's size after them.

    Arrays lie in the parts: at an odd address, compiled code would be slower or refuse them.
    """
    places = [0]
    for nbytes in part_bytes:
        places.append(-(-(places[-1] + nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _size_of(wire: Any) -> int:
    match wire:
        case bytes() | str():
            return len(wire)
        case list() | tuple():
            return sum(map(_size_of, cast("Sequence[Any]", wire)))
        case dict():
            return _size_of([*cast("dict[str, Any]", wire).items()])
        case WirePart():
            return _size_of(wire.to_wire())
        case _:
            return 8


class LaneItem(WirePart):
    """Record of one item of a lane; on the wire its code comes before its fields."""

    __slots__ = ()
    CODE: ClassVar[int]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return _HEAD_BYTES + _size_of(self.to_wire())

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack, which asks for those of the records in it."""
        return [self.CODE, *(getattr(self, name) for name in self.__slots__)]


@dataclass(frozen=True, slots=True)
class StoreFunction(LaneItem):
    """Function for later calls; sent before its first call, and again after :class:`ForgetFunctions`."""

    # Calls name it by its id: pickling it each time cost more than the rest of a small call (decision 006).
    function_id: str
    payload: Payload
    label: str

    @classmethod
    def from_wire(cls, function_id: str, payload: Sequence[Any], label: str) -> StoreFunction:
        """Return the record of a list's fields."""
        return cls(function_id, Payload(*payload), label)


@dataclass(frozen=True, slots=True)
class StoreSources(LaneItem):
    """Sources of modules that calls after it need; sent once per edition, and taken between calls."""

    sources: Sequence[ModuleSource]

    @classmethod
    def from_wire(cls, sources: Sequence[Sequence[Any]]) -> StoreSources:
        """Return the record of a list's fields."""
        return cls(tuple(ModuleSource(*source) for source in sources))


@dataclass(frozen=True, slots=True)
class ForgetFunctions(LaneItem):
    """Functions that no later call names; calls that wait keep them."""

    # The client decides, not the worker: so no call can name a function that its worker has dropped.
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
        return [self.CODE, self.function_id, self.position, self.final, self.call_ids, self.pickles]


@dataclass(frozen=True, slots=True)
class RunSpecialCall(LaneItem):
    """Call with large arguments, or with a header; its position and finality are as in :class:`RunCalls`."""

    function_id: str
    position: int
    final: bool
    call_id: int
    payload: Payload
    header: CallHeader

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        # Without the header's fields: to look at each took a sixth of the client's time for a call of a broadcast.
        return _size_of([self.payload.data, *self.payload.blobs]) + 3 * _HEAD_BYTES

    @classmethod
    def from_wire(cls, *fields: Any) -> RunSpecialCall:
        """Return the record of a list's fields."""
        *plain, payload, header = fields
        return cls(*plain, payload=Payload(*payload), header=CallHeader(*header))


@dataclass(frozen=True, slots=True)
class ReleaseSegments(LaneItem):
    """Segments of results that the client maps no longer.

    Attributes:
        names: their names.
        reusable: False if a process that was forked from the client may still read them.
    """

    names: Sequence[str]
    reusable: bool


@dataclass(frozen=True, slots=True)
class CancelCalls(LaneItem):
    """Calls to drop; one that runs ends with its worker."""

    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RevokeCalls(LaneItem):
    """Calls to give back, unless they have begun."""

    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StreamCredit(LaneItem):
    """How much of a generator's items the client has read, all in all.

    Attributes:
        call_id: the generator's call.
        items: number of the items.
        size: their size in bytes.
    """

    # In total, not since the last time: what is sent again after a reconnect, or comes late, counts once.
    call_id: int
    items: int
    size: int


@dataclass(frozen=True, slots=True)
class StopStream(LaneItem):
    """Generator to close at its next ``yield``: nothing reads its items any more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class GangAddresses(LaneItem):
    """Texts that all calls of a gang have sent as :class:`GangAddress`, by rank."""

    # Through the client: the lanes are authenticated, and no port is needed to agree on ports (decision 013).
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

    call_id: int
    outcome: Outcome

    @property
    def nbytes(self) -> int:
        """Approximate size of the item in bytes, with the memory that it shares."""
        return _HEAD_BYTES + _size_of(self.to_wire()) + self.outcome.shared_bytes

    @classmethod
    def from_wire(cls, call_id: int, outcome: Sequence[Any]) -> CallResult:
        """Return the record of a list's fields."""
        *plain, error = outcome
        return cls(call_id, Outcome(*plain, error=PackedError(*error) if error else None))


@dataclass(slots=True)
class SmallResults(LaneItem):
    """Small results of calls that succeeded, in the order in which they ended.

    Attributes:
        seconds: durations of the calls on the worker.
        pickles: the results.
    """

    # Not frozen: see RunCalls.
    call_ids: Sequence[int]
    seconds: Sequence[float]
    pickles: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(map(len, self.pickles)) + _HEAD_BYTES

    def to_wire(self) -> list[Any]:
        """Return the list for msgpack."""
        return [self.CODE, self.call_ids, self.seconds, self.pickles]


@dataclass(frozen=True, slots=True)
class StreamItems(LaneItem):
    """Small items of a generator, in order; its end is a :class:`SmallResults` or a :class:`CallResult`."""

    call_id: int
    pickles: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(map(len, self.pickles)) + _HEAD_BYTES


@dataclass(frozen=True, slots=True)
class StreamItem(LaneItem):
    """Large item of a generator; sent after its chunks."""

    call_id: int
    outcome: Outcome

    @property
    def nbytes(self) -> int:
        """Approximate size of the item in bytes, with the memory that it shares."""
        return _HEAD_BYTES + _size_of(self.to_wire()) + self.outcome.shared_bytes

    @classmethod
    def from_wire(cls, call_id: int, outcome: Sequence[Any]) -> StreamItem:
        """Return the record of a list's fields."""
        return cls(call_id, Outcome(*outcome))


@dataclass(frozen=True, slots=True)
class PrintedLines(LaneItem):
    """Lines that a call printed.

    Attributes:
        call_id: the call; 0 for output between calls.
        pieces: the lines.
        log_end: offset in the worker's log; captured output before it has been sent. 0 gives no offset.
    """

    # Without log_end, the supervisor's report of a dead worker's last output would repeat lines (decision 015).
    call_id: int
    pieces: Sequence[LogPiece]
    log_end: int

    @property
    def nbytes(self) -> int:
        """Approximate size of the item on the wire, in bytes."""
        return sum(len(piece.text) for piece in self.pieces) + _HEAD_BYTES

    @classmethod
    def from_wire(cls, call_id: int, pieces: Sequence[Sequence[Any]], log_end: int) -> PrintedLines:
        """Return the record of a list's fields."""
        return cls(call_id, tuple(LogPiece(*piece) for piece in pieces), log_end)


@dataclass(frozen=True, slots=True)
class LoggedRecord(LaneItem):
    """Record of :mod:`logging` made in a call.

    Attributes:
        call_id: the call; 0 for none.
        task: name of the Dask task, if a task made it.
        values: its attributes, with simple values only.
    """

    call_id: int
    task: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EmittedEvent(LaneItem):
    """Event that user code emitted, pickled."""

    call_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RevokedCalls(LaneItem):
    """Calls that will not run on this worker."""

    call_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MissingBlobs(LaneItem):
    """Call that did not run, because these blobs are not on the node."""

    call_id: int
    blob_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class GangAddress(LaneItem):
    """Text of one call of a gang for the others; the call waits for :class:`GangAddresses`."""

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
    call_ids: Sequence[int]
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten(LaneItem):
    """A running call has made its folder of checkpoints, or changed what is in it.

    Attributes:
        call_id: the call.
        name: name of the folder, for :attr:`CallHeader.checkpoint`.
    """

    call_id: int
    name: str


@dataclass(frozen=True, slots=True)
class SetLevels(LaneItem):
    """Levels of the client's loggers, by name; the root's as ``""``."""

    levels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CallsWait(LaneItem):
    """Calls wait for the worker, which runs one of a job: it lets them come before it runs the next one of a job."""


ToWorker = (
    StoreFunction
    | StoreSources
    | ForgetFunctions
    | RunCalls
    | RunSpecialCall
    | ReleaseSegments
    | CancelCalls
    | RevokeCalls
    | StreamCredit
    | StopStream
    | GangAddresses
    | SetLevels
    | CallsWait
)
"""Records that the client sends."""
ToClient = (
    ResultChunk
    | CallResult
    | SmallResults
    | StreamItems
    | StreamItem
    | PrintedLines
    | LoggedRecord
    | EmittedEvent
    | RevokedCalls
    | MissingBlobs
    | GangAddress
    | SpentProcess
    | CheckpointWritten
)
"""Records that the worker sends."""


def _decoders(records: Any, first_code: int) -> dict[int, Callable[..., Any]]:
    for code, record in enumerate(get_args(records), start=first_code):
        record.CODE = code
    return {record.CODE: getattr(record, "from_wire", record) for record in get_args(records)}


_TO_WORKER = _decoders(ToWorker, 1)
_TO_CLIENT = _decoders(ToClient, 1 + len(_TO_WORKER))
_SEVERAL = {record.CODE for record in (SmallResults, RevokedCalls, SpentProcess)}
_ONE = {record.CODE for record in (CallResult, ResultChunk, StreamItems, StreamItem, MissingBlobs, GangAddress)}


def to_worker(item: Item) -> ToWorker:
    """Return the record of an item from the client.

    Raises:
        KeyError: the code is unknown.
        TypeError: the number of fields is wrong.
    """
    return _TO_WORKER[item[0]](*item[1:])


def to_client(item: Item) -> ToClient:
    """Return the record of an item from a worker; raises as :func:`to_worker`."""
    return _TO_CLIENT[item[0]](*item[1:])


def result_bytes(item: Item) -> int:
    """Return the size of a large result in an item as received; its worker waits until it is acknowledged."""
    if item[0] == ResultChunk.CODE:
        return len(item[-1])
    if item[0] in (CallResult.CODE, StreamItem.CODE):
        with suppress(TypeError, ValueError):  # one that cannot be decoded fails its call, not the lane
            _, _, part_bytes, segment, _ = item[2]
            return sum(part_bytes) if segment else 0  # without a segment, they have come as chunks
    return 0


def answered_calls(item: Item) -> Sequence[int]:
    """Return the ids of the calls that an item from a worker decides on; printed lines and events decide nothing."""
    # Takes the item as received, not its record: the calls of an item that cannot be decoded have to fail, too.
    code = item[0]
    return item[1] if code in _SEVERAL else (item[1],) if code in _ONE else ()
