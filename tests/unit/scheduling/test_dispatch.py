from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from skyward.scheduling.dispatch_and_retries import Action, CallState, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId

A, B = WorkerId(0, 0), WorkerId(0, 1)


class Table:
    """A dispatch with a clock that stands still unless told otherwise, and what it sent where."""

    def __init__(self, *workers: WorkerId) -> None:
        self.dispatch = Dispatch()
        self.now = 0.0
        self.ids = itertools.count(1)
        for worker in workers:
            assert self.dispatch.worker_up(worker, self.now) == []

    def calls(self, count: int, kind: str = "f", **options: object) -> list[CallState]:
        return [CallState(id=next(self.ids), kind=kind, **options) for _ in range(count)]  # type: ignore[arg-type]

    def submit(self, calls: Sequence[CallState]) -> list[Action]:
        return number(self.dispatch.submit(calls, self.now))

    def learn(self, kind: str, seconds: float) -> None:
        (call,) = self.calls(1, kind)
        self.submit([call])
        self.dispatch.finished([(call.id, seconds)], self.now)


_positions = itertools.count(1)


def number(actions: list[Action]) -> list[Action]:
    """As a slot does with the calls that it sends."""
    for action in actions:
        for call in action.calls if isinstance(action, Send) else ():
            call.position = next(_positions)
    return actions


def sent(actions: Sequence[Action]) -> dict[WorkerId, list[int]]:
    found: dict[WorkerId, list[int]] = {}
    for action in actions:
        if isinstance(action, Send):
            found.setdefault(action.worker, []).extend(call.id for call in action.calls)
    return found


def test_calls_of_an_unknown_kind_go_one_to_each_idle_worker() -> None:
    table = Table(A, B)
    calls = table.calls(4)
    assert sent(table.submit(calls)) == {B: [calls[0].id], A: [calls[1].id]}


def test_short_calls_of_a_known_kind_go_in_batches_shared_fairly() -> None:
    table = Table(A, B)
    table.learn("f", 0.0001)
    calls = table.calls(10)
    shares = sent(table.submit(calls))
    assert {len(ids) for ids in shares.values()} == {5}
    assert sorted(itertools.chain(*shares.values())) == [call.id for call in calls]


def test_long_calls_are_never_stacked() -> None:
    table = Table(A, B)
    table.learn("f", 1.0)
    assert all(len(ids) == 1 for ids in sent(table.submit(table.calls(10))).values())


def test_a_generator_runs_alone_however_short_others_of_its_kind_were() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    (generator,), short = table.calls(1, streams=True), table.calls(2)
    assert sent(table.submit([generator, *short])) == {A: [generator.id]}
    assert sent(table.dispatch.finished([(generator.id, 0.0001)], 0.0)) == {A: [call.id for call in short]}


def test_a_generator_is_not_put_behind_other_calls() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    short, (generator,) = table.calls(2), table.calls(1, streams=True)
    assert sent(table.submit([*short, generator])) == {A: [call.id for call in short]}
    assert sent(table.dispatch.finished([(call.id, 0.0001) for call in short], 0.0)) == {A: [generator.id]}


def test_a_long_round_trip_widens_the_window() -> None:
    table = Table()
    table.dispatch.worker_up(A, 0.0, round_trip_s=0.05)
    table.learn("f", 0.02)
    assert len(sent(table.submit(table.calls(50)))[A]) == 5


def test_a_finished_call_makes_room_for_the_next() -> None:
    table = Table(A)
    first, second = table.calls(2)
    table.submit([first, second])
    assert sent(table.dispatch.finished([(first.id, 1.0)], 0.0)) == {A: [second.id]}


def test_calls_wait_until_a_worker_is_there() -> None:
    table = Table()
    (call,) = table.calls(1)
    assert table.submit([call]) == []
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [call.id]}


def test_a_pinned_call_waits_for_its_worker_and_does_not_hold_up_others() -> None:
    table = Table(A)
    pinned, free = table.calls(1, pinned=B)[0], table.calls(1)[0]
    assert sent(table.submit([pinned, free])) == {A: [free.id]}
    assert sent(table.dispatch.worker_up(B, 0.0)) == {B: [pinned.id]}


def test_lost_worker_requeues_its_calls_in_order_and_charges_those_that_it_began() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    calls = table.calls(5)
    table.submit(calls)
    assert table.dispatch.worker_lost(A, "killed", 0.0, begun=calls[0].position) == []
    assert [call.losses for call in calls] == [1, 0, 0, 0, 0]
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [calls[0].id]}, "a suspect runs alone"
    assert sent(table.dispatch.finished([(calls[0].id, 0.0001)], 0.0)) == {A: [call.id for call in calls[1:]]}


def test_a_call_whose_result_was_lost_with_its_worker_is_not_run_again() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    calls = table.calls(5, retries=0)
    table.submit(calls)
    actions = table.dispatch.worker_lost(A, "killed", 0.0, begun=calls[2].position)
    assert {action.call for action in actions if isinstance(action, GiveUp)} == set(calls[:3])
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [call.id for call in calls[3:]]}


def test_a_call_past_its_limits_ends_whatever_its_retries_and_those_behind_it_move_for_free() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    calls = table.calls(4, retries=0)
    calls[1].retries = 3
    table.submit(calls)
    over = calls[1].position
    actions = table.dispatch.worker_lost(A, "ran too long", 0.0, begun=over, overran=over)
    assert [a for a in actions if isinstance(a, GiveUp) and a.overran] == [GiveUp(calls[1], A, "ran too long", True)]
    assert [call.losses for call in calls[2:]] == [0, 0]
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [call.id for call in calls[2:]]}


def test_where_nobody_knows_what_a_worker_began_all_that_was_sent_may_have_begun() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    calls = table.calls(3, retries=0)
    table.submit(calls)
    actions = table.dispatch.worker_lost(A, "its node is gone", 0.0)
    assert {action.call for action in actions if isinstance(action, GiveUp)} == set(calls)


def test_a_call_that_had_not_left_the_client_is_not_charged() -> None:
    table = Table(A)
    (call,) = table.calls(1, retries=0)
    table.dispatch.submit([call], 0.0)
    assert table.dispatch.worker_lost(A, "killed", 0.0) == []
    assert call.losses == 0


def test_poison_is_given_up_after_its_retries_and_its_neighbours_survive() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    innocent, poison, bystander = table.calls(3, retries=2)
    actions = table.submit([innocent, poison, bystander])
    given_up: list[GiveUp] = []
    for _ in range(20):
        running = list(itertools.chain(*sent(actions).values()))
        actions = []
        for call_id in running:
            if call_id == poison.id:
                actions += table.dispatch.worker_lost(A, "killed by signal 9", 0.0, begun=poison.position)
                given_up += [action for action in actions if isinstance(action, GiveUp)]
                actions += number(table.dispatch.worker_up(A, 0.0))
                break
            actions += number(table.dispatch.finished([(call_id, 0.0001)], 0.0))
    assert [action.call for action in given_up] == [poison]
    assert given_up[0].reason == "killed by signal 9"
    assert poison.losses == 3
    assert table.dispatch.unfinished == 0


def test_a_preemption_uses_up_no_retry_of_a_call_that_may_be_repeated_and_fails_the_others() -> None:
    table = Table(A)
    repeatable, once, together = *table.calls(1, retries=1), *table.calls(1, retries=0), *table.calls(1, together=True)
    given_up: list[GiveUp] = []

    def lose(call: CallState, *, preempted: bool) -> None:
        actions = table.submit([call]) if table.dispatch.call(call.id) is None else []
        assert call.worker == A
        actions = table.dispatch.worker_lost(A, "taken", 0.0, preempted=preempted)
        given_up.extend(action for action in actions if isinstance(action, GiveUp))
        number(table.dispatch.worker_up(A, 0.0))

    for preempted in (True, True, False, True, True):
        lose(repeatable, preempted=preempted)
    assert (given_up, repeatable.losses) == ([], 1)
    lose(repeatable, preempted=False)
    for call in (once, together):
        lose(call, preempted=True)
    assert [action.call for action in given_up] == [repeatable, once, together]
    assert table.dispatch.unfinished == 0


def test_with_no_worker_left_what_waits_is_given_up() -> None:
    table = Table(A)
    calls = table.calls(3, retries=0)
    table.submit(calls)
    actions = table.dispatch.worker_gone(A, "its node ended", 0.0)
    assert {action.call.id for action in actions if isinstance(action, GiveUp)} == {call.id for call in calls}
    assert table.dispatch.unfinished == 0


def test_cancelling_a_waiting_call_drops_it_silently() -> None:
    table = Table(A)
    first, second, third = table.calls(3)
    table.submit([first, second, third])
    assert table.dispatch.cancel([second.id], kill=True) == []
    assert sent(table.dispatch.finished([(first.id, 1.0)], 0.0)) == {A: [third.id]}


@pytest.mark.parametrize(("kill", "action"), [(True, Cancel), (False, Revoke)])
def test_cancelling_a_call_in_flight_asks_its_worker(kill: bool, action: type[Action]) -> None:
    table = Table(A)
    (call,) = table.calls(1)
    table.submit([call])
    assert table.dispatch.cancel([call.id], kill=kill) == [action(A, [call.id])]
    table.dispatch.worker_lost(A, "cancelled", 0.0)
    assert table.dispatch.unfinished == 0


def test_what_waits_behind_an_overdue_call_is_taken_back_for_idle_workers() -> None:
    table = Table(A)
    table.learn("f", 0.001)
    slow, *rest = table.calls(4)
    table.submit([slow, *rest])
    table.dispatch.worker_up(B, 0.0)
    assert table.dispatch.rebalance(0.01) == []
    ids = [call.id for call in rest]
    assert table.dispatch.rebalance(1.0) == [Revoke(A, ids)]
    assert sent(table.dispatch.given_back(ids, 1.0)) == {B: ids}


def test_what_waits_behind_an_overdue_call_is_taken_back_although_younger_calls_keep_all_workers_busy() -> None:
    table = Table(A, B)
    table.learn("f", 0.005)
    slow, *younger = table.calls(40)
    (last_used,) = sent(table.submit([slow])).keys()
    other = A if last_used == B else B
    shares = sent(table.submit(younger))
    behind = shares[last_used]
    table.dispatch.finished([(shares[other][0], 0.005)], 0.99)
    assert table.dispatch.rebalance(1.0) == [Revoke(last_used, behind)]
    assert table.dispatch.rebalance(1.0) == [], "one request is enough"
    table.dispatch.given_back(behind, 1.0)
    resent = sent(table.dispatch.finished([(call_id, 0.005) for call_id in shares[other][1:]], 1.1))
    assert resent[other][: len(behind)] == behind, "before the younger ones"


def test_nothing_is_taken_back_from_the_only_worker_that_goes_on() -> None:
    table = Table(A)
    table.learn("f", 0.001)
    table.submit(table.calls(4))
    assert table.dispatch.rebalance(1.0) == []


def test_of_two_overdue_workers_one_keeps_its_calls_as_no_other_would_run_them_earlier() -> None:
    table = Table(A, B)
    table.learn("f", 0.001)
    shares = sent(table.submit(table.calls(8)))
    (revoked,) = (action for action in table.dispatch.rebalance(1.0) if isinstance(action, Revoke))
    assert revoked.call_ids == shares[revoked.worker][1:]


@pytest.mark.parametrize("preempted", [True, False])
def test_an_interrupted_call_runs_on_the_next_idle_worker_and_never_waits_behind_a_running_one(preempted: bool) -> None:
    table = Table(A)
    table.learn("f", 0.001)
    running, *behind = table.calls(3)
    table.submit([running, *behind])
    table.dispatch.worker_up(B, 0.0)
    (moved,) = table.calls(1)
    assert sent(table.submit([moved])) == {B: [moved.id]}

    actions = table.dispatch.worker_lost(B, "outbid", 0.0, preempted=preempted, begun=moved.position)
    assert sent(actions) == {}, "A has room, but its running call may take hours"
    table.dispatch.given_back([call.id for call in behind], 0.0)
    assert sent(table.dispatch.worker_up(B, 0.0)) == {B: [moved.id]}, "before those that had not begun"
    assert moved.losses == (0 if preempted else 1)


def test_interrupted_calls_wait_in_the_order_of_their_losses() -> None:
    table = Table(A, B)
    first, second = table.calls(2)
    begun = sent(table.submit([first, second]))
    for worker in (B, A):
        assert sent(table.dispatch.worker_lost(worker, "outbid", 0.0, preempted=True)) == {}
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: begun[B]}
    assert sent(table.dispatch.worker_up(B, 0.0)) == {B: begun[A]}


def test_the_successor_of_an_overdue_worker_gets_a_whole_window() -> None:
    table = Table(A, B)
    table.learn("f", 0.001)
    table.submit(table.calls(12))
    (revoked,) = (action for action in table.dispatch.rebalance(1.0) if isinstance(action, Revoke))
    table.dispatch.worker_lost(revoked.worker, "killed", 1.0, preempted=True, begun=0)
    table.dispatch.worker_up(revoked.worker, 1.0)
    assert len(sent(table.submit(table.calls(20)))[revoked.worker]) > 1


def test_calls_far_away_are_not_overdue_before_they_can_have_answered() -> None:
    table = Table()
    table.dispatch.worker_up(A, 0.0, round_trip_s=0.3)
    table.learn("f", 0.001)
    calls = table.calls(4)
    table.submit(calls)
    table.dispatch.worker_up(B, 0.0)
    assert table.dispatch.rebalance(0.3) == []
    assert table.dispatch.rebalance(0.4) == [Revoke(A, [call.id for call in calls[1:]])]


def test_one_slow_call_teaches_caution() -> None:
    table = Table(A)
    table.learn("f", 0.0001)
    table.learn("f", 1.0)
    assert len(sent(table.submit(table.calls(10)))[A]) == 1


def test_no_call_is_lost_or_run_twice_in_a_random_history() -> None:
    import random

    chance = random.Random(7)
    workers = [WorkerId(node, index) for node in range(3) for index in range(2)]
    table = Table(*workers)
    in_flight: dict[WorkerId, list[int]] = {worker: [] for worker in workers}
    finished: list[int] = []
    submitted: list[int] = []

    def apply(actions: Sequence[Action]) -> None:
        for worker, ids in sent(actions).items():
            in_flight[worker] += ids
        assert not any(isinstance(action, GiveUp) for action in actions)

    for _ in range(2000):
        worker = chance.choice(workers)
        match chance.randrange(10):
            case 0:
                calls = table.calls(chance.randrange(8), chance.choice("fg"), retries=10**6)
                submitted += [call.id for call in calls]
                apply(table.submit(calls))
            case 1:
                in_flight[worker].clear()
                apply(table.dispatch.worker_lost(worker, "killed", table.now))
                apply(table.dispatch.worker_up(worker, table.now))
            case _ if in_flight[worker]:
                call_id = in_flight[worker].pop(0)
                finished.append(call_id)
                apply(table.dispatch.finished([(call_id, chance.choice([1e-5, 1e-3, 0.5]))], table.now))
            case _:
                pass
    while any(in_flight.values()):
        for worker in workers:
            while in_flight[worker]:
                call_id = in_flight[worker].pop(0)
                finished.append(call_id)
                apply(table.dispatch.finished([(call_id, 1e-4)], table.now))
    assert sorted(finished) == submitted
    assert table.dispatch.unfinished == 0


def test_expected_time_of_an_unknown_kind_is_unbounded() -> None:
    table = Table(A)
    (call,) = table.calls(1)
    table.submit([call])
    assert call.expected_s == math.inf


def test_a_draining_worker_keeps_its_own_calls_gives_back_the_others_and_gets_no_more() -> None:
    table = Table(A)
    table.learn("f", 0.001)
    calls, (own,) = table.calls(3), table.calls(1, pinned=A)
    table.submit([*calls, own])
    table.dispatch.worker_up(B, 0.0)

    assert table.dispatch.drain(A) == [Revoke(A, [call.id for call in calls])]
    assert sent(table.dispatch.given_back([calls[1].id, calls[2].id], 0.0)) == {B: [calls[1].id, calls[2].id]}
    (late,) = table.calls(1, pinned=A)
    assert sent(table.submit([late, *table.calls(1)])).get(A, []) == [late.id]
    assert not table.dispatch.drained(A)
    table.dispatch.finished([(call.id, 0.001) for call in (calls[0], own, late)], 0.0)
    assert table.dispatch.drained(A)


def test_a_worker_that_comes_back_does_its_own_calls_then() -> None:
    table = Table(A)
    running, own = table.calls(1)[0], table.calls(1, pinned=A)[0]
    table.submit([running])
    table.dispatch.drain(A, comes_back=True)
    assert sent(table.submit([own])) == {}
    table.dispatch.finished([(running.id, 1.0)], 0.0)
    assert table.dispatch.drained(A), "it is not waited for, since it waits for the worker"
    table.dispatch.worker_lost(A, "renewed", 0.0)
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [own.id]}


def test_a_worker_that_comes_back_gives_back_even_its_own_calls_unless_they_have_begun() -> None:
    table = Table(A)
    table.learn("f", 0.001)
    running, own = table.calls(2, pinned=A)
    table.submit([running, own])
    assert table.dispatch.drain(A, comes_back=True) == [Revoke(A, [running.id, own.id])]
    assert sent(table.dispatch.given_back([own.id], 0.0)) == {}
    assert sent(table.dispatch.finished([(running.id, 0.001)], 0.0)) == {}
    assert table.dispatch.drained(A)
    table.dispatch.worker_lost(A, "renewed", 0.0)
    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [own.id]}


def test_a_worker_that_runs_a_job_gives_back_its_calls_and_gets_the_next_ones_after_it() -> None:
    table = Table(A, B)
    first, own = table.calls(1)[0], table.calls(1, pinned=A)[0]
    table.submit([first, own])

    assert table.dispatch.job_running(A, 0.0, runs=True) == [Revoke(A, [own.id])]
    assert sent(table.dispatch.given_back([own.id], 0.0)) == {}
    assert sent(table.submit(table.calls(2))) == {}
    assert not table.dispatch.drained(A), "its node must not be ended"
    assert set(sent(table.dispatch.job_running(A, 0.0, runs=False))) == {A}


def test_workers_that_run_jobs_are_told_once_a_run_that_calls_wait() -> None:
    table = Table(A, B)
    table.dispatch.job_running(A, 0.0, runs=True)
    table.submit(table.calls(1))
    assert table.dispatch.held_up() == [], "nothing waits"

    table.submit(table.calls(1))
    assert [table.dispatch.held_up() for _ in range(2)] == [[A], []]
    table.dispatch.job_running(A, 0.0, runs=True)
    assert table.dispatch.held_up() == [A]


def test_a_worker_whose_process_died_with_its_job_takes_calls_once_it_is_back() -> None:
    table = Table(A)
    table.dispatch.job_running(A, 0.0, runs=True)
    table.dispatch.worker_lost(A, "killed", 0.0)
    (call,) = table.calls(1)
    table.submit([call])

    assert sent(table.dispatch.worker_up(A, 0.0)) == {A: [call.id]}


def test_a_retired_worker_that_was_replaced_gets_its_own_calls_only() -> None:
    table = Table(A)
    table.dispatch.drain(A)
    table.dispatch.worker_lost(A, "killed", 0.0)
    (own,) = table.calls(1, pinned=A)
    table.submit([own, *table.calls(2)])
    assert sent(table.dispatch.worker_up(A, 0.0, retired=True)) == {A: [own.id]}


def test_calls_wait_for_an_expected_worker_even_where_one_was_given_up() -> None:
    table = Table(A)
    table.dispatch.worker_gone(A, "gone", 0.0)
    table.dispatch.expect(A)
    own, other = table.calls(1, pinned=A)[0], table.calls(1)[0]
    assert table.submit([own, other]) == []
    assert table.dispatch.unfinished == 2


# --- the work, for the size of elastic pools


def test_the_work_is_what_waits_and_what_is_left_of_what_runs_by_measured_seconds() -> None:
    table = Table(A)
    table.learn("f", 10.0)
    table.submit(table.calls(5, "f"))
    table.now = 4.0
    load = table.dispatch.workload(table.now)
    assert (load.calls, load.work_s, load.idle_s) == (5, pytest.approx(4 * 10.0 + 6.0), {0: 0.0})


def test_calls_of_an_unknown_function_count_as_long_as_one_of_them_has_run() -> None:
    table = Table(A)
    table.submit(table.calls(5, "new"))
    assert table.dispatch.workload(0.0).work_s == 0.0
    assert table.dispatch.workload(7.0).work_s == pytest.approx(5 * 7.0)


def test_a_call_that_takes_longer_than_expected_is_expected_to_take_as_long_again() -> None:
    table = Table(A)
    table.learn("f", 1.0)
    table.submit(table.calls(3, "f"))
    assert table.dispatch.workload(30.0).work_s == pytest.approx(30.0 + 2 * 30.0)


def test_the_work_of_a_long_queue_is_estimated_from_a_sample() -> None:
    table = Table(A)
    table.learn("f", 1.0)
    table.learn("g", 3.0)
    mixed = [call for pair in zip(table.calls(25_000, "f"), table.calls(25_000, "g"), strict=True) for call in pair]
    table.submit(mixed)
    load = table.dispatch.workload(table.now)
    assert load.calls == pytest.approx(50_000, rel=0.01)
    assert load.work_s == pytest.approx(100_000, rel=0.02)


def test_a_node_is_idle_since_the_last_of_its_workers_had_a_call() -> None:
    table = Table(A, B, WorkerId(1, 0))
    table.dispatch.expect(WorkerId(2, 0))
    (call,) = table.calls(1)
    (send,) = table.submit([call])
    table.now = 50.0
    assert table.dispatch.workload(60.0).idle_s == {0: 60.0, 1: 0.0, 2: 0.0}, "node 2 is coming"
    table.dispatch.finished([(call.id, 50.0)], table.now)
    assert table.dispatch.workload(60.0).idle_s == {0: 60.0, 1: 10.0, 2: 0.0}
    assert send.worker == WorkerId(1, 0)


def test_nodes_that_leave_and_what_runs_there_are_no_part_of_the_work() -> None:
    table = Table(A, WorkerId(1, 0))
    table.submit(table.calls(2))
    table.dispatch.drain(WorkerId(1, 0))
    load = table.dispatch.workload(1.0)
    assert (load.calls, load.idle_s) == (1, {0: 0.0})


def test_calls_that_come_while_the_last_worker_leaves_wait_for_the_next_one() -> None:
    table = Table(A)
    table.dispatch.drain(A)
    calls = table.calls(2)
    assert table.submit(calls) == []
    assert table.dispatch.worker_gone(A, "made smaller", table.now, planned=True) == []
    assert sent(table.dispatch.worker_up(B, table.now)) == {B: [calls[0].id]}


def test_a_worker_that_runs_a_job_is_no_worker_for_the_calls_that_wait() -> None:
    table = Table(A)
    table.dispatch.job_running(A, 0.0, runs=True)
    table.submit(table.calls(1))
    load = table.dispatch.workload(600.0)
    assert (load.calls, load.work_s, load.idle_s) == (2, 600.0, {0: 0.0})


@pytest.mark.parametrize(
    ("known_s", "ran_s", "busy_for_s"),
    [(None, 5.0, math.inf), (30.0, 10.0, 20.0), (30.0, 50.0, 50.0)],
    ids=["of an unknown function", "as long as others took", "longer than others: as long again"],
)
def test_a_node_is_busy_for_the_rest_of_its_longest_call(
    known_s: float | None, ran_s: float, busy_for_s: float
) -> None:
    table = Table(A, B, WorkerId(1, 0))
    if known_s is not None:
        table.learn("f", known_s)
    table.submit(table.calls(3))

    assert table.dispatch.busy_for_s(0, table.now + ran_s) == busy_for_s


def test_a_node_without_calls_is_not_busy_and_one_with_a_job_is_for_as_long_as_that_takes() -> None:
    table = Table(A, WorkerId(1, 0))
    table.dispatch.job_running(A, table.now, runs=True)

    assert table.dispatch.busy_for_s(0, table.now) == math.inf
    assert table.dispatch.busy_for_s(1, table.now) == 0.0
