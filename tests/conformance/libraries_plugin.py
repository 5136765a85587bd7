"""A pytest plugin that gives the tests of ``libraries.py`` a cluster: Skyward's, or Dask's own as the control."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster

import skyward as sky
from skyward_dask import SkywardCluster

WORKERS = 2


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.config.getoption("--backend") == "skyward":
        with SkywardCluster(provider=sky.Local(), nodes=WORKERS, display="quiet") as cluster:
            yield cluster
    else:
        with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
            yield cluster


@pytest.fixture
def client(cluster: Any) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client
