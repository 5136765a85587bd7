"""Limits of single calls: time and memory, enforced on the node, with the other calls unharmed."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from skyward import CallTimeoutError, ComputePool, Local, compute, gather
from skyward.errors import ConfigurationError, WorkerLostError


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    with ComputePool(provider=Local(), display="quiet", collect_metrics=False) as pool:
        yield pool


@compute
def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@compute
def hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # for years, without letting any other thread of the process run


@compute
def fill(mib: int) -> int:
    filled = bytearray(mib << 20)
    for _ in range(600):
        threading.Event().wait(0.1)
    return len(filled)


@compute(retries=0)
def quick(number: int) -> int:
    return number


@pytest.mark.parametrize("call", [wait(3600), hold_the_interpreter()], ids=["sleeping", "busy"])
def test_a_call_past_its_timeout_ends_with_its_worker_and_runs_once(pool: ComputePool, call: object) -> None:
    timed = call.options(timeout=0.3)  # type: ignore[attr-defined]
    others = [pool.submit(quick, number) for number in range(3)]
    message = r"#\d+ ran longer than its timeout of 0\.3 s on node 0, worker 0, .* raise timeout="
    with pytest.raises(CallTimeoutError, match=message) as caught:
        timed >> pool
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.timeout_s, caught.value.node, caught.value.worker) == (0.3, 0, 0)
    assert [future.result() for future in others] == [0, 1, 2]
    assert quick(7) >> pool == 7


class Endless:
    """Value whose pickling never ends."""

    def __reduce__(self) -> str:
        time.sleep(3600)
        return ""


class EndlessError(Exception):
    """Error whose pickling never ends."""

    def __reduce__(self) -> str:
        time.sleep(3600)
        return ""


class Lasting:
    """Value that never goes."""

    def __del__(self) -> None:
        time.sleep(3600)


@compute
def return_endless() -> Endless:
    return Endless()


@compute
def raise_endless() -> None:
    raise EndlessError


@compute
def close_everything() -> None:
    os.closerange(3, 4096)
    time.sleep(3600)


@compute
def leave_one_that_never_goes() -> None:
    lasting = Lasting()
    raise LookupError(type(lasting).__name__)  # its traceback refers to it


@pytest.mark.parametrize("call", [return_endless(), raise_endless(), close_everything()])
def test_a_timeout_holds_until_the_answer_is_sent(pool: ComputePool, call: object) -> None:
    with pytest.raises(CallTimeoutError):
        call.options(timeout=0.3) >> pool  # type: ignore[attr-defined]
    assert quick(7) >> pool == 7


def test_a_timeout_holds_while_a_calls_values_are_dropped(pool: ComputePool) -> None:
    with pytest.raises(LookupError):
        leave_one_that_never_goes().options(timeout=0.3) >> pool
    assert quick(7) >> pool == 7


def test_calls_behind_it_move_without_a_retry(pool: ComputePool) -> None:
    results = gather(wait(3600).options(timeout=0.3), *map(quick, range(5)), return_exceptions=True) >> pool
    assert isinstance(results[0], CallTimeoutError)
    assert results[1:] == (0, 1, 2, 3, 4)


def test_the_limit_counts_from_the_beginning_of_the_call_and_ends_with_it(pool: ComputePool) -> None:
    in_a_row = [pool.submit(wait(0.4).options(timeout=10.0)) for _ in range(2)]
    assert [future.result() for future in in_a_row] == [0.4, 0.4]
    assert wait(0.01).options(timeout=0.3) >> pool == 0.01
    assert wait(0.5) >> pool == 0.5


def test_a_call_past_its_memory_ends_with_its_worker(pool: ComputePool) -> None:
    message = r"fill#\d+ added more than its memory of 0\.0488 GiB .* raise memory="
    with pytest.raises(WorkerLostError, match=message):
        fill(300).options(memory="50MB") >> pool
    assert quick(1) >> pool == 1


def test_more_memory_than_a_worker_has_is_refused_at_once(pool: ComputePool) -> None:
    with pytest.raises(ConfigurationError, match=r"memory of quick must be at most the [\d.]+ GiB .* got 1024\.0 GiB"):
        quick(1).options(memory="1TB") >> pool


NEVER_JOINS = """
import asyncio

def dask_setup(worker):
    worker._finds_scheduler = lambda: asyncio.sleep(0)
"""


def test_limits_and_cancellations_hold_although_a_worker_has_not_joined_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "never_joins.py").write_text(NEVER_JOINS)
    env = {"DASK_DISTRIBUTED__WORKER__PRELOAD": str(tmp_path / "never_joins.py")}
    with ComputePool(provider=Local(), display="quiet", collect_metrics=False, env=env) as pool:
        with pytest.raises(CallTimeoutError):
            hold_the_interpreter().options(timeout=0.3) >> pool
        endless = pool.submit(hold_the_interpreter)
        while not endless.running():
            time.sleep(0.01)
        pool.cancel_calls([endless])
        with pytest.raises(CancelledError):
            endless.result()
        assert quick(7) >> pool == 7
