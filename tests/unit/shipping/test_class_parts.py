"""Classes arrive as they say, and what calls leave on them lasts until they change where they come from."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from skyward.shipping.pickling import pack, unpack

WORKER = """
import gc, pickle, sys
from skyward.shipping.pickling import pack_result, unpack_call
answers = []
for function, arguments in pickle.load(sys.stdin.buffer):
    try:
        answers.append(pack_result(unpack_call(function)(*unpack_call(arguments)), what="it").data)
    except Exception as error:
        answers.append(pickle.dumps(type(error)))
    gc.collect()
pickle.dump(answers, sys.stdout.buffer)
"""


class Worker:
    """One worker that runs calls in the order in which they were made, each pickled when it was made."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, bytes]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.calls.append((pack(function, what="it").data, pack(arguments, what="it").data))

    def results(self) -> list[Any]:
        program = [sys.executable, "-c", WORKER]
        done = subprocess.run(program, input=pickle.dumps(self.calls), capture_output=True, check=True)
        return [unpack(answer) for answer in pickle.loads(done.stdout)]


def test_what_calls_leave_on_a_class_lasts_though_nothing_else_holds_it() -> None:
    class Model:
        cache: dict[int, str] = {}  # noqa: RUF012
        loads = 0

        def load(self) -> tuple[int, int]:
            type(self).loads += 1
            self.cache[len(self.cache)] = "loaded"
            return len(self.cache), self.loads

    worker = Worker()
    for _ in range(3):
        worker.call(lambda model: model.load(), Model())
    worker.call(lambda cls: (cls.loads, sorted(cls.cache)), Model)
    worker.call(lambda model: setattr(type(model), "own", 1), Model())
    worker.call(lambda model: model.own, Model())
    assert worker.results() == [(1, 1), (2, 2), (3, 3), (3, [0, 1, 2]), None, 1]
    assert Model.cache == {}


def test_what_changes_where_a_class_comes_from_replaces_what_calls_left() -> None:
    class Model:
        names: list[str] = []  # noqa: RUF012
        limit = 1
        extra = 0

        def value(self) -> int:
            return scale * 10

    scale = 1

    def grown(model: Any) -> Any:
        type(model).limit += 1
        model.names.append("worker's")
        return model.limit, list(model.names), model.value(), model.extra

    worker = Worker()
    worker.call(grown, Model())
    worker.call(grown, Model())
    Model.limit = 10
    worker.call(grown, Model())
    Model.names.append("client's")
    worker.call(grown, Model())
    scale = 2
    worker.call(grown, Model())
    Model.value = lambda self: -1  # type: ignore[method-assign]
    worker.call(grown, Model())
    del Model.extra
    worker.call(grown, Model())
    assert worker.results() == [
        (2, ["worker's"], 10, 0),
        (3, ["worker's"] * 2, 10, 0),
        (11, ["worker's"] * 3, 10, 0),
        (12, ["client's", "worker's"], 10, 0),
        (13, ["client's", "worker's", "worker's"], 20, 0),
        (14, ["client's", "worker's", "worker's", "worker's"], -1, 0),
        AttributeError,
    ]


def test_a_method_that_a_call_replaces_stays_replaced() -> None:
    class Model:
        def value(self) -> str:
            return "own"

        @staticmethod
        def still() -> str:
            return "own"

    def patch(model: Any) -> None:
        type(model).value = lambda self: "patched"
        type(model).still = staticmethod(lambda: "patched")

    worker = Worker()
    for act in (lambda model: model.value(), patch, lambda model: (model.value(), model.still())):
        worker.call(act, Model())
    assert worker.results() == ["own", None, ("patched", "patched")]


def diamond() -> type[Any]:
    class Base:
        setting = 1

        def run(self) -> str:
            return "base"

    class Left(Base):
        run = Base.run
        setting = Base.setting

    class Right(Base):
        setting = 2

        def run(self) -> str:
            return "right"

    class Both(Left, Right): ...

    return Both


def resolved(cls: Any) -> Any:
    return cls().run(), cls.setting, [sorted(vars(each).keys() & {"run", "setting"}) for each in cls.__mro__[:3]]


def test_what_a_class_and_its_base_both_say_arrives() -> None:
    worker = Worker()
    worker.call(resolved, diamond())
    worker.call(resolved, diamond())
    assert worker.results() == [("base", 1, [[], ["run", "setting"], ["run", "setting"]])] * 2


def ordered() -> type[Any]:
    class Base:
        __hash__ = None  # type: ignore[assignment]
        zeta = None

    class Fields(Base):
        zeta = None
        beta = 2
        alpha = 1
        __hash__ = None  # type: ignore[assignment]

        def method(self) -> int:
            return 3

    return Fields


def test_attributes_arrive_in_their_order() -> None:
    names = ["zeta", "beta", "alpha", "method"]
    worker = Worker()
    worker.call(lambda cls: [name for name in vars(cls) if not name.startswith("__")], ordered())
    worker.call(lambda cls: "__hash__" in vars(cls), ordered())
    assert worker.results() == [names, True]
