"""Counts of Dask's tasks, state by state; on a real scheduler in tests/e2e/dask/test_dask.py."""

from __future__ import annotations

import pytest

from skyward.events import Progress
from skyward_dask.tasks import TaskCounts


class Tasks:
    """Tasks that a test moves, and the reports about them."""

    def __init__(self, counts: TaskCounts) -> None:
        self.counts = counts
        self.running: list[str] = []

    def __call__(self, state: str, *keys: str) -> None:
        for key in keys:
            self.counts.move(key, state)

    def look(self) -> list[Progress]:
        return list(self.counts.look(lambda: self.running))

    def shown(self) -> list[tuple[str, int, int, int, int, int | None]]:
        """Return label, done, failed, cancelled, running and total of each report."""
        return [(each.label, each.done, each.failed, each.cancelled, each.running, each.total) for each in self.look()]


@pytest.fixture
def tasks() -> Tasks:
    return Tasks(TaskCounts())


def test_every_task_counts_once_and_the_last_line_is_of_five(tasks: Tasks) -> None:
    tasks("waiting", "inc-1", "inc-2", "inc-3", "inc-4", "inc-5")
    tasks("processing", "inc-1", "inc-2")
    tasks.running = ["inc-1", "inc-2", "unknown"]
    assert tasks.shown() == []
    assert tasks.shown() == [("inc", 0, 0, 0, 2, 5)]

    tasks("memory", "inc-1")
    tasks("erred", "inc-2")
    tasks("released", "inc-1", "inc-2")  # used up
    tasks("forgotten", "inc-1", "inc-2")
    tasks.running = ["inc-3"]
    assert tasks.shown() == [("inc", 1, 1, 0, 1, 5)]

    tasks("memory", "inc-3")
    tasks("released", "inc-4", "inc-5")  # cancelled
    tasks("forgotten", "inc-4", "inc-5")
    tasks.running = []
    assert tasks.shown() == [("inc", 2, 1, 2, 0, 5)]
    assert not tasks.counts
    assert tasks.shown() == []


def test_tasks_of_a_lost_worker_wait_again_and_lost_results_are_no_longer_done(tasks: Tasks) -> None:
    tasks("waiting", "inc-1", "inc-2", "inc-3")
    tasks("memory", "inc-1")
    tasks.look()
    assert tasks.shown() == [("inc", 1, 0, 0, 0, 3)]

    for key in ("inc-1", "inc-2"):
        tasks("released", key)
        tasks("waiting", key)
    assert tasks.shown() == [("inc", 0, 0, 0, 0, 3)]
    tasks("memory", "inc-1", "inc-2", "inc-3")
    assert tasks.shown() == [("inc", 3, 0, 0, 0, 3)]

    tasks("released", "inc-3")
    tasks("waiting", "inc-3")  # its work is over: it is work of its own
    tasks.running = ["inc-3"]
    tasks.look()
    assert tasks.shown() == [("inc", 0, 0, 0, 1, 1)]


def test_what_has_not_begun_what_takes_an_instant_and_scattered_data_are_not_shown(tasks: Tasks) -> None:
    tasks("memory", "ndarray-1")
    tasks("waiting", "sum-1")
    tasks("waiting", "inc-1")
    tasks("memory", "inc-1")

    assert [tasks.shown() for _ in range(3)] == [[], [], []]


def test_keys_without_labels_share_one(tasks: Tasks) -> None:
    keys = [f"item{number}" for number in range(100)]
    tasks("waiting", *keys)
    tasks("memory", *keys[:50])
    tasks.look()
    tasks("memory", keys[50])

    assert ("tasks", 35, 0, 0, 0, 84) in tasks.shown()
