"""The fleet grows, shrinks and heals while calls run; none is lost, none that need not is repeated."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.errors import WorkerLostError
from skyward.events import Error, InstanceProvisioned, WorkerLost, WorkerReplaced


def open_pool(**options: object) -> sky.ComputePool:
    return sky.ComputePool(**{"provider": sky.Local(), "nodes": 2, "display": "quiet"} | options)  # type: ignore[arg-type]


def square_slowly(number: int) -> int:
    time.sleep(0.02)
    return number * number


@sky.compute
def pid() -> int:
    return os.getpid()


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with open_pool(nodes=1) as pool:
        yield pool


def is_new(event: object) -> bool:
    return isinstance(event, InstanceProvisioned)


def instance_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SKYWARD_INSTANCE", "")
    except psutil.Error:  # gone meanwhile
        return ""


class TestScale:
    def test_grows_and_shrinks_under_load_and_loses_nothing(self) -> None:
        events: list[object] = []
        with open_pool(on_event=events.append) as pool:
            futures = [pool.submit(square_slowly, n) for n in range(600)]
            growing = pool.scale(3)
            assert (pool.capacity, pool.status.wanted) == (3, 3)
            growing.result(60)
            assert [node.state for node in pool.status.nodes] == ["ready"] * 3
            assert pool.instance_count == 3
            futures += [pool.submit(square_slowly, n) for n in range(600, 900)]
            pool.scale(1).result(60)
            assert [node.rank for node in pool.status.nodes] == [0]
            assert [future.result(60) for future in futures] == [n * n for n in range(900)]
        assert [event for event in events if isinstance(event, Error | WorkerLost)] == []

    def test_a_broadcast_counts_the_nodes_that_are_on_their_way(self) -> None:
        with open_pool(nodes=1) as pool:
            pool.scale(2)
            assert ranks_and_sizes() @ pool == ((0, 2), (1, 2))
            pool.scale(1)
            assert ranks_and_sizes() @ pool == ((0, 1),)

    def test_what_runs_on_a_node_that_goes_ends_there_and_only_once(self, tmp_path: Path) -> None:
        def wait_for_release(n: int) -> int:
            (tmp_path / f"{n}-{os.getpid()}").touch()
            while not (tmp_path / "release").exists():
                time.sleep(0.01)
            return sky.instance_info().node

        with open_pool() as pool:
            futures = [pool.submit(wait_for_release, n) for n in range(2)]
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
            shrinking = pool.scale(1)
            assert not shrinking.done()
            assert {node.rank: node.state for node in pool.status.nodes} == {0: "ready", 1: "ending"}
            (tmp_path / "release").touch()
            assert sorted(future.result(60) for future in futures) == [0, 1]
            shrinking.result(60)
            assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.full
    def test_the_nodes_named_go_first_and_their_ranks_are_free_again(self) -> None:
        with open_pool(nodes=3) as pool:
            before = dict(ranks_and_pids() @ pool)
            pool.scale(2, drop=[1]).result(60)
            assert dict(ranks_and_pids() @ pool) == {0: before[0], 2: before[2]}
            pool.scale(3).result(60)
            after = dict(ranks_and_pids() @ pool)
            assert (after[0], after[2]) == (before[0], before[2])
            assert after[1] != before[1]

    def test_a_later_call_overrides_an_earlier_one(self) -> None:
        with open_pool(nodes=1) as pool:
            growing = pool.scale(3)
            shrinking = pool.scale(1)
            shrinking.result(60)
            with pytest.raises(CancelledError):
                growing.result(60)
            assert len(pid() @ pool) == 1
            assert pool.instance_count == 1

    def test_closing_while_it_grows_ends_what_is_on_its_way(self) -> None:
        launched: list[str] = []
        with open_pool(nodes=1, on_event=lambda e: launched.append(e.instance_id) if is_new(e) else None) as pool:
            growing = pool.scale(3)
            wait_for(lambda: len(launched) > 1)
        assert growing.done()
        assert not set(launched) & set(map(instance_of, psutil.process_iter()))

    @pytest.mark.parametrize("nodes", [0, -1, "x", 1.5, True, None])
    def test_what_no_pool_can_have_is_refused(self, pool: sky.ComputePool, nodes: int) -> None:
        with pytest.raises(sky.ConfigurationError, match=r"nodes must be a whole number ≥ 1"):
            pool.scale(nodes)

    def test_what_is_no_rank_is_refused(self, pool: sky.ComputePool) -> None:
        with pytest.raises(sky.ConfigurationError, match="a rank in drop must be a whole number ≥ 0"):
            pool.scale(1, drop=["node1"])  # type: ignore[list-item]

    def test_a_closed_pool_says_so(self) -> None:
        pool = open_pool(nodes=1)
        for attempt in (lambda: pool.scale(2), lambda: pool.scheduler, lambda: pool.status, pool.dask_client):
            with pytest.raises(sky.PoolStateError, match="not open"):
                attempt()


@sky.compute
def ranks_and_sizes() -> tuple[int, int]:
    return sky.instance_info().node, sky.instance_info().total_nodes


class TestLostNodes:
    def test_calls_of_a_node_whose_supervisor_is_gone_run_elsewhere_and_another_takes_its_place(self) -> None:
        events: list[object] = []
        with open_pool(concurrency=1, on_event=events.append) as pool:
            doomed = supervisor_of(pool, 1)
            futures = [pool.submit(square_slowly, n) for n in range(200)]
            os.kill(doomed, signal.SIGKILL)
            assert [future.result(60) for future in futures] == [n * n for n in range(200)]
            assert len(pid() @ pool) == 2, "a broadcast waits for the node that takes its place"
            assert supervisor_of(pool, 1) != doomed
            assert pool.instance_count == 2
        (error,) = [event for event in events if isinstance(event, Error)]
        assert error.message == "node 1 is lost: its supervisor is gone; another takes its place"
        replaced = [event for event in events if isinstance(event, WorkerReplaced)]
        assert [(event.node, event.worker) for event in replaced] == [(1, 0)]

    def test_the_only_node_is_replaced_and_what_ran_there_runs_again(self, tmp_path: Path) -> None:
        @sky.compute
        def twice(path: str) -> str:
            with open(path, "a") as begun:
                begun.write("x")
            while len(text := Path(path).read_text()) < 2:
                time.sleep(0.01)
            return text

        with open_pool(nodes=1, concurrency=1) as pool:
            doomed = supervisor_of(pool, 0)
            running, waiting = pool.submit(twice, str(tmp_path / "begun")), pool.submit(abs, -1)
            wait_for((tmp_path / "begun").exists)
            os.kill(doomed, signal.SIGKILL)
            assert running.result(60) == "xx"
            assert waiting.result(60) == 1

    def test_survivors_go_on_without_the_head_and_know_the_next_one(self, tmp_path: Path) -> None:
        def note(n: int) -> int:
            with open(tmp_path / str(sky.instance_info().node), "a") as begun:
                begun.write(f"{n} ")
            time.sleep(0.05)
            return n

        with open_pool(nodes=3, concurrency=1) as pool:
            before = dict(ranks_and_pids() @ pool)
            doomed = supervisor_of(pool, 0)
            futures = [pool.submit(note, n) for n in range(200)]
            wait_for((tmp_path / "0").exists)
            os.kill(doomed, signal.SIGKILL)
            assert [future.result(60) for future in futures] == list(range(200))
            wait_for(lambda: not psutil.pid_exists(before[0]))
            after = dict(ranks_and_pids() @ pool)
            heads = {address for address, _ in zip(head_address() @ pool, range(3), strict=True)}
        assert (after[1], after[2]) == (before[1], before[2]), "nobody else was touched"
        assert after[0] != before[0]
        assert len(heads) == 1
        begun = Counter(n for node in range(3) for n in (tmp_path / str(node)).read_text().split())
        assert set(begun) == set(map(str, range(200)))
        repeated = {n for n, times in begun.items() if times > 1}
        assert repeated <= set((tmp_path / "0").read_text().split()), "only what the head had begun runs again"

    def test_a_node_whose_time_is_over_is_not_replaced_and_calls_fail_instead_of_waiting_for_ever(self) -> None:
        with open_pool(nodes=1, concurrency=1, timeout=8) as pool:
            waiting = [pool.submit(time.sleep, 3600) for _ in range(3)]
            for future in waiting:
                with pytest.raises(WorkerLostError, match="its timeout of 8 s is over"):
                    future.result(60)
            with pytest.raises(sky.PoolStateError, match="every node"):
                pid() >> pool
            began = time.monotonic()
        assert time.monotonic() - began < 5, "nobody waits for a node that is gone"


@sky.compute
def ranks_and_pids() -> tuple[int, int]:
    return sky.instance_info().node, os.getpid()


@sky.compute
def head_address() -> str:
    return sky.instance_info().head_addr


def supervisor_of(pool: sky.ComputePool, node: int) -> int:
    """Return the process that started all others of a node."""

    @sky.compute
    def supervisor() -> tuple[int, int]:
        (found,) = [each for each in psutil.Process().parents() if "skyward.node.supervisor" in each.cmdline()]
        return sky.instance_info().node, found.pid

    return dict(supervisor() @ pool)[node]
