"""Results bring instances of the classes here, and change none of them. A process of its own stands for the worker."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import pytest

from skyward.errors import SerializationError
from skyward.shipping.pickling import pack, unpack
from support.worker_process import WorkerProcess


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """This module goes by value, as a script does."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Model:
    hits = 0

    def hit(self) -> int:
        return len(LOG)

    @staticmethod
    def helper() -> int:
        return len(LOG)


LOG: list[int] = []


@dataclasses.dataclass
class Point:
    x: int

    def log(self) -> list[int]:
        return LOG


class Pair(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = 1

    def log(self) -> list[int]:
        return LOG


class OddError(Exception):
    hits = 0

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")


class Registered:
    known: list[str] = []  # noqa: RUF012 - as users write it

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls.__name__)


class Plugin(Registered):
    pass


class Outer:
    class Inner:
        hits = 0


def helper() -> list[int]:
    return LOG


def local_class() -> type:
    class Local:
        hits = 0

        def log(self) -> list[int]:
            return LOG

    return Local


def spoil(cls: Any) -> None:
    cls.hits = 99
    LOG.append(1)


def spoilt_instance(cls: Any, *args: Any) -> Any:
    spoil(cls)
    return cls(*args)


def spoilt_in_containers(cls: Any) -> Any:
    spoil(cls)
    return {"models": [cls(), (cls(), cls)], "pairs": {Pair(1, 2)}}


def identity(value: Any) -> Any:
    return value


def state(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name != "__abc_cache__"}


LOCAL = local_class()


@pytest.mark.parametrize(
    ("cls", "args"),
    [
        (Model, ()),
        (Point, (1,)),
        (Pair, (1, 2)),
        (Colour, (1,)),
        (OddError, (1,)),
        (Plugin, ()),
        (Outer.Inner, ()),
        (LOCAL, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_call_does_to_a_class_stays_on_its_worker(
    worker: WorkerProcess, cls: type, args: tuple[Any, ...]
) -> None:
    before = state(cls)
    for _ in range(2):
        result = worker.call(spoilt_instance, cls, *args)
        assert type(result) is cls
    assert all(before[name] is value for name, value in state(cls).items())
    assert before.keys() == state(cls).keys()
    assert LOG == []


def test_instances_in_containers_and_classes_themselves_are_those_here(worker: WorkerProcess) -> None:
    result = worker.call(spoilt_in_containers, Model)
    one, (other, cls) = result["models"]
    assert type(one) is type(other) is cls is Model
    assert Model.hits == 0
    assert Model.hit.__globals__ is globals()
    assert {type(pair) for pair in result["pairs"]} == {Pair}


def test_subclasses_are_not_announced_again_by_results(worker: WorkerProcess) -> None:
    assert isinstance(worker.call(identity, Plugin()), Plugin)
    assert Registered.known == ["Plugin"]


def test_functions_and_bound_methods_are_those_here(worker: WorkerProcess) -> None:
    assert worker.call(identity, helper) is helper
    assert worker.call(identity, Model.helper) is Model.helper
    method = worker.call(identity, Model().hit)
    assert method.__func__ is Model.hit
    assert type(method.__self__) is Model


def test_a_module_that_went_by_value_is_the_one_here(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sky_returned.py").write_text("FACTOR = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("sky_returned")
    assert worker.call(identity, module) is module


def test_modules_that_hold_each_other_travel(worker: WorkerProcess) -> None:
    one, other = ModuleType("sky_one"), ModuleType("sky_other")
    one.other, other.one, other.value = other, one, 5  # type: ignore[attr-defined]
    result = worker.call(identity, one)
    assert result.other.one is result
    assert result.other.value == 5


def subclass_of(cls: Any, value: int) -> Any:
    return type("Sub", (cls,), {"value": value})()


def kept(name: str, make: Callable[[], Any]) -> Any:
    kept = sys.modules.setdefault(f"_kept_{name}", ModuleType(name))
    if not hasattr(kept, "value"):
        kept.value = make()  # type: ignore[attr-defined]
    return kept.value


def test_a_class_made_in_a_call_is_based_on_the_class_here(worker: WorkerProcess) -> None:
    result = worker.call(subclass_of, Model, 7)
    assert type(result).__bases__ == (Model,)
    assert result.value == 7
    assert Model.hits == 0


def test_a_class_made_in_a_call_is_the_same_in_every_result(worker: WorkerProcess) -> None:
    def make() -> Any:
        return subclass_of(Model, 8)

    first = worker.call(kept, "made", make)
    type(first).value = 9
    second = worker.call(kept, "made", make)
    assert type(first) is type(second)
    assert second.value == 9, "results change no class here"
    assert worker.call(identity, first).value == 9


def test_a_result_of_a_class_that_was_defined_anew_is_of_the_class_that_was_sent(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = worker.send(spoilt_instance, Model)
    monkeypatch.setattr(sys.modules[__name__], "Model", type("Model", (), {"__module__": __name__}))
    old = unpack(data)
    monkeypatch.undo()
    assert type(old) is Model


def test_a_result_of_a_class_that_is_gone_is_of_the_one_with_its_name(worker: WorkerProcess) -> None:
    names: dict[str, Any] = {"__name__": "sky_gone"}
    module = sys.modules["sky_gone"] = ModuleType("sky_gone")
    module.__dict__.update(names)
    module.__file__ = "/sky_gone.py"
    try:
        exec("class Thing: pass", module.__dict__)
        data = worker.send(spoilt_instance, module.Thing)
        exec("class Thing: new = True", module.__dict__)
        gc.collect()
        assert unpack(data).new
        del module.Thing
        gc.collect()
        with pytest.raises(Exception, match=r"sky_gone\.Thing, which went with the call but is not here any more"):
            unpack(data)
    finally:
        del sys.modules["sky_gone"]


def test_a_local_class_that_is_gone_here_comes_back_whole(worker: WorkerProcess) -> None:
    data = worker.send(spoilt_instance, local_class())
    gc.collect()
    assert unpack(data).hits == 99


def test_a_large_state_of_the_worker_does_not_come_back_with_an_instance(worker: WorkerProcess) -> None:
    def grow(model: Any) -> Any:
        type(model).hit.__globals__["LOG"].extend(range(100_000))
        return model

    assert len(worker.send(grow, Model())) < 1000


class Slotted:
    __slots__ = ("__hidden", "__weakref__", "open")

    def __init__(self) -> None:
        self.open, self.__hidden = 1, 2

    def total(self) -> int:
        return self.open + self.__hidden


class MoreSlots(Slotted):
    __slots__ = ("more",)

    def __init__(self) -> None:
        super().__init__()
        self.more = 3


@dataclasses.dataclass(slots=True)
class SlottedPoint:
    x: int
    y: int = 2


class WithDict(SlottedPoint):
    pass


def has_dict(cls: type, *args: object) -> tuple[object, bool]:
    instance = cls(*args)
    return instance, hasattr(instance, "__dict__")


@pytest.mark.parametrize(
    ("cls", "args"), [(Slotted, ()), (MoreSlots, ()), (SlottedPoint, (1,)), (WithDict, (1,))], ids=str
)
def test_a_class_with_slots_has_them_on_the_worker_too(worker: WorkerProcess, cls: type, args: tuple[Any, ...]) -> None:
    instance, with_dict = worker.call(has_dict, cls, *args)

    assert type(instance) is cls
    assert with_dict == hasattr(instance, "__dict__")
    if isinstance(instance, Slotted):
        assert instance.total() == 3
    else:
        assert instance == cls(*args)


def slotted_of_a_call() -> list[Any]:
    class Local:
        __slots__ = ("x",)

        def __init__(self, x: int) -> None:
            self.x = x

    return [Local(1), Local(2)]


def test_a_class_with_slots_made_in_a_call_keeps_them(worker: WorkerProcess) -> None:
    first, second = worker.call(slotted_of_a_call)

    assert (first.x, second.x) == (1, 2)
    assert not hasattr(first, "__dict__")
    assert worker.call(identity, first).x == 1


@pytest.mark.parametrize("value", [type(threading.Lock()), ctypes.c_int * 3, (ctypes.c_double * 2) * 2], ids=repr)
def test_a_class_without_a_class_statement_arrives_as_itself(value: type) -> None:
    assert unpack(pack(value, what="it").data) is value


@pytest.mark.parametrize("value", [type(iter([])), type("Local", (ctypes.Structure,), {})], ids=repr)
def test_a_class_that_only_its_process_can_make_is_refused(value: type) -> None:
    with pytest.raises(SerializationError, match="compiled"):
        pack([value], what="it")
