"""Scaling a cluster by hand and with the work, on a fleet whose scheduler and workers are real."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace

import dask.config
import pytest
from distributed import Client, Scheduler
from distributed.deploy.adaptive import Adaptive

from skyward.errors import CapacityError, ConfigurationError
from skyward.market.autoscale import workers_worth
from skyward.request.request import NodeRange
from skyward_dask import SkywardCluster
from support.elastic_fleet import FakeElasticFleet

QUICKLY = {"interval": "50ms", "wait_count": 2, "target_duration": "500ms"}


def wait_for_file(path, _number):
    """A task that runs until the test lets it end."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return True


def names(*ranks):
    return {f"node{rank}-worker{index}" for rank in ranks for index in range(2)}


class TestByHand:
    def test_whole_nodes_come_and_go(self, cluster, fleet, capsys, until):
        assert cluster.plan == cluster.requested == cluster.observed == names(0, 1)
        assert cluster.scale(5) is None
        cluster.wait_for_workers(6, timeout=20)
        assert cluster.plan == cluster.requested == cluster.observed == names(0, 1, 2)
        cluster.scale(2)
        until(lambda: cluster.observed == names(0))
        assert fleet.scaled == [(3, ()), (1, ())]
        assert capsys.readouterr().out == "scale(5): 3 nodes of 2 workers each make 6\n"

    def test_returns_before_the_nodes_are_there(self, cluster, fleet, until):
        fleet.pause_boots()
        cluster.scale(6)
        until(lambda: cluster.plan == cluster.requested == names(0, 1, 2))
        assert cluster.observed == names(0, 1)
        fleet.resume_boots()
        until(lambda: cluster.observed == cluster.plan)

    def test_by_cores_and_memory(self, cluster, fleet):
        cluster.scale(cores=3)
        cluster.scale(memory="5 GiB")
        cluster.scale(1, cores=2, memory="1 GiB")
        assert [nodes for nodes, _ in fleet.scaled] == [2, 3, 1]

    def test_the_head_node_stays_and_that_is_said_once(self, cluster, fleet, capsys):
        cluster.scale(0)
        cluster.scale(0)
        assert [nodes for nodes, _ in fleet.scaled] == [1, 1]
        assert capsys.readouterr().out.count("scale(0): node 0 stays, with its 2 workers") == 1

    def test_wrong_numbers_are_named_and_change_nothing(self, cluster, fleet, subtests):
        for arguments, says in (
            ({"n": -1}, "n must be a whole number ≥ 0, got -1"),
            ({"n": "x"}, "n must be a whole number ≥ 0, got 'x'"),
            ({"n": 2.5}, "n must be a whole number ≥ 0, got 2.5"),
            ({"cores": -2}, "cores must be a whole number ≥ 0"),
            ({"memory": "much"}, 'memory must be a size such as "64 GiB"'),
        ):
            with subtests.test(arguments), pytest.raises(ConfigurationError, match=says):
                cluster.scale(**arguments)
        assert fleet.scaled == []

    def test_scale_down_takes_the_nodes_that_are_wholly_named(self, cluster, fleet, until):
        cluster.scale(6)
        cluster.wait_for_workers(6, timeout=20)
        cluster.scale_down(["node1-worker0", "node1-worker1", "node2-worker0", *names(0)])
        until(lambda: cluster.observed == names(0, 2))
        assert fleet.scaled[-1] == (2, (1,))
        assert cluster.plan == names(0, 2)

    def test_scale_down_wants_names(self, cluster):
        with pytest.raises(ConfigurationError, match="workers must be names of workers"):
            cluster.scale_down("node1-worker0")

    def test_data_on_nodes_that_go_is_kept(self, cluster, until):
        with Client(cluster) as client:
            scattered = client.scatter(list(range(8)), broadcast=False)
            cluster.scale(2)
            until(lambda: cluster.observed == names(0))
            assert client.gather(scattered) == list(range(8))

    def test_a_fleet_that_cannot_grow_is_reported(self, cluster, fleet, capsys, until):
        fleet.refuse(CapacityError("no such machine today"))
        cluster.scale(8)
        until(lambda: "could not be scaled: no such machine today" in cluster.get_logs()["Cluster"])
        assert "no such machine today" in capsys.readouterr().out


class TestWithTheWork:
    def test_grows_for_tasks_and_shrinks_without(self, cluster, fleet, tmp_path, until):
        cluster.scale(2)
        until(lambda: cluster.observed == names(0))
        with Client(cluster) as client:
            cluster.adapt(minimum=0, maximum=6, **QUICKLY)
            futures = [client.submit(wait_for_file, tmp_path / "go", number) for number in range(30)]
            until(lambda: cluster.observed == names(0, 1, 2))
            (tmp_path / "go").touch()
            assert all(client.gather(futures))
            del futures
            until(lambda: cluster.observed == names(0))
        assert max(nodes for nodes, _ in fleet.scaled) == 3

    def test_the_node_of_the_scheduler_stays_whichever_is_cheapest_to_close(self, cluster, fleet, until):
        with Client(cluster) as client:
            kept = client.scatter([bytes(1000)] * 2, workers=["node1-worker0", "node1-worker1"])
            cluster.adapt(minimum=2, maximum=4, **QUICKLY)
            until(lambda: cluster.observed == names(0))
            assert client.gather(kept) == [bytes(1000)] * 2
        assert fleet.scaled == [(1, (1,))]

    def test_keeps_the_minimum(self, cluster, fleet, until):
        adaptive = cluster.adapt(minimum=3, maximum=10, **QUICKLY)
        assert (adaptive.minimum, adaptive.maximum) == (4, 10)
        cluster.scale_down(names(1))
        until(lambda: fleet.scaled[-1:] == [(2, ())])
        until(lambda: len(cluster.observed) == 4 and cluster.observed >= names(0))

    def test_without_a_maximum_is_never_dearer_than_what_was_asked_for(self, cluster, capsys):
        assert cluster.adapt().maximum == 4
        assert "at most 4 workers, the highest number requested so far" in capsys.readouterr().out
        cluster.scale(6)
        cluster.scale(2)
        assert cluster.adapt().maximum == 6
        assert cluster.adapt(maximum=math.inf).maximum == math.inf

    def test_settings_say_what_arguments_do_not(self, cluster):
        with dask.config.set({"skyward.adaptive": {"interval": "3s", "wait-count": 5, "target-duration": "1m",
                                                   "minimum": 3, "maximum": 8}}):  # fmt: skip
            adaptive = cluster.adapt()
        assert (adaptive.interval, adaptive.wait_count, adaptive.target_duration) == (3, 5, 60)
        assert (adaptive.minimum, adaptive.maximum) == (4, 8)

    def test_defaults_are_fit_for_machines(self, cluster):
        adaptive = cluster.adapt()
        assert (adaptive.interval, adaptive.wait_count, adaptive.target_duration) == (10, 12, 60)

    def test_a_machine_is_worth_the_time_that_the_latest_one_took_to_boot(self, cluster, fleet, until):
        adaptive = cluster.adapt(interval="20ms", maximum=4)
        fleet.boot_s = 95.0
        until(lambda: adaptive.target_duration == 95.0)
        assert cluster.adapt(target_duration="3m").target_duration == 180

    def test_an_elastic_pool_adapts_from_the_beginning_within_its_limits(self, fleet, until, tmp_path):
        fleet.elastic = NodeRange(minimum=1, maximum=3, idle_s=120)
        fleet.boot_s = 1.0
        with dask.config.set({"skyward.adaptive.interval": "100ms"}), SkywardCluster(fleet) as cluster:
            assert "Adaptive" in cluster._scaling_status()
            assert (cluster.adapt().minimum, cluster.adapt().maximum, cluster.adapt().wait_count) == (2, 6, 1200)
            assert cluster.adapt(maximum=100, interval="50ms", wait_count=2).maximum == 6
            with Client(cluster) as client:
                futures = [client.submit(wait_for_file, tmp_path / "go", number) for number in range(30)]
                until(lambda: len(cluster.observed) == 6)  # of other ranks, if node 1 was idle before they came
                (tmp_path / "go").touch()
                assert all(client.gather(futures))
                del futures
                until(lambda: cluster.observed == names(0))

    def test_ends_when_scaled_by_hand(self, cluster, fleet, capsys):
        adaptive = cluster.adapt(minimum=2, maximum=4)
        cluster.scale(4)
        assert adaptive.state == "stopped"
        assert "adaptive scaling has ended" in capsys.readouterr().out

    def test_ends_with_the_cluster(self, fleet):
        with SkywardCluster(fleet) as cluster:
            adaptive = cluster.adapt(minimum=2, maximum=4)
        assert adaptive.state == "stopped"

    def test_takes_a_class_of_ones_own(self, cluster, until):
        class Always(Adaptive):
            async def target(self):
                return 6

        cluster.adapt(Always, maximum=6, **QUICKLY)
        until(lambda: cluster.observed == names(0, 1, 2))

    def test_no_wait_is_a_wait_count_of_zero(self, cluster):
        assert cluster.adapt(**(QUICKLY | {"wait_count": 0})).wait_count == 0

    def test_wrong_arguments_are_named_and_change_nothing(self, cluster, fleet, subtests):
        for arguments, says in (
            ({"minimum": 4, "maximum": 2}, r"minimum must not be above maximum \(2 workers\), got 4"),
            ({"minimum": -1}, "minimum must be a whole number ≥ 0, got -1"),
            ({"maximum": "many"}, "maximum must be a whole number ≥ 0, got 'many'"),
            ({"minimum_cores": 9, "maximum": 4}, "minimum must not be above maximum"),
            ({"minimum": 2, "maximum_memory": "1 GiB"}, "minimum must not be above maximum"),
            ({"interval": "often"}, "interval must be a duration above zero"),
            ({"wait_count": -1}, "wait_count must be a whole number ≥ 0, got -1"),
            ({"target_duration": -3}, "target_duration must be a duration above zero"),
        ):
            with subtests.test(arguments), pytest.raises(ConfigurationError, match=says):
                cluster.adapt(**arguments)
        assert fleet.scaled == []


@pytest.mark.parametrize(("work_s", "tasks"), [(59, 100), (61, 100), (600, 100), (600, 4), (3600, 1), (10_000, 20)])
def test_dask_wants_as_many_workers_as_the_policy_of_elastic_pools(work_s: float, tasks: int):
    worker = SimpleNamespace(processing=dict.fromkeys(range(tasks)), nthreads=1, memory_limit=2, nbytes=1)
    scheduler = SimpleNamespace(queued=(), unrunnable={}, total_occupancy=work_s, workers={"a": worker})
    assert Scheduler.adaptive_target(scheduler, target_duration=60) == workers_worth(work_s, tasks, 60)  # type: ignore[arg-type]


def test_a_fleet_of_several_sizes_agrees_with_itself():
    with FakeElasticFleet(1, workers_per_node=1) as fleet, SkywardCluster(fleet) as cluster:
        cluster.scale(3)
        cluster.wait_for_workers(3, timeout=20)
        assert cluster.plan == {"node0-worker0", "node1-worker0", "node2-worker0"}
