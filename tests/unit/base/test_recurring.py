"""Loops that others depend on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest

from skyward.base.waiting import keep
from support.clock import FakeClock

FAILURES = [
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    RuntimeError("one bad item"),
]


class Loop:
    """Fails as told, then comes to its end."""

    def __init__(self, *failures: BaseException) -> None:
        self.runs = 0
        self._failures: Iterator[BaseException] = iter(failures)

    async def live(self) -> None:
        self.runs += 1
        for failure in self._failures:
            raise failure


async def test_a_loop_goes_on_after_any_failure_and_reports_it() -> None:
    loop, reports = Loop(*FAILURES), list[str]()
    await keep(loop.live, what="listening", report=reports.append, clock=FakeClock())
    assert loop.runs == len(FAILURES) + 1
    assert [said.partition(": ")[0] for said in reports] == ["listening failed and was started again"] * len(FAILURES)
    assert "Too many open files" in reports[0]
    assert "SystemExit: 3" in reports[2]


async def test_a_failure_that_lasts_is_reported_once() -> None:
    loop, reports = Loop(*[OSError("full") for _ in range(5)]), list[str]()
    await keep(loop.live, what="listening", report=reports.append, clock=FakeClock())
    assert loop.runs == 6
    assert len(reports) == 1


async def test_pauses_grow_to_a_second() -> None:
    clock = FakeClock()
    await keep(Loop(*[OSError("full") for _ in range(100)]).live, what="listening", clock=clock)
    assert 90 < clock.monotonic() < 100


async def test_being_cancelled_ends_it() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    kept = asyncio.ensure_future(keep(live, what="listening"))
    await began.wait()
    kept.cancel()
    with pytest.raises(asyncio.CancelledError):
        await kept
    assert ended.is_set()
