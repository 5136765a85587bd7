"""Workers, nodes and the head node are killed while a Dask graph, native calls and joblib tasks run on one pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from pathlib import Path

import joblib
import numpy as np
import psutil
import pytest
from dask import array as da
from distributed import Client
from distributed.comm import CommClosedError

import skyward as sky
from skyward.errors import PoolStateError
from skyward_joblib import joblib_backend

PATIENCE_S = 60.0
TASKS = 120


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@sky.compute
def place():
    return sky.instance_info().node, os.getpid()


def by_value():
    """Functions that Dask pickles by value, since they have no importable name: this file is not on the nodes."""

    def note(folder, number):
        with open(os.path.join(folder, str(sky.instance_info().node)), "a") as begun:
            begun.write(f"{number} ")
        time.sleep(0.05)
        return number

    def add(first, second):
        time.sleep(0.02)
        return first + second

    return note, add


note, add = by_value()


class Load:
    """All three front-ends at work on a pool."""

    def __init__(self, pool: sky.ComputePool, client: Client, folder: Path) -> None:
        self.folder = folder
        for name in ("native", "joblib"):
            (folder / name).mkdir()
        self.native = [pool.submit(note, folder / "native", n) for n in range(TASKS)]
        self.joblib: Future[list[int]] = Future()
        self.graph = client.submit(sum, self._tree(client))
        self._thread = threading.Thread(target=self._loop, args=(pool,))
        self._thread.start()

    def _tree(self, client: Client) -> list[object]:
        leaves = client.map(add, range(TASKS), range(TASKS), pure=False)
        return client.map(add, leaves, leaves[::-1], pure=False)

    def _loop(self, pool: sky.ComputePool) -> None:
        try:
            with joblib_backend(pool):
                tasks = (joblib.delayed(note)(self.folder / "joblib", n) for n in range(TASKS))
                self.joblib.set_result(joblib.Parallel(n_jobs=-1)(tasks))
        except BaseException as error:
            self.joblib.set_exception(error)

    def wait_until_under_way(self, node: int) -> None:
        until((self.folder / "native" / str(node)).exists)

    def finish(self) -> None:
        assert [call.result(PATIENCE_S) for call in self.native] == list(range(TASKS))
        assert self.joblib.result(PATIENCE_S) == list(range(TASKS))
        self._thread.join()

    def repeated_elsewhere(self, lost: int) -> set[str]:
        """Native and joblib tasks that ran twice although the node that was lost had not begun them."""
        found: set[str] = set()
        for folder in (self.folder / "native", self.folder / "joblib"):
            begun = {path.name: path.read_text().split() for path in folder.iterdir()}
            times = Counter(number for numbers in begun.values() for number in numbers)
            found |= {n for n, count in times.items() if count > 1 and n not in begun.get(str(lost), ())}
        return found


def kill_node(pid: int) -> None:
    """Kill every program of the node, as if the machine were gone."""
    supervisor = supervisor_of(pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def kill_scheduler(pid: int) -> None:
    """Kill the scheduler on the node, and nothing else of it."""
    (scheduler,) = [p for p in supervisor_of(pid).children(recursive=True) if p.name() == "sky-dask"]
    scheduler.kill()
    scheduler.wait(10)


def supervisor_of(pid: int) -> psutil.Process:
    return next(p for p in psutil.Process(pid).parents() if "skyward.node.supervisor" in p.cmdline())


def end_loop(client: Client) -> None:
    """Dask's client keeps its thread when it is closed after its scheduler has gone."""
    client._loop_runner.stop()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_worker_a_node_and_the_head_are_killed_under_load(tmp_path):
    with sky.ComputePool(provider=sky.Local(), nodes=3, display="quiet") as pool:
        with pool.dask_client(set_as_default=False) as client:
            for victim in ("worker", "node"):
                (folder := tmp_path / victim).mkdir()
                pids = dict(place() @ pool)
                load = Load(pool, client, folder)
                load.wait_until_under_way(1)
                if victim == "worker":
                    os.kill(pids[1], signal.SIGKILL)
                else:
                    kill_node(pids[1])
                load.finish()
                assert load.graph.result(PATIENCE_S) == 4 * sum(range(TASKS))
                assert load.repeated_elsewhere(1) == set()
                after = dict(place() @ pool)
                assert (after[0], after[2]) == (pids[0], pids[2])
                assert after[1] != pids[1]

            (folder := tmp_path / "head").mkdir()
            load = Load(pool, client, folder)
            load.wait_until_under_way(0)
            old = pool.scheduler.address
            began = time.monotonic()
            kill_node(dict(place() @ pool)[0])
            with pytest.raises((CancelledError, CommClosedError)):  # the latter if the graph was done just before
                load.graph.result(PATIENCE_S)
            assert time.monotonic() - began < 30
            load.finish()
            assert load.repeated_elsewhere(0) == set()
        end_loop(client)

        until(lambda: address_of(pool) not in ("", old))
        with pool.dask_client(set_as_default=False) as client:
            client.wait_for_workers(3, timeout=PATIENCE_S)
            assert client.submit(add, 1, 2).result(PATIENCE_S) == 3
            total = da.ones((400, 400), chunks=(100, 100)).rechunk((400, 50)).sum()
            assert client.compute(total).result(PATIENCE_S) == 160_000
        assert len({pid for _, pid in place() @ pool}) == 3


def address_of(pool: sky.ComputePool) -> str:
    try:
        return pool.scheduler.address
    except PoolStateError:
        return ""


@pytest.mark.full
def test_workers_that_dask_used_join_the_next_scheduler_and_keep_their_processes():
    with sky.ComputePool(provider=sky.Local(), nodes=3, display="quiet") as pool:
        before = dict(place() @ pool)
        with pool.dask_client(set_as_default=False) as client:
            kept = client.submit(np.arange, 10, workers=["node1-worker0"])
            assert kept.result(PATIENCE_S)[9] == 9
            kill_node(before[0])
            until(lambda: dict(place() @ pool)[0] != before[0])
        end_loop(client)
        until(lambda: address_of(pool))
        with pool.dask_client(set_as_default=False) as client:
            client.wait_for_workers(3, timeout=PATIENCE_S)
        after = dict(place() @ pool)
        assert (after[1], after[2]) == (before[1], before[2])


def test_a_scheduler_that_dies_alone_is_back_at_its_address():
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        before, address = place() @ pool, pool.scheduler.address
        kill_scheduler(before[0][1])
        assert place() @ pool == before
        with pool.dask_client(set_as_default=False) as client:
            client.wait_for_workers(2, timeout=PATIENCE_S)
            assert client.scheduler.address == address
            assert client.submit(add, 1, 2).result(PATIENCE_S) == 3
        assert place() @ pool == before
