"""Classes arrive as they say, and what calls leave on them lasts until they change where they come from."""

from __future__ import annotations

from typing import Any

import pytest

from support.worker_process import WorkerProcess


def test_what_calls_leave_on_a_class_lasts_though_nothing_else_holds_it(worker: WorkerProcess) -> None:
    class Model:
        cache: dict[int, str] = {}  # noqa: RUF012
        loads = 0

        def load(self) -> tuple[int, int]:
            type(self).loads += 1
            self.cache[len(self.cache)] = "loaded"
            return len(self.cache), self.loads

    assert [worker.call(lambda model: model.load(), Model()) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]
    assert worker.call(lambda cls: (cls.loads, sorted(cls.cache)), Model) == (3, [0, 1, 2])
    worker.call(lambda model: setattr(type(model), "own", 1), Model())
    assert worker.call(lambda model: model.own, Model()) == 1
    assert Model.cache == {}


def test_what_changes_where_a_class_comes_from_replaces_what_calls_left(worker: WorkerProcess) -> None:
    class Model:
        names: list[str] = []  # noqa: RUF012
        nested: dict[str, Any] = {"a": {}}  # noqa: RUF012
        limit = 1
        extra = 0

        def value(self) -> int:
            return scale * 10

    scale = 1

    def grown(model: Any) -> Any:
        type(model).limit += 1
        model.names.append("worker's")
        return model.limit, list(model.names), model.value(), model.extra

    assert worker.call(grown, Model()) == (2, ["worker's"], 10, 0)
    assert worker.call(grown, Model()) == (3, ["worker's"] * 2, 10, 0)
    Model.limit = 10
    assert worker.call(grown, Model()) == (11, ["worker's"] * 3, 10, 0)
    Model.names.append("client's")
    assert worker.call(grown, Model()) == (12, ["client's", "worker's"], 10, 0)
    scale = 2
    assert worker.call(grown, Model()) == (13, ["client's", "worker's", "worker's"], 20, 0)
    Model.value = lambda self: -1  # type: ignore[method-assign]
    assert worker.call(grown, Model()) == (14, ["client's", "worker's", "worker's", "worker's"], -1, 0)
    Model.limit = 10.0  # type: ignore[assignment]
    Model.nested["a"]["b"] = 2
    assert repr(worker.call(lambda model: (model.limit, model.nested), Model())) == "(10.0, {'a': {'b': 2}})"
    del Model.extra
    with pytest.raises(AttributeError, match="extra"):
        worker.call(grown, Model())


def test_a_method_that_a_call_replaces_stays_replaced(worker: WorkerProcess) -> None:
    class Model:
        def value(self) -> str:
            return "own"

        @staticmethod
        def still() -> str:
            return "own"

    def patch(model: Any) -> None:
        type(model).value = lambda self: "patched"
        type(model).still = staticmethod(lambda: "patched")

    assert worker.call(lambda model: model.value(), Model()) == "own"
    worker.call(patch, Model())
    assert worker.call(lambda model: (model.value(), model.still()), Model()) == ("patched", "patched")


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


def test_what_a_class_and_its_base_both_say_arrives(worker: WorkerProcess) -> None:
    assert worker.call(resolved, diamond()) == ("base", 1, [[], ["run", "setting"], ["run", "setting"]])


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


def test_attributes_arrive_in_their_order(worker: WorkerProcess) -> None:
    names = worker.call(lambda cls: [*vars(cls)], ordered())
    assert [name for name in names if not name.startswith("__")] == ["zeta", "beta", "alpha", "method"]
    assert "__hash__" in names
