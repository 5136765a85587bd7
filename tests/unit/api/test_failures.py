"""Notes on the exceptions of batches: bounded, in one line, and harmless, whatever the arguments are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from skyward.api.executor import PoolExecutor
from skyward.api.misuse import kept, note_call, outline
from skyward.testing.in_process import InProcessSubmitter


class Broken:
    def __repr__(self) -> str:
        raise SystemExit("no")


class Noteless(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


@dataclasses.dataclass
class Config:
    name: str = "x" * 1000


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((3, "a"), "f(3, 'a')"),
        ((list(range(100)),), "f([0, 1, 2, 3, ...])"),
        ((np.zeros((1000, 1000)),), "f(<ndarray (1000, 1000)>)"),
        ((bytes(10_000_000),), "f(<bytes, 10,000,000 bytes>)"),
        ((10**10_000,), "f(<int>)"),
        ((Broken(), [Broken()]), "f(<Broken>, [<Broken>])"),
        ((int, "\x1b[2Jtitle\n"), r"f(int, '\x1b[2Jtitle\n')"),
    ],
)
def test_an_outline_is_short_whatever_the_arguments_are(args: tuple[Any, ...], text: str) -> None:
    assert outline("f", args, {}) == text


def test_an_outline_is_bounded_and_names_keywords() -> None:
    assert outline("f", (), {"lr": 0.1}) == "f(lr=0.1)"
    assert len(outline("f", [Config()] * 100, {})) <= 200


def test_kept_arguments_hold_no_large_memory() -> None:
    assert outline("f", kept((3, "a", None, np.zeros(3), b"x" * 1000, "y" * 1000)), {}) == (
        "f(3, 'a', None, <ndarray>, <bytes>, <str>)"
    )


def test_the_class_and_the_text_of_an_exception_stay() -> None:
    error = ValueError("loss is NaN")
    note_call(error, "train#2", 2, 5, "train(2)")
    assert str(error) == "loss is NaN"
    assert error.__notes__ == ["in train#2, index 2 of 5 calls: train(2)"]
    note_call(Noteless(), "train#2", 2, 5)


@pytest.mark.parametrize(
    ("chunksize", "note"),
    [
        (1, "in inverse, index 3 of 5 calls: inverse(0)"),
        (2, "in inverse, one of the items with index 2 to 3"),
        (5, "in inverse, one of the items with index 0 to 4"),
    ],
)
def test_the_failure_of_a_mapped_call_names_it(chunksize: int, note: str) -> None:
    with InProcessSubmitter() as submitter:
        results = PoolExecutor(submitter).map(inverse, [4, 3, 2, 0, 1], chunksize=chunksize)
        with pytest.raises(ZeroDivisionError) as caught:
            list(results)
    assert note in caught.value.__notes__


def inverse(x: float) -> float:
    return 1 / x
