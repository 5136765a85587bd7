from __future__ import annotations

import joblib
import pytest
from joblib import Parallel, delayed, parallel_config
from packaging.version import Version

from skyward.events import Progress
from skyward_joblib.backend import LoopProgress


class Pool:
    def __init__(self):
        self.events = []

    def publish(self, event):
        self.events.append(event)


def test_progress_starts_with_the_first_batch_and_ends_with_the_last():
    pool = Pool()
    progress = LoopProgress(pool, total=3)
    progress.begin("fit")
    progress.add(2)
    progress.begin("score")
    progress.add(1)
    progress.end()
    assert pool.events == [Progress("fit", 0, 3), Progress("fit", 2, 3), Progress("fit", 3, 3)]


def test_many_batches_in_a_moment_are_told_together():
    pool = Pool()
    progress = LoopProgress(pool, total=1000)
    progress.begin("fit")
    for _ in range(1000):
        progress.add(1)
    assert len(pool.events) < 100
    assert pool.events[-1] == Progress("fit", 1000, 1000)


def test_given_up_work_says_so_and_what_ends_later_is_not_told():
    pool = Pool()
    progress = LoopProgress(pool, total=9)
    progress.begin("fit")
    progress.add(2)
    progress.fail()
    progress.end()
    progress.add(1)
    progress.end()
    assert pool.events[2:] == [Progress("fit", 2, 9, failed=1, cancelled=6)]


def test_call_without_tasks_is_silent():
    pool = Pool()
    LoopProgress(pool, total=None).end()
    assert pool.events == []


@pytest.mark.skipif(Version(joblib.__version__) < Version("1.5"), reason="Parallel does not count its tasks")
def test_a_failing_loop_counts_its_failure_and_the_tasks_that_it_gives_up(fleet):
    with parallel_config("skyward", pool=fleet), pytest.raises(ZeroDivisionError):
        Parallel(batch_size=1, pre_dispatch="all")([delayed(divmod)(n, n - 1) for n in range(5)])
    last = fleet.events[-1]
    assert last.over
    assert (last.total, last.failed) == (5, 1)
    assert [event.over for event in fleet.events[:-1]] == [False] * (len(fleet.events) - 1)


@pytest.mark.skipif(Version(joblib.__version__) < Version("1.5"), reason="Parallel does not count its tasks")
def test_loop_tells_its_pool_how_far_it_is(fleet):
    with parallel_config("skyward", pool=fleet):
        Parallel(batch_size=2, pre_dispatch="all")([delayed(abs)(n) for n in range(4)])
    assert fleet.events == [Progress("abs", done, 4) for done in (0, 2, 4)]


def test_loop_of_unknown_length_tells_its_pool_when_it_is_through(fleet):
    with parallel_config("skyward", pool=fleet):
        Parallel(batch_size=1)(delayed(abs)(n) for n in range(2))
    assert fleet.events[:2] == [Progress("abs", 0, None), Progress("abs", 1, None)]
    assert fleet.events[-1] == Progress("abs", 2, 2)
