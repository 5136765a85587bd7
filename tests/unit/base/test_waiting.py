"""`wait_until`: values, failures, pauses, and the error at the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from skyward.base.waiting import SYSTEM_CLOCK, BusyWaits, NotYet, wait_until
from skyward.errors import UnreachableError
from support.clock import FakeClock


@dataclass
class Probe:
    answer: Callable[[int], object]
    asked: int = 0

    async def __call__(self) -> object:
        self.asked += 1
        return self.answer(self.asked)


def wait(probe: Probe, clock: FakeClock, deadline_s: float = 60, interval_s: float = 1) -> object:
    return asyncio.run(
        wait_until(probe, deadline_s=deadline_s, interval_s=interval_s, what="node 2 to answer", clock=clock)
    )


def test_value_is_returned_at_once() -> None:
    clock = FakeClock()
    assert wait(Probe(lambda _: "up"), clock) == "up"
    assert clock.slept_s == []


@pytest.mark.parametrize("value", [0, "", False, ()])
def test_falsy_value_is_a_value(value: object) -> None:
    probe = Probe(lambda _: value)
    assert wait(probe, FakeClock()) == value
    assert probe.asked == 1


def test_probe_is_asked_again_while_it_returns_nothing() -> None:
    clock = FakeClock()
    assert wait(Probe(lambda n: "up" if n == 3 else None), clock) == "up"
    assert clock.slept_s == [1, 1.5]


def test_pauses_grow_to_ten_intervals_and_no_further() -> None:
    clock = FakeClock()
    wait(Probe(lambda n: "up" if n == 12 else None), clock, deadline_s=1000, interval_s=2)
    assert clock.slept_s == sorted(clock.slept_s)
    assert clock.slept_s[-2:] == [20, 20]


def test_deadline_names_what_and_the_last_observation() -> None:
    clock = FakeClock()
    with pytest.raises(UnreachableError, match=r"waited 60 s for node 2 to answer; last observed: state PENDING \d+$"):
        wait(Probe(lambda n: NotYet(f"state PENDING {n}")), clock)


def test_deadline_is_rounded_to_hundredths_of_a_second() -> None:
    with pytest.raises(UnreachableError, match=r"waited 5.99 s for node 2"):
        wait(Probe(lambda n: None), FakeClock(), deadline_s=5.99114)


def test_observation_survives_a_probe_that_sees_nothing() -> None:
    with pytest.raises(UnreachableError, match="last observed: booting"):
        wait(Probe(lambda n: NotYet("booting") if n == 1 else None), FakeClock())


def test_last_probe_is_made_at_the_deadline() -> None:
    clock = FakeClock()
    assert wait(Probe(lambda _: "up" if clock.monotonic() >= 10 else None), clock, deadline_s=10, interval_s=4) == "up"
    assert clock.monotonic() == 10


def test_nothing_is_slept_past_the_deadline() -> None:
    clock = FakeClock()
    with pytest.raises(UnreachableError):
        wait(Probe(lambda _: None), clock, deadline_s=10, interval_s=4)
    assert sum(clock.slept_s) == 10


def test_deadline_of_zero_still_asks_once() -> None:
    assert wait(Probe(lambda _: "up"), FakeClock(), deadline_s=0) == "up"


def test_what_the_probe_raises_ends_the_wait() -> None:
    def fail(_: int) -> object:
        raise PermissionError("wrong key")

    probe = Probe(fail)
    with pytest.raises(PermissionError, match="wrong key"):
        wait(probe, FakeClock())
    assert probe.asked == 1


def test_timeout_of_the_probe_itself_is_its_own_failure() -> None:
    def fail(_: int) -> object:
        raise TimeoutError("the API took too long")

    with pytest.raises(TimeoutError, match="the API took too long"):
        wait(Probe(fail), FakeClock())


def test_probe_that_hangs_is_cancelled_and_reported() -> None:
    cancelled: list[bool] = []

    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "never"

    with pytest.raises(UnreachableError, match="last observed: no answer within"):
        asyncio.run(wait_until(hang, deadline_s=0.01, interval_s=0.01, what="an API"))
    assert cancelled


def test_elapsed_time_is_that_of_a_clock_that_runs_while_the_machine_is_suspended() -> None:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME)
    before, told, after = time.clock_gettime(clock), SYSTEM_CLOCK.elapsed(), time.clock_gettime(clock)

    assert before <= told <= after


@pytest.mark.parametrize(
    ("replies_us", "due"),
    [
        ([], False),
        ([900], True),  # soon enough for a try
        ([2_000], False),
        ([900, 150, 150], True),
        ([900, 600], False),  # in vain: the next wait is not busy
        ([900, 600, 600], True),
        ([900, 600, 600, 600, 600, 600], False),  # again: the next three are not
        ([900, 600, 600, 600, 600, 600, 600], True),
        ([900, 600, 600, 200, 600, 600], True),  # one that paid: back to one
    ],
)
def test_a_busy_wait_in_vain_is_followed_by_ever_more_waits_that_are_not_busy(replies_us, due):
    waits = BusyWaits()
    for reply_us in replies_us:
        waits.replied(reply_us / 1e6)
    assert waits.due is due
