"""The commonest slips: each is answered at the user's line with what to write instead."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward import ComputePool, Local, compute, gather
from skyward.api.calls import invocation_of
from skyward.errors import ConfigurationError
from skyward.submission import CallFuture


@compute
def train(rows: Any) -> Any:
    return rows


def plain(rows: Any) -> Any:
    return rows


class Trainer:
    @compute
    def fit(self, rows: Any) -> Any:
        return rows


class ReturningPool(ComputePool):
    def run(self, pending: Any) -> Any:
        pending.mark_used()
        return NotImplemented


POOL: Any = ComputePool(provider=Local())
TRAIN: Any = train
FUTURE: Any = CallFuture[int]()
TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "list >> pool": (lambda: [train(1), train(2)] >> POOL, r"got list: .* write gather\(\*calls\) >> pool"),
    "tuple >> pool": (lambda: (train(1), train(2)) >> POOL, r"got tuple: .* write gather\(\*calls\) >> pool"),
    "set >> pool": (lambda: {train(1)} >> POOL, r"got set: .* write gather\(\*calls\) >> pool"),
    "generator >> pool": (
        lambda: (train(n) for n in range(2)) >> POOL,
        r"generator: .* write gather\(\*calls\) >> pool",
    ),
    "map >> pool": (lambda: map(train, range(2)) >> POOL, r"got map: .* write gather\(\*calls\) >> pool"),
    "dict >> pool": (lambda: {"a": train(1)} >> POOL, r"got dict: .* write gather\(\*calls\.values\(\)\) >> pool"),
    "list @ pool": (lambda: [train(1)] @ POOL, r"gather\(\*calls\) >> pool; .* write f\(\.\.\.\) @ pool"),
    "result >> pool": (lambda: plain(3) >> POOL, r"got int: .* @skyward\.compute .* pool\.submit\(f, \.\.\.\)"),
    "result NotImplemented": (
        lambda: train(1) >> ReturningPool(provider=Local()),
        r"train ran and its result is NotImplemented.* pool\.submit\(\.\.\.\)\.result\(\)",
    ),
    "None >> pool": (lambda: plain(None) >> POOL, "got NoneType: .* ran here"),
    "array >> pool": (lambda: np.arange(3) >> POOL, "got ndarray: .* ran here"),
    "result @ pool": (lambda: plain(2.5) @ POOL, r"got float: .* f\(\.\.\.\) @ pool"),
    "array @ pool": (lambda: np.eye(2) @ POOL, "got ndarray: .* ran here"),
    "function >> pool": (
        lambda: plain >> POOL,
        r"plain was not called.* plain\(\.\.\.\) >> pool.*submit\(plain, \.\.\.\)",
    ),
    "class >> pool": (lambda: dict >> POOL, "dict was not called"),
    "future >> pool": (lambda: FUTURE >> POOL, r"sent already: write future\.result\(\)"),
    "compute function >> pool": (lambda: TRAIN >> POOL, r"train was not called: write train\(\.\.\.\) >> pool"),
    "compute function @ pool": (lambda: TRAIN @ POOL, r"train was not called: write train\(\.\.\.\) @ pool"),
    "compute function + 1": (lambda: TRAIN + 1, r"train was not called"),
    "function & call": (lambda: TRAIN & train(1), r"train was not called"),
    "call & function": (lambda: train(1) & TRAIN, r"and train was not called: write \(train\(\.\.\.\) & g"),
    "call & number": (lambda: train(1) & 3, r"& joins pending calls.*write \(f\(\) & g\(\)\) >> pool"),
    "number & call": (lambda: 3 & train(1), r"& joins pending calls.*write \(f\(\) & g\(\)\) >> pool"),
    "batch & None": (lambda: (train(1) & train(2)) & None, r"& joins pending calls.*write \(f\(\) & g\(\)\) >> pool"),
    "number & batch": (lambda: 3 & (train(1) & train(2)), r"& joins pending calls.*write \(f\(\) & g\(\)\) >> pool"),
    "method >> pool": (lambda: Trainer().fit >> POOL, r"fit was not called: write fit\(\.\.\.\) >> pool"),
    "pool >> call": (lambda: POOL >> train(3), r"to the right of >>.* write train\(\.\.\.\) >> pool"),
    "pool @ call": (lambda: POOL @ train(3), r"to the right of @.* write train\(\.\.\.\) @ pool"),
    "pool >> batch": (lambda: POOL >> gather(train(1)), r"write gather\(\.\.\.\) >> pool"),
    "batch @ pool": (lambda: gather(train(1)) @ POOL, r"gather\(\.\.\.\) >> pool; .* f\(1\) @ pool"),
    "pool >> function": (lambda: POOL >> plain, r"to the right of >>.* write plain\(\.\.\.\) >> pool"),
    "pool >> value": (lambda: POOL >> 42, r"to the right of >>.* write f\(\.\.\.\) >> pool"),
    "call >> list": (lambda: train(3) >> [POOL], r"got list: write train\(\.\.\.\) >> pool for one of them"),
    "call @ list": (lambda: train(3) @ [POOL], r"got list: write train\(\.\.\.\) @ pool for one of them"),
    "call >> class": (lambda: train(3) >> ComputePool, r"the class ComputePool: open one"),
    "call >> provider": (lambda: train(3) >> Local(), r"a provider: .*ComputePool\(provider=Local\(\.\.\.\)\)"),
    "call >> None": (lambda: train(3) >> None, r"None: open one"),
    "call >> number": (lambda: train(3) >> 3, r"a pool must stand to the right of >>, got int: open one"),
    "call @ text": (
        lambda: train(3) @ "pool",
        r"a pool must stand to the right of @, got str: write .* for one of them",
    ),
    "call >> executor": (lambda: train(3) >> ThreadPoolExecutor(1), r"executor\.submit\(f, \.\.\.\)"),
    "call >> module": (lambda: train(3) >> sky, r"got module: open one"),
    "batch >> list": (lambda: gather(train(3)) >> [POOL], r"write gather\(\.\.\.\) >> pool for one of them"),
    "future + 1": (lambda: FUTURE + 1, r"not its result.* write future\.result\(\)"),
    "1 - future": (lambda: 1 - FUTURE, r"write future\.result\(\)"),
    "future[0]": (lambda: FUTURE[0], r"no items; write future\.result\(\)"),
    "future < 3": (lambda: FUTURE < 3, r"no order; write future\.result\(\)"),
    "float(future)": (lambda: float(FUTURE), r"no number; write future\.result\(\)"),
    "sum(futures)": (lambda: sum([FUTURE]), r"write future\.result\(\)"),
    "for x in future": (lambda: list(FUTURE), r"write future\.result\(\)"),
    "offers by position": (lambda: sky.offers(Local(), "A100"), r"options by name: write offers\(.*, accelerator="),  # type: ignore[misc]
    "offers of a gpu": (lambda: sky.offers(Local(), gpu="A100"), r"no option 'gpu' \(did you mean accelerator\?\)"),  # type: ignore[call-arg]
}
ATTRIBUTES: dict[str, tuple[Callable[[], Any], str]] = {
    "future.shape": (lambda: FUTURE.shape, r"write future\.result\(\)\.shape"),
    "f.remote": (lambda: TRAIN.remote(1), r"no attribute 'remote'; write train\(\.\.\.\) >> pool"),
    "f.options": (lambda: TRAIN.options(timeout=3), r"train\(\.\.\.\)\.options\(\.\.\.\)"),
    "method.delay": (lambda: Trainer().fit.delay(1), r"no attribute 'delay'; write fit\(\.\.\.\) >> pool"),
    "call.result": (lambda: TRAIN(1).result(), r"train\(\.\.\.\) >> pool waits .* pool\.submit\(train, \.\.\.\)"),
}
CONFIGURATION: dict[str, tuple[Callable[[], Any], str]] = {
    "submit a result": (lambda: POOL.submit(train.local(3)), r"got int: write pool\.submit\(f, \.\.\.\)"),
    "submit a list": (lambda: POOL.submit([train(3)]), r"got list: write gather\(\*calls\) >> pool"),
    "submit a future": (lambda: POOL.submit(FUTURE), r"a future: its call was sent already"),
    "submit nothing": (lambda: POOL.submit(None), r"got NoneType"),
    "map a result": (lambda: POOL.map(train.local(3), [1]), r"got int"),
    "map over a number": (lambda: POOL.map(train, 3), r"map takes iterables, got int as argument 2"),
    "run a function": (lambda: POOL.run(plain), r"got function; write f\(\.\.\.\) >> pool, or pool\.submit"),
    "gather a list": (lambda: gather([train(1)]), r"got list as argument 1; .*gather\(\*calls\) for a list"),
    "gather a generator": (
        lambda: gather(train(n) for n in range(2)),
        r"got generator as argument 1; .*gather\(\*calls\)",
    ),
    "gather a function": (lambda: gather(train(1), TRAIN), r"got ComputeFunction as argument 2; "),
    "gather a batch": (lambda: gather(train(1), gather(train(1))), r"got PendingBatch as argument 2; "),
    "gather nothing": (lambda: gather(None), r"got NoneType as argument 1; "),
}


@pytest.mark.parametrize(("slip", "step"), TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_a_slip_is_a_type_error_at_the_users_line_with_the_next_step(slip: Callable[[], Any], step: str) -> None:
    with pytest.raises(TypeError, match=step) as caught:
        slip()
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


@pytest.mark.parametrize(("slip", "step"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_missing_attribute_names_the_next_step(slip: Callable[[], Any], step: str) -> None:
    with pytest.raises(AttributeError, match=step) as caught:
        slip()
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


@pytest.mark.parametrize(("slip", "step"), CONFIGURATION.values(), ids=CONFIGURATION)
def test_a_wrong_value_names_the_next_step(slip: Callable[[], Any], step: str) -> None:
    with pytest.raises(ConfigurationError, match=step):
        slip()


async def test_waiting_for_a_pending_call_names_the_next_step() -> None:
    with pytest.raises(TypeError, match=r"write await pool\.submit\(train, \.\.\.\)"):
        await TRAIN(1)
    with pytest.raises(TypeError, match=r"write await pool\.submit\(train, \.\.\.\)"):
        await asyncio.gather(TRAIN(1))


def test_futures_and_functions_are_true_and_no_sequences() -> None:
    assert FUTURE
    assert TRAIN
    assert np.array([FUTURE, TRAIN], dtype=object)[0] is FUTURE
    assert {FUTURE: 1}[FUTURE] == 1
    assert not any(hasattr(value, "__len__") for value in (FUTURE, TRAIN))


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_WORKER", "{}")


@pytest.mark.usefixtures("on_a_node")
class TestInsideACall:
    @pytest.mark.parametrize(
        "use",
        [
            lambda: 2 * train(1),
            lambda: train(1) >> None,  # type: ignore[operator]
            lambda: train(1) @ "pool",  # type: ignore[operator]
            lambda: bool(train(1)),
        ],
    )
    def test_a_use_of_a_pending_call_names_the_plain_function(self, use: Callable[[], Any]) -> None:
        with pytest.raises(TypeError, match=r"calls cannot submit calls: write train\.local\(\.\.\.\)"):
            use()

    def test_so_do_its_attributes_and_other_calls(self) -> None:
        with pytest.raises(AttributeError, match=r"write train\.local\(\.\.\.\)\.shape"):
            TRAIN(1).shape  # noqa: B018
        with pytest.raises(ConfigurationError, match=r"x = train\.local\(\.\.\.\)"):
            invocation_of(plain, (train(1),), {})
