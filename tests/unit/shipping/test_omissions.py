"""What cannot be pickled of a module or a class stays behind, and says so when it is used."""

from __future__ import annotations

import copy
import importlib
import math
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from skyward.errors import SerializationError
from skyward.shipping.pickling import LeftOut, pack, unpack
from support.worker_process import WorkerProcess

SOURCE = """
import functools
import sqlite3
import threading

LOCK = threading.Lock()
CONNECTION = sqlite3.connect(":memory:")
FACTOR = 3

def synchronized(lock):
    def decorate(fn):
        def inner(*args):
            with lock:
                return fn(*args)
        return inner
    return decorate

def times(x):
    return FACTOR * x

def locked():
    with LOCK:
        return FACTOR

@functools.lru_cache(maxsize=7)
def factorial(n):
    return n * factorial(n - 1) if n else 1

guarded = synchronized(LOCK)(times)

class Model:
    lock = threading.Lock()

    def value(self):
        return FACTOR

    def locked(self):
        with LOCK:
            return FACTOR

    def selected(self):
        return CONNECTION.execute("SELECT 1")

class Child(Model):
    pass
"""


@pytest.fixture(scope="module")
def helpers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "sky_locking.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module("sky_locking")
        cloudpickle.register_pickle_by_value(module)
        yield module
        cloudpickle.unregister_pickle_by_value(module)
        module.CONNECTION.close()
        del sys.modules["sky_locking"]


def sent(fn: Any) -> Any:
    return unpack(pack(fn, what="it").data)


def test_a_module_with_a_lock_and_a_connection_travels_without_them(helpers: Any) -> None:
    function = sent(lambda x: 1 + helpers.times(x))
    assert function(2) == 7


@pytest.mark.parametrize(("name", "variable"), [("locked", "LOCK"), ("guarded", "guarded")])
def test_using_what_was_left_out_says_what_to_do(helpers: Any, name: str, variable: str) -> None:
    def use() -> Any:
        return getattr(helpers, name)()

    function = sent(use)
    said = (
        f"'{variable}' of module sky_locking was left out .*cannot pickle '_thread.lock' object.*"
        r"inside the function.*Image\(pip=\[…\]\)"
    )
    with pytest.raises(SerializationError, match=said):
        function()


def test_a_caching_function_of_such_a_module_travels_and_caches_there(helpers: Any) -> None:
    for function in (sent(lambda: helpers.factorial)(), sent(helpers.factorial)):
        assert function is not helpers.factorial
        assert function(5) == 120
        assert function.cache_info().maxsize == 7
        assert function.cache_info().misses == 6
        assert function.__name__ == "factorial"


@pytest.mark.parametrize("name", ["Model", "Child"])
def test_a_class_whose_methods_refer_to_a_lock_travels_without_it(
    helpers: Any, worker: WorkerProcess, name: str
) -> None:
    cls = getattr(helpers, name)
    assert worker.call(lambda make: make().value(), cls) == 3
    uses: dict[str, Callable[[Any], object]] = {
        "'LOCK' of module sky_locking": lambda make: make().locked(),
        "'CONNECTION' of module sky_locking": lambda make: make().selected().fetchone(),
        "'lock' of class Model": lambda make: make().lock.acquire(),
    }
    for what, use in uses.items():
        with pytest.raises(SerializationError, match=f"{what} was left out"):
            worker.call(use, cls)


def test_what_the_function_itself_refers_to_is_an_error_before_anything_is_sent(helpers: Any) -> None:
    lock = threading.Lock()

    def calls_helper() -> Any:
        return helpers.times(2), inner()

    def inner() -> object:
        return lock

    with pytest.raises(SerializationError, match="function calls_helper → its variable 'inner' → its variable 'lock'"):
        pack(calls_helper, what="the function calls_helper")
    with pytest.raises(SerializationError, match="its variable 'LOCK'"):
        pack(helpers.locked, what="it")
    with pytest.raises(SerializationError, match=r"its variable 'LOCK'"):
        pack((helpers.Model().locked,), what="it")


def test_data_of_a_call_is_never_left_out(helpers: Any) -> None:
    model = helpers.Model()
    model.own = threading.Lock()
    with pytest.raises(SerializationError, match=r"it\[0\]\.own cannot be pickled"):
        pack([model], what="it")


def with_statement(stand_in: Any) -> None:
    with stand_in:
        pass


def matched(stand_in: Any) -> bool:
    match stand_in:
        case int():
            return True
        case _:
            return False


def of_class(stand_in: Any) -> Any:
    class Owner:
        part = stand_in

    return Owner


USES: dict[str, Callable[[Any], object]] = {
    "call": lambda it: it(),
    "attribute": lambda it: it.attribute,
    "dunder": lambda it: it.__dict__,
    "class": lambda it: it.__class__,
    "isinstance": lambda it: isinstance(it, int),
    "match": matched,
    "item": lambda it: it[0],
    "bool": bool,
    "not": lambda it: not it,
    "equal": lambda it: it == 4,
    "equal from the left": lambda it: 4 == it,  # noqa: SIM300
    "not equal": lambda it: it != 4,
    "in": lambda it: it in [1, 2],
    "contains": lambda it: 1 in it,
    "hash": lambda it: {it: 1},
    "set": lambda it: {it},
    "str": str,
    "format": lambda it: f"{it}",
    "percent": lambda it: "%s" % it,  # noqa: UP031
    "formatted width": lambda it: f"{it:>5}",
    "bytes": bytes,
    "print": print,
    "len": len,
    "iterate": list,
    "unpack": lambda it: [*it],
    "sorted": lambda it: sorted([it, it]),
    "next": next,
    "add": lambda it: it + 1,
    "reflected": lambda it: 2**it,
    "in place": lambda it: operator.iadd(it, 1),
    "floor division": lambda it: it // 2,
    "xor": lambda it: it ^ 1,
    "negate": lambda it: -it,
    "int": int,
    "round": round,
    "floor": math.floor,
    "path": os.fspath,
    "array": np.asarray,
    "set attribute": lambda it: setattr(it, "x", 1),
    "delete attribute": lambda it: delattr(it, "x"),
    "set item": lambda it: operator.setitem(it, 0, 1),
    "with": with_statement,
    "dir": dir,
    "subclass": lambda it: types.new_class("Sub", (it,)),
    "isinstance of it": lambda it: isinstance(3, it),
    "attribute of a class": lambda it: of_class(it).part,
    "attribute of an object": lambda it: of_class(it)().part,
    "hasattr": lambda it: hasattr(it, "shape"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_stand_in_is_an_error(use: Callable[[Any], object]) -> None:
    stand_in = sent(LeftOut("'X' of module m was left out"))
    with pytest.raises(SerializationError, match="'X' of module m was left out"):
        use(stand_in)


async def test_awaiting_or_entering_a_stand_in_is_an_error() -> None:
    stand_in: Any = LeftOut("left out")
    with pytest.raises(SerializationError, match="left out"):
        await stand_in
    with pytest.raises(SerializationError, match="left out"):
        async with stand_in:
            pass


def test_a_stand_in_may_be_shown_copied_and_sent_on() -> None:
    stand_in = sent(LeftOut("'X' of module m was left out"))
    assert repr(sent([copy.copy(stand_in), copy.deepcopy([stand_in])])[1][0]) == "<'X' of module m was left out>"

    def around() -> Any:
        return stand_in

    assert repr(sent(around)()) == "<'X' of module m was left out>"


def test_an_attribute_of_the_object_takes_the_place_of_a_stand_in_of_its_class() -> None:
    made = of_class(LeftOut("left out"))()
    made.part = 3
    assert made.part == 3


def test_large_arrays_beside_a_lock_are_kept_out_of_the_pickle_once(helpers: Any, tmp_path: Path) -> None:
    large = bytearray(2 << 20)
    packed = pack([large, lambda: helpers.times(2)], what="it")
    assert len(packed.buffers) <= 1
    assert unpack(packed.data, packed.buffers)[1]() == 6


class Counted:
    pickled = 0

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.pickled += 1
        return Counted, (self.inner,)


def test_nothing_is_pickled_once_for_every_object_around_it(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: object = None
    for number in range(50):
        inner = Counted(inner)
        monkeypatch.setattr(helpers, f"counted_{number}", inner, raising=False)

    pack(lambda: helpers.times(2), what="it")

    assert Counted.pickled <= 150
