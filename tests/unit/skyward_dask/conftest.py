"""A fleet in this process, a cluster on it, and waiting for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from skyward_dask import SkywardCluster
from support.elastic_fleet import FakeElasticFleet

PATIENCE_S = 20.0


def wait_for(condition: Callable[[], object]) -> None:
    """Return once ``condition`` holds; fail when it does not within a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    return wait_for


@pytest.fixture
def fleet() -> Iterator[FakeElasticFleet]:
    with FakeElasticFleet(2, workers_per_node=2) as fleet:
        yield fleet


@pytest.fixture
def cluster(fleet: FakeElasticFleet) -> Iterator[SkywardCluster]:
    with SkywardCluster(fleet, name="tests", scheduler_sync_interval="50ms") as cluster:
        yield cluster
