"""Answers that are kept for a time, and asked for once by tasks of several event loops."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyward.errors import QuotaError
from skyward.providers._common.cached_answers import SharedAnswers


async def test_an_answer_is_kept_for_its_time_under_its_name() -> None:
    now = 0.0
    answers = SharedAnswers[str](60.0, lambda: now)
    calls: list[str] = []

    async def call() -> str:
        calls.append(f"answer {len(calls)}")
        return calls[-1]

    assert (await answers.of("a", call)).value == (await answers.of("a", call)).value == "answer 0"
    assert (await answers.of("b", call)).value == "answer 1"
    now = 61.0
    found = await answers.of("a", call)
    assert (found.value, found.at) == ("answer 2", 61.0)


@pytest.mark.parametrize("refused", [False, True])
def test_tasks_of_several_event_loops_wait_for_one_call(refused: bool) -> None:
    answers = SharedAnswers[str](60.0)
    called, others = threading.Event(), threading.Barrier(4)
    calls: list[bool] = []

    async def call() -> str:
        calls.append(True)
        called.set()
        await asyncio.to_thread(others.wait, 30)
        if refused:
            raise QuotaError("no more of them today")
        return "answer"

    async def ask(*, first: bool) -> str:
        if not first:
            await asyncio.to_thread(called.wait, 30)
        task = asyncio.create_task(answers.of("a", call))
        await asyncio.sleep(0)
        if not first:  # it waits by now
            await asyncio.to_thread(others.wait, 30)
        try:
            return (await task).value
        except QuotaError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(asyncio.run, ask(first=number == 0)) for number in range(4)]
        found = [each.result(60) for each in running]

    assert found == ["no more of them today" if refused else "answer"] * 4
    assert calls == [True]


async def test_when_the_task_that_calls_is_cancelled_the_next_one_calls_and_a_cancelled_waiter_harms_nobody() -> None:
    answers = SharedAnswers[int](60.0)
    calls: list[int] = []
    may_answer = asyncio.Event()

    async def call() -> int:
        calls.append(len(calls))
        number = calls[-1]
        await may_answer.wait()
        return number

    tasks = [asyncio.create_task(answers.of("a", call)) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    tasks[0].cancel()
    may_answer.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)

    assert [isinstance(each, asyncio.CancelledError) for each in found] == [True, True, False, False]
    assert found[2] == found[3]
    assert calls == [0, 1]
