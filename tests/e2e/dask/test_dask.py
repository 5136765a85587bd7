"""Dask on real pools of this machine."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time

import dask
import psutil
import pytest
from distributed import Client, Status, get_client, get_worker, wait

import skyward as sky
from skyward.errors import ConfigurationError, PoolStateError
from skyward.node.plan import memory_bytes
from skyward_dask import SkywardCluster

PATIENCE_S = 60.0

MODULE = """
class Scaled:
    def __init__(self, value):
        self.value = value

def scaled(number):
    import {name}_deeper
    return Scaled(number * {name}_deeper.FACTOR)

def total(parts):
    return sum(part.value for part in parts)
"""


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def by_value():
    """Functions that Dask pickles by value, since they have no importable name: this file is not on the nodes."""

    def where(dask_worker):
        return dask_worker.name, os.getpid()

    def wait_for_file(path, _number):
        while not os.path.exists(path):
            time.sleep(0.01)
        return True

    def slow_square(number):
        time.sleep(0.02)
        return number * number

    def divide(path, number):
        wait_for_file(path, number)
        return 1 // number

    def page_of_workers(dask_scheduler):
        from distributed.dashboard.components.scheduler import WorkerTable

        table = WorkerTable(dask_scheduler)
        table.update()
        return [each for each in table.source.data.get("skyward_call", []) if each]

    return where, wait_for_file, slow_square, divide, page_of_workers


where, wait_for_file, slow_square, divide, page_of_workers = by_value()


@sky.compute
def slow_pid(seconds):
    time.sleep(seconds)
    return os.getpid()


@pytest.fixture(scope="module")
def pool():
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        yield pool


@pytest.fixture
def cluster(pool):
    with SkywardCluster(pool, scheduler_sync_interval="100ms") as cluster:
        yield cluster


def by_value_too():
    def announce(number):
        print(f"task {number}")
        return sky.shard([1, 2, 3, 4]), current_call_is_known()

    def current_call_is_known():
        from skyward.distributed.runtime import current_call

        return current_call() is not None

    return announce


announce = by_value_too()


@sky.compute
def hold(seconds):
    time.sleep(seconds)


@sky.compute
def hold_until(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def test_tasks_belong_to_no_call_and_what_they_print_arrives(capfd):
    lines: list[tuple[int, str]] = []
    with sky.ComputePool(provider=sky.Local(), nodes=1, display="quiet") as pool:
        pool.on(sky.LogLine, lambda event: lines.append((event.node, event.line)))
        with pool.dask_client(set_as_default=False) as client:
            held = pool.broadcast_call(hold(3).invocation())
            assert client.gather(client.map(announce, range(3))) == [([1, 2, 3, 4], False)] * 3
            assert not held[0].done()
            until(lambda: len(lines) == 3)
        left_open = pool.dask_client(set_as_default=False)
    assert sorted(lines) == [(0, "task 0"), (0, "task 1"), (0, "task 2")]
    assert (left_open.status, capfd.readouterr().err) == ("closed", "")


class TestBorrowed:
    def test_tasks_run_on_the_workers_of_native_calls(self, pool, cluster):
        with Client(cluster) as client:
            dask = client.run(where)
            assert {name for name, _ in dask.values()} == {"node0-worker0", "node1-worker0"}
            assert {pid for _, pid in dask.values()} == set(slow_pid(0) @ pool)

    def test_nodes_of_one_machine_divide_its_memory(self, cluster):
        limits = [worker["memory_limit"] for worker in cluster.scheduler_info["workers"].values()]
        assert limits == [memory_bytes() // 2] * 2

    @pytest.mark.parametrize("of_the_pool", [False, True], ids=["Client(cluster)", "pool.dask_client()"])
    def test_local_modules_come_along_with_graphs_and_so_do_their_changes(
        self, pool, cluster, tmp_path, monkeypatch, of_the_pool
    ):
        name = f"sky_graph_{int(of_the_pool)}"
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"{name}_deeper.py").write_text("FACTOR = 10\n")
        (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
        helpers = importlib.import_module(name)
        with pool.dask_client(set_as_default=False) if of_the_pool else Client(cluster) as client:
            assert [each.value for each in client.gather(client.map(helpers.scaled, range(3)))] == [0, 10, 20]
            assert type(client.submit(helpers.scaled, 3).result()) is helpers.Scaled
            total = dask.delayed(helpers.total)([dask.delayed(helpers.scaled)(n) for n in (1, 2)])
            assert client.compute(total).result() == 30

            (tmp_path / f"{name}_deeper.py").write_text("FACTOR = 7\n")
            assert client.submit(helpers.scaled, 1, pure=False).result().value == 7

    def test_a_native_call_is_on_the_dashboards_page_of_workers_while_it_runs(self, pool, cluster, tmp_path):
        with Client(cluster) as client:

            def shown():
                return [each.partition(", ")[0] for each in client.run_on_scheduler(page_of_workers)]

            running = pool.submit(hold_until(str(tmp_path / "go on")))
            try:
                until(lambda: shown() == ["hold_until"])
            finally:
                (tmp_path / "go on").touch()
            assert running.result() is None
            until(lambda: shown() == [])

    def test_the_progress_of_tasks_is_published_by_the_pool(self, pool, cluster, tmp_path):
        seen = []
        pool.on(sky.Progress, seen.append)
        with Client(cluster) as client:
            futures = client.map(divide, [str(tmp_path / "go on")] * 3, range(3))
            until(lambda: sky.Progress("divide", 0, 3, running=2) in seen)
            assert [work.label for work in pool.snapshot().works] == ["divide"]
            (tmp_path / "go on").touch()
            wait(futures)
            until(lambda: seen[-1].over)
        assert seen[-1] == sky.Progress("divide", 2, 3, failed=1)

    def test_a_task_finds_its_worker_and_a_client(self, cluster):
        with Client(cluster) as client:
            name, address = client.submit(lambda: (get_worker().name, get_client().scheduler.address)).result()
        assert name in cluster.observed
        assert address == cluster.scheduler_address

    def test_names_agree(self, cluster):
        assert cluster.plan == cluster.requested == cluster.observed == {"node0-worker0", "node1-worker0"}

    def test_logs_come_from_everywhere(self, cluster):
        logs = cluster.get_logs()
        assert {"Cluster", "Scheduler"} < set(logs)
        assert len(logs) == 4

    def test_the_pool_stays_open(self, pool):
        with SkywardCluster(pool):
            pass
        assert slow_pid(0) >> pool

    def test_the_pools_own_client_is_the_same_scheduler(self, pool, cluster):
        with pool.dask_client() as client:
            assert client.scheduler.address == cluster.scheduler_address
            assert client.submit(pow, 2, 3).result() == 8

    def test_direct_access_works_where_there_is_no_tunnel(self, cluster):
        with Client(cluster, direct_to_workers=True) as client:
            assert client.gather(client.scatter([1, 2])) == [1, 2]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_grows_and_shrinks_by_hand_and_with_the_work_while_tasks_and_calls_run(tmp_path):
    with (
        SkywardCluster(provider=sky.Local(), nodes=2, display="quiet", scheduler_sync_interval="100ms") as cluster,
        Client(cluster) as client,
        cluster.pool.executor() as executor,
    ):
        tasks = client.map(slow_square, range(400))
        calls = [executor.submit(slow_square, number) for number in range(400)]
        cluster.scale(3)
        cluster.wait_for_workers(3, timeout=PATIENCE_S)
        cluster.scale(1)
        until(lambda: cluster.observed == {"node0-worker0"})
        assert client.gather(tasks) == [call.result() for call in calls] == [n * n for n in range(400)]

        cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=5, target_duration="1s")
        tasks = [client.submit(wait_for_file, tmp_path / "go", number) for number in range(40)]
        calls = [executor.submit(slow_square, number) for number in range(200)]
        until(lambda: len(cluster.observed) == 3)
        (tmp_path / "go").touch()
        assert all(client.gather(tasks))
        assert [call.result() for call in calls] == [n * n for n in range(200)]
        del tasks
        until(lambda: cluster.observed == {"node0-worker0"})


# In `make test`: fleet/test_fleet.py, whose survivors go on without the head.
@pytest.mark.full
@pytest.mark.timeout(240)
def test_outlives_its_head_node():
    with SkywardCluster(provider=sky.Local(), nodes=2, display="quiet", scheduler_sync_interval="100ms") as cluster:
        before = cluster.scheduler_address
        with Client(cluster) as client:
            names = dict(client.run(where).values())
        end_node(names["node0-worker0"])
        until(lambda: cluster.scheduler_address != before)
        with Client(cluster) as client:
            client.wait_for_workers(2, timeout=PATIENCE_S)
            assert client.gather(client.map(slow_square, range(20))) == [n * n for n in range(20)]
            assert {name for name, _ in client.run(where).values()} == set(names)


def end_node(worker_pid):
    """Kill every program of the node, as if the machine were gone."""
    supervisor = next(
        each for each in psutil.Process(worker_pid).parents() if "skyward.node.supervisor" in each.cmdline()
    )
    for process in [supervisor, *supervisor.children(recursive=True)]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


async def test_asynchronously():
    async with (
        SkywardCluster(provider=sky.Local(), display="quiet", asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        assert await client.submit(pow, 2, 5) == 32
        pool = cluster.pool
    assert cluster.status == Status.closed
    assert not pool.is_active


def test_a_pool_that_cannot_open_says_why_and_leaves_nothing():
    with pytest.raises(ConfigurationError, match="python"):
        SkywardCluster(provider=sky.Local(), image=sky.Image(python="2.7"), display="quiet")


def test_a_closed_clusters_pool_is_closed():
    cluster = SkywardCluster(provider=sky.Local(), display="quiet")
    cluster.close()
    assert not cluster.pool.is_active
    with pytest.raises(PoolStateError, match="make another SkywardCluster"):
        cluster.scale(2)


SCRIPT = """
import skyward as sky
from distributed import Client
from skyward_dask import SkywardCluster

if __name__ == "__main__":
    cluster = SkywardCluster(provider=sky.Local(), display="quiet")
    client = Client(cluster)
    print(client.submit(pow, 2, 3).result(), client.submit(__import__("os").getpid).result())
"""


# In `make test`: unit/skyward_dask/test_skyward_cluster.py::TestClosing.
@pytest.mark.full
def test_a_process_that_does_not_close_its_cluster_ends_its_machines(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    result, pid = ended.stdout.split()
    assert (ended.returncode, result) == (0, "8")
    assert ended.stderr == ""
    assert not psutil.pid_exists(int(pid))
