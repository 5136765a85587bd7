"""How the suites for cluster managers get their clusters, and how they wait."""

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

# Asserts in library code explain themselves only if pytest is told of the modules before they are imported.
pytest.register_assert_rewrite(
    "skyward.testing._cluster_facts",
    "skyward.testing._cluster_lifecycle",
    "skyward.testing._cluster_scaling",
    "skyward.testing._cluster_security",
)

T = TypeVar("T")

_GLANCE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMembers:
    """Which workers a cluster has, by name.

    Attributes:
        plan: those that should be there.
        requested: those that were asked for.
        observed: those that the scheduler knows.
    """

    plan: frozenset[Hashable]
    requested: frozenset[Hashable]
    observed: frozenset[Hashable]

    def is_settled(self, workers: int) -> bool:
        """Whether all three are the same ``workers`` names."""
        return self.plan == self.requested == self.observed and len(self.plan) == workers


def membership(cluster: Any) -> ClusterMembers:
    """Which workers ``cluster``, a synchronous one, has at one moment of its event loop."""

    async def look() -> ClusterMembers:
        return ClusterMembers(
            plan=frozenset(cluster.plan), requested=frozenset(cluster.requested), observed=frozenset(cluster.observed)
        )

    return cluster.sync(look)


class ClusterSuite:
    """What a subclass says of its cluster manager, and what the suites share.

    Attributes:
        workers_per_step: workers come and go in steps of this many: 4 where every machine has 4.
        fewest_workers: what is left after ``scale(0)``: 1 where the scheduler's machine always has a worker.
        threads_per_worker: the threads of each worker of :meth:`make_cluster`.
        finds_by_name: whether ``from_name`` finds the open clusters of this process; if not, it must raise
            ``NotImplementedError``.
        patience_s: how long anything may take, such as a new worker's coming or a process's end.
    """

    workers_per_step: ClassVar[int] = 1
    fewest_workers: ClassVar[int] = 0
    threads_per_worker: ClassVar[int] = 1
    finds_by_name: ClassVar[bool] = False
    patience_s: ClassVar[float] = 60.0

    def make_cluster(self, *, workers: int, **options: Any) -> Any:
        """A cluster with ``workers`` workers, or ``fewest_workers`` if these are more.

        Must work without fixtures: one test calls it in a process of its own. Quiet: no output of its own.

        Args:
            workers: a multiple of ``workers_per_step``, or 0.
            options: ``asynchronous``, ``name`` and ``scheduler_sync_interval``, which every ``Cluster`` takes, and
                ``security=True``: with temporary certificates. A manager that always has them may ignore this.
        """
        raise NotImplementedError

    def make_broken_cluster(self) -> Any:
        """Try to make a synchronous cluster that cannot start, and raise what its manager raises then."""
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
        """The cluster of ``elastic_client``."""
        return elastic_client.cluster

    def count(self, steps: int) -> int:
        """The workers of a cluster that has ``steps`` steps, the fewest among them."""
        return max(self.whole(self.fewest_workers), steps * self.workers_per_step)

    def above(self, steps: int) -> int:
        """``steps`` steps more than the fewest workers."""
        return self.fewest_workers + steps * self.workers_per_step

    def whole(self, workers: int) -> int:
        """The workers in the steps that ``workers`` workers need."""
        return math.ceil(workers / self.workers_per_step) * self.workers_per_step

    def check_works(self, client: Any) -> None:
        """Assert that ``client`` gets its work done."""
        assert client.submit(add, "a", "b", pure=False).result(timeout=self.patience_s) == "ab"

    def settle(self, cluster: Any, workers: int) -> ClusterMembers:
        """Wait until ``cluster`` has exactly ``workers`` workers and wants no others."""
        return self.until(
            lambda: membership(cluster), lambda seen: seen.is_settled(workers), what=f"{workers} workers to be settled"
        )

    def until(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """Look again and again until what is seen is wanted; return it.

        Raises:
            UnreachableError: ``patience_s`` passed; names ``what`` and what was seen last.
        """
        return asyncio.run(self.eventually(look, wanted, what=what))

    async def eventually(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """As :meth:`until`, where an event loop runs."""

        async def probe() -> tuple[T] | NotYet:
            seen = look()
            return (seen,) if wanted(seen) else NotYet(repr(seen))

        return (await wait_until(probe, deadline_s=self.patience_s, interval_s=_GLANCE_S, what=what))[0]

    def stays(self, look: Callable[[], T], wanted: Callable[[T], bool], *, for_s: float) -> None:
        """Assert that whatever is seen for ``for_s`` seconds is wanted."""

        async def watch() -> None:
            end = SYSTEM_CLOCK.monotonic() + for_s
            while SYSTEM_CLOCK.monotonic() < end:
                assert wanted(look()), look()
                await SYSTEM_CLOCK.sleep(_GLANCE_S)

        asyncio.run(watch())
