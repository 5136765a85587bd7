"""Pending calls that are used as if they were results, or not used at all."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from skyward import ComputePool, Local, UnsentCallWarning, compute, gather
from skyward.api.calls import PendingBatch, PendingCompute, invocation_of
from skyward.errors import ConfigurationError
from skyward.scheduling.calls import pack_calls
from skyward.shipping.function_cache import FunctionCache
from skyward.submission import ArgumentMemo, Invocation


@compute
def train(rows: Any, rate: float = 0.1, *, seed: int = 0) -> Any:
    return rows, rate, seed


class Pool:
    def run(self, pending: PendingCompute[Any]) -> Any:
        pending.invocation()

    def run_batch(self, batch: PendingBatch[Any]) -> Any:
        return [call.invocation() for call in batch]

    def broadcast(self, pending: PendingCompute[Any]) -> Any:
        return self.run(pending)


POOL: Any = Pool()
USES: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "not": lambda call: not call,
    "iterate": list,
    "unpack": lambda call: [*call],
    "len": len,
    "index": lambda call: call[0],
    "in": lambda call: 3 in call,
    "add": lambda call: call + 1,
    "reflected": lambda call: 1 - call,
    "negate": lambda call: -call,
    "power": lambda call: 2**call,
    "compare": lambda call: call < 3,
    "float": float,
    "int": int,
    "round": round,
    "slice": lambda call: [1, 2][call],
    "or": lambda call: call | {},
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_of_the_missing_result_names_the_operator_and_shows_the_users_line_only(
    use: Callable[[Any], Any],
) -> None:
    with pytest.raises(TypeError, match=r"train\(\.\.\.\) is a pending call.*write train\(\.\.\.\) >> pool") as caught:
        use(train(1))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}


def test_an_attribute_of_the_missing_result_names_the_operator() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'shape'; write \(train\(\.\.\.\) >> pool\)\.shape"
    ) as caught:
        train(1).shape  # type: ignore[attr-defined] # noqa: B018
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


def test_calls_live_in_containers_and_are_equal_to_themselves_only() -> None:
    one, two = train(1), train(1)
    assert one != two
    assert {one: 1, two: 2}[two] == 2
    assert [one, two].index(two) == 1
    assert two in [3, "x", one, two]
    assert len({one, two}) == 2


@pytest.mark.parametrize(
    "name",
    ["__array__", "__array_interface__", "_repr_html_", "_ipython_canary_method_should_not_exist_", "__wrapped__"],
)
def test_protocols_that_libraries_look_for_are_absent(name: str) -> None:
    assert not hasattr(train(1), name)


def test_numpy_and_copies_take_a_call_as_an_object() -> None:
    import numpy as np

    call = train(1)
    assert np.array([call, None], dtype=object)[0] is call
    assert copy.copy(call).args == copy.deepcopy(call).args == pickle.loads(pickle.dumps(call)).args == (1,)
    assert f"{call}" == str(call)


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda: ComputePool(Local()), r"write ComputePool\(provider=Local\(\.\.\.\), \.\.\.\)"),  # type: ignore[misc]
        (
            lambda: ComputePool(provider=Local(), node=2),
            r"no option 'node' \(did you mean nodes\?\); its options are acc",
        ),  # type: ignore[call-arg]
        (ComputePool, r"needs provider, as in ComputePool\(provider=skyward\.Local\(\)\)"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_option_of_a_pool_is_answered_with_the_right_one(make: Callable[[], Any], right: str) -> None:
    with pytest.raises(TypeError, match=right) as caught:
        make()
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


def test_pools_and_calls_have_short_texts() -> None:
    assert repr(ComputePool(provider=Local(), nodes=2)) == "<ComputePool of 2 nodes of local: not open>"
    text = repr(train(list(range(1000)), rate=0.5))
    assert text == "<pending call train([0, 1, 2, 3, ...], rate=0.5): not sent, write ... >> pool>"
    assert len(repr(train("x" * 10_000, seed=3))) < 100


class TestArguments:
    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((1, 2, 3), {}, r"train\(\) takes from 1 to 2 positional arguments but 3 were given"),
            ((), {}, r"train\(\) missing 1 required positional argument: 'rows'"),
            ((1,), {"sed": 3}, r"train\(\) got an unexpected keyword argument 'sed'"),
            ((1,), {"rows": 3}, r"train\(\) got multiple values for argument 'rows'"),
        ],
    )
    def test_they_are_bound_when_the_call_is_made(self, args: Any, kwargs: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message) as caught:
            train(*args, **kwargs)
        assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}

    def test_any_signature_is_bound(self) -> None:
        def every(a: int, /, b: int, *rest: int, c: int, d: int = 4, **more: int) -> None: ...

        fn = compute(every)
        assert fn(1, 2, 3, c=3, e=5).args == (1, 2, 3)
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'c'"):
            fn(1, 2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
            fn(1, c=3)  # type: ignore[call-arg]

    def test_builtins_and_functions_behind_a_decorator_pass(self) -> None:
        import functools

        @functools.wraps(every := lambda given, rows: rows)
        def inject(*args: Any) -> Any:
            return every("given", *args)

        assert compute(max)(1, 2, 3).args == (1, 2, 3)
        assert compute(inject)(1).args == (1,)

    @pytest.mark.parametrize(
        "make", [lambda call: call, lambda call: [1, call], lambda call: {"a": call}, lambda call: (gather(call),)]
    )
    def test_a_pending_call_among_them_is_refused_at_once(self, make: Callable[[Any], Any]) -> None:
        for send in (lambda: train(make(train(1))), lambda: train(1, seed=make(train(1)))):
            with pytest.raises(ConfigurationError, match=r"argument of train\(\) is the pending call .* run it first"):
                send()
        with pytest.raises(ConfigurationError, match="pending call train"):
            invocation_of(print, ([train(1)],), {})

    def test_a_deeply_hidden_one_is_refused_when_it_is_sent(self) -> None:
        call = train([[{"a": [train(1)]}]])
        with pytest.raises(ConfigurationError, match="train is the pending call train"):
            pack_calls([call.invocation()], ArgumentMemo(), FunctionCache())
        assert pickle.loads(pickle.dumps([[train(3)]]))[0][0].args == (3,)  # elsewhere it is a value like any other

    def test_a_future_among_them_is_refused_at_once(self) -> None:
        with pytest.raises(ConfigurationError, match=r"is a future; pass its result: train\(future\.result\(\)\)"):
            train([Future[int]()])


@contextmanager
def collected() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
        gc.collect()


class TestUnsent:
    def test_a_call_that_nothing_uses_is_warned_of_once_at_its_line(self) -> None:
        with collected() as caught:
            for number in range(3):
                train(number)
        assert [type(each.message) for each in caught] == [UnsentCallWarning]
        assert caught[0].filename == __file__
        assert caught[0].lineno == self.first_line() + 3
        assert "train(...) was never sent to a pool" in str(caught[0].message)

    def first_line(self) -> int:
        return type(self).test_a_call_that_nothing_uses_is_warned_of_once_at_its_line.__code__.co_firstlineno

    def test_a_batch_that_nothing_uses_is_warned_of(self) -> None:
        with collected() as caught:
            gather(train(1), train(2))
            train(3) & train(4)
            train(5).options(timeout=60)
        assert len(caught) == 3

    @pytest.mark.parametrize(
        "use",
        [
            lambda: train(1) >> POOL,
            lambda: train(1) @ POOL,
            lambda: gather(train(1), train(2)) >> POOL,
            lambda: (train(1) & train(2)) >> POOL,
            lambda: train(1).options(timeout=3) >> POOL,
            lambda: train(1).invocation(),
            lambda: invocation_of(train(1), (), {}),
            lambda: invocation_of(train, (1,), {}),
            lambda: pickle.loads(pickle.dumps(train(1))),
            lambda: copy.deepcopy(gather(train(1))),
            lambda: PendingCompute(fn=len),
        ],
    )
    def test_a_call_that_was_used_is_not(self, use: Callable[[], object]) -> None:
        with collected() as caught:
            use()
        assert caught == []

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda: bool(train(1)),
            lambda: train(1) >> 3,  # type: ignore[operator]
            lambda: POOL >> train(1),
            lambda: gather(train(1), 3),  # type: ignore[call-overload]
            lambda: train(1) & 3,  # type: ignore[operator]
            lambda: train(train(1)),
            lambda: train(1).options(timeout=0),
            lambda: gather(train(1), stream="yes"),  # type: ignore[call-overload]
            lambda: train(1).options(tmeout=1),  # type: ignore[call-arg]
            lambda: train(1) >> ComputePool(provider=Local()),
            lambda: ComputePool(provider=Local()).submit(train(1)),
            lambda: ComputePool(provider=Local()).run(train(1)),
        ],
    )
    def test_a_call_that_an_error_has_named_is_not(self, misuse: Callable[[], object]) -> None:
        with collected() as caught, pytest.raises((TypeError, ConfigurationError, RuntimeError)):
            misuse()
        assert caught == []

    def test_the_end_of_the_interpreter_is_no_reason(self) -> None:
        script = "import skyward as sky\nf = sky.compute(len)\nleft = f('four')\n"
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", script], check=False, capture_output=True, text=True, timeout=60
        )
        assert (ended.returncode, ended.stderr) == (0, "")


class TestOptions:
    def test_they_reach_the_invocation(self) -> None:
        fn = compute(timeout=60, retries=1, memory="4GB")(train.local)
        call = fn(1).invocation()
        assert (call.retries, call.limits and call.limits.timeout_s, call.limits and call.limits.memory_gib) == (
            1,
            60,
            4,
        )

    def test_those_of_one_call_override_those_of_the_function(self) -> None:
        call = compute(timeout=60, memory="4GB")(train.local)(1).options(timeout=None, retries=0)
        assert (call.retries, call.limits and call.limits.timeout_s, call.limits and call.limits.memory_gib) == (
            0,
            None,
            4,
        )
        assert call.options(memory=None).limits is None
        assert pickle.loads(pickle.dumps(call)).limits == call.limits

    def test_times_may_be_said_with_their_unit(self) -> None:
        limits = compute(timeout="5m", grace="30s")(train.local)(1).invocation().limits
        assert limits is not None
        assert (limits.timeout_s, limits.grace_s) == (300.0, 30.0)
        with pytest.raises(ConfigurationError, match="timeout must be a length of time such as"):
            train(1).options(timeout="3")

    def test_a_call_without_them_has_no_limits(self) -> None:
        assert train(1).invocation().limits is None
        assert Invocation(fn=len).limits is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"timeout": 0}, "timeout must be a number > 0, got 0"),
            ({"timeout": True}, "timeout must be a number > 0, got True"),
            ({"timeout": 3, "grace": 0}, "grace must be a number > 0, got 0"),
            ({"timeout": float("nan")}, "timeout must be a number > 0, got nan"),
            ({"memory": 4}, 'memory must be a size such as "32GB", got 4'),
            ({"memory": "lots"}, "memory must be a size such as \"32GB\", got 'lots'"),
            ({"memory": "0GB"}, "memory must be a size such as \"32GB\", got '0GB'"),
            ({"retries": -1}, "retries must be a whole number ≥ 0, got -1"),
        ],
    )
    def test_bad_values_are_refused_at_once(self, options: dict[str, Any], message: str) -> None:
        for make in (lambda: compute(**options), lambda: train(1).options(**options)):
            with pytest.raises(ConfigurationError) as caught:
                make()
            assert str(caught.value) == message

    def test_unknown_ones_are_refused_with_the_list_of_the_others(self) -> None:
        with pytest.raises(
            TypeError,
            match=r"compute has no option .timeot. \(did you mean timeout\?.*grace, memory, retries, retry, timeout",
        ):
            compute(timeot=3)  # type: ignore[call-overload]
        with pytest.raises(
            TypeError, match=r"train\(\.\.\.\)\.options has no option .cpu.; .* grace, memory, retries, timeout"
        ):
            train(1).options(cpu=3)  # type: ignore[arg-type]
