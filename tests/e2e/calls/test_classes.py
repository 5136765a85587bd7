"""What calls do to classes stays on their workers, on a real pool, whichever way an object comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from joblib import Parallel, delayed

import skyward as sky
from skyward.integrations import joblib_backend

heard: SimpleQueue[Any] = SimpleQueue()


class Model:
    hits = 0

    def predict(self) -> int:
        return FACTOR


class OddError(Exception):
    hits = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    model: Any


FACTOR = 3


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        start_callbacks(pool)
        yield pool


def spoilt(cls: Any) -> Any:
    global FACTOR  # noqa: PLW0603 - as a call may do
    FACTOR = 4
    cls.hits = 99
    cls.predict = None
    return cls()


def returned(pool: sky.ComputePool) -> object:
    return sky.compute(spoilt)(Model) >> pool


def submitted(pool: sky.ComputePool) -> object:
    return pool.submit(spoilt, Model).result()


def mapped_by_joblib(pool: sky.ComputePool) -> object:
    with joblib_backend(pool):
        (model,) = Parallel()(delayed(spoilt)(cls) for cls in [Model])
    return model


def emitted(pool: sky.ComputePool) -> object:
    def emit() -> None:
        sky.emit(Fitted(spoilt(Model)))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    with sky.use_callback(heard.put):
        pool.submit(emit).result()
    while not isinstance(event := heard.get(timeout=60), Fitted):
        pass
    return event.model


def attached_to_an_exception(pool: sky.ComputePool) -> object:
    def fail() -> None:
        spoilt(OddError)
        raise OddError(spoilt(Model))

    with pytest.raises(OddError) as caught:
        pool.submit(fail).result()
    assert OddError.hits == 0
    return caught.value.args[0]


@pytest.mark.parametrize("way", [returned, submitted, mapped_by_joblib, emitted, attached_to_an_exception])
def test_an_object_is_of_the_class_here_and_the_class_is_as_it_was(
    way: Callable[[sky.ComputePool], Any], pool: sky.ComputePool
) -> None:
    predict = Model.predict
    model = way(pool)
    assert type(model) is Model
    assert (Model.hits, Model.predict, FACTOR) == (0, predict, 3)
    assert model.predict() == 3
    assert Model.predict.__globals__ is globals()
