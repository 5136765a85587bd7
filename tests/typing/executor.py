"""What type checkers must infer of executor, futures and several pools; checked by pyright, never run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import assert_type

import skyward as sky
from skyward.integrations import JoblibPool, joblib_backend


@sky.compute
def length(text: str) -> int:
    return len(text)


def plain(text: str) -> bytes:
    return text.encode()


async def submitted(executor: sky.PoolExecutor) -> None:
    anywhere: Executor = executor
    assert_type(executor.submit(length, "a"), sky.CallFuture[int])
    assert_type(executor.submit(plain, "a").result(), bytes)
    assert_type(await executor.submit(length, "a"), int)
    assert_type(executor.map(length, ["a"]), Iterator[int])
    assert_type(executor.map(plain, ["a"], chunksize=2), Iterator[bytes])
    assert_type(anywhere.submit(plain, "a").result(), bytes)
    assert_type(executor.submit(length("a")), sky.CallFuture[int])
    executor.submit(length, 1)  # pyright: ignore[reportCallIssue, reportArgumentType]


def several(first: AbstractContextManager[int], second: AbstractContextManager[int]) -> None:
    with sky.MultiPool(first, second) as opened:
        assert_type(opened, tuple[int, ...])


def pools(pool: sky.ComputePool) -> None:
    assert_type(length("a") >> pool, int)
    assert_type(length("a") @ pool, tuple[int, ...])
    assert_type((length("a") & length("b")) >> pool, tuple[int, int])
    with sky.MultiPool(pool, pool) as (left, right):
        assert_type(left, sky.ComputePool)
        assert_type(right, sky.ComputePool)


INTEGRATIONS = (JoblibPool, joblib_backend)
