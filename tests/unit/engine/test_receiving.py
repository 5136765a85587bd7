from __future__ import annotations

import pickle
import sys

import pytest

from skyward.engine.calls import Incoming
from skyward.engine.dispatch import WorkerId
from skyward.engine.futures import RawOutcome
from skyward.errors import RemoteError
from skyward.events import Error, LogLine
from skyward.wire.messages import EmittedEvent, Outcome, ResultChunk
from skyward.wire.pickling import PackedError, pack, unpack_error


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


def test_an_emitted_event_arrives_as_itself() -> None:
    event = LogLine(0, "i", "text", 1.0)
    item = EmittedEvent(1, pack(event, what="it").data)
    assert list(Incoming().events(item, node=0, instance_id="i")) == [event]


def test_an_event_that_cannot_be_rebuilt_is_told_and_does_no_harm() -> None:
    (event,) = Incoming().events(EmittedEvent(1, b"no pickle"), node=0, instance_id="i")
    assert isinstance(event, Error)
    assert "cannot be rebuilt" in event.message


class Exits:
    """Ends the interpreter that rebuilds it, or so it tries."""

    def __reduce__(self) -> object:
        return sys.exit, (3,)


def test_an_event_that_exits_when_it_is_rebuilt_is_told_and_does_no_harm() -> None:
    (event,) = Incoming().events(EmittedEvent(1, pickle.dumps(Exits())), node=0, instance_id="i")
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
