"""A cluster object from its first parameter to its close."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import warnings

import pytest
from distributed import Client, Security, Status

import skyward as sky
from skyward.api.pool import ComputePool
from skyward.errors import ConfigurationError, PoolStateError
from skyward_dask import SkywardCluster
from skyward_dask.cluster import PoolParams
from support.elastic_fleet import FakeElasticFleet


class TestParameters:
    def test_are_those_of_a_pool(self):
        elsewhere = {
            "name",
            "keep",
            "results",
            "takeover",
            "spread",
        }  # `name` is the cluster's: a kept pool is opened, and passed
        assert set(PoolParams.__annotations__) | elsewhere == set(inspect.signature(ComputePool).parameters)

    @pytest.mark.parametrize(
        ("params", "says"),
        [
            ({}, "provider is missing"),
            ({"provider": sky.Local(), "nodes": 0}, "nodes must be"),
            ({"pool": 3}, "pool must be an open ComputePool, got int"),
            ({"provider": sky.Local(), "name": ""}, "name must be non-empty text"),
            ({"provider": sky.Local(), "name": 7}, "name must be non-empty text, got 7"),
            ({"provider": sky.Local(), "scheduler_sync_interval": "soon"}, "scheduler_sync_interval must be"),
            ({"provider": sky.Local(), "scheduler_sync_interval": 0}, "scheduler_sync_interval must be"),
        ],
    )
    def test_wrong_ones_are_named_and_nothing_is_left(self, params, says):
        with pytest.raises(ConfigurationError, match=says):
            SkywardCluster(**params)

    @pytest.mark.parametrize(
        ("unknown", "says"),
        [
            (
                "node",
                r"no option 'node' \(did you mean nodes\?\); its options are .*, asynchronous, .*, wait_for_capacity$",
            ),
            ("asynchronus", r"\(did you mean asynchronous\?\)"),
            ("spread", "no option 'spread': Dask's workers have to reach each other"),
            ("n_workers", "no option 'n_workers': nodes= is the number of machines"),
            ("shutdown_on_close", "open a ComputePool yourself"),
        ],
    )
    def test_unknown_ones_are_refused_with_the_meant_one(self, unknown, says):
        with pytest.raises(TypeError, match=rf"^SkywardCluster has .*{says}"):
            SkywardCluster(provider=sky.Local(), **{unknown: 2})

    def test_an_open_pool_takes_no_parameters_of_a_pool(self, fleet):
        with pytest.raises(ConfigurationError, match="nodes: an open pool has its parameters"):
            SkywardCluster(fleet, nodes=3)

    def test_a_pool_that_is_not_open_is_refused(self):
        with pytest.raises(PoolStateError, match="the pool is not open"):
            SkywardCluster(FakeElasticFleet())


class TestBorrowing:
    def test_runs_a_graph(self, cluster):
        with Client(cluster) as client:
            assert client.submit(pow, 2, 10).result() == 1024

    def test_leaves_the_pool_open(self, fleet):
        with SkywardCluster(fleet) as cluster:
            assert cluster.pool is fleet
        assert fleet.is_active
        assert fleet.scaled == []

    def test_is_silent_from_start_to_close(self, fleet, capfd):
        capfd.readouterr()
        with SkywardCluster(fleet):
            pass
        printed = capfd.readouterr()
        assert printed.out == ""
        assert "distributed.deploy" not in printed.err

    @pytest.mark.filterwarnings("ignore:Scheduler already contains a plugin")
    def test_two_clusters_share_a_pool_and_both_see_it_change(self, fleet, until):
        with (
            SkywardCluster(fleet, name="one", scheduler_sync_interval="50ms") as one,
            SkywardCluster(fleet, name="two", scheduler_sync_interval="50ms") as two,
        ):
            assert (one.name, two.name) == ("one", "two")
            assert one != two
            assert SkywardCluster.from_name("two") is two
            one.scale(6)
            until(lambda: len(one.observed) == len(two.observed) == 6)
            two.scale(2)
            until(lambda: len(one.observed) == len(two.observed) == 2)

    def test_the_pools_end_ends_the_cluster(self, until):
        with FakeElasticFleet() as fleet:
            cluster = SkywardCluster(fleet, scheduler_sync_interval="50ms")
        until(lambda: cluster.status == Status.closed)
        with pytest.raises(PoolStateError, match="make another SkywardCluster"):
            cluster.scale(2)
        cluster.close()

    async def test_a_client_without_the_pools_certificates_is_refused(self, cluster):
        with pytest.raises(OSError, match="TLS certificate does not match"):
            await Client(cluster.scheduler_address, security=Security.temporary(), timeout="60s", asynchronous=True)


class TestClosing:
    def test_twice_is_once(self, fleet):
        cluster = SkywardCluster(fleet)
        assert cluster.close() is None
        assert cluster.close() is None
        assert cluster.status == Status.closed

    def test_a_closed_cluster_takes_no_clients_and_does_not_scale(self, fleet):
        cluster = SkywardCluster(fleet)
        cluster.close()
        with pytest.raises(RuntimeError, match="closed"):
            Client(cluster)
        with pytest.raises(PoolStateError, match="is closed: make another SkywardCluster"):
            cluster.scale(1)
        with pytest.raises(PoolStateError, match="is closed"):
            cluster.adapt()
        with pytest.raises(PoolStateError, match="is closed"):
            cluster.get_dashboard_link()
        assert repr(cluster).startswith("SkywardCluster(")
        assert cluster.dashboard_link == ""

    def test_a_forgotten_cluster_is_warned_of(self, fleet):
        cluster = SkywardCluster(fleet)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cluster.__del__()
        assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == [
            f"unclosed cluster {cluster!r}"
        ]
        cluster.close()

    def test_the_end_of_the_process_closes_it(self):
        script = """
from distributed import Status
from support.elastic_fleet import FakeElasticFleet
from skyward_dask import SkywardCluster
import atexit
fleet = FakeElasticFleet()
fleet.__enter__()
atexit.register(fleet.__exit__, None, None, None)
atexit.register(lambda: print(cluster.status.name))
import skyward_dask.cluster
cluster = SkywardCluster(fleet)
atexit.register(skyward_dask.cluster.close_clusters)
"""
        ended = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.split() == ["closed"]

    async def test_one_that_was_never_started_is_warned_of_at_once(self, fleet):
        forgotten = [SkywardCluster(fleet, asynchronous=True, name="forgotten")]
        with pytest.warns(ResourceWarning, match="forgotten"):
            forgotten.clear()


class TestNames:
    def test_a_cluster_is_found_by_its_name(self, cluster):
        assert SkywardCluster.from_name("tests") is cluster

    def test_an_unknown_name_lists_those_there_are(self, cluster):
        with pytest.raises(ConfigurationError, match=re.escape("('tests'), got 'other'")):
            SkywardCluster.from_name("other")

    def test_a_closed_one_is_not_found(self, fleet):
        SkywardCluster(fleet, name="gone").close()
        with pytest.raises(ConfigurationError, match="gone"):
            SkywardCluster.from_name("gone")

    def test_repr_says_class_name_address_and_workers(self, cluster):
        assert re.fullmatch(
            r"SkywardCluster\(tests, 'tls://127.0.0.1:\d+', workers=4, threads=4, memory=4.00 GiB\)", repr(cluster)
        )


class TestAsynchronously:
    async def test_nothing_happens_before_it_is_entered(self, fleet):
        cluster = SkywardCluster(fleet, asynchronous=True)
        assert cluster.status == Status.created
        assert cluster.scheduler_address == "<Not Connected>"
        with pytest.raises(PoolStateError, match="has not started"):
            cluster.scale(3)
        async with cluster, Client(cluster, asynchronous=True) as client:
            assert await client.submit(pow, 2, 3) == 8
        assert cluster.status == Status.closed

    async def test_its_pool_may_be_one_of_the_named_settings(self, tmp_path, monkeypatch):
        (tmp_path / "skyward.toml").write_text("[pools.big]\nprovider = 'local'\nnodes = 2\nn_workers = 3\n")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=r"skyward.toml:4: .* no option 'n_workers': nodes= is the number"):
            SkywardCluster.named("big", asynchronous=True)

        (tmp_path / "skyward.toml").write_text("[pools.big]\nprovider = 'local'\nnodes = 2\n")
        cluster = SkywardCluster.named("big", nodes=3, asynchronous=True, name="tests")
        assert repr(cluster.pool) == "<DaskPool of 3 nodes of local: not open>"
        await cluster.close()

    async def test_methods_can_be_awaited(self, fleet):
        async with SkywardCluster(fleet, asynchronous=True) as cluster:
            await cluster.scale(6)
            await cluster.wait_for_workers(6, timeout=20)
            assert len(cluster.observed) == 6
            assert set(await cluster.get_logs()) >= {"Cluster", "Scheduler"}
            assert await cluster.get_dashboard_link() == "http://127.0.0.1:8787/status?token=secret"

    async def test_closing_can_be_awaited_twice(self, fleet):
        cluster = await SkywardCluster(fleet, asynchronous=True)
        assert await cluster is cluster
        await cluster.close()
        await cluster.close()
        with pytest.raises(PoolStateError, match="is closed"):
            await cluster

    async def test_a_plain_with_says_what_to_write(self, fleet):
        cluster = SkywardCluster(fleet, asynchronous=True)
        with pytest.raises(TypeError, match="async with"), cluster:
            pass
        await cluster.close()

    async def test_the_link_is_there_soon_and_reading_it_never_waits(self, fleet):
        async with SkywardCluster(fleet, asynchronous=True) as cluster:
            assert cluster.dashboard_link == ""
            await cluster.get_dashboard_link()
            assert cluster.dashboard_link.endswith("/status?token=secret")
            assert fleet.dashboard_asked == 1


class Unreachable(FakeElasticFleet):
    def service(self, service):
        raise OSError("no way to the head node")


class TestStarting:
    """That nothing is left is what the check around every test looks for."""

    def test_a_pool_that_cannot_be_reached_leaves_nothing(self):
        with Unreachable() as fleet, pytest.raises(OSError, match="no way to the head node"):
            SkywardCluster(fleet)

    async def test_nor_does_it_asynchronously(self):
        with Unreachable() as fleet:
            cluster = SkywardCluster(fleet, asynchronous=True)
            with pytest.raises(OSError, match="no way to the head node"):
                await cluster
            assert cluster.status == Status.closed
