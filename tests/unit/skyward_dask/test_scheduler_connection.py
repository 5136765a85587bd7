"""A cluster object stays true to a fleet whose scheduler is replaced."""

from __future__ import annotations

from distributed import Client

from skyward_dask import SkywardCluster
from skyward_dask.clients import scheduler_of


def test_a_new_client_works_on_the_new_scheduler(cluster, fleet):
    before = cluster.scheduler_address
    fleet.replace_scheduler()
    with Client(cluster) as client:
        assert client.submit(pow, 2, 5).result() == 32
    assert cluster.scheduler_address == scheduler_of(fleet).address != before
    assert cluster.name == "tests"


def test_the_workers_of_the_new_scheduler_are_seen_to_come_and_go(cluster, fleet, until):
    before = cluster.scheduler_address
    fleet.replace_scheduler()
    until(lambda: cluster.scheduler_address != before)
    cluster.scale(2)
    until(lambda: cluster.observed == {"node0-worker0", "node0-worker1"})
    cluster.scale(4)
    until(lambda: len(cluster.observed) == 4)


def test_adaptive_scaling_goes_on(cluster, fleet, until):
    adaptive = cluster.adapt(minimum=0, maximum=4, interval="50ms", wait_count=2)
    fleet.replace_scheduler()
    until(lambda: cluster.observed == {"node0-worker0", "node0-worker1"})
    assert adaptive.state == "running"


async def test_asynchronously_too(fleet):
    async with SkywardCluster(fleet, asynchronous=True, scheduler_sync_interval="50ms") as cluster:
        fleet.replace_scheduler()
        async with Client(cluster, asynchronous=True) as client:
            assert await client.submit(pow, 2, 6) == 64


def test_a_cluster_can_close_while_its_scheduler_is_away(fleet):
    with SkywardCluster(fleet, scheduler_sync_interval="50ms"):
        fleet.lose_scheduler()
