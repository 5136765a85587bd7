"""What user code has seeded is drawn from by user code alone."""

from __future__ import annotations

import time

import skyward as sky
from skyward_dask import SkywardCluster

PATIENCE_S = 30.0


def test_heartbeats_leave_the_seeded_generator_alone() -> None:
    @sky.compute
    def seeded() -> tuple[bool, bool]:
        import random

        import dask.sizeof

        random.seed(3)
        before, sampled = random.getstate(), dask.sizeof.random.getstate()
        deadline = time.monotonic() + PATIENCE_S
        while dask.sizeof.random.getstate() == sampled and time.monotonic() < deadline:
            time.sleep(0.05)
        return dask.sizeof.random.getstate() != sampled, random.getstate() == before

    with SkywardCluster(provider=sky.Local(), display="quiet") as cluster:
        assert seeded() >> cluster.pool == (True, True)
