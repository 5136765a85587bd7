"""Batches of outcomes that one caller waits for."""

from __future__ import annotations

import threading

from skyward.engine.futures import CallBatch, RawOutcome

FAILED = RawOutcome(error=ValueError("no"))
DONE = RawOutcome(data=b"")


def test_the_first_failure_ends_the_wait() -> None:
    batch = CallBatch(3)
    assert not batch.wait(0)
    batch.deliver(1, FAILED)
    assert batch.wait(0)
    assert batch.failed == 1


def test_who_waits_on_after_failures_is_told_of_the_end() -> None:
    batch = CallBatch(3)
    batch.deliver(0, FAILED)
    batch.deliver(1, FAILED)
    assert batch.wait(0)
    batch.rearm()
    assert not batch.wait(0.01) or batch.remaining
    threading.Timer(0.05, batch.deliver, (2, DONE)).start()
    while not batch.wait(10):
        pass
    assert batch.remaining == 0


def test_an_end_that_came_before_the_wait_goes_on_is_not_missed() -> None:
    batch = CallBatch(2)
    batch.deliver(0, FAILED)
    batch.deliver(1, DONE)
    batch.rearm()
    assert batch.wait(0)


def test_a_batch_of_nothing_is_over() -> None:
    assert CallBatch(0).wait(0)
