"""Pools whose nodes do not all reach each other: every call works there, gangs and Dask are refused at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.errors import ConfigurationError
from skyward.events import InstanceLaunching
from skyward_dask import SkywardCluster
from skyward_joblib import joblib_backend
from support.fleets import LocalNetworks

PATIENCE_S = 60.0
REFUSED_S = 2.0


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    """Two islands."""
    with sky.ComputePool(provider=LocalNetworks(), nodes=2, display="quiet") as pool:
        start_callbacks(pool)
        yield pool


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def square(number: int) -> int:
    return number * number


@sky.compute
def place() -> tuple[int, int]:
    return sky.instance_info().node, os.getpid()


@sky.compute
def supervisor() -> int:
    (found,) = [each for each in psutil.Process().parents() if "skyward.node.supervisor" in each.cmdline()]
    return found.pid


@sky.compute
@sky.distributed.jax()
def train() -> int:
    return 1


def test_calls_of_every_kind_run_on_islands(pool: sky.ComputePool) -> None:
    assert [node for node, _ in place() @ pool] == [0, 1]
    assert sky.compute(square)(3) >> pool == 9
    results = sky.gather(*(sky.compute(square)(n) for n in range(200))) >> pool
    assert list(results) == [n * n for n in range(200)]
    assert pool.submit(square, 4).result(PATIENCE_S) == 16
    with pool.executor() as executor:
        assert list(executor.map(square, range(10))) == [n * n for n in range(10)]
    with joblib_backend(pool):
        assert joblib.Parallel()(joblib.delayed(square)(n) for n in range(50)) == [n * n for n in range(50)]


def test_a_large_argument_reaches_every_island(pool: sky.ComputePool) -> None:
    data = np.arange(4_000_000, dtype=np.float64)

    assert sky.compute(np.sum)(data) @ pool == (data.sum(),) * 2


def test_ranks_and_shards_count_all_islands(pool: sky.ComputePool) -> None:
    @sky.compute
    def facts() -> tuple[int, bool, list[int]]:
        info = sky.instance_info()
        return info.total_nodes, info.is_head, sky.shard(list(range(4)), shuffle=True)

    first, second = facts() @ pool

    assert (first[:2], second[:2]) == ((2, True), (2, False))
    assert sorted(first[2] + second[2]) == [0, 1, 2, 3], "the seed is the same on both"


def test_a_call_whose_worker_is_killed_runs_again(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def die_once() -> int:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    assert die_once() >> pool == 1


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda pool: train() @ pool, r"train is decorated with .* nodes 0, 1 reach no other\. Ask for nodes=1"),
        (lambda pool: pool.scheduler, "Dask's workers have to reach each other, but nodes 0, 1 reach no other"),
        (lambda pool: pool.dask_client(), "Dask's workers have to reach each other"),
        (SkywardCluster, "Dask's workers have to reach each other"),
    ],
    ids=["gang", "scheduler", "client", "cluster"],
)
def test_gangs_and_dask_are_refused_at_once(pool: sky.ComputePool, use: Callable[[Any], object], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=message):
        use(pool)
    assert time.monotonic() - began < REFUSED_S


def test_a_cluster_of_islands_is_refused_before_a_machine_is_bought() -> None:
    events: list[object] = []
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="none of the machines on offer reaches another"):
        SkywardCluster(provider=LocalNetworks(), nodes=2, display="quiet", on_event=events.append)
    assert time.monotonic() - began < REFUSED_S
    assert [event for event in events if isinstance(event, InstanceLaunching)] == []


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_island_is_replaced_and_the_other_one_goes_on(pool: sky.ComputePool, lost: int) -> None:
    before = dict(place() @ pool)
    os.kill((supervisor() @ pool)[lost], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(before[lost]))
    after = dict(place() @ pool)

    assert after[1 - lost] == before[1 - lost]
    assert after[lost] != before[lost]


# In `make test`: unit/fleet/test_topology.py, and calls of every kind in this file.
@pytest.mark.full
def test_dask_is_refused_while_the_head_is_elsewhere_and_works_when_it_is_near_again() -> None:
    provider = LocalNetworks(networks={0: "a", 1: "a"})
    with sky.ComputePool(provider=provider, nodes=2, display="quiet") as pool:
        assert pool.scheduler.address
        before = dict(place() @ pool)
        for network in ("b", "a"):
            provider.networks[0] = network
            head = dict(place() @ pool)[0]
            os.kill((supervisor() @ pool)[0], signal.SIGKILL)
            until(lambda head=head: not psutil.pid_exists(head))
            assert len(place() @ pool) == 2
            if network == "b":
                with pytest.raises(ConfigurationError, match="Dask's workers have to reach each other"):
                    _ = pool.scheduler
        with pool.dask_client(set_as_default=False) as client:
            assert len(client.run(os.getpid)) == 2
        assert dict(place() @ pool)[1] == before[1], "its worker only moved"
