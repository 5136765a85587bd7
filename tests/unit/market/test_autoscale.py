"""How many nodes the work of an elastic pool is worth, as tables."""

from __future__ import annotations

import pytest

from skyward.market.autoscale import Backlog, Workload, wanted, workers_worth
from skyward.request.request import NodeRange

ZERO_TO_EIGHT = NodeRange(minimum=0, maximum=8, idle_s=300)


@pytest.mark.parametrize(
    ("work_s", "calls", "workers"),
    [
        (0, 0, 0),
        (0, 1, 1),  # of a function that is not known: one worker measures it
        (0, 1000, 1),
        (59, 1000, 1),  # less than a boot in all
        (61, 1000, 2),
        (600, 1000, 10),
        (600, 4, 4),  # no worker without a call
        (3600, 1, 1),
    ],
)
def test_a_worker_is_worth_its_boot_if_it_has_as_much_work_and_a_call(work_s: float, calls: int, workers: int) -> None:
    assert workers_worth(work_s, calls, boot_s=60) == workers


def test_a_boot_of_no_time_counts_as_a_second() -> None:
    assert workers_worth(8.0, 100, boot_s=0.0) == 8


@pytest.mark.parametrize(
    ("size", "calls", "work_s", "idle_s", "nodes"),
    [
        ((0, 8), 0, 0, {}, 0),
        ((0, 8), 1, 0, {}, 1),
        ((0, 8), 100, 4 * 120.0, {}, 4),  # two workers a node, each has a minute
        ((0, 8), 100, 10_000, {}, 8),
        ((2, 8), 0, 0, {}, 0),  # nodes that reached their timeout are bought again for a call only
        ((2, 8), 1, 0, {}, 2),
        ((0, 8), 0, 0, {0: 0, 1: 0, 2: 0}, 3),
        ((0, 8), 0, 0, {0: 299, 1: 299, 2: 10}, 3),
        ((0, 8), 2, 20, {0: 0, 1: 300, 2: 900}, 1),
        ((0, 8), 0, 0, {0: 300, 1: 300, 2: 900}, 0),
        ((1, 8), 0, 0, {0: 300, 1: 300, 2: 900}, 1),
        ((0, 8), 6, 4 * 120.0, {0: 0, 1: 300, 2: 900}, 3),  # idle, and about to be of use
        ((0, 8), 1, 5, {0: 300, 1: 0}, 1),  # only node 0 is idle: the other's work moves there
    ],
)
def test_wanted_nodes(size: tuple[int, int], calls: int, work_s: float, idle_s: dict[int, float], nodes: int) -> None:
    limits = NodeRange(minimum=size[0], maximum=size[1], idle_s=300)
    load = Workload(calls=calls, work_s=work_s, idle_s=idle_s)
    assert wanted(load, limits, nodes=len(idle_s), per_node=2, boot_s=60) == nodes


@pytest.mark.parametrize(("nodes", "calls", "expected"), [(1, 16, 2), (2, 16, 4), (4, 16, 8), (8, 16, 8), (4, 10, 5)])
def test_a_queue_that_is_refilled_doubles_the_nodes_for_which_there_are_calls(
    nodes: int, calls: int, expected: int
) -> None:
    load = Workload(calls=calls, work_s=1.0, idle_s=dict.fromkeys(range(nodes), 0.0))
    assert wanted(load, ZERO_TO_EIGHT, nodes=nodes, per_node=2, boot_s=60, is_refilled=True) == expected


def test_nodes_idle_for_the_longest_time_leave_first() -> None:
    assert Workload(idle_s={0: 400, 1: 299, 2: 900, 3: 300}).idle_nodes(ZERO_TO_EIGHT) == [2, 0, 3]


def looks(*calls: int, workers: int = 2) -> list[bool]:
    """What a backlog says every ten seconds, with a boot of 30 s."""
    backlog = Backlog()
    return [backlog.is_refilled(each, workers, 10.0 * turn, boot_s=30) for turn, each in enumerate(calls)]


def test_a_backlog_is_refilled_if_it_has_not_become_shorter_for_a_boot() -> None:
    assert looks(8, 8, 8, 8, 8) == [False, False, False, True, True]
    assert looks(8, 9, 12, 30) == [False, False, False, True]
    assert looks(8, 7, 8, 7, 8) == [False, False, False, False, True]


def test_a_batch_that_is_worked_off_is_not_refilled_and_neither_are_calls_that_do_not_wait() -> None:
    assert not any(looks(*range(100, 3, -1)))
    assert not any(looks(2, 2, 2, 2, 2, 2))
    assert looks(8, 8, 2, 8, 8, 8, 8) == [False] * 6 + [True]


def test_time_counts_anew_after_a_change_of_the_size() -> None:
    backlog = Backlog()
    assert not backlog.is_refilled(8, 2, 0, boot_s=30)
    assert backlog.is_refilled(8, 2, 30, boot_s=30)
    assert not backlog.is_refilled(8, 4, 31, boot_s=30)
    assert not backlog.is_refilled(8, 4, 60, boot_s=30)
    assert backlog.is_refilled(8, 4, 61, boot_s=30)
