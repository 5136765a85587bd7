"""What type checkers must infer; checked by pyright, never run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, assert_type

from skyward.api.calls import ComputeFunction, PendingBatch, PendingCompute, Runner, compute, gather
from skyward.api.streams import Stream


@compute
def number(text: str, *, base: int = 10) -> int:
    return int(text, base)


@compute
def half(value: float) -> float:
    return value / 2


@compute(retries=1, retry=(OSError,))
def name() -> str:
    return "name"


@compute
def yielded(count: int) -> Generator[int]:
    yield from range(count)


@compute(retries=1)
def iterated(count: int) -> Iterator[str]:
    yield from map(str, range(count))


@compute
def anything() -> Any: ...


class Model:
    @compute
    def predict(self, row: int) -> bytes:
        return bytes(row)


def decorated() -> None:
    assert_type(number("1", base=2), PendingCompute[int])
    assert_type(number.local("1"), int)
    assert_type(name, ComputeFunction[[], str])
    assert_type(name(), PendingCompute[str])
    number(1)  # pyright: ignore[reportArgumentType]
    number("1", unknown=1)  # pyright: ignore[reportCallIssue]


def methods(model: Model) -> None:
    assert_type(model.predict(3), PendingCompute[bytes])
    assert_type(Model.predict.local(model, 3), bytes)
    assert_type(model.predict.local(3), bytes)


async def streams(pool: Runner) -> None:
    assert_type(yielded(3) >> pool, Stream[int])
    assert_type(iterated(3) @ pool, tuple[Stream[str], ...])
    assert_type([item async for item in iterated(3) >> pool], list[str])
    assert_type([*(yielded(3) >> pool)], list[int])
    assert_type(yielded.local(3), Generator[int])
    assert_type(anything() >> pool, Any)


async def results_as_they_come(pool: Runner) -> None:
    assert_type(gather(number("1"), number("2"), stream=True) >> pool, Stream[int])
    assert_type(gather(map(half, [1.0]), stream=True, ordered=False) >> pool, Stream[float])
    assert_type(gather([half(1.0)], stream=True, return_exceptions=True) >> pool, Stream[float | BaseException])
    assert_type([result async for result in gather([half(1.0)], stream=True) >> pool], list[float])


def operators(pool: Runner) -> None:
    assert_type(number("1") >> pool, int)
    assert_type(name() @ pool, tuple[str, ...])
    assert_type((number("1") & half(2.0) & name()) >> pool, tuple[int, float, str])
    assert_type(
        (name() & name() & name() & name() & half(1) & name() & name() & number("1")) >> pool,
        tuple[str, str, str, str, float, str, str, int],
    )
    assert_type(number("1") & (half(2.0) & name()), PendingBatch[int, float, str])
    a, b, c = (number("1") & half(2.0) & name()) >> pool
    assert_type(a, int)
    assert_type(b, float)
    assert_type(c, str)
    number("1") & 1  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


def gathered(pool: Runner, texts: Sequence[str]) -> None:
    assert_type(gather() >> pool, tuple[()])
    assert_type(gather(number("1"), half(2.0)) >> pool, tuple[int, float])
    assert_type(gather(name(), number("1"), half(2.0), name(), number("1")) >> pool, tuple[str, int, float, str, int])
    assert_type(gather(*[number(text) for text in texts]) >> pool, tuple[int, ...])
    assert_type(gather(*map(number, texts), return_exceptions=True) >> pool, tuple[int | BaseException, ...])
    gather(texts)  # pyright: ignore[reportArgumentType, reportCallIssue]
