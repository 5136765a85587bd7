"""Gangs of calls, and the results received for calls."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from skyward.errors import RemoteError, WorkerLostError
from skyward.events import Error, LogLine
from skyward.scheduling.calls import CallGang, CallNumbers, Incoming, LiveCall, RawOutcome
from skyward.scheduling.dispatch_and_retries import CallState, Dispatch, GiveUp, Send, WorkerId
from skyward.scheduling.mapped_results import MappedResults
from skyward.shipping.function_cache import PackedFunction
from skyward.shipping.pickling import pack
from skyward.shipping.remote_exceptions import unpack_error
from skyward.wire.messages import (
    EmittedEvent,
    LogPiece,
    Outcome,
    PackedError,
    Payload,
    PrintedLines,
    ReleaseSegments,
    ResultChunk,
)

A, B = WorkerId(0, 0), WorkerId(0, 1)


def ranks(count: int) -> list[CallState]:
    return [CallState(id=rank + 1, kind="f", pinned=WorkerId(0, rank), together=True) for rank in range(count)]


def busy(*calls: CallState) -> Dispatch:
    """Two workers, and these calls on them."""
    dispatch = Dispatch()
    for worker in (A, B):
        dispatch.worker_up(worker, 0.0)
    dispatch.submit(calls, 0.0)
    return dispatch


class TestGang:
    def test_everyone_is_answered_once_the_last_one_has_spoken(self) -> None:
        gang = CallGang([])
        gang.calls = (object(),) * 3  # type: ignore[assignment]  # only their number counts

        assert gang.add_address(2, "c") is None
        assert gang.add_address(0, "a") is None
        assert gang.add_address(1, "b") == ["a", "b", "c"]
        assert gang.add_address(1, "again") is None

    def test_who_begins_anew_speaks_anew(self) -> None:
        gang = CallGang([])
        gang.calls = (object(),) * 2  # type: ignore[assignment]

        assert gang.add_address(0, "before") is None
        assert gang.add_address(0, "after") is None
        assert gang.add_address(1, "b") == ["after", "b"]

    def test_the_first_failure_counts(self) -> None:
        gang = CallGang([])

        assert gang.fail()
        assert not gang.fail()
        assert gang.failed


class TestDispatch:
    def test_a_call_of_a_gang_that_had_begun_is_never_run_again(self) -> None:
        first, second = ranks(2)
        dispatch = busy(first, second)
        first.position = 1

        actions = dispatch.worker_lost(A, "killed", 1.0)

        assert actions == [GiveUp(first, A, "killed")]
        assert dispatch.unfinished == 1

    def test_one_that_had_not_left_yet_is(self) -> None:
        first, second = ranks(2)
        dispatch = busy(first, second)

        assert dispatch.worker_lost(A, "killed", 1.0) == []
        assert dispatch.worker_up(A, 2.0) == [Send(A, [first])]

    def test_a_worker_that_has_a_call_of_a_gang_has_no_other_one(self) -> None:
        """Else the blobs of one gang could be late on one worker, which begins with the next gang, and wait there."""
        dispatch = busy()
        for worker in (A, B):
            dispatch.submit([CallState(id=8 + worker.worker, kind="f", pinned=worker)], 0.0)
        dispatch.finished([(8, 0.0001), (9, 0.0001)], 0.0)  # such calls are short: several of them share a worker
        running = CallState(id=10, kind="f", pinned=A)
        first, second = ranks(2)
        _, next_one = ranks(2)
        next_one.id = 11

        assert dispatch.submit([running, first, second, next_one], 0.0) == [Send(A, [running]), Send(B, [second])]
        assert dispatch.finished([(10, 0.0001)], 1.0) == [Send(A, [first])]
        assert dispatch.finished([(second.id, 0.0001)], 2.0) == [Send(B, [next_one])]


def test_chunks_and_outcome_make_a_writable_result() -> None:
    incoming = Incoming()
    incoming.add_chunk(ResultChunk(1, 0, 6, 3, b"def"))
    incoming.add_chunk(ResultChunk(1, 0, 6, 0, b"abc"))
    raw = incoming.outcome(Outcome(seconds=0.5, data=b"pickle", part_bytes=(6,)), WorkerId(0, 1))
    assert raw.data == b"pickle"
    assert [bytes(buffer) for buffer in raw.buffers] == [b"abcdef"]
    assert not raw.buffers[0].readonly
    assert raw.seconds == 0.5


def test_a_large_pickle_is_the_first_part() -> None:
    incoming = Incoming()
    incoming.add_chunk(ResultChunk(1, 0, 3, 0, b"abc"))
    raw = incoming.outcome(Outcome(seconds=0.0, part_bytes=(3,)), WorkerId(0, 1))
    assert bytes(raw.data) == b"abc"
    assert raw.buffers == ()


def test_a_result_without_memory_for_it_is_a_memory_error_and_its_other_pieces_are_dropped() -> None:
    incoming = Incoming()
    for part, size in enumerate((3, 1 << 48, 3)):
        incoming.add_chunk(ResultChunk(1, part, size, 0, b"abc"))
    raw = incoming.outcome(Outcome(seconds=0.5, data=b"", part_bytes=(3, 1 << 48, 3)), WorkerId(0, 1))
    with pytest.raises(MemoryError, match="281,474,977 MB"):
        raw.value()


class Released(list[ReleaseSegments]):
    """Takes what is released."""

    def take(self, item: ReleaseSegments) -> None:
        self.append(item)


def test_a_result_whose_segment_was_removed_is_lost_with_the_reason(tmp_path: Path) -> None:
    results = MappedResults(str(tmp_path), Released().take)
    outcome = Outcome(seconds=0.5, data=b"x", part_bytes=(3,), segment="missing")
    incoming = Incoming()
    incoming.map_segment(outcome, results)
    error = incoming.outcome(outcome, A).error
    assert isinstance(error, WorkerLostError)
    assert "node 0, worker 0 is lost: its file" in str(error)


def test_an_emitted_event_arrives_as_itself() -> None:
    event = LogLine(0, "i", "text", 1.0)
    item = EmittedEvent(1, pack(event, what="it").data)
    assert list(Incoming().events(item, worker=WorkerId(0, 1), instance_id="i")) == [event]


def test_an_event_that_cannot_be_rebuilt_is_told_and_does_no_harm() -> None:
    (event,) = Incoming().events(EmittedEvent(1, b"no pickle"), worker=WorkerId(0, 1), instance_id="i")
    assert isinstance(event, Error)
    assert "cannot be rebuilt" in event.message


class Exits:
    """Ends the interpreter that rebuilds it, or so it tries."""

    def __reduce__(self) -> object:
        return sys.exit, (3,)


def test_an_event_that_exits_when_it_is_rebuilt_is_told_and_does_no_harm() -> None:
    (event,) = Incoming().events(EmittedEvent(1, pickle.dumps(Exits())), worker=WorkerId(0, 1), instance_id="i")
    assert isinstance(event, Error)
    assert "SystemExit: 3" in event.message


def test_a_result_that_exits_when_it_is_rebuilt_is_an_error_of_its_call() -> None:
    with pytest.raises(pickle.UnpicklingError, match="ended with SystemExit: 3"):
        RawOutcome(data=pickle.dumps(Exits()), worker=WorkerId(0, 1)).value()


def test_an_exception_that_exits_when_it_is_rebuilt_is_told_in_words() -> None:
    packed = PackedError(type_name="Odd", message="text", traceback="Traceback", pickled=pickle.dumps(Exits()))
    error = unpack_error(packed, where="node 0, worker 1")
    assert isinstance(error, RemoteError)
    assert "rebuilding it here failed with SystemExit: 3" in error.__notes__[0]


def test_a_line_names_its_worker_its_call_and_its_stream() -> None:
    piece = LogPiece(text="hello", stream="stderr", timestamp=2.0)
    (event,) = Incoming().events(PrintedLines(7, [piece], 0), worker=WorkerId(0, 1), instance_id="i", call="train#3")
    assert event == LogLine(0, "i", "hello", 2.0, worker=1, call="train#3", stream="stderr")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("train", "train#3"),
        ("test_it.<locals>.train", "train#3"),
        ("<lambda>", "<lambda>#3"),
        ("mean (12 tasks)", "mean#3"),
    ],
)
def test_a_call_is_named_after_the_end_of_its_label_and_its_number(label: str, name: str) -> None:
    function = PackedFunction(id="f", label=label, payload=Payload())
    call = LiveCall(id=1, kind="f", label=label, function=function, number=3)
    assert call.name == name


def test_labels_with_the_same_end_are_counted_together() -> None:
    numbers = CallNumbers()
    labels = ["train", "a.train", "b.<locals>.train", "fit (2 tasks)", "fit (4 tasks)", "train"]
    assert [next(numbers[label]) for label in labels] == [0, 1, 2, 0, 1, 3]
