"""Actions that are stuck, that raise, that are many."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic

import pytest

from skyward.events.bus import Courier


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Have every start of a thread fail, as it does at the system's limit: no address space holds such a stack."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.fixture
def courier() -> Iterator[Courier]:
    courier = Courier("skyward-test", what="an action", patience_s=0.01)
    yield courier
    assert courier.close(20)


def saying(text: str, said: SimpleQueue[str]) -> Callable[[], None]:
    return lambda: said.put(text)


def test_actions_enqueued_together_wake_an_idle_thread_at_the_end(courier: Courier) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    for _ in range(3):  # from the second time on, there is a thread that waits
        with courier.together():
            courier.run(saying("first", said))
            courier.run(saying("second", said))
        assert [said.get(timeout=20) for _ in range(2)] == ["first", "second"]


@pytest.mark.parametrize("kind", [LookupError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_action_that_raises_ends_nothing(
    courier: Courier, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise kind("no further")

    said = SimpleQueue[str]()
    courier.run(fail)
    courier.run(saying("after it", said))
    assert said.get(timeout=20) == "after it"
    assert "an action raised" in caplog.text


def test_a_handler_that_raises_ends_no_thread() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    courier, threads, handler = Courier("skyward-test", what="an action"), SimpleQueue[int](), Broken()
    logging.getLogger("skyward").addHandler(handler)
    try:
        for _ in range(2):
            courier.run(lambda: threads.put(threading.get_ident()))
            courier.run(lambda: 1 / 0)
        assert courier.close(20)
    finally:
        logging.getLogger("skyward").removeHandler(handler)
    assert threads.get(timeout=20) == threads.get(timeout=20)


def test_actions_run_in_order_in_one_thread() -> None:
    courier = Courier("skyward-test", what="an action")
    seen: list[tuple[int, str]] = []
    for number in range(1000):
        courier.run(lambda number=number: seen.append((number, threading.current_thread().name)))
    assert courier.close(20)
    assert seen == [(number, "skyward-test") for number in range(1000)]


def test_others_go_on_in_order_while_actions_are_stuck(courier: Courier) -> None:
    release, said = threading.Event(), SimpleQueue[str]()
    for text in ("a", "b", "c"):
        courier.run(release.wait)
        courier.run(saying(text, said))
    assert [said.get(timeout=20) for _ in "abc"] == ["a", "b", "c"]
    release.set()


def test_when_too_many_are_stuck_the_others_wait() -> None:
    courier = Courier("skyward-test", what="an action", patience_s=0.01, threads=2)
    release, said = threading.Event(), SimpleQueue[str]()
    for _ in range(5):
        courier.run(release.wait)
    courier.run(saying("at last", said))
    assert not courier.close(0.2)
    assert said.empty()
    release.set()
    assert said.get(timeout=20) == "at last"
    assert courier.close(20)


def test_what_waits_behind_a_stuck_action_runs_although_the_courier_is_closed() -> None:
    courier = Courier("skyward-test", what="an action", patience_s=0.01)
    release, said = threading.Event(), SimpleQueue[str]()
    courier.run(release.wait)
    courier.run(saying("late", said))
    assert not courier.close(0)
    assert said.get(timeout=20) == "late"
    release.set()
    assert courier.close(20)


def test_an_action_may_hand_over_another_and_close(courier: Courier) -> None:
    said = SimpleQueue[str]()

    def last() -> None:
        courier.run(saying("next", said))
        assert courier.close(20)

    courier.run(last)
    assert said.get(timeout=20) == "next"


def test_nothing_is_started_for_nothing() -> None:
    courier = Courier("skyward-test", what="an action")
    assert courier.close(0)
    courier.run(lambda: pytest.fail("it is closed"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skyward-test")]


def test_without_a_thread_for_it_an_action_waits_for_the_next_one(courier: Courier) -> None:
    said = SimpleQueue[str]()
    with no_more_threads():
        courier.run(saying("first", said))
    courier.run(saying("second", said))
    assert [said.get(timeout=20), said.get(timeout=20)] == ["first", "second"]


def test_without_a_thread_for_it_an_action_runs_when_the_courier_closes() -> None:
    courier, said = Courier("skyward-test", what="an action"), SimpleQueue[str]()
    with no_more_threads():
        courier.run(saying("late", said))
    assert courier.close(20)
    assert said.get(timeout=20) == "late"


def test_a_lookout_that_cannot_be_started_ends_nothing(courier: Courier) -> None:
    began, release, said = threading.Event(), threading.Event(), SimpleQueue[str]()
    courier.run(lambda: began.set() or release.wait())
    began.wait()
    with no_more_threads():
        courier.run(saying("behind it", said))
        release.set()
        assert said.get(timeout=20) == "behind it"
    courier.run(saying("after it", said))
    assert said.get(timeout=20) == "after it"


def test_an_action_does_not_wait_for_actions() -> None:
    courier, waited = Courier("skyward-test", what="an action", patience_s=60), SimpleQueue[float]()

    def wait() -> None:
        began = monotonic()
        courier.wait_past(courier.queued, 30)
        waited.put(monotonic() - began)

    courier.run(wait)
    assert waited.get(timeout=60) < 10
    assert courier.close(20)


def test_the_wait_for_actions_ends_when_the_one_that_runs_has_ended() -> None:
    courier, begun, go, ended = (
        Courier("skyward-test", what="an action"),
        threading.Event(),
        threading.Event(),
        list[bool](),
    )

    def slow() -> None:
        begun.set()
        go.wait(20)
        ended.append(True)

    courier.run(slow)
    begun.wait(20)
    threading.Timer(0.05, go.set).start()
    courier.wait_past(courier.queued, 20)
    assert ended == [True]
    courier.wait_past(courier.queued, 20)
    assert courier.close(20)
    courier.wait_past(courier.queued + 1, 20)
