"""Every record of a lane crosses msgpack unchanged."""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller
from typing import Any, get_args

import msgpack
import pytest

from skyward.wire import messages
from skyward.wire.messages import (
    TEXTS,
    CallHeader,
    CallResult,
    CallsWait,
    CancelCalls,
    CheckpointWritten,
    EmittedEvent,
    ForgetFunctions,
    GangAddress,
    GangAddresses,
    LoggedRecord,
    LogPiece,
    MissingBlobs,
    ModuleSource,
    Outcome,
    PackedError,
    Payload,
    PrintedLines,
    ReleaseSegments,
    ResultChunk,
    RevokeCalls,
    RevokedCalls,
    RunCalls,
    RunSpecialCall,
    SetLevels,
    SmallResults,
    SpentProcess,
    StopStream,
    StoreFunction,
    StoreSources,
    StreamCredit,
    StreamItem,
    StreamItems,
    ToClient,
    ToWorker,
    answered_calls,
)

ERROR = PackedError(type_name="builtins.ValueError", message="no", traceback="Traceback", pickled=b"p")
SOURCE = ModuleSource(name="own.part", text="é = 1", is_package=False, origin="/own/part.py", edition_ns=2**60)
LARGE = Payload(data_blob="d", buffer_blobs=("a", "b"))
TO_WORKER: list[ToWorker] = [
    StoreFunction("f", Payload(data=b"f"), "label"),
    StoreSources((SOURCE, replace(SOURCE, is_package=True, files=(("data/a.bin", b"\x00"), ("b.txt", b""))))),
    ForgetFunctions(("f",)),
    RunCalls("f", 3, True, (1, 2), (b"x", b"y")),
    RunSpecialCall("f", 3, False, 1, LARGE, CallHeader(world=2, rank=1, gang=True)),
    RunSpecialCall("f", 3, False, 1, LARGE, CallHeader(timeout_s=1.5, memory_bytes=1 << 40)),
    ReleaseSegments(("result-0-1",), reusable=True),
    CancelCalls((1,)),
    RevokeCalls((1,)),
    RunSpecialCall("f", 3, False, 1, LARGE, CallHeader(streams=True)),
    StreamCredit(1, 256, 1 << 40),
    StopStream(1),
    GangAddresses(1, ("a", "b")),
    SetLevels({"": 20, "app": 10}),
    CallsWait(),
]
TO_CLIENT: list[ToClient] = [
    ResultChunk(1, 0, 8, 4, b"abcd"),
    CallResult(1, Outcome(seconds=0.5, data=b"x", part_bytes=(3, 4))),
    CallResult(1, Outcome(seconds=0.5, error=ERROR)),
    SmallResults((1, 2), (0.1, 0.2), (b"x", b"y")),
    StreamItems(1, (b"x", b"y")),
    StreamItem(1, Outcome(seconds=0.0, part_bytes=(3, 4), segment="result-0-1")),
    PrintedLines(1, (LogPiece(text="line", partial=True, stream="stderr", timestamp=1.0, writer=2),), 7),
    PrintedLines(0, (LogPiece(text="1/9", timestamp=1.0, state=True, task="inc"),), 0),
    LoggedRecord(1, "inc", {"name": "app", "levelno": 20, "msg": "text", "exc_text": None}),
    EmittedEvent(1, b"pickle"),
    RevokedCalls((1,)),
    MissingBlobs(1, ("b",)),
    GangAddress(1, "a"),
    SpentProcess((1,), "used"),
    CheckpointWritten(1, "c"),
]


def over_the_wire(item: ToWorker | ToClient) -> Any:
    """Pack and unpack as a connection does."""
    packed = msgpack.packb(item, default=methodcaller("to_wire"), unicode_errors=TEXTS)
    return msgpack.unpackb(packed, use_list=False, unicode_errors=TEXTS)


@pytest.mark.parametrize("item", [*TO_WORKER, *TO_CLIENT], ids=lambda item: type(item).__name__)
def test_a_record_arrives_as_it_was(item: ToWorker | ToClient) -> None:
    received = over_the_wire(item)
    to_client = isinstance(item, get_args(ToClient))
    assert (messages.to_client if to_client else messages.to_worker)(received) == item
    deciding = to_client and not isinstance(item, PrintedLines | LoggedRecord | EmittedEvent | CheckpointWritten)
    assert bool(answered_calls(received)) == deciding


@pytest.mark.parametrize(
    ("item", "nbytes"),
    [
        (ResultChunk(1, 0, 8, 4, b"abcd"), 4),
        (CallResult(1, Outcome(seconds=0.5, part_bytes=(30 << 20, 4), segment="result-0-1")), (30 << 20) + 4),
        (CallResult(1, Outcome(seconds=0.5, part_bytes=(30 << 20, 4))), 0),
        (StreamItem(1, Outcome(seconds=0.0, part_bytes=(30 << 20, 4), segment="result-0-1")), (30 << 20) + 4),
        (SmallResults((1, 2), (0.1, 0.2), (b"x", b"y")), 0),
        (GangAddress(1, "a"), 0),
    ],
    ids=repr,
)
def test_the_memory_of_a_large_result_counts_until_it_is_acknowledged(item: ToClient, nbytes: int) -> None:
    """Or a worker whose client is away would fill it."""
    assert messages.result_bytes(over_the_wire(item)) == nbytes
    assert nbytes <= item.nbytes < nbytes + 1000


@pytest.mark.parametrize(
    "outcome", [7, (), (0.5, b"x", 7, "result-0-1", None), (0.5, b"x", ("a",), "result-0-1", None)]
)
def test_a_result_that_cannot_be_decoded_has_no_size(outcome: Any) -> None:
    assert messages.result_bytes([CallResult.CODE, 1, outcome]) == 0


def test_parts_of_a_segment_begin_where_arrays_may() -> None:
    assert messages.places_in_segment([]) == [0]
    assert messages.places_in_segment([1, 64, 0, 65, 7]) == [0, 64, 128, 128, 256, 320]


def test_every_record_is_tried() -> None:
    assert {*get_args(ToWorker), *get_args(ToClient)} == {type(item) for item in (*TO_WORKER, *TO_CLIENT)}


def test_sources_keep_their_files_and_names_that_are_not_utf_8() -> None:
    origin, files = "/caf\udce9/__init__.py", (("caf\udce9.txt", b"\xff"), ("data/a.bin", b""))
    record = messages.to_worker(over_the_wire(StoreSources((replace(SOURCE, origin=origin, files=files),))))
    assert isinstance(record, StoreSources)
    assert [(source.origin, source.files) for source in record.sources] == [(origin, files)]
