"""What the specification's pages show, done on real pools; tests/unit/api/test_spec_surface.py checks the names."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from joblib import Parallel, delayed

import skyward as sky
from skyward import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    CostFinal,
    CostUpdate,
    Error,
    Image,
    InfraCreated,
    InfraCreating,
    InstanceInfo,
    InstanceLaunching,
    InstanceProvisioned,
    InstanceStopping,
    LogLine,
    Metrics,
    MultiPool,
    PendingCompute,
    PoolStarted,
    PoolStopping,
    SkywardEvent,
    Spot,
    compose,
    compute,
    emit,
    gather,
    instance_info,
    shard,
    use_callback,
)
from skyward.integrations import JoblibPool, joblib_backend, sklearn_backend

WAIT_S = 20


class Heard:
    """A callback that can be waited on."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[SkywardEvent] = queue.SimpleQueue()

    def __call__(self, event: SkywardEvent) -> None:
        self._queue.put(event)

    def next(self) -> Any:
        return self._queue.get(timeout=WAIT_S)

    def all(self) -> list[SkywardEvent]:
        return [self._queue.get() for _ in range(self._queue.qsize())]


def local(**parameters: Any) -> sky.ComputePool:
    return sky.ComputePool(**({"provider": sky.Local(), "display": "quiet"} | parameters))


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with local(nodes=2, concurrency=2) as pool:
        start_callbacks(pool)
        yield pool


@compute
def add(a: int, b: int = 1) -> int:
    return a + b


@compute
def my_pid() -> int:
    return os.getpid()


def plain_pid(_: int) -> int:
    return os.getpid()


class TestCalls:
    def test_a_pending_call_can_be_annotated_and_sent_many_times(self, pool: sky.ComputePool) -> None:
        pending: PendingCompute[int] = add(1, b=2)
        assert [pending >> pool, pending >> pool, *(pending @ pool)] == [3] * 6

    def test_methods_do_what_the_operators_do(self, pool: sky.ComputePool) -> None:
        assert pool.run(add(1)) == pool.run(pending=add(1)) == 2
        assert pool.run_batch(add(1) & add(2)) == pool.run_batch(batch=gather(add(1), add(2))) == (2, 3)
        assert pool.broadcast(add(1)) == pool.broadcast(pending=add(1)) == (2, 2, 2, 2)
        assert pool.broadcast(my_pid()) == my_pid() @ pool

    def test_eight_calls_can_be_chained(self, pool: sky.ComputePool) -> None:
        a, b, c, d, e, f, g, h = (add(0) & add(1) & add(2) & add(3) & add(4) & add(5) & add(6) & add(7)) >> pool
        assert (a, b, c, d, e, f, g, h) == (1, 2, 3, 4, 5, 6, 7, 8)

    def test_a_pool_can_be_opened_and_awaited_in_asyncio(self) -> None:
        async def main() -> tuple[list[int], bool, int]:
            async with local() as pool:
                results = await asyncio.gather(pool.submit(add, 1), pool.submit(add, 2, b=3))
                return results, pool.is_active, pool.instance_count

        assert asyncio.run(main()) == ([2, 5], True, 1)

    def test_properties_of_an_open_pool(self, pool: sky.ComputePool) -> None:
        assert pool.is_active is True
        assert pool.instance_count == 2


class TestOnANode:
    def test_instance_info_describes_every_worker(self, pool: sky.ComputePool) -> None:
        @compute
        def where() -> tuple[InstanceInfo, str | None]:
            return instance_info(), sky.current_accelerator()

        infos, accelerators = zip(*(where() @ pool), strict=True)
        first = infos[0]
        assert [(info.node, info.worker) for info in infos] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [info.is_head for info in infos] == [True, False, False, False]
        same = "total_nodes", "workers_per_node", "head_addr", "head_port", "job_id"
        assert all(
            {name: asdict(info)[name] for name in same} == {name: asdict(first)[name] for name in same}
            for info in infos
        )
        assert (first.total_nodes, first.workers_per_node) == (2, 2)
        assert first.job_id.startswith("sky-")
        assert all(type(info.accelerators) is list for info in infos)
        assert accelerators == tuple(next(iter(info.accelerators), None) for info in infos)

    def test_workers_of_a_broadcast_meet_at_the_heads_port(self, pool: sky.ComputePool) -> None:
        @compute
        def meet() -> list[str]:
            info = instance_info()
            name = f"{info.node}.{info.worker}"
            if not info.is_head:
                for _ in range(1000):
                    try:
                        with socket.create_connection((info.head_addr, info.head_port), timeout=10) as client:
                            client.sendall(name.encode())
                            return []
                    except ConnectionRefusedError:
                        threading.Event().wait(0.01)
                raise TimeoutError("the head does not listen")
            names = [name]
            with socket.create_server((info.head_addr, info.head_port)) as server:
                server.settimeout(10)
                while len(names) < info.total_nodes * info.workers_per_node:
                    with server.accept()[0] as peer:
                        names.append(peer.recv(16).decode())
            return sorted(names)

        assert meet() @ pool == (["0.0", "0.1", "1.0", "1.1"], [], [], [])

    def test_arrays_are_sharded_alike(self, pool: sky.ComputePool) -> None:
        @compute
        def rows(x: np.ndarray[Any, Any], y: list[int]) -> tuple[list[int], list[int]]:
            x_local, y_local = shard(x, y, shuffle=True, seed=42)
            return [int(value) for value in x_local], y_local

        numbers = list(range(41))
        parts = rows(np.array(numbers) * 10, numbers) @ pool
        assert all(xs == [10 * y for y in ys] for xs, ys in parts)
        dealt = [y for _, ys in parts for y in ys]
        assert sorted(dealt) == numbers
        assert dealt != numbers
        assert parts == rows(np.array(numbers) * 10, numbers) @ pool

    def test_a_distributed_sampler_deals_every_index_anew_in_each_epoch(self, pool: sky.ComputePool) -> None:
        @compute
        def epochs(dataset: range) -> list[list[int]]:
            sampler = sky.DistributedSampler(dataset, shuffle=True)
            order: list[list[int]] = []
            for epoch in range(2):
                sampler.set_epoch(epoch)
                order.append(list(sampler))
            return order

        first, second = zip(*(epochs(range(40)) @ pool), strict=True)
        assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(40))
        assert first != second


class TestEvents:
    def test_on_hears_its_kind_and_no_other(self) -> None:
        lines, metrics = Heard(), Heard()

        @compute
        def talk(text: str) -> None:
            print(text)

        with local() as pool:
            pool.on(LogLine, lines)
            pool.on(event_type=Metrics, callback=metrics)
            talk("grüße") >> pool
            match lines.next():
                case LogLine(line=line, node=node, instance_id=instance_id):
                    assert (line, node) == ("grüße", 0)
            match metrics.next():
                case Metrics(cpu=cpu, memory=memory, gpu=gpu) as event:
                    assert event.instance_id == instance_id
                    assert 0 <= cpu <= 100
                    assert 0 < memory <= 100
                    assert gpu is None or 0 <= gpu <= 100
        assert lines.all() == []

    def test_an_event_emitted_in_a_call_reaches_the_client(self, pool: sky.ComputePool) -> None:
        @compute
        def report() -> None:
            emit(Error("disk is nearly full", "node-7"))

        heard, inner = Heard(), Heard()
        pool.on(Error, heard)
        with use_callback(inner):
            report() >> pool
        assert heard.next() == inner.next() == Error("disk is nearly full", "node-7")

    def test_two_pools_tell_their_whole_lives(self) -> None:
        heard, also, around = Heard(), Heard(), Heard()
        telling = local(
            image=Image(pip=["numpy"], env={"KEPT": "image", "CHANGED": "image"}),
            env={"CHANGED": "pool"},
            pip=["joblib"],
            cpu=1,
            memory="64MB",
            spot=Spot.Always(retries=10, interval=1.0),
            timeout=600,
            on_event=compose(heard, also),
        )
        silent = local(collect_metrics=False, spot=0.8)
        unmeasured = Heard()
        silent.on(Metrics, unmeasured)

        with use_callback(around), MultiPool(telling, silent) as (first, second):
            assert (first, second) == (telling, silent)
            assert (add(1) >> first, add(2) >> second) == (2, 3)
            environment = first.submit(lambda: (os.environ["KEPT"], os.environ["CHANGED"])).result()
            assert environment == ("image", "pool")
            while not isinstance(heard.next(), PoolStarted):
                pass
            while not isinstance(heard.next(), Metrics):
                pass
        assert [pool.is_active for pool in (first, second)] == [False, False]
        assert unmeasured.all() == []

        story = [event for event in also.all() if not isinstance(event, Metrics)]
        assert is_in_order(
            story,
            InfraCreating,
            InfraCreated,
            InstanceLaunching,
            InstanceProvisioned,
            BootstrapStarting,
            BootstrapProgress,
            BootstrapCompleted,
            PoolStarted,
            CostUpdate,
            PoolStopping,
            InstanceStopping,
            CostFinal,
        )
        provisioned = next(event for event in story if isinstance(event, InstanceProvisioned))
        assert (provisioned.provider, provisioned.node, provisioned.spot) == ("local", 0, False)
        stopped = [event.instance_id for event in story if isinstance(event, InstanceStopping)]
        assert stopped == [provisioned.instance_id]
        final = next(event for event in story if isinstance(event, CostFinal))
        assert (final.total_cost, final.spot_count, final.savings_vs_ondemand) == (0, 0, 0)
        assert final.total_seconds > 0
        assert len([event for event in around.all() if isinstance(event, PoolStarted)]) == 2


def is_in_order(story: list[SkywardEvent], *kinds: type[Any]) -> bool:
    remaining = iter(story)
    return all(any(isinstance(event, kind) for event in remaining) for kind in kinds)


class TestIntegrations:
    @pytest.mark.parametrize("backend", [joblib_backend, sklearn_backend])
    def test_an_open_pool_is_the_backend_for_a_block(self, pool: sky.ComputePool, backend: Any) -> None:
        workers = set(my_pid() @ pool)
        with backend(pool=pool):
            assert set(Parallel(n_jobs=-1)(delayed(plain_pid)(n) for n in range(8))) <= workers
        assert pool.is_active

    def test_a_joblib_pool_takes_a_pools_parameters_and_gives_the_pool(self) -> None:
        with JoblibPool(
            provider=sky.Local(), nodes=2, concurrency=1, image=Image(pip=["joblib"]), display="quiet"
        ) as pool:
            assert pool.instance_count == 2
            data = random.Random(1).sample(range(100), 20)
            assert Parallel(n_jobs=-1)(delayed(abs)(-x) for x in data) == data
            workers = set(my_pid() @ pool)
            assert set(Parallel(n_jobs=-1)(delayed(plain_pid)(n) for n in range(8))) <= workers
