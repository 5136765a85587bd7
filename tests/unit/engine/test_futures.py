"""Batches of outcomes that one caller waits for."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace

import pytest

from skyward.engine.futures import CallBatch, RawOutcome, RemoteFuture
from skyward.wire.code.pickling import pack_error

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


def future() -> RemoteFuture:
    return RemoteFuture(drop=lambda _: None, run_callback=lambda fn, future: fn(future))


def test_a_future_shows_state_call_duration_and_the_errors_last_line_in_a_notebook() -> None:
    waiting, done, failed = future(), future(), future()
    waiting.call = done.call = SimpleNamespace(
        name="train#3", number=3, parcel=SimpleNamespace(label="fit.<locals>.train")
    )
    done.deliver(0, RawOutcome(data=pickle.dumps(3), seconds=2.5))
    failed.deliver(0, RawOutcome(error=ValueError("first\nlast <line>")))

    assert waiting._repr_html_() == "<div><b>train#3</b> · queued</div>"
    assert done._repr_html_() == "<div><b>train#3</b> · finished · 2.5 s on its worker</div>"
    assert failed._repr_html_() == "<div><b>call</b> · failed · <code>ValueError: last &lt;line&gt;</code></div>"
    assert repr(done) == "<RemoteFuture train#3, finished, 2.5 s on its worker>"
    assert waiting.cancel()
    assert "cancelled" in waiting._repr_html_()


def test_an_error_about_a_missing_module_is_completed_where_it_is_raised() -> None:
    packed = pack_error(ModuleNotFoundError("No module named 'a'", name="a"))
    raw = RawOutcome(error=packed, complete=lambda error: ModuleNotFoundError(f"{error}, nor b", name=error.name))

    with pytest.raises(ModuleNotFoundError, match="No module named 'a', nor b"):
        raw.value()


def test_a_subscriber_that_a_result_waits_for_may_request_that_result() -> None:
    awaited, seen = future(), list[int]()
    own = threading.current_thread()

    def shown() -> None:
        if threading.current_thread() is own:
            subscriber = threading.Thread(target=lambda: seen.append(awaited.result(20)), daemon=True)
            subscriber.start()
            subscriber.join(5)

    awaited.deliver(0, RawOutcome(data=pickle.dumps(3), shown=shown))
    assert (awaited.result(20), seen) == (3, [3])
