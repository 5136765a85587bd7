"""Progress of batches, against the truth: every event of work that succeeds, fails, is cancelled or loses a worker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, cast

from skyward.errors import PoolStateError
from skyward.events import Progress, SkywardEvent
from skyward.scheduling.calls import CallBatch, CallTable, LiveCall, RawOutcome, RemoteFuture, WorkCount
from skyward.scheduling.dispatch_and_retries import Action, Dispatch, GiveUp, WorkerId
from skyward.shipping.function_cache import PackedFunction
from skyward.wire.messages import Payload

FIRST, SECOND = WorkerId(0, 0), WorkerId(0, 1)
FUNCTION = PackedFunction(id="f", label="f", payload=Payload(data=b"f"))


class Stage:
    """Two workers, the dispatch of their calls and the table of them; the time is the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[SkywardEvent] = []
        self.table = CallTable(self.told.append)
        self.dispatch = Dispatch()
        self.serial = 0
        for worker in (FIRST, SECOND):
            self.dispatch.worker_up(worker, self.now)

    def calls(self, count: int, label: str = "train", sink: Any = None, **shape: Any) -> list[LiveCall]:
        calls: list[LiveCall] = []
        batch = sink or CallBatch(range(count))
        for index in range(count):
            self.serial += 1
            shape |= {"index": index, "work": batch.work, "retries": 0}
            calls.append(LiveCall(id=self.serial, kind=label, label=label, function=FUNCTION, **shape))
            calls[-1].sink = batch
            if isinstance(batch, CallBatch):
                batch.entries[index] = calls[-1]
        self.table.add(calls, self.now)
        self.act(self.dispatch.submit(calls, self.now))
        return calls

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, GiveUp):
                self.table.complete(cast("LiveCall", action.call), RawOutcome(error=RuntimeError("lost")))
            elif hasattr(action, "calls"):
                for call in action.calls:
                    call.position = 1

    def end(self, call: LiveCall, error: Exception | None = None) -> None:
        self.table.complete(call, RawOutcome(error=error))
        self.act(self.dispatch.finished([(call.id, 1.0)], self.now))

    def cancel(self, calls: list[LiveCall], *, kill: bool) -> None:
        self.dispatch.cancel([call.id for call in calls], kill=kill)
        for call in calls:
            self.table.complete(call, RawOutcome(error=CancelledError()))

    def look(self, after_s: float = 1.0) -> list[SkywardEvent]:
        """What is published after so many seconds."""
        self.now += after_s
        before = len(self.told)
        self.table.publish_progress(self.now, self.running)
        return self.told[before:]

    def running(self) -> Iterator[WorkCount | None]:
        return (cast("LiveCall", call).work for call in self.dispatch.running())


def test_a_batch_counts_what_is_done_and_what_runs() -> None:
    stage = Stage()
    calls = stage.calls(5)
    assert stage.look(after_s=0.4) == []
    assert stage.look() == [Progress("train", 0, 5, running=2)]
    stage.end(calls[0])
    stage.end(calls[1])
    assert stage.look() == [Progress("train", 2, 5, running=2)]
    stage.end(calls[2])
    stage.end(calls[3])
    stage.end(calls[4])
    assert stage.told[-1] == Progress("train", 5, 5)
    assert stage.look() == []


def test_a_failing_batch_accounts_for_every_call() -> None:
    stage = Stage()
    calls = stage.calls(5)
    stage.look()
    stage.end(calls[0])
    stage.end(calls[1], ValueError())
    assert stage.look() == [Progress("train", 1, 5, failed=1, running=2)]
    stage.cancel(calls[2:], kill=False)
    assert stage.told[-1] == Progress("train", 1, 5, failed=1, cancelled=3)
    assert (stage.table.failed, stage.table.cancelled, stage.table.ended) == (1, 3, 5)


def test_failures_that_are_results_are_counted_and_the_rest_goes_on() -> None:
    stage = Stage()
    calls = stage.calls(4)
    stage.look()
    for call in calls:
        stage.end(call, ValueError() if call.index % 2 else None)
    assert stage.told[-1] == Progress("train", 2, 4, failed=2)
    assert stage.table.last_failure == "train#0: ValueError"


def test_a_cancelled_batch_has_no_failures() -> None:
    stage = Stage()
    calls = stage.calls(5)
    stage.look()
    stage.end(calls[0])
    stage.cancel(calls[1:], kill=True)
    assert stage.told[-1] == Progress("train", 1, 5, cancelled=4)
    assert list(stage.running()) == [], "calls that nothing waits for run for no work"


def test_calls_of_a_lost_worker_are_queued_again_and_fail_once_it_was_their_last_run() -> None:
    stage = Stage()
    stage.calls(3)
    assert stage.look() == [Progress("train", 0, 3, running=2)]
    stage.act(stage.dispatch.worker_lost(SECOND, "preempted", stage.now, begun=0))
    assert stage.look() == [Progress("train", 0, 3, running=1)]
    stage.act(stage.dispatch.worker_up(SECOND, stage.now))
    assert stage.look() == [Progress("train", 0, 3, running=2)]
    stage.act(stage.dispatch.worker_lost(SECOND, "killed", stage.now, begun=1))
    assert stage.look() == [Progress("train", 0, 3, failed=1, running=1)]


def test_unchanged_progress_is_published_once_a_second() -> None:
    stage = Stage()
    stage.calls(1)
    assert [len(stage.look(after_s=0.25)) for _ in range(8)] == [0, 1, 0, 0, 0, 1, 0, 0]


def test_submitted_calls_of_a_function_are_one_piece_of_work_until_none_is_left() -> None:
    stage = Stage()
    calls = stage.calls(1, sink=RemoteFuture(drop=print, run_callback=print))
    stage.look()
    calls += [stage.calls(1, sink=RemoteFuture(drop=print, run_callback=print))[0] for _ in range(2)]
    assert stage.look() == [Progress("train", 0, 3, running=2)]
    for call in calls:
        stage.table.complete(call, RawOutcome())
    assert stage.told[-1] == Progress("train", 3, 3)
    assert stage.look() == []


def test_chunks_count_their_items() -> None:
    stage = Stage()
    calls = stage.calls(2, tasks=10)
    stage.end(calls[0])
    assert stage.look() == [Progress("train", 10, 20, running=1)]


def test_two_batches_of_one_function_have_two_labels_and_a_mixed_one_has_a_plain_one() -> None:
    stage = Stage()
    stage.calls(1)
    stage.calls(1)
    mixed = CallBatch(range(2))
    stage.calls(1, sink=mixed)
    stage.calls(1, label="test", sink=mixed)
    assert [event.label for event in stage.look() if isinstance(event, Progress)] == ["train", "train (2)", "calls"]


def test_a_front_end_publishes_its_own_progress_and_gets_the_number_of_running_calls() -> None:
    stage = Stage()
    stage.calls(3, sink=RemoteFuture(drop=print, run_callback=print), label="fit (8 tasks)", work_label="fit")
    assert stage.look() == []
    for event in (Progress("fit", 8, 24), Progress("fit", 23, 24), Progress("fit", 8), Progress("fit", 24, 24)):
        stage.table.report(event)
    assert stage.told == [
        Progress("fit", 8, 24, running=2),
        Progress("fit", 23, 24, running=1),
        Progress("fit", 8, running=2),
        Progress("fit", 24, 24),
    ]


def test_submitted_calls_that_are_over_leave_nothing_and_the_next_ones_count_anew() -> None:
    stage = Stage()
    for _ in range(2):
        future = RemoteFuture(drop=lambda _: None, run_callback=lambda fn, future: fn(future))
        (submitted,) = stage.calls(1, sink=future)
        stage.end(submitted)
        assert submitted.work is not None
        assert submitted.work.progress("train", 0).total == 1
    assert not stage.table._streams
    assert not stage.table._current


def test_calls_that_a_closing_pool_ends_are_cancelled_and_no_failures() -> None:
    stage = Stage()
    (call,) = stage.calls(1)
    stage.end(call, PoolStateError("the pool was closed before the call was done"))
    assert (stage.table.cancelled, stage.table.failed, stage.table.last_failure) == (1, 0, "")
