"""Files of a job: what was written is read, in other programs too, and nothing else is."""

from __future__ import annotations

import io
import re
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.errors import CallTimeoutError, WorkerLostError
from skyward.shipping.job_file import (
    DamagedJobFileError,
    JobEnd,
    JobOutcome,
    call_bytes,
    job_call,
    join_calls,
    outcome_parts,
    outcome_value,
    read_call,
    read_end,
    read_head,
    read_outcome,
    split_calls,
)
from skyward.shipping.pickling import pack_result, unpack_call
from skyward.shipping.remote_exceptions import pack_error
from skyward.submission import CallLimits, Invocation

_MEBI = 1 << 20


def _written(path: Path, content: Any) -> Path:
    path.write_bytes(content if isinstance(content, bytes | bytearray) else b"".join(content))
    return path


def _outcome(end: JobEnd, **facts: Any) -> JobOutcome:
    return JobOutcome(end=end, node=1, worker=2, attempt=3, **facts)


def test_a_call_is_read_with_its_function_arguments_and_limits(tmp_path: Path) -> None:
    large = np.arange(_MEBI, dtype=np.int64)

    def total(values: Any, *, factor: int) -> int:
        return int(values.sum()) * factor

    limits = CallLimits(timeout_s=60, memory_gib=2)
    sent = job_call(Invocation(fn=total, args=(large,), kwargs={"factor": 3}, retries=5, limits=limits))

    call = read_call(_written(tmp_path / "call", call_bytes(sent)))

    function = unpack_call(call.function.data, call.function.buffers)
    args, kwargs = unpack_call(call.arguments.data, call.arguments.buffers)
    assert function(*args, **kwargs) == int(large.sum()) * 3
    assert args[0].ctypes.data % 64 == 0, "code that uses vector instructions reads it"
    args[0][0] = 7  # the call may write to it; the file stays
    assert np.frombuffer(read_call(tmp_path / "call").arguments.buffers[0], np.int64)[0] == 0
    assert (call.label.rpartition(".")[2], call.retries) == ("total", 5)
    assert (call.header.timeout_s, call.header.memory_bytes) == (60, 2 << 30)


def test_equal_calls_have_different_files() -> None:
    one, other = (call_bytes(job_call(Invocation(fn=abs, args=(1,)))) for _ in range(2))

    assert one != other


@pytest.mark.parametrize(
    "value", [None, "text \ud800", {"a": [1, 2]}, np.ones(_MEBI)], ids=lambda value: type(value).__name__
)
def test_a_value_is_read_after_its_file_is_gone(tmp_path: Path, value: Any) -> None:
    outcome = _outcome(JobEnd.VALUE, seconds=1.5, result=pack_result(value, what="it"))
    path = _written(tmp_path / "end", outcome_parts(outcome))

    read, end = read_outcome(path), read_end(path)
    path.unlink()

    np.testing.assert_equal(outcome_value(read, where=""), value)
    assert (end.end, end.seconds, end.attempt, end.result) == (JobEnd.VALUE, 1.5, 3, None)


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        (_outcome(JobEnd.ERROR, error=pack_error(KeyError("beta"))), KeyError, "beta"),
        (_outcome(JobEnd.LOST, message="it died twice", reason="SIGKILL"), WorkerLostError, "it died twice"),
        (_outcome(JobEnd.TIMEOUT, message="too long", timeout_s=5.0), CallTimeoutError, "too long"),
        (_outcome(JobEnd.CANCELLED, message="cancelled"), CancelledError, "cancelled"),
    ],
    ids=lambda value: value.end if isinstance(value, JobOutcome) else "",
)
def test_a_failed_call_raises_its_error(tmp_path: Path, outcome: JobOutcome, error: type[Exception], says: str) -> None:
    read = read_outcome(_written(tmp_path / "end", outcome_parts(outcome)))

    with pytest.raises(error, match=says) as raised:
        outcome_value(read, where="node 1")
    assert read == replace(outcome, result=None)
    if outcome.end is JobEnd.LOST:
        assert (raised.value.node, raised.value.worker, raised.value.reason) == (1, 2, "SIGKILL")  # type: ignore[attr-defined]


@pytest.mark.parametrize("cut", [0, 5, 12, 40, 900, -1])
def test_an_incomplete_file_is_refused(tmp_path: Path, cut: int) -> None:
    whole = b"".join(outcome_parts(_outcome(JobEnd.VALUE, result=pack_result("x" * 1000, what="it"))))
    path = _written(tmp_path / "end", whole[:cut])

    with pytest.raises(DamagedJobFileError, match=re.escape(str(path))):
        read_outcome(path)


def test_a_call_is_no_outcome_and_an_outcome_no_call(tmp_path: Path) -> None:
    call = _written(tmp_path / "call", call_bytes(job_call(Invocation(fn=abs, args=(1,)))))
    end = _written(tmp_path / "end", outcome_parts(_outcome(JobEnd.CANCELLED)))

    with pytest.raises(DamagedJobFileError):
        read_outcome(call)
    with pytest.raises(DamagedJobFileError):
        read_call(end)


def test_the_facts_of_a_call_are_read_without_its_sources(tmp_path: Path) -> None:
    path = _written(tmp_path / "call", call_bytes(job_call(Invocation(fn=abs, args=(1,), retries=2))))

    head = read_head(path)

    assert (head["label"], head["retries"]) == ("abs", 2)


def test_a_stream_of_calls_is_taken_apart() -> None:
    calls = [(0, b"first"), (7, b""), (3, b"x" * (3 * _MEBI + 1))]

    stream = io.BytesIO(join_calls(calls))

    assert [(index, b"".join(pieces)) for index, pieces in split_calls(stream)] == calls


@pytest.mark.parametrize("missing", [1, 12])
def test_a_stream_that_ends_early_is_refused(missing: int) -> None:
    stream = io.BytesIO(join_calls([(0, b"0123456789")])[:-missing])

    with pytest.raises(DamagedJobFileError, match="ends"):
        for _, pieces in split_calls(stream):
            list(pieces)
