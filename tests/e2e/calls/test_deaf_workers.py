"""Workers that live but cannot answer any more, through what a call did to its process: replaced within seconds."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import pytest

import skyward as sky
from skyward.errors import WorkerLostError
from skyward.node.worker.lane_watchdog import DEAF_REASON

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are listed in /proc")

DEADLINE_S = 60
E = TypeVar("E", bound=sky.SkywardEvent)


events: SimpleQueue[sky.SkywardEvent] = SimpleQueue()


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet", on_event=events.put) as pool:
        start_callbacks(pool)
        yield pool


def descriptors(kind: str) -> list[int]:
    """Those from 3 on whose description begins like this."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            described = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found += [int(name)] if int(name) > 2 and described.startswith(kind) else []
    return found


def loops() -> list[asyncio.AbstractEventLoop]:
    return [each for each in gc.get_objects() if isinstance(each, asyncio.BaseEventLoop) and each.is_running()]


def close_everything() -> None:
    os.closerange(3, 4096)


def close_connections() -> None:
    for descriptor in descriptors("socket:"):
        os.close(descriptor)


def close_listening_sockets() -> None:
    for descriptor in descriptors("socket:"):
        with socket.socket(fileno=os.dup(descriptor)) as seen:
            listens = seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens:
            os.close(descriptor)


def close_pipes() -> None:
    for descriptor in descriptors("pipe:"):
        os.close(descriptor)


def close_selectors() -> None:
    for descriptor in descriptors("anon_inode:[eventpoll]"):
        os.close(descriptor)


def replace_connections() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors("socket:"):
        os.dup2(null, descriptor)


def replace_selectors() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors("anon_inode:[eventpoll]"):
        os.dup2(null, descriptor)


def close_everything_and_go_on() -> None:
    os.closerange(3, 4096)
    time.sleep(3600)


@pytest.mark.parametrize(
    "spoil",
    [
        close_everything,
        close_connections,
        close_listening_sockets,
        close_pipes,
        close_selectors,
        replace_connections,
        replace_selectors,
        close_everything_and_go_on,
    ],
)
def test_a_worker_whose_descriptors_a_call_has_closed_is_replaced(
    pool: sky.ComputePool, spoil: Callable[[], None]
) -> None:
    assert_replaced(pool, spoil, reason=DEAF_REASON)


def without_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def end_loops() -> None:
    for loop in loops():
        loop.call_soon_threadsafe(sys.exit)


def close_selector_objects() -> None:
    for loop in loops():
        loop._selector.close()  # type: ignore[attr-defined]


def replace_policy() -> None:
    asyncio.set_event_loop_policy(None)
    asyncio.set_event_loop(asyncio.new_event_loop())


def raise_in_all_threads() -> None:
    raising = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            raising(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def end_in_a_fork() -> None:
    if os.fork() == 0:
        os.closerange(3, 4096)
        os._exit(1)
    os.wait()


def freeze() -> None:
    gc.freeze()
    faulthandler.enable()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    "spoil",
    [
        without_descriptors,
        end_loops,
        close_selector_objects,
        replace_policy,
        raise_in_all_threads,
        end_in_a_fork,
        freeze,
    ],
)
def test_calls_go_on_whatever_one_did_to_its_worker(pool: sky.ComputePool, spoil: Callable[[], None]) -> None:
    try:
        pool.submit(sky.compute(retries=0)(spoil)).result(DEADLINE_S)
    except WorkerLostError as lost:
        assert lost.reason == DEAF_REASON  # noqa: PT017 - it may end well, too
    assert [pool.submit(abs, -number).result(DEADLINE_S) for number in range(3)] == [0, 1, 2]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def block_loops() -> None:
    for loop in loops():
        loop.call_soon_threadsafe(threading.Event().wait)


@pytest.mark.full  # each takes ten seconds by design
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(stop, "it was stopped, as by SIGSTOP, for 10 s, and was killed"), (block_loops, DEAF_REASON)],
)
def test_a_worker_that_does_not_answer_for_ten_seconds_is_replaced(
    pool: sky.ComputePool, spoil: Callable[[], None], reason: str
) -> None:
    assert_replaced(pool, spoil, reason=reason)


@pytest.mark.full
def test_a_call_that_holds_the_interpreters_lock_for_long_ends_well(pool: sky.ComputePool) -> None:
    before = pool.submit(os.getpid).result(DEADLINE_S)
    assert pool.submit(hold_the_lock, 15).result(DEADLINE_S) == before


def hold_the_lock(seconds: int) -> int:
    ctypes.PyDLL(None).sleep(seconds)
    return os.getpid()


def assert_replaced(pool: sky.ComputePool, spoil: Callable[[], None], *, reason: str) -> None:
    before = pool.submit(os.getpid).result(DEADLINE_S)
    while not events.empty():
        events.get()
    with suppress(WorkerLostError):  # its result may have left before
        pool.submit(sky.compute(retries=0)(spoil)).result(DEADLINE_S)
    assert next_event(sky.WorkerLost).reason == reason
    next_event(sky.WorkerReplaced)
    assert pool.submit(os.getpid).result(DEADLINE_S) != before


def next_event(kind: type[E]) -> E:
    while not isinstance(event := events.get(timeout=DEADLINE_S), kind):
        pass
    return event
