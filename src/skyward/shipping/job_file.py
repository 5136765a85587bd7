"""Files of a job: the call that a node keeps until it has run, and its outcome, which any later program may read.

Both are a magic number, the length of a head, the head as msgpack, and parts at multiples of 64 bytes: pickles and
their buffers. A reader maps the parts, so that large arrays are never copied. What only states facts about a file reads
its head, without the libraries that pickles need.
"""

from __future__ import annotations

import mmap
import os
import struct
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import msgpack

from skyward.errors import CallTimeoutError, WorkerLostError
from skyward.wire.messages import TEXTS, CallHeader, ModuleSource, PackedError, WirePart, places_in_segment

if TYPE_CHECKING:
    from skyward.shipping.pickling import Packed
    from skyward.submission import Invocation

_MAGIC: Final = b"SKYJOB01"
_LENGTH: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QQ")
_START: Final = len(_MAGIC) + _LENGTH.size
_GIB: Final = 1 << 30
_COPY_BYTES: Final = 1 << 20


class DamagedJobFileError(ValueError):
    """The file of a call or of an outcome is incomplete, or of another version of Skyward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCall:
    """Call of a job, with everything that a worker needs to run it.

    Attributes:
        label: name of the function, for messages.
        function: the pickled function.
        arguments: the pickle of ``(args, kwargs)``.
        sources: sources of the modules that both need.
        header: limits of a run, and facts about the call.
        retries: runs after the first, each after the loss of a worker.
        name: name of the call in its lines, such as ``"run-7[3]"``; empty for job and index.
        token: id of the call, by which the same one can be told from an equal one.
    """

    label: str
    function: Packed
    arguments: Packed
    sources: tuple[ModuleSource, ...] = ()
    header: CallHeader = field(default_factory=CallHeader)
    retries: int = 3
    name: str = ""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


class JobEnd(StrEnum):
    """How a call of a job ended."""

    VALUE = "value"
    """It returned."""
    ERROR = "error"
    """It raised."""
    LOST = "lost"
    """Its worker died, and no retry was left; or it exceeded its memory."""
    TIMEOUT = "timeout"
    """It ran longer than its timeout."""
    CANCELLED = "cancelled"
    """It was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The end of a job's call.

    Attributes:
        end: how it ended.
        node: rank of the node of its last run.
        worker: index of the worker there.
        attempt: number of its last run, from 1; 0 if it never ran.
        seconds: duration of that run.
        result: the pickled value; None unless it returned.
        error: what it raised; None unless it raised.
        message: what happened to it otherwise, for the user.
        reason: why its worker ended.
        timeout_s: the limit that it exceeded.
        log_path: log of its worker, on the node.
    """

    end: JobEnd
    node: int
    worker: int
    attempt: int
    seconds: float = 0.0
    result: Packed | None = None
    error: PackedError | None = None
    message: str = ""
    reason: str = ""
    timeout_s: float = 0.0
    log_path: str = ""


def job_call(invocation: Invocation, *, name: str = "") -> JobCall:
    """Pickle a call for a job, called ``name`` in its lines.

    Raises:
        SerializationError: its function or an argument cannot be pickled; the message names the part.
    """
    from skyward.shipping.pickling import pack, pack_arguments

    own = str(getattr(invocation.fn, "__qualname__", type(invocation.fn).__name__)).removesuffix(".__wrapped__")
    label = invocation.label or own
    function = pack(invocation.fn, what=f"the function {label}", apart=True)
    arguments = pack_arguments(invocation.args, invocation.kwargs, label)
    sets = (packed.sources.sources for packed in (function, arguments) if packed.sources is not None)
    sources = {source.name: source for sources in sets for source in sources}
    header = CallHeader()
    if (limits := invocation.limits) is not None:
        header = CallHeader(
            timeout_s=limits.timeout_s or 0.0,
            grace_s=limits.grace_s or 0.0,
            memory_bytes=round((limits.memory_gib or 0.0) * _GIB),
        )
    return JobCall(
        label=label,
        function=function,
        arguments=arguments,
        sources=tuple(sources.values()),
        header=header,
        retries=invocation.retries,
        name=name,
    )


def call_bytes(call: JobCall) -> bytearray:
    """Return the content of a call's file."""
    function, arguments = call.function, call.arguments
    facts = {name: getattr(call, name) for name in ("label", "retries", "name", "token")}
    facts |= {"timeout_s": call.header.timeout_s, "memory_bytes": call.header.memory_bytes}
    facts["function_parts"] = 1 + len(function.buffers)
    sources = _packb([call.header, call.sources])  # not in the head: they may be large, and few readers need them
    parts = (sources, function.data, *function.buffers, arguments.data, *arguments.buffers)
    return bytearray().join(_file_of(facts, parts))


def read_call(path: Path) -> JobCall:
    """Return the call in a file.

    Raises:
        DamagedJobFileError: it holds no call.
    """
    head, parts = _read(path)
    with _reading(path):
        needed, *pickles = parts
        header, sources = _unpackb(needed)
        count = head["function_parts"]
        return JobCall(
            label=head["label"],
            retries=head["retries"],
            name=head["name"],
            token=head["token"],
            header=CallHeader(*header),
            sources=tuple(ModuleSource(*source) for source in sources),
            function=_packed(pickles[:count]),
            arguments=_packed(pickles[count:]),
        )


def outcome_parts(outcome: JobOutcome) -> list[bytes | memoryview]:
    """Return the content of an outcome's file, in parts; the result's buffers are not copied."""
    facts = ("node", "worker", "attempt", "seconds", "error", "message", "reason", "timeout_s", "log_path")
    head = {"end": str(outcome.end)} | {name: getattr(outcome, name) for name in facts}
    result = outcome.result
    return _file_of(head, (result.data, *result.buffers) if result is not None else ())


def read_outcome(path: Path) -> JobOutcome:
    """Return the outcome in a file; its result's buffers are mapped, and stay readable once the file is removed.

    Raises:
        DamagedJobFileError: it holds no outcome.
    """
    head, parts = _read(path)
    return _outcome_of(path, head, _packed(parts) if parts else None)


def read_end(path: Path) -> JobOutcome:
    """Return the outcome in a file without its result; raises as :func:`read_outcome`."""
    return _outcome_of(path, read_head(path), None)


def _outcome_of(path: Path, head: Mapping[str, Any], result: Packed | None) -> JobOutcome:
    with _reading(path):
        facts = {name: head[name] for name in head if name not in ("end", "error", "part_bytes")}
        error = PackedError(*head["error"]) if head["error"] else None
        return JobOutcome(end=JobEnd(head["end"]), error=error, result=result, **facts)


def outcome_value(outcome: JobOutcome, *, where: str) -> Any:
    """Return what the call returned, or raise why it did not.

    Args:
        outcome: the outcome.
        where: the call and its place, for the note of an error, such as ``"node 0, worker 1 (run-7)"``.

    Raises:
        WorkerLostError: its worker died more often than its retries allow.
        CallTimeoutError: it ran longer than its timeout.
        CancelledError: it was cancelled.
        Exception: what it raised.
    """
    from skyward.shipping.pickling import unpack
    from skyward.shipping.remote_exceptions import unpack_error

    place: dict[str, Any] = {"node": outcome.node, "worker": outcome.worker, "log_path": outcome.log_path}
    match outcome.end:
        case JobEnd.VALUE:
            assert outcome.result is not None
            return unpack(outcome.result.data, outcome.result.buffers)
        case JobEnd.ERROR:
            assert outcome.error is not None
            raise unpack_error(outcome.error, where=where)
        case JobEnd.LOST:
            raise WorkerLostError(outcome.message, reason=outcome.reason, **place)
        case JobEnd.TIMEOUT:
            raise CallTimeoutError(outcome.message, timeout_s=outcome.timeout_s, **place)
        case JobEnd.CANCELLED:
            raise CancelledError(outcome.message)


def read_head(path: Path) -> Mapping[str, Any]:
    """Return the facts in a file, without its pickles.

    Raises:
        DamagedJobFileError: it is incomplete, or of another version.
    """
    with path.open("rb") as file:
        return _head(file, path)[0]


def join_calls(calls: Iterable[tuple[int, bytes | bytearray]]) -> bytearray:
    """Return several calls' files, by their index in the job, as one stream; :func:`split_calls` takes it apart."""
    return bytearray().join(part for index, content in calls for part in (_ENTRY.pack(index, len(content)), content))


def split_calls(stream: BinaryIO) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the index and the content of each file in a stream, which has to be read before the next one.

    Raises:
        DamagedJobFileError: the stream ends too early.
    """
    while entry := stream.read(_ENTRY.size):
        if len(entry) != _ENTRY.size:
            raise DamagedJobFileError("the stream of calls ends in the middle of an entry")
        index, nbytes = _ENTRY.unpack(entry)
        yield index, _pieces(stream, nbytes)


def _pieces(stream: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        piece = stream.read(min(nbytes, _COPY_BYTES))
        if not piece:
            raise DamagedJobFileError(f"the stream of calls ends {nbytes} bytes before its end")
        nbytes -= len(piece)
        yield piece


def _file_of(head: Mapping[str, Any], parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    sizes = [len(part) if isinstance(part, bytes) else part.nbytes for part in parts]
    packed = _packb({**head, "part_bytes": sizes})
    content: list[bytes | memoryview] = [_MAGIC, _LENGTH.pack(len(packed)), packed]
    end, places = _START + len(packed), _places(len(packed), sizes)
    for place, size, part in zip(places, sizes, parts, strict=False):
        content += [bytes(place - end), part]
        end = place + size
    return content


def _packb(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value, default=WirePart.to_wire, unicode_errors=TEXTS))


def _unpackb(data: bytes | memoryview) -> Any:
    return cast("Any", msgpack.unpackb(data, use_list=False, unicode_errors=TEXTS))


def _places(head_bytes: int, sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, and the next one after the last."""
    first = places_in_segment([_START + head_bytes])[-1]
    return [first + place for place in places_in_segment(sizes)]


def _read(path: Path) -> tuple[Mapping[str, Any], list[memoryview]]:
    """Return a file's head and its parts, which are mapped: writable, and copied only where they are written."""
    with path.open("rb") as file:
        head, head_bytes = _head(file, path)
        sizes: Sequence[int] = head["part_bytes"]
        places = _places(head_bytes, sizes)
        needed = places[-2] + sizes[-1] if sizes else 0
        if os.fstat(file.fileno()).st_size < needed:
            raise DamagedJobFileError(f"{path} is incomplete: it ends before its {needed} bytes")
        if not sizes:
            return head, []
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return head, [view[place : place + size] for place, size in zip(places, sizes, strict=False)]


def _head(file: BinaryIO, path: Path) -> tuple[Mapping[str, Any], int]:
    start = file.read(_START)
    if len(start) < _START or start[: len(_MAGIC)] != _MAGIC:
        raise DamagedJobFileError(f"{path} is no file of a job of this version of Skyward")
    (head_bytes,) = _LENGTH.unpack_from(start, len(_MAGIC))
    packed = file.read(min(head_bytes, os.fstat(file.fileno()).st_size))
    with _reading(path):
        head: Mapping[str, Any] = _unpackb(packed)
        if "part_bytes" not in head:
            raise ValueError("no sizes")
        return head, head_bytes


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, msgpack.UnpackException) as error:
        raise DamagedJobFileError(f"{path} is damaged, or of another version of Skyward: {error!r}") from None


def _packed(parts: Sequence[memoryview]) -> Packed:
    from skyward.shipping.pickling import Packed

    data, *buffers = parts
    return Packed(data=bytes(data), buffers=tuple(buffers))
