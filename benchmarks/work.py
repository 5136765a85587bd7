"""What runs on the workers. Nothing heavy is imported here: the module is loaded by every worker of every peer."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any


def nothing(_: object = None) -> None:
    """Do nothing: the shortest call."""


def count(most: int) -> Iterator[int]:
    """Yield numbers: the shortest generator."""
    yield from range(most)


def nap(seconds: float) -> None:
    """Sleep: a call that uses no processor."""
    time.sleep(seconds)  # noqa: TID251  # the call itself


def touch(array: Any, column: int = 0) -> float:
    """Read something from every page of a large array."""
    return float(array[:, column].sum())


def large(size: int) -> tuple[Any, float]:
    """Bytes that no compression makes small, and how long it took to make them."""
    started = time.perf_counter()
    made = random_bytes(size)
    return made, time.perf_counter() - started


def random_bytes(size: int) -> Any:
    """Return an array of ``size`` bytes, different every time, made without holding the interpreter's lock."""
    import numpy as np

    return np.random.default_rng().random(size // 8).view(np.uint8)


def touch_bytes(array: Any) -> int:
    """Read a byte of every page."""
    return int(array[::4096].sum(dtype=int))


class Model:
    """A large model, read from a file of its weights; it predicts from one row of them."""

    def __init__(self, path: str) -> None:
        import numpy as np

        self._weights = np.load(path)

    def predict(self, row: int) -> float:
        """Return the sum of a row."""
        return float(self._weights[row].sum())


_kept_model = functools.cache(Model)


def predict(path: str, row: int) -> float:
    """Predict with the model that this worker keeps."""
    return _kept_model(path).predict(row)
