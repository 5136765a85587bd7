"""A function's pickle is kept as long as nothing it refers to can have changed."""

from __future__ import annotations

import colorsys
import functools
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

import skyward as sky
from skyward.scheduling.calls import pack_calls
from skyward.shipping.function_cache import FunctionCache, PackedFunction
from skyward.shipping.pickling import unpack
from skyward.submission import ArgumentMemo, Invocation

SOURCE = """
import math
factor = 2
numbers = [1, 2]
def helper(x): return x * factor
def direct(x): return x * factor
def indirect(x): return helper(x)
def by_reference(x): return math.sqrt(x)
def of_a_list(x): return numbers
def with_default(x, y=3): return x * y
def inner(x): return (lambda: helper(x))()
def early(x): return late
def rate(x): return settings.rate * x
"""


@pytest.fixture
def module() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "settings": ModuleType("sky_settings")}
    names["settings"].rate = 1
    exec(SOURCE, names)
    return names


@pytest.fixture
def send() -> Callable[[Callable[..., Any]], PackedFunction]:
    cache = FunctionCache()

    def sent(fn: Callable[..., Any]) -> PackedFunction:
        return cache.packed(fn, ArgumentMemo())

    return sent


def run(packed: PackedFunction, *args: object) -> Any:
    return unpack(packed.payload.data)(*args)


@pytest.mark.parametrize("name", ["direct", "indirect", "by_reference", "with_default", "inner"])
def test_what_has_not_changed_is_not_pickled_again(module: dict[str, Any], send: Any, name: str) -> None:
    assert send(module[name]) is send(module[name])


@pytest.mark.parametrize(
    ("name", "change", "result"),
    [
        ("direct", "factor = 3", 15),
        ("indirect", "factor = 3", 15),
        ("inner", "factor = 3", 15),
        ("indirect", "def helper(x): return -x", -5),
        ("early", "late = 7", 7),
        ("of_a_list", "numbers.append(3)", [1, 2, 3]),
        ("with_default", "with_default.__defaults__ = (4,)", 20),
        ("direct", "direct.__code__ = (lambda x: x - factor).__code__", 3),
        ("rate", "settings.rate = 2", 10),
    ],
)
def test_a_change_of_what_a_function_refers_to_is_seen(
    module: dict[str, Any], send: Any, name: str, change: str, result: object
) -> None:
    send(module[name])
    exec(change, module)
    assert run(send(module[name]), 5) == result


def test_a_closure_over_an_array_is_pickled_every_time(send: Any) -> None:
    array = np.zeros(3)

    def total(_: object) -> float:
        return float(array.sum())

    total.__module__ = "__main__"
    assert run(send(total), 0) == 0
    array += 1
    assert run(send(total), 0) == 3


def test_a_closure_over_a_number_is_pickled_again_only_when_it_changed(send: Any) -> None:
    number = 1

    def same(_: object) -> int:
        return number

    same.__module__ = "__main__"
    assert send(same) is send(same)
    number = 2
    assert run(send(same), 0) == 2


def test_compute_functions_are_kept_too(module: dict[str, Any], send: Any) -> None:
    function = sky.compute(module["indirect"])
    body = function(1).invocation().fn
    assert send(body) is send(body)
    module["factor"] = 5
    assert run(send(body), 2) == 10


def test_a_function_keeps_its_own_name_whatever_its_calls_are_called() -> None:
    cache = FunctionCache()
    for label in ("first", "second"):
        (call,) = pack_calls([Invocation(fn=statistics.mean, label=label)], ArgumentMemo(), cache)
        assert (call.label, call.function.label) == (label, "mean")


def test_a_bound_builtin_is_looked_into(send: Any) -> None:
    table = {"a": 1}
    look = table.get

    def read(name: str) -> int | None:
        return look(name)

    read.__module__ = "__main__"
    assert run(send(read), "a") == 1
    table["a"] = 2
    assert run(send(read), "a") == 2


def test_a_wrapper_that_took_over_an_installed_functions_name_is_looked_into(send: Any) -> None:
    factor = 2

    @functools.wraps(statistics.mean)
    def scaled(numbers: list[float]) -> float:
        return statistics.mean(numbers) * factor

    assert run(send(scaled), [1, 3]) == 4
    factor = 5
    assert run(send(scaled), [1, 3]) == 10


def test_a_default_that_becomes_a_keywords_is_a_change(send: Any) -> None:
    def pair(x: int, *, y: int = 1) -> tuple[int, int]:
        return (x, y)

    pair.__module__ = "__main__"
    assert run(send(pair), 3) == (3, 1)
    pair.__defaults__, pair.__kwdefaults__ = (1,), None  # type: ignore[assignment]
    with pytest.raises(TypeError, match="'y'"):
        run(send(pair), 3)


def test_functions_of_many_threads_are_kept_and_dropped_without_an_error() -> None:
    cache = FunctionCache()

    def keep(_: int) -> None:
        for _ in range(1000):
            cache.packed(eval("lambda: 1"), ArgumentMemo())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(keep, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert len(cache._known) <= 2048, "32 MiB, 16 KiB at least for each"


@pytest.mark.parametrize("name", ["__name__", "__qualname__", "__module__", "__doc__"])
def test_a_changed_name_is_seen(module: dict[str, Any], send: Any, name: str) -> None:
    send(module["direct"])
    setattr(module["direct"], name, "another")
    sent = unpack(send(module["direct"]).payload.data)
    assert getattr(sent, name) == "another"


def test_a_changed_annotation_is_seen(module: dict[str, Any], send: Any) -> None:
    send(module["direct"])
    module["direct"].__annotations__["x"] = int
    assert unpack(send(module["direct"]).payload.data).__annotations__ == {"x": int}


def test_a_module_that_is_registered_to_travel_by_value_does_so_from_then_on(
    module: dict[str, Any], send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module["colorsys"] = colorsys
    exec("def grey(x): return colorsys.ONE_THIRD", module)
    send(module["grey"])
    cloudpickle.register_pickle_by_value(colorsys)
    try:
        monkeypatch.setattr(colorsys, "ONE_THIRD", 0.3)
        packed = send(module["grey"])
    finally:
        cloudpickle.unregister_pickle_by_value(colorsys)
    monkeypatch.undo()
    assert run(packed, 0) == 0.3


def test_a_module_that_could_not_be_found_at_first_travels_once_it_can(
    send: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(_: object) -> Any:
        import sky_appears  # pyright: ignore[reportMissingImports]

        return sky_appears.VALUE

    fn.__module__ = "__main__"
    monkeypatch.syspath_prepend(tmp_path)
    assert send(fn) is send(fn)
    (tmp_path / "sky_appears.py").write_text("VALUE = 1")
    sources = send(fn).sources
    assert sources is not None
    assert [source.text for source in sources.sources] == ["VALUE = 1"]
