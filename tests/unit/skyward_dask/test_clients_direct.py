"""Clients that would dial workers past a tunnel."""

from __future__ import annotations

import dask.config
import pytest
from distributed import Client

from skyward.errors import ConfigurationError
from skyward_dask import SkywardCluster
from support.elastic_fleet import FakeElasticFleet


@pytest.fixture
def tunnelled():
    with FakeElasticFleet(tunnelled=True) as fleet, SkywardCluster(fleet, name="tunnelled") as cluster:
        yield cluster


def test_are_refused_at_once_and_leave_dask_as_it_was(tunnelled):
    with pytest.raises(ConfigurationError, match="direct_to_workers=True cannot work here"):
        Client(tunnelled, direct_to_workers=True)
    assert dask.config.get("scheduler", None) is None


async def test_are_refused_asynchronously_too(tunnelled):
    with pytest.raises(ConfigurationError, match="direct_to_workers=True cannot work here"):
        await Client(tunnelled, direct_to_workers=True, asynchronous=True, set_as_default=False)


def test_others_are_not(tunnelled):
    with Client(tunnelled) as client:
        assert client.submit(pow, 2, 4).result() == 16


def test_they_work_where_there_is_no_tunnel(tunnelled, cluster):
    with Client(cluster, direct_to_workers=True) as client:
        assert client.gather(client.scatter([1, 2, 3])) == [1, 2, 3]


def test_the_setting_is_refused_before_anything_runs():
    with (
        FakeElasticFleet(tunnelled=True) as fleet,
        dask.config.set({"distributed.client.direct-to-workers": True}),
        pytest.raises(ConfigurationError, match=r"distributed.client.direct-to-workers cannot work here"),
    ):
        SkywardCluster(fleet)
