"""Skyward's cluster and what users of ``distributed`` expect of one; ``control_clusters.py`` is Dask's own."""

from __future__ import annotations

from typing import Any

import pytest

import skyward as sky
from skyward.testing.provider import FakeProvider
from skyward_dask import SkywardCluster
from support.dask_clusters import StrictClusterConformance


@pytest.mark.full
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
