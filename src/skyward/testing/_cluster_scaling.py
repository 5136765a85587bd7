"""Tests of a cluster that grows, shrinks and heals: by hand, and by itself."""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from inspect import isawaitable
from operator import add
from typing import Any

import pytest

from skyward.testing._cluster_base import ClusterSuite, membership

__all__ = ["ClusterAdapting", "ClusterScaling", "StrictScaling"]

_TASK_S = 0.1
_HELD_S = 0.3
_LOOK_S = 0.2


class ClusterScaling(ClusterSuite):
    """Scaling by hand, and workers that are lost."""

    def test_scale_returns_before_the_workers_are_there(self, elastic: Any) -> None:
        """They are in the plan by then, and come: no fewer than asked for, in whole steps."""
        target = self.whole(self.above(1) + 1)
        assert elastic.scale(self.above(1) + 1) is None
        before = membership(elastic)
        assert len(before.plan) == target
        assert len(before.observed) < target
        elastic.wait_for_workers(target, timeout=self.patience_s)
        self.settle(elastic, target)

    def test_scale_down_ends_workers(self, elastic: Any) -> None:
        """As many as are too many; the others are the same as before."""
        elastic.scale(self.above(2))
        before = self.settle(elastic, self.above(2))
        assert elastic.scale(self.above(1)) is None
        after = self.settle(elastic, self.above(1))
        assert after.observed < before.observed

    def test_last_word_counts(self, elastic: Any) -> None:
        """The last call of ``scale`` counts, even while earlier ones are under way."""
        for steps in (2, 1, 3, 1):
            elastic.scale(self.above(steps))
        self.settle(elastic, self.above(1))
        self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(1), for_s=_HELD_S)

    def test_work_waits_for_workers(self, elastic: Any, elastic_client: Any) -> None:
        """It runs as soon as somebody is there, if there was nobody."""
        waiting = elastic_client.submit(add, "a", "b", pure=False)
        elastic.scale(self.above(1))
        assert waiting.result(timeout=self.patience_s) == "ab"

    def test_scale_by_cores_and_memory(self, elastic: Any) -> None:
        """The workers that have them, no fewer: where both are given, that have both."""
        elastic.scale(cores=(self.above(1) - 1) * self.threads_per_worker + 1)
        self.settle(elastic, self.above(1))
        limit = min(each["memory_limit"] for each in elastic.scheduler_info["workers"].values())
        elastic.scale(cores=1, memory=f"{math.ceil(limit * (self.above(2) - 0.5))} B")
        self.settle(elastic, self.above(2))

    def test_scale_down_by_name_takes_those(self, elastic: Any) -> None:
        """And nobody else."""
        elastic.scale(self.above(1))
        first = self.settle(elastic, self.above(1)).observed
        elastic.scale(self.above(2))
        second = self.settle(elastic, self.above(2)).observed - first
        _scale_down(elastic, second)
        assert self.settle(elastic, self.above(1)).observed == first

    def test_work_goes_on_while_workers_come_and_go(self, elastic: Any, elastic_client: Any) -> None:
        """No task is lost."""
        elastic.scale(self.above(1))
        naps = _load(elastic_client, self.above(2))
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        elastic.scale(self.above(1))
        assert elastic_client.gather(naps) == [None] * len(naps)

    def test_killed_worker_is_replaced(self, elastic: Any, elastic_client: Any) -> None:
        """Other workers do its tasks."""
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        naps = _load(elastic_client, self.above(2))
        self.kill_one(elastic_client)
        elastic_client.gather(naps)
        self.settle(elastic, self.above(2))

    def hold_results(self, client: Any) -> dict[Any, str]:
        """One result per worker, held by it alone; each would be another if it were computed again."""
        held = [
            client.submit(secrets.token_hex, 8, pure=False, workers=[worker], allow_other_workers=True)
            for worker in client.scheduler_info(n_workers=-1)["workers"]
        ]
        return dict(zip(held, client.gather(held), strict=True))

    def kill_one(self, client: Any) -> None:
        """Kill a worker that is not among the fewest, and wait until another process does its work."""
        before = _pids(client)
        worker = list(before)[-1]
        client.run(signal.raise_signal, signal.SIGKILL, workers=[worker], on_error="return")
        self.until(
            lambda: set(_pids(client).values()),
            lambda pids: before[worker] not in pids and len(pids) == len(before),
            what=f"{len(before)} processes without {before[worker]}",
        )


class ClusterAdapting(ClusterScaling):
    """Scaling by itself."""

    def test_adapt_grows_under_load_and_shrinks_after_it(self, elastic: Any, elastic_client: Any) -> None:
        """It keeps to its limits."""
        low, high = self.above(1), self.above(3)
        seen: list[int] = []

        def plan() -> int:
            seen.append(len(membership(elastic).plan))
            return seen[-1]

        with self.adapting(elastic, minimum=low, maximum=high):
            self.settle(elastic, low)
            naps = _load(elastic_client, high, tasks_per_worker=200)
            self.until(plan, lambda workers: workers == high, what=f"{high} workers under load")
            elastic_client.cancel(naps)
            self.until(plan, lambda workers: workers == low, what=f"{low} workers after it")
            self.settle(elastic, low)
            self.stays(plan, lambda workers: workers == low, for_s=_HELD_S)
        assert max(seen) == high

    def test_adapt_replaces_a_killed_worker(self, elastic: Any, elastic_client: Any) -> None:
        """And keeps the number it should."""
        with self.adapting(elastic, minimum=self.above(2), maximum=self.above(2)):
            self.settle(elastic, self.above(2))
            self.kill_one(elastic_client)
            self.settle(elastic, self.above(2))

    def test_next_adapt_has_the_last_word(self, elastic: Any, elastic_client: Any) -> None:
        """The first one's limits are forgotten. Results of workers that must go are moved, not computed again."""
        with self.adapting(elastic, minimum=self.above(2), maximum=self.above(3)):
            self.settle(elastic, self.above(2))
            held = self.hold_results(elastic_client)
            with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1)):
                self.settle(elastic, self.above(1))
                assert elastic_client.gather(list(held)) == list(held.values())
                self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(1), for_s=_HELD_S)

    def test_scale_after_adapting_has_stopped_holds(self, elastic: Any) -> None:
        """Nothing adapts any more."""
        with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1)):
            self.settle(elastic, self.above(1))
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(2), for_s=_HELD_S)

    @contextmanager
    def adapting(self, cluster: Any, *, minimum: int, maximum: int, interval: str = "50ms") -> Generator[None]:
        """Let ``cluster`` adapt quickly; stop it afterwards, and let the look that is under way end."""
        adaptive = cluster.adapt(
            minimum=minimum, maximum=maximum, interval=interval, wait_count=3, target_duration="200ms"
        )
        try:
            yield
        finally:
            _stop(cluster, adaptive)
            self.stays(lambda: adaptive.state, lambda state: state == "stopped", for_s=_LOOK_S)


class StrictScaling(ClusterAdapting):
    """Checks that ``LocalCluster`` leaves to its user."""

    @pytest.mark.parametrize("workers", [-1, 1.5, "x"])
    def test_scale_refuses_what_is_no_number_of_workers(self, elastic: Any, workers: Any) -> None:
        """By the parameter's name, and nothing changes."""
        with pytest.raises((TypeError, ValueError), match=r"\bn\b|workers"):
            elastic.scale(workers)
        assert membership(elastic).is_settled(self.fewest_workers)

    @pytest.mark.parametrize(
        ("name", "wanted"), [("cores", -1), ("cores", "x"), ("memory", "-1 GB"), ("memory", "much")]
    )
    def test_scale_refuses_what_is_no_amount(self, elastic: Any, name: str, wanted: Any) -> None:
        """By the parameter's name, and nothing changes."""
        with pytest.raises((TypeError, ValueError), match=name):
            elastic.scale(**{name: wanted})
        assert membership(elastic).is_settled(self.fewest_workers)

    @pytest.mark.parametrize("limits", [{"minimum": 3, "maximum": 2}, {"minimum": -1}, {"maximum": "x"}])
    def test_adapt_refuses_limits_that_make_no_sense(self, elastic: Any, limits: dict[str, Any]) -> None:
        """By the parameter's name, and nothing adapts."""
        with pytest.raises((TypeError, ValueError), match="|".join(limits)):
            elastic.adapt(**limits)
        assert membership(elastic).is_settled(self.fewest_workers)

    def test_results_outlive_workers_that_scaling_ends(self, elastic: Any, elastic_client: Any) -> None:
        """They are moved, not computed again."""
        elastic.scale(self.above(3))
        self.settle(elastic, self.above(3))
        held = self.hold_results(elastic_client)
        elastic.scale(self.above(1))
        self.settle(elastic, self.above(1))
        assert elastic_client.gather(list(held)) == list(held.values())

    def test_scale_ends_adapting(self, elastic: Any) -> None:
        """``scale`` counts even while adapting is computing another number."""
        with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1), interval="5ms"):
            self.settle(elastic, self.above(1))
            elastic.scale(self.above(2))
            self.settle(elastic, self.above(2))
            self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(2), for_s=_HELD_S)


def _load(client: Any, workers: int, *, tasks_per_worker: int = 8) -> list[Any]:
    """Submit tasks that keep ``workers`` workers busy for a while; each returns None."""
    naps = [_TASK_S] * (tasks_per_worker * workers)
    return client.map(time.sleep, naps, pure=False)  # noqa: TID251 - the tasks take their time, not the test


def _pids(client: Any) -> dict[str, int]:
    """Return the process id of every worker that answers, by address."""
    answers = client.run(os.getpid, on_error="return")
    return {address: pid for address, pid in answers.items() if isinstance(pid, int)}


def _scale_down(cluster: Any, names: frozenset[Hashable]) -> None:
    async def on_its_loop() -> None:
        scaled = cluster.scale_down(list(names))
        if isawaitable(scaled):
            await scaled

    cluster.sync(on_its_loop)


def _stop(cluster: Any, adaptive: Any) -> None:
    async def on_its_loop() -> None:
        adaptive.stop()

    cluster.sync(on_its_loop)
