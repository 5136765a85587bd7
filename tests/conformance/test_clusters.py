"""Cluster managers and what users of ``distributed`` expect of them; Dask's own is the control."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import pytest
from distributed import LocalCluster, Nanny

import skyward as sky
from skyward.testing.clusters import ClusterConformance, StrictClusterConformance
from skyward.testing.provider import FakeProvider
from skyward_dask import SkywardCluster


@pytest.fixture(autouse=True, scope="module")
def scratch() -> Iterator[None]:
    """Dask's own workers make this folder and leave it; their processes leave a resource tracker."""
    folder = Path(tempfile.gettempdir(), "dask-scratch-space")
    folder.mkdir()
    yield
    shutil.rmtree(folder)
    resource_tracker._resource_tracker._stop()


class BrokenNanny(Nanny):
    async def start_unsafe(self) -> NoReturn:
        raise RuntimeError("broken, for a test")


class TestLocalCluster(ClusterConformance):
    threads_per_worker = 2

    def make_cluster(self, *, workers: int, **options: Any) -> LocalCluster:
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=self.threads_per_worker,
            memory_limit="1GiB",
            dashboard_address="127.0.0.1:0",
            **options,
        )

    def make_broken_cluster(self) -> LocalCluster:
        return LocalCluster(n_workers=1, worker_class=BrokenNanny, dashboard_address="127.0.0.1:0")


class TestSkywardCluster(StrictClusterConformance):
    fewest_workers = 1
    finds_by_name = True

    def make_cluster(self, *, workers: int, security: bool = True, **options: Any) -> SkywardCluster:
        assert security, "every pool has certificates of its own"
        return SkywardCluster(provider=sky.Local(), nodes=max(workers, 1), display="quiet", **options)

    def make_broken_cluster(self) -> SkywardCluster:
        provider = FakeProvider()
        provider.fail("offers", sky.CapacityError("broken, for a test"), times=100)
        return SkywardCluster(provider=provider, nodes=1, display="quiet")
