"""Tracebacks show the user's lines: those of the worker first, then the one that sent the call."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from skyward import CallTimeoutError, ComputePool, Local, PoolStateError, RemoteTraceback, compute
from skyward.api.calls import PendingCompute
from skyward.hidden_frames import add_lines, hide_frames
from skyward.shipping.remote_exceptions import pack_error, unpack_error


@compute
def divide(number: int) -> float:
    try:
        return number / 0
    except ZeroDivisionError as error:
        raise ValueError("no quotient") from error


class Pool:
    def run(self, pending: PendingCompute[Any]) -> Any:
        call = pending.invocation()
        try:
            return call.fn(*call.args, **call.kwargs)
        except Exception as error:
            packed = pack_error(error)
        raise unpack_error(packed, where="node 0, worker 0")

    run_batch = broadcast = run


def files_of(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def test_the_last_line_is_the_users_own_and_the_cause_has_the_remote_ones_only() -> None:
    with pytest.raises(ValueError, match="no quotient") as caught:
        divide(1) >> Pool()  # type: ignore[operator]

    assert files_of(caught.value) == {__file__}
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    remote = str(caught.value.__cause__)
    assert "ZeroDivisionError" in remote
    assert "return number / 0" in remote
    assert "skyward/client" not in remote
    assert pickle.loads(pickle.dumps(caught.value)).args == ("no quotient",)


def test_all_frames_are_kept_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_TRACEBACK", "full")
    with pytest.raises(ValueError, match="no quotient") as caught:
        divide(1) >> Pool()  # type: ignore[operator]

    assert any("skyward/api/calls.py" in file for file in files_of(caught.value))
    assert "skyward/api/calls.py" in str(caught.value.__cause__)


def test_frames_of_skyward_are_hidden_in_contexts_and_members_of_groups_too() -> None:
    scope: dict[str, Any] = {"__name__": "skyward.made_up"}
    exec("def below(act):\n    act()", scope)

    def first() -> None:
        raise KeyError("first")

    def second() -> None:
        try:
            scope["below"](first)
        except KeyError:
            raise ValueError("second")  # noqa: B904 - the context is the point

    with pytest.raises(ValueError, match="second") as caught:
        scope["below"](second)
    hide_frames(ExceptionGroup("of one", [caught.value]))

    names = [
        [frame.name for frame in traceback.extract_tb(each.__traceback__)]
        for each in (caught.value, caught.value.__context__)
        if each is not None
    ]
    assert [each[-1] for each in names] == ["second", "first"]
    assert "below" not in names[0] + names[1]


def test_groups_come_back_without_frames_of_skyward() -> None:
    group = ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    error = unpack_error(pack_error(group), where="node 0, worker 0")

    assert isinstance(error, ExceptionGroup)
    assert [type(each) for each in error.exceptions] == [ValueError, KeyError]


def test_errors_with_attributes_are_pickled_with_them() -> None:
    error = CallTimeoutError("late", timeout_s=3.0, node=1, worker=2)
    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.timeout_s, copy.node, copy.worker) == ("late", 3.0, 1, 2)


def test_lines_that_only_this_process_has_are_added_to_the_workers_traceback() -> None:
    here = f'  File "{__file__}", line 1, in train\n'
    there = '  File "/opt/env/lib.py", line 7, in fit\n'
    first = '    """Tracebacks show the user\'s lines: those of the worker first, then the one that sent the call."""\n'

    text = f"Traceback:\n{here}{there}    model.fit()\n{there}{here}    kept = 1\nValueError: x\n"

    assert add_lines(text) == text.replace(here, here + first, 1)


def test_an_error_of_a_pools_method_has_the_callers_frame_only() -> None:
    pool = ComputePool(provider=Local(), display="quiet")
    with pytest.raises(PoolStateError) as caught:
        pool.fetch("*.bin", to="results")
    assert [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)] == [
        "test_an_error_of_a_pools_method_has_the_callers_frame_only"
    ]
