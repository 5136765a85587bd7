from __future__ import annotations

import operator
import threading

import pytest

from skyward.errors import SerializationError
from skyward.submission import CallFuture, Invocation
from skyward_joblib.backend import CallWindow


def call(number=0):
    return Invocation(fn=operator.neg, args=(number,))


class Calls:
    """A callback that remembers, and says in which thread and whether inside ``submit``."""

    def __init__(self):
        self.futures: list[CallFuture] = []
        self.threads: list[int] = []
        self.submitting = False
        self.early = 0
        self.called = threading.Semaphore(0)

    def __call__(self, future):
        self.futures.append(future)
        self.threads.append(threading.get_ident())
        self.early += self.submitting and threading.get_ident() == self.submitter
        self.called.release()

    def submit_to(self, window, a_call):
        self.submitter, self.submitting = threading.get_ident(), True
        future = window.submit(a_call, self)
        self.submitting = False
        return future

    def wait(self):
        assert self.called.acquire(timeout=5)


def test_no_more_calls_than_the_limit_are_in_the_fleet(hand_fleet):
    window = CallWindow(hand_fleet, limit=2)
    for number in range(5):
        window.submit(call(number), Calls())
    assert len(hand_fleet.calls) == 2
    hand_fleet.futures[1].set_result(None)
    assert [sent.args for sent in hand_fleet.calls] == [(0,), (1,), (2,)]


def test_without_a_limit_everything_goes_to_the_fleet(hand_fleet):
    window = CallWindow(hand_fleet, limit=None)
    for number in range(50):
        window.submit(call(number), Calls())
    assert len(hand_fleet.calls) == 50


def test_without_a_limit_the_fleets_own_future_is_handed_on(hand_fleet):
    calls = Calls()
    future = calls.submit_to(CallWindow(hand_fleet, limit=None), call())
    assert future is hand_fleet.futures[0]
    future.set_result("done")
    assert calls.futures == [future]


def test_result_and_worker_time_reach_the_future_and_the_callback(hand_fleet):
    calls = Calls()
    future = calls.submit_to(CallWindow(hand_fleet, limit=1), call())
    hand_fleet.futures[0].worker_seconds = 0.25
    hand_fleet.futures[0].set_result("done")
    assert calls.futures == [future]
    assert (future.result(), future.worker_seconds) == ("done", 0.25)


def test_error_of_a_call_is_the_futures(hand_fleet):
    calls = Calls()
    future = calls.submit_to(CallWindow(hand_fleet, limit=1), call())
    hand_fleet.futures[0].set_exception(KeyError("lost"))
    assert calls.futures == [future]
    with pytest.raises(KeyError, match="lost"):
        future.result()


@pytest.mark.parametrize("limit", [1, None])
def test_callback_never_runs_inside_submit(ready_fleet, limit):
    calls = Calls()
    future = calls.submit_to(CallWindow(ready_fleet, limit=limit), call(3))
    calls.wait()
    assert future.result() == -3
    assert calls.early == 0
    assert calls.threads != [threading.get_ident()]


@pytest.mark.parametrize("limit", [1, None])
def test_failed_submission_is_an_outcome_not_an_exception(hand_fleet, monkeypatch, limit):
    def refuse(*_args, **_kwargs):
        raise SerializationError("the argument cannot be pickled")

    monkeypatch.setattr(hand_fleet, "submit_calls", refuse)
    calls = Calls()
    future = calls.submit_to(CallWindow(hand_fleet, limit=limit), call())
    calls.wait()
    assert calls.early == 0
    with pytest.raises(SerializationError, match="the argument"):
        future.result()


@pytest.mark.parametrize(("limit", "sent"), [(1, 1), (None, 3)])
def test_closing_cancels_what_runs_and_what_waits_each_told_once(hand_fleet, limit, sent):
    window, calls = CallWindow(hand_fleet, limit=limit), Calls()
    futures = [window.submit(call(number), calls) for number in range(3)]
    window.close()
    window.close()
    assert all(future.cancelled() for future in futures)
    assert sorted(map(id, calls.futures)) == sorted(map(id, futures))
    assert (len(hand_fleet.calls), len(hand_fleet.cancelled)) == (sent, sent)


@pytest.mark.parametrize("limit", [1, None])
def test_call_submitted_after_closing_is_cancelled_and_never_sent(hand_fleet, limit):
    window, calls = CallWindow(hand_fleet, limit=limit), Calls()
    window.close()
    future = calls.submit_to(window, call())
    calls.wait()
    assert future.cancelled()
    assert calls.early == 0
    assert hand_fleet.calls == []


def test_finished_calls_are_not_cancelled(hand_fleet):
    window = CallWindow(hand_fleet, limit=None)
    window.submit(call(), Calls())
    hand_fleet.futures[0].set_result(None)
    window.close()
    assert hand_fleet.cancelled == []
