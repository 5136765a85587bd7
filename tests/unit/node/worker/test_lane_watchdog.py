from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from skyward.node.worker.lane_watchdog import Watchdog


class EndedError(Exception):
    """The watchdog has ended the process."""


def end(reason: str) -> None:
    raise EndedError(reason)


class Loop:
    """Event loop that runs its callbacks only when it is told to."""

    def __init__(self) -> None:
        self.runs = True
        self.waits_for_disk = False
        self.callbacks: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None], /) -> bool:
        self.callbacks.append(callback)
        return True

    def answer(self) -> None:
        while self.callbacks:
            self.callbacks.pop()()


def test_a_loop_that_answers_is_left_alone() -> None:
    loop = Loop()
    watchdog = Watchdog(loop, str, end=end)
    for _ in range(100):
        watchdog.look(after_s=1.0)
        loop.answer()


def test_a_loop_that_answers_late_is_left_alone() -> None:
    loop = Loop()
    watchdog = Watchdog(loop, str, end=end)
    for _ in range(3):
        for _ in range(10):
            watchdog.look(after_s=1.0)
        loop.answer()


def test_a_loop_that_does_not_answer_for_ten_looks_ends_its_process() -> None:
    watchdog = Watchdog(Loop(), str, end=end)
    for _ in range(10):
        watchdog.look(after_s=1.0)
    with pytest.raises(EndedError, match="has not answered for 10 s, while other threads ran"):
        watchdog.look(after_s=1.0)


def test_looks_that_the_interpreters_lock_held_up_do_not_count() -> None:
    watchdog = Watchdog(Loop(), str, end=end)
    for _ in range(100):
        watchdog.look(after_s=5.0)


def test_looks_while_the_loop_waits_for_a_disk_or_a_file_server_do_not_count() -> None:
    loop = Loop()
    loop.waits_for_disk = True
    watchdog = Watchdog(loop, str, end=end)
    for _ in range(100):
        watchdog.look(after_s=1.0)


def test_a_loop_that_ends_in_order_ends_no_process() -> None:
    loop = Loop()
    ends: list[str] = []
    watchdog = Watchdog(loop, str, end=ends.append)
    watchdog.start()
    (thread,) = (each for each in threading.enumerate() if each.name == "skyward-watchdog")
    loop.runs = False
    watchdog.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert ends == []


def test_a_loop_that_has_ended_ends_its_process_at_once() -> None:
    loop = Loop()
    watchdog = Watchdog(loop, str, end=end)
    loop.runs = False
    with pytest.raises(EndedError, match="has ended"):
        watchdog.look(after_s=1.0)


def test_trouble_that_the_loop_finds_ends_its_process() -> None:
    loop = Loop()
    watchdog = Watchdog(loop, lambda: "a call closed its connections", end=end)
    watchdog.look(after_s=1.0)
    with pytest.raises(EndedError, match="a call closed its connections"):
        loop.answer()
