"""What runs on the workers. Nothing heavy is imported here: the module is loaded by every worker of every peer."""

from __future__ import annotations

import time
from typing import Any


def nothing(_: object = None) -> None:
    """Do nothing: the shortest call."""


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
