from __future__ import annotations

from skyward.engine.calls import CallGang
from skyward.engine.dispatch import CallState, Dispatch, GiveUp, Send, WorkerId

A, B = WorkerId(0, 0), WorkerId(0, 1)


def ranks(count: int) -> list[CallState]:
    return [CallState(id=rank + 1, kind="f", pinned=WorkerId(0, rank), together=True) for rank in range(count)]


def busy(*calls: CallState) -> Dispatch:
    """Two workers, and these calls on them."""
    dispatch = Dispatch()
    for worker in (A, B):
        dispatch.worker_up(worker, 0.0)
    dispatch.submit(calls, 0.0)
    return dispatch


class TestGang:
    def test_everyone_is_answered_once_the_last_one_has_spoken(self) -> None:
        gang = CallGang([])
        gang.calls = (object(),) * 3  # type: ignore[assignment]  # only their number counts

        assert gang.add_address(2, "c") is None
        assert gang.add_address(0, "a") is None
        assert gang.add_address(1, "b") == ["a", "b", "c"]
        assert gang.add_address(1, "again") is None

    def test_who_begins_anew_speaks_anew(self) -> None:
        gang = CallGang([])
        gang.calls = (object(),) * 2  # type: ignore[assignment]

        assert gang.add_address(0, "before") is None
        assert gang.add_address(0, "after") is None
        assert gang.add_address(1, "b") == ["after", "b"]

    def test_the_first_failure_counts(self) -> None:
        gang = CallGang([])

        assert gang.fail()
        assert not gang.fail()
        assert gang.failed


class TestDispatch:
    def test_a_call_of_a_gang_that_had_begun_is_never_run_again(self) -> None:
        first, second = ranks(2)
        dispatch = busy(first, second)
        first.position = 1

        actions = dispatch.worker_lost(A, "killed", 1.0)

        assert actions == [GiveUp(first, A, "killed")]
        assert dispatch.unfinished == 1

    def test_one_that_had_not_left_yet_is(self) -> None:
        first, second = ranks(2)
        dispatch = busy(first, second)

        assert dispatch.worker_lost(A, "killed", 1.0) == []
        assert dispatch.worker_up(A, 2.0) == [Send(A, [first])]

    def test_a_worker_that_has_a_call_of_a_gang_has_no_other_one(self) -> None:
        """Else the blobs of one gang could be late on one worker, which begins with the next gang, and wait there."""
        dispatch = busy()
        for worker in (A, B):
            dispatch.submit([CallState(id=8 + worker.worker, kind="f", pinned=worker)], 0.0)
        dispatch.finished([(8, 0.0001), (9, 0.0001)], 0.0)  # such calls are short: several of them share a worker
        running = CallState(id=10, kind="f", pinned=A)
        first, second = ranks(2)
        _, next_one = ranks(2)
        next_one.id = 11

        assert dispatch.submit([running, first, second, next_one], 0.0) == [Send(A, [running]), Send(B, [second])]
        assert dispatch.finished([(10, 0.0001)], 1.0) == [Send(A, [first])]
        assert dispatch.finished([(second.id, 0.0001)], 2.0) == [Send(B, [next_one])]
