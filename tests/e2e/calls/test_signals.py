"""Calls run in the main thread of their worker's process, as code does in a program: signals, alarms, event loops."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import skyward as sky

DEADLINE_S = 60


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


def is_in_the_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    raise TimeoutError(f"signal {number}")


def is_stopped_by_an_alarm() -> bool:
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        threading.Event().wait(DEADLINE_S)
    except TimeoutError:
        return True
    return False


def gets_a_signal_on_its_event_loop() -> bool:
    async def wait() -> bool:
        got = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, got.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(got.wait(), DEADLINE_S)
        return True

    return asyncio.run(wait())


def handles_an_interrupt() -> bool:
    got: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: got.append(number))
    os.kill(os.getpid(), signal.SIGINT)
    return got == [signal.SIGINT]


def ignores_an_interrupt() -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return True


@pytest.mark.parametrize(
    "call",
    [
        is_in_the_main_thread,
        is_stopped_by_an_alarm,
        gets_a_signal_on_its_event_loop,
        handles_an_interrupt,
        ignores_an_interrupt,
    ],
)
def test_a_call_owns_the_main_thread(pool: sky.ComputePool, call: Callable[[], bool]) -> None:
    assert pool.submit(call).result(DEADLINE_S)


def leave_handlers_and_timers() -> None:
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    signal.setitimer(signal.ITIMER_REAL, 30)
    signal.setitimer(signal.ITIMER_PROF, 30)


def handlers_and_timers() -> list[object]:
    return [
        *(signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)),
        *(signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF)),
    ]


def leave_and_fail() -> None:
    leave_handlers_and_timers()
    raise LookupError


@pytest.mark.parametrize("leaving", [leave_handlers_and_timers, leave_and_fail])
def test_handlers_and_timers_end_with_the_call_that_set_them(
    pool: sky.ComputePool, leaving: Callable[[], None]
) -> None:
    pool.submit(leaving).exception(DEADLINE_S)
    assert pool.submit(handlers_and_timers).result(DEADLINE_S) == [
        signal.SIG_DFL,
        signal.SIG_IGN,
        signal.SIG_DFL,
        signal.SIG_DFL,
        (0.0, 0.0),
        (0.0, 0.0),
    ]
