"""Tasks that no worker can run: when they fail, and what the error says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from operator import add
from pathlib import Path

import dask
import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import rpc
from tests.support.clock import FakeClock

from skyward.base.waiting import wait_until
from skyward.errors import ConfigurationError
from skyward_dask.tasks import WorkerOffer, fail_unrunnable, unmet_demand

GPU = WorkerOffer(name="node0-worker0", address="tls://10.0.0.5:1", host="10.0.0.5", resources={"GPU": 1.0})
HALF = WorkerOffer(name="node0-worker1", address="tls://10.0.0.5:2", host="10.0.0.5", resources={"GPU": 0.5})
BARE = WorkerOffer(name="node1-worker0", address="tls://10.0.0.6:1", host="10.0.0.6")


@pytest.mark.parametrize(
    ("resources", "places", "offers", "message"),
    [
        ({"GPU": 1}, (), [GPU, BARE], ""),
        ({"GPU": 0.5}, (), [HALF], ""),
        ({}, ("node1-worker0",), [GPU, BARE], ""),
        ({}, ("tls://10.0.0.6:1",), [GPU, BARE], ""),
        ({}, ("10.0.0.6", "10.9.9.9"), [GPU, BARE], ""),
        (
            {"GPU": 1},
            (),
            [BARE],
            "no worker has that. Offered: none by node1-worker0. .*accelerator=",
        ),
        ({"GPU": 1}, (), [HALF], "Offered: GPU=0.5 by node0-worker1. .*a fraction where they share one"),
        ({"GPU": 2}, (), [GPU, BARE], "Offered: GPU=1 by node0-worker0; none by node1-worker0. .*require no more"),
        ({"gpu": 1}, (), [GPU], "Write 'GPU' instead of 'gpu'"),
        ({"GPU": 1, "TPU": 1}, (), [GPU], "no other resources than 'GPU'"),
        ({"MEMORY": 1e9}, (), [BARE], "no other resources than 'GPU'"),
        ({"GPU": 1}, ("node1-worker0",), [GPU, BARE], "no worker of those in workers= has that"),
        ({}, ("node7-worker0",), [GPU, BARE], r"workers=\['node7-worker0'\] names no worker .* node0-worker0, node1-"),
        ({}, ("tls://10.0.0.5:9",), [GPU], "names no worker .* addresses do not"),
    ],
)
def test_an_unmet_demand_names_what_is_offered(
    resources: Mapping[str, float], places: Collection[str], offers: Collection[WorkerOffer], message: str
) -> None:
    found = unmet_demand(resources, places, offers)

    if message:
        with pytest.raises(ConfigurationError, match=message):
            raise ConfigurationError(found)
    else:
        assert found == ""


def test_a_long_list_of_workers_is_cut() -> None:
    many = [WorkerOffer(name=f"node{number}-worker0", address=f"tls://10.0.0.5:{number}") for number in range(20)]

    assert unmet_demand({}, ["x"], many).count("-worker0") == 8
    assert "and 12 more" in unmet_demand({"GPU": 1}, [], many)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def cluster(clock: FakeClock, tmp_path: Path) -> AsyncIterator[Client]:
    """A scheduler, a worker with a GPU, and one without."""
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            fail_unrunnable(scheduler, clock=clock)
            async with (
                worker(scheduler.address, "node0-worker0", {"GPU": 1}),
                worker(scheduler.address, "node0-worker1"),
                Client(scheduler.address, asynchronous=True) as client,
            ):
                yield client


def worker(scheduler: str, name: str, resources: Mapping[str, float] | None = None) -> Worker:
    return Worker(scheduler, name=name, resources=resources, nthreads=1, host="127.0.0.1", dashboard=False)


async def test_tasks_that_a_worker_can_run_run(cluster: Client) -> None:
    futures = [
        cluster.submit(add, 1, 2, resources={"GPU": 1}),
        cluster.submit(add, 1, 3, workers=["node0-worker1"]),
        cluster.submit(add, 1, 4, workers=["node9-worker9"], allow_other_workers=True),
    ]

    assert await cluster.gather(futures) == [3, 4, 5]


async def test_tasks_that_no_worker_can_run_and_those_that_need_them_fail_with_the_reason(
    cluster: Client,
) -> None:
    wrong = cluster.submit(add, 1, 2, resources={"gpu": 1})
    above = cluster.submit(add, wrong, 2)
    astray = cluster.submit(add, 1, 3, workers=["node9-worker9"])
    with dask.annotate(resources={"GPU": 3}):
        graph = dask.delayed(add)(1, 4)
    annotated = cluster.compute(graph, optimize_graph=False)
    apart = cluster.submit(add, 1, 5, workers=["node0-worker1"], resources={"GPU": 1})

    async with asyncio.timeout(20):
        for future, message in (
            (wrong, "Write 'GPU' instead of 'gpu'"),
            (above, "Write 'GPU' instead of 'gpu'"),
            (astray, r"\['node9-worker9'\] names no worker of this pool. It has node0-worker0, node0-worker1"),
            (annotated, r"Offered: GPU=1 by node0-worker0; none by node0-worker1"),
            (apart, r"no worker of those in workers= has that. Offered: none by node0-worker1"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                await future


async def test_a_task_waits_for_a_worker_that_is_away(cluster: Client, clock: FakeClock) -> None:
    address = cluster.scheduler_info()["address"]
    async with worker(address, "node1-worker0", {"TPU": 1}):
        assert await cluster.submit(add, 1, 2, resources={"TPU": 1}) == 3

    again = cluster.submit(add, 1, 3, resources={"TPU": 1})

    async def looked() -> bool | None:
        return len(clock.slept_s) > 60 or None

    await wait_until(looked, deadline_s=20, interval_s=0.01, what="many looks")
    assert again.status == "pending"
    async with worker(address, "node1-worker0", {"TPU": 1}):
        assert await again == 4


async def test_a_task_waits_for_no_worker_that_is_gone_for_good(cluster: Client) -> None:
    address = cluster.scheduler_info()["address"]
    async with worker(address, "node1-worker0", {"TPU": 1}):
        assert await cluster.submit(add, 1, 2, workers=["node1-worker0"]) == 3
        async with rpc(address) as scheduler:
            await scheduler.skyward_forget(workers=["node1-worker0"])
        assert await cluster.submit(add, 1, 3, workers=["node1-worker0"]) == 4  # its connection may end later

    with pytest.raises(ConfigurationError, match=r"It has node0-worker0, node0-worker1; names stay"):
        async with asyncio.timeout(20):
            await cluster.submit(add, 1, 4, workers=["node1-worker0"])

    async with worker(address, "node1-worker0", {"TPU": 1}):  # a later node has its rank
        assert await cluster.submit(add, 1, 5, workers=["node1-worker0"]) == 6
