"""The loop thread: shared by reference count, called from other threads, ended without noise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import CancelledError
from contextvars import ContextVar

import pytest

from skyward.base.loop import LoopThread, acquire_loop
from skyward.errors import PoolStateError

colour: ContextVar[str] = ContextVar("colour", default="none")


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = acquire_loop()
    yield thread
    thread.release()


def loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "skyward-loop"]


async def name_of_thread() -> str:
    return threading.current_thread().name


def test_users_share_one_thread_that_ends_with_the_last() -> None:
    first, second = acquire_loop(), acquire_loop()
    assert first is second
    assert loop_threads() == ["skyward-loop"]
    first.release()
    assert second.call(name_of_thread()) == "skyward-loop"
    second.release()
    assert loop_threads() == []
    assert second.loop.is_closed()


def test_next_user_after_the_end_gets_a_new_loop() -> None:
    first = acquire_loop()
    first.release()
    second = acquire_loop()
    try:
        assert second is not first
        assert second.call(name_of_thread()) == "skyward-loop"
    finally:
        second.release()


def test_release_of_an_ended_loop_leaves_the_next_one_alone() -> None:
    ended = acquire_loop()
    ended.release()
    current = acquire_loop()
    ended.release()
    assert current.call(name_of_thread()) == "skyward-loop"
    current.release()


def test_call_raises_what_the_coroutine_raises(loop_thread: LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("no such node")

    with pytest.raises(LookupError, match="no such node"):
        loop_thread.call(fail())


def test_call_runs_in_the_context_of_the_caller(loop_thread: LoopThread) -> None:
    async def read() -> str:
        return colour.get()

    token = colour.set("blue")
    try:
        assert loop_thread.call(read()) == "blue"
    finally:
        colour.reset(token)


def test_call_past_its_timeout_cancels_the_coroutine(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        loop_thread.call(hang(), timeout_s=0.01)
    assert cancelled.wait(5)


def test_ctrl_c_in_the_waiting_thread_cancels_the_coroutine(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        loop_thread.call(hang())
    assert cancelled.wait(5)


@pytest.mark.parametrize("error", [None, LookupError("no such node")], ids=["ends", "fails"])
def test_ctrl_c_while_work_is_handed_to_the_loop_is_raised_after_the_work(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch, error: LookupError | None
) -> None:
    runs, attempts = list[str](), iter(["before", "after", "after", "not at all"])
    go_on = asyncio.Event()

    async def work() -> None:
        runs.append("begun")
        await go_on.wait()
        runs.append("over")
        if error is not None:
            raise error

    # No signal can be sent at exactly these moments.
    def call_soon(callback: Callable[[], None]) -> bool:
        interrupted = next(attempts)
        if interrupted != "before":
            call_soon_as_ever(callback)
        if interrupted != "not at all":
            raise KeyboardInterrupt
        loop_thread.loop.call_soon_threadsafe(go_on.set)
        return True

    call_soon_as_ever = loop_thread.call_soon
    monkeypatch.setattr(loop_thread, "call_soon", call_soon)
    with pytest.raises(KeyboardInterrupt) as raised:
        loop_thread.finish(work())
    assert runs == ["begun", "over"]
    assert raised.value.__cause__ is error


def test_work_ends_although_a_signal_handler_raises_an_error_of_ours(loop_thread: LoopThread) -> None:
    ended = list[str]()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        try:
            await asyncio.sleep(0.05)
        finally:
            ended.append("cancelled" if sys.exc_info()[0] else "whole")

    def handle(number: int, frame: object) -> None:  # such as one that asks a closing pool for its status
        raise PoolStateError("the pool is not open")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(PoolStateError, match="not open"):
            loop_thread.finish(work())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended == ["whole"]


def test_finish_of_work_that_was_cancelled_raises_that(loop_thread: LoopThread) -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CancelledError):
        loop_thread.finish(work())


@pytest.mark.parametrize("interrupted", ["before", "after"])
def test_ctrl_c_is_raised_although_the_loop_ends_meanwhile(monkeypatch: pytest.MonkeyPatch, interrupted: str) -> None:
    thread = acquire_loop()
    ended_in = list[str]()
    begun, releasing = threading.Event(), threading.Thread(target=thread.release)

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended_in.append(threading.current_thread().name)

    def call_soon(callback: Callable[[], None]) -> None:
        monkeypatch.undo()
        if interrupted == "after":
            thread.call_soon(callback)
            assert begun.wait(10)
        releasing.start()
        while not thread._ended:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "call_soon", call_soon)
    with pytest.raises(KeyboardInterrupt):
        thread.finish(work())
    assert ended_in == (["skyward-loop"] if interrupted == "after" else [])
    releasing.join()


@pytest.mark.parametrize("method", [LoopThread.call, LoopThread.finish])
def test_waiting_in_the_loop_itself_is_refused(loop_thread: LoopThread, method: Callable[..., object]) -> None:
    async def nested() -> None:
        method(loop_thread, name_of_thread())

    with pytest.raises(PoolStateError, match="await"):
        loop_thread.call(nested())


def test_release_from_the_loop_itself_is_refused(loop_thread: LoopThread) -> None:
    async def nested() -> None:
        loop_thread.release()

    with pytest.raises(PoolStateError, match="own thread"):
        loop_thread.call(nested())


def test_call_after_the_end_is_refused() -> None:
    thread = acquire_loop()
    thread.release()
    for method in (thread.call, thread.finish, thread.spawn):
        with pytest.raises(PoolStateError, match="has ended"):
            method(name_of_thread())


def test_spawned_coroutine_runs_and_its_failure_is_logged(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise LookupError("lost in the background")

    async def pause() -> None:
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, logger="skyward"):
        loop_thread.spawn(fail())
        for _ in range(3):
            loop_thread.call(pause())
    assert "lost in the background" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_loop_goes_on_after_what_passes_through_asyncio(
    loop_thread: LoopThread, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    left = asyncio.Event()

    async def outlast() -> str:
        await left.wait()
        return await name_of_thread()

    def leave() -> None:
        left.set()
        raise error

    waiting = asyncio.run_coroutine_threadsafe(outlast(), loop_thread.loop)
    loop_thread.loop.call_soon_threadsafe(leave)
    assert waiting.result(10) == "skyward-loop"
    assert loop_thread.call(name_of_thread()) == "skyward-loop"
    assert "goes on" in caplog.text


def test_tasks_and_generators_are_cleaned_up_at_the_end() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("task")

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            ended.append("generator")

    generator = numbers()

    async def start() -> int:
        return await anext(generator)

    thread = acquire_loop()
    thread.spawn(hang())
    assert thread.call(start()) == 1
    thread.release()
    assert ended == ["task", "generator"]


def test_loop_ends_while_a_thread_still_waits_for_an_answer_that_no_one_wants() -> None:
    answer, loop_thread = threading.Event(), LoopThread(waits=False)

    async def ask() -> None:
        asking = asyncio.ensure_future(asyncio.to_thread(answer.wait, 60))
        await asyncio.sleep(0)
        asking.cancel()

    assert loop_thread.call(asyncio.to_thread(lambda: 7)) == 7
    loop_thread.call(ask())
    loop_thread.end()
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "skyward-call"]
    assert waiting.daemon, "the interpreter's exit does not wait for it"
    answer.set()
    waiting.join()


def test_waiting_caller_is_freed_when_the_loop_ends() -> None:
    thread = acquire_loop()
    waiting = threading.Event()
    outcome: list[BaseException] = []

    async def hang() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            thread.call(hang())
        except CancelledError as error:
            outcome.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    assert waiting.wait(5)
    thread.release()
    caller.join(5)
    assert len(outcome) == 1


def test_tornado_finds_its_loop_inside(loop_thread: LoopThread) -> None:
    async def current() -> asyncio.AbstractEventLoop:
        from tornado.ioloop import IOLoop

        return IOLoop.current().asyncio_loop  # type: ignore[attr-defined]

    assert loop_thread.call(current()) is loop_thread.loop


SCRIPT = """
import asyncio, os, sys
from skyward.base.loop import acquire_loop
from skyward.errors import PoolStateError

async def hang(): await asyncio.Event().wait()
async def seven(): return 7

inherited = acquire_loop()
inherited.spawn(hang())
if "fork" in sys.argv:
    child = os.fork()
    if not child:
        try:
            inherited.call(seven())
        except PoolStateError:
            os._exit(acquire_loop().call(seven()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    inherited.release()
"""


@pytest.mark.parametrize("mode", ["fork", "exit without release"])
def test_fork_starts_afresh_and_exit_is_silent(mode: str) -> None:
    # From Python 3.12 on a warning advises against forks of a process with threads, and this is such a fork.
    program = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", SCRIPT, mode]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SELECTOR_CLOSED = """
import asyncio, os, threading
from skyward.base.loop import LoopThread

thread = LoopThread()
threads = [each for each in threading.enumerate() if each.name == "skyward-loop"]

async def close_selector():
    os.close(asyncio.get_running_loop()._selector.fileno())

thread.spawn(close_selector())
threads[0].join(20)
print(thread.runs, thread.call_soon(print), flush=True)
os._exit(0)
"""


def test_a_loop_whose_selector_other_code_has_closed_ends_instead_of_spinning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SELECTOR_CLOSED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False False\n", done.stderr
    assert done.stderr.count("Traceback") < 10
