"""Example of a front-end in a package of its own: results of endless iterables, as they finish.

It imports public names of Skyward only: docs/extending/writing-a-front-end.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import TypeVar

from skyward.errors import ConfigurationError
from skyward.submission import Invocation, TaskSubmitter

__all__ = ["stream"]

T = TypeVar("T")
R = TypeVar("R")


def stream(
    fleet: TaskSubmitter,
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    chunk: int = 1,
    ahead: int = 2,
) -> Generator[tuple[T, R]]:
    """Yield each item with its result, as soon as it has one.

    Items are taken from the iterable while calls finish, so it may be endless. Closing the generator ends its calls.

    Args:
        fleet: the open pool, or anything else that submits calls.
        fn: plain function of one item; of a compute function, pass its ``.local``.
        items: items, in the order in which they are sent.
        chunk: number of items in a call.
        ahead: number of calls for each worker that are sent before results are there.

    Raises:
        ConfigurationError: ``chunk`` or ``ahead`` is below 1.
    """
    for name, value in (("chunk", chunk), ("ahead", ahead)):
        if value < 1:
            raise ConfigurationError(f"{name} must be a whole number ≥ 1, got {value!r}")
    return _stream(fleet, fn, iter(items), chunk, ahead)


def _stream(
    fleet: TaskSubmitter, fn: Callable[[T], R], rest: Iterator[T], chunk: int, ahead: int
) -> Generator[tuple[T, R]]:
    pending: dict[Future[list[R]], list[T]] = {}
    try:
        while True:
            # The capacity is read again each time: a pool may grow while it works.
            free = max(0, ahead * fleet.capacity - len(pending))
            parts = [part for _ in range(free) if (part := list(islice(rest, chunk)))]
            calls = [Invocation(fn=_run, args=(fn, part), label=_name(fn), tasks=len(part)) for part in parts]
            pending |= zip(fleet.submit_calls(calls), parts, strict=True)
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                yield from zip(pending[future], future.result(), strict=True)
                del pending[future]
    finally:
        fleet.cancel_calls(pending)


def _run(fn: Callable[[T], R], part: list[T]) -> list[R]:
    """Run one call. It is imported on the node, which therefore needs this package."""
    return [fn(item) for item in part]


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", "item")
