"""The link to the dashboard: asked for when it is read, and never in the way."""

from __future__ import annotations

import dask.config
import pytest
from distributed import Client

from skyward.errors import UnreachableError
from skyward_dask import SkywardCluster
from support.elastic_fleet import FakeElasticFleet

LINK = "http://127.0.0.1:8787/status?token=secret"


def test_it_is_asked_for_once_and_only_when_it_is_read(cluster, fleet):
    assert fleet.dashboard_asked == 0
    assert cluster.dashboard_link == cluster.dashboard_link == cluster.get_dashboard_link() == LINK
    assert fleet.dashboard_asked == 1


def test_it_leads_through_the_tunnel():
    with FakeElasticFleet(tunnelled=True) as fleet, SkywardCluster(fleet) as cluster:
        assert cluster.dashboard_link == "http://127.0.0.2:8787/status?token=secret"


def test_notebooks_show_it_without_its_token(cluster):
    with Client(cluster) as client:
        assert client.dashboard_link == LINK
        for shown in (client._repr_html_(), cluster._repr_html_()):
            assert LINK.partition("?")[0] in shown
            assert "secret" not in shown


def test_why_there_is_none_can_be_asked(cluster, fleet):
    fleet.dashboard = {"error": "bokeh is missing: pip install 'bokeh>=3.1'"}
    assert cluster.dashboard_link == ""
    with pytest.raises(UnreachableError, match="no dashboard: bokeh is missing"):
        cluster.get_dashboard_link()
    fleet.dashboard = {"address": "127.0.0.1:8787", "token": "secret"}
    assert cluster.dashboard_link == LINK


def test_one_that_takes_its_time_is_not_waited_for(cluster, fleet, until):
    fleet.dashboard_comes.clear()
    with dask.config.set({"skyward.dashboard-timeout": "50ms"}):
        assert cluster.dashboard_link == ""
        assert cluster.dashboard_link == ""
        fleet.dashboard_comes.set()
        until(lambda: cluster.dashboard_link == LINK)
    assert fleet.dashboard_asked == 1


def test_a_new_scheduler_has_another(cluster, fleet, until):
    assert cluster.dashboard_link == LINK
    fleet.dashboard = {"address": "127.0.0.1:9999", "token": "other"}
    fleet.replace_scheduler()
    until(lambda: cluster.dashboard_link == "http://127.0.0.1:9999/status?token=other")
