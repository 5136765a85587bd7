"""Base of the suites for cluster managers: fixtures that make clusters, and helpers that wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from operator import add
from typing import Any, ClassVar, TypeVar

import pytest
from distributed import Client

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until

__all__ = ["ClusterMembers", "ClusterSuite", "membership"]

# pytest rewrites asserts in library code only if the modules are registered before they are imported.
pytest.register_assert_rewrite(
    "skyward.testing._cluster_facts",
    "skyward.testing._cluster_lifecycle",
    "skyward.testing._cluster_scaling",
)

T = TypeVar("T")

_GLANCE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMembers:
    """Names of a cluster's workers.

    Attributes:
        plan: workers that the cluster should have.
        requested: workers that were requested.
        observed: workers that are registered with the scheduler.
    """

    plan: frozenset[Hashable]
    requested: frozenset[Hashable]
    observed: frozenset[Hashable]

    def is_settled(self, workers: int) -> bool:
        """Return True if all three are the same ``workers`` names."""
        return self.plan == self.requested == self.observed and len(self.plan) == workers


def membership(cluster: Any) -> ClusterMembers:
    """Return the workers of ``cluster``, a synchronous one, at one moment of its event loop."""

    async def look() -> ClusterMembers:
        return ClusterMembers(
            plan=frozenset(cluster.plan), requested=frozenset(cluster.requested), observed=frozenset(cluster.observed)
        )

    return cluster.sync(look)


class ClusterSuite:
    """Description of a cluster manager, for subclasses to fill in, and the shared part of the suites.

    Attributes:
        workers_per_step: workers come and go in steps of this many: 4 where every machine has 4.
        fewest_workers: the workers left after ``scale(0)``: 1 where the scheduler's machine always has a worker.
        threads_per_worker: the threads of each worker of :meth:`make_cluster`.
        finds_by_name: True if ``from_name`` finds the open clusters of this process; if not, it must raise
            ``NotImplementedError``.
        patience_s: limit of every wait, such as for a new worker or for the end of a process.
    """

    workers_per_step: ClassVar[int] = 1
    fewest_workers: ClassVar[int] = 0
    threads_per_worker: ClassVar[int] = 1
    finds_by_name: ClassVar[bool] = False
    patience_s: ClassVar[float] = 60.0

    def make_cluster(self, *, workers: int, **options: Any) -> Any:
        """Return a cluster with ``workers`` workers, or ``fewest_workers`` if these are more.

        Must work without fixtures: one test calls it in a process of its own. Quiet: no output of its own.

        Args:
            workers: a multiple of ``workers_per_step``, or 0.
            options: ``asynchronous``, ``name`` and ``scheduler_sync_interval``, which every ``Cluster`` takes, and
                ``security=True``: with temporary certificates. A manager that always has them may ignore this.
        """
        raise NotImplementedError

    def make_broken_cluster(self) -> Any:
        """Try to make a synchronous cluster that cannot start; raise its manager's exception."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Any]:
        """Two steps of workers, with certificates, for all tests that only look."""
        suite = cls()
        with suite.make_cluster(workers=suite.count(2), security=True) as cluster:
            yield cluster

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, cluster: Any) -> Iterator[Any]:
        """Of ``cluster``; not the default client."""
        with Client(cluster, set_as_default=False) as client:
            yield client

    @pytest.fixture(scope="class")
    @classmethod
    def resting_client(cls) -> Iterator[Any]:
        """Of a cluster with the fewest workers."""
        with cls().make_cluster(workers=0) as cluster, Client(cluster, set_as_default=False) as client:
            yield client

    @pytest.fixture
    def elastic_client(self, resting_client: Any) -> Iterator[Any]:
        """Of a cluster (its ``cluster``) that may be scaled; it has the fewest workers before and after each test."""
        yield resting_client
        resting_client.cluster.scale(0)
        self.settle(resting_client.cluster, self.fewest_workers)

    @pytest.fixture
    def elastic(self, elastic_client: Any) -> Any:
        """Return the cluster of ``elastic_client``."""
        return elastic_client.cluster

    def count(self, steps: int) -> int:
        """Return the number of workers of a cluster that has ``steps`` steps, the fewest included."""
        return max(self.whole(self.fewest_workers), steps * self.workers_per_step)

    def above(self, steps: int) -> int:
        """Return the number of workers that is ``steps`` steps above the fewest."""
        return self.fewest_workers + steps * self.workers_per_step

    def whole(self, workers: int) -> int:
        """Return ``workers``, rounded up to whole steps."""
        return math.ceil(workers / self.workers_per_step) * self.workers_per_step

    def check_works(self, client: Any) -> None:
        """Assert that ``client`` gets its work done."""
        assert client.submit(add, "a", "b", pure=False).result(timeout=self.patience_s) == "ab"

    def settle(self, cluster: Any, workers: int) -> ClusterMembers:
        """Wait until ``cluster`` has exactly ``workers`` workers and no others are planned."""
        return self.until(
            lambda: membership(cluster), lambda seen: seen.is_settled(workers), what=f"{workers} workers to be settled"
        )

    def until(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """Call ``look`` until ``wanted`` accepts its result; return that.

        Raises:
            UnreachableError: ``patience_s`` passed; the message has ``what`` and the last result.
        """
        return asyncio.run(self.eventually(look, wanted, what=what))

    async def eventually(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """Do the same as :meth:`until` where an event loop runs."""

        async def probe() -> tuple[T] | NotYet:
            seen = look()
            return (seen,) if wanted(seen) else NotYet(repr(seen))

        return (await wait_until(probe, deadline_s=self.patience_s, interval_s=_GLANCE_S, what=what))[0]

    def stays(self, look: Callable[[], T], wanted: Callable[[T], bool], *, for_s: float) -> None:
        """Assert that ``wanted`` accepts every observation for ``for_s`` seconds."""

        async def watch() -> None:
            end = SYSTEM_CLOCK.monotonic() + for_s
            while SYSTEM_CLOCK.monotonic() < end:
                assert wanted(look()), look()
                await SYSTEM_CLOCK.sleep(_GLANCE_S)

        asyncio.run(watch())
