"""Calls whose workers run together, with a framework that is a ring of sockets: who hangs up is noticed by nobody."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.distributed._gang import Gang, decorator
from skyward.distributed.runtime import FreshProcessNeeded, node_address
from skyward.errors import ConfigurationError, WorkerLostError

NODES, CONCURRENCY = 2, 2
WORLD = NODES * CONCURRENCY
PATIENCE_S = 60.0


def joined() -> list[Gang]:
    """The gangs that this process is in. Not a global of this module, of which every function takes a copy along."""
    return vars(sys).setdefault("joined", [])


class Ring:
    """Every worker listens, and has sent its rank to the next one before user code runs."""

    def __init__(self) -> None:
        if "worn" in vars(sys):
            raise FreshProcessNeeded
        self._listening = socket.create_server((node_address(), 0))
        self.port = int(self._listening.getsockname()[1])
        self.gpus = ()

    @contextmanager
    def join(self, gang: Gang) -> Iterator[None]:
        peer = gang.peers[(gang.rank + 1) % gang.world]
        with self._listening, socket.create_connection((peer.address, peer.port)) as there:
            there.sendall(bytes([gang.rank]))
            here, _ = self._listening.accept()
            with here:
                assert here.recv(1)[0] == (gang.rank - 1) % gang.world
                joined().append(gang)
                vars(sys)["before_me"] = here
                try:
                    yield
                finally:
                    joined().remove(gang)


def ring() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return decorator(Ring)


def place_in_the_gang() -> tuple[int, int, int, int, int]:
    (gang,) = joined()
    return gang.rank, gang.world, gang.mine.node, gang.mine.local_rank, gang.local_world


@sky.compute
@ring()
def inside() -> tuple[int, int, int, int, int]:
    return place_in_the_gang()


@ring()
@sky.compute
def outside() -> tuple[int, int, int, int, int]:
    return place_in_the_gang()


@sky.compute
@ring()
def fail_on(rank: int) -> None:
    if joined()[0].rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    threading.Event().wait()


@sky.compute
@ring()
def die_on(rank: int) -> None:
    if joined()[0].rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_own_node() -> None:
    """All that runs on it ends with its supervisor."""
    next(p for p in psutil.Process().parents() if "skyward.node.supervisor" in p.cmdline()).kill()
    threading.Event().wait()


@sky.compute
@ring()
def die_on_and_be_missed(rank: int, die: Callable[[], None] = kill_own_process) -> None:
    if joined()[0].rank == rank:
        die()
    vars(sys)["before_me"].recv(1)
    raise ConnectionError(f"rank {joined()[0].rank} misses the one before it")


@sky.compute
@ring()
def fail_on_and_be_died_for(rank: int) -> None:
    """As frameworks end a process that has lost the one which coordinates it."""
    if joined()[0].rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    if joined()[0].rank == (rank + 1) % WORLD:
        vars(sys)["before_me"].recv(1)
        os.kill(os.getpid(), signal.SIGABRT)
    threading.Event().wait()


@sky.compute
def place_inside() -> tuple[int, int, int, int, int]:
    return inside.local()


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def wear_out() -> int:
    vars(sys)["worn"] = True
    return os.getpid()


@sky.compute
@ring()
def gang_pid() -> int:
    return os.getpid()


def soon(run: Callable[[], Any]) -> Any:
    """What ``run`` gives or raises: a gang that hangs must not hang the tests."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result(PATIENCE_S)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(
        provider=sky.Local(), nodes=NODES, concurrency=CONCURRENCY, display="quiet", timeout=600
    ) as pool:
        yield pool


EXPECTED = ((0, WORLD, 0, 0, 2), (1, WORLD, 0, 1, 2), (2, WORLD, 1, 0, 2), (3, WORLD, 1, 1, 2))


@pytest.mark.parametrize("call", [inside, outside], ids=["compute outside", "compute inside"])
def test_all_workers_meet_before_user_code_runs(pool: sky.ComputePool, call: Callable[[], Any]) -> None:
    assert call() @ pool == EXPECTED
    assert call() @ pool == EXPECTED


def test_on_one_worker_it_is_a_gang_of_one() -> None:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        assert inside() >> pool == (0, 1, 0, 0, 1)
        assert inside() @ pool == ((0, 1, 0, 0, 1),)
        with pytest.raises(ValueError, match="enough"):
            fail_on(0) >> pool
        before = pid() >> pool
        assert inside() >> pool == (0, 1, 0, 0, 1)
        assert pid() >> pool == before


def test_here_it_is_a_gang_of_one() -> None:
    assert inside.local() == (0, 1, 0, 0, 1)


@pytest.mark.parametrize(
    "submit",
    [
        lambda pool: inside() >> pool,
        lambda pool: sky.gather(pid(), outside()) >> pool,
        lambda pool: pool.submit(inside),
        lambda pool: pool.submit(inside.__wrapped__),
    ],
    ids=[">>", "gather", "submit", "a plain function"],
)
def test_one_worker_of_several_is_refused(pool: sky.ComputePool, submit: Callable[[sky.ComputePool], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"all 4 workers .* use @, as in (inside|outside)\(\.\.\.\) @ pool"):
        submit(pool)


def test_a_failed_rank_ends_the_others_with_its_own_error(pool: sky.ComputePool) -> None:
    before = pid() @ pool
    with pytest.raises(ValueError, match="rank 1 has had enough") as caught:
        soon(lambda: fail_on(1) @ pool)
    notes = "".join(caught.value.__notes__)
    assert "node 0, worker 1" in notes
    assert "index 1 of 4 calls" in notes
    assert soon(lambda: inside() @ pool) == EXPECTED
    assert not set(before) & set(pid() @ pool), "a process of the failed gang was used again"


def test_every_future_of_a_failed_gang_has_the_first_error(pool: sky.ComputePool) -> None:
    futures = pool.broadcast_call(fail_on(3).invocation())
    for future in futures:
        with pytest.raises(ValueError, match="rank 3 has had enough"):
            future.result(PATIENCE_S)


def test_a_killed_rank_ends_the_others_with_its_cause(pool: sky.ComputePool) -> None:
    with pytest.raises(WorkerLostError, match=r"rank 2 of the 4 .*node 1, worker 0: killed by signal 9 \(SIGKILL\)"):
        soon(lambda: die_on(2) @ pool)
    assert soon(lambda: inside() @ pool) == EXPECTED


@pytest.mark.full
def test_that_a_killed_rank_is_missed_is_not_the_cause(pool: sky.ComputePool) -> None:
    for rank in (1, 2, 3):
        with pytest.raises(WorkerLostError, match=rf"rank {rank} of the 4 .*killed by signal 9"):
            soon(lambda rank=rank: die_on_and_be_missed(rank) @ pool)


@pytest.mark.full
def test_that_the_others_die_when_one_that_has_raised_ends_is_not_the_cause(pool: sky.ComputePool) -> None:
    for rank in (0, 3):
        with pytest.raises(ValueError, match=f"rank {rank} has had enough"):
            soon(lambda rank=rank: fail_on_and_be_died_for(rank) @ pool)


def test_inside_another_call_it_is_a_gang_of_one(pool: sky.ComputePool) -> None:
    assert place_inside() @ pool == ((0, 1, 0, 0, 1),) * CONCURRENCY + ((0, 1, 1, 0, 1),) * CONCURRENCY


# In `make test`: the killed rank in this file, and lost nodes in fleet/test_fleet.py.
@pytest.mark.full
def test_a_lost_node_ends_the_others_with_its_cause_and_the_next_gang_has_one_in_its_place() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=NODES, concurrency=CONCURRENCY, display="quiet") as pool:
        with pytest.raises(WorkerLostError) as caught:
            soon(lambda: die_on_and_be_missed(2, kill_own_node) @ pool)
        assert (caught.value.node, caught.value.worker) in {(1, 0), (1, 1)}
        assert soon(lambda: inside() @ pool) == EXPECTED


def test_a_cancelled_rank_cancels_the_others(pool: sky.ComputePool) -> None:
    futures = pool.broadcast_call(fail_on(-1).invocation())
    pool.cancel_calls(futures[:1])
    assert soon(lambda: inside() @ pool) == EXPECTED
    assert all(future.done() for future in futures)


def test_gangs_of_several_threads_take_turns(pool: sky.ComputePool) -> None:
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(lambda: inside() @ pool) for _ in range(12)]
        assert [run.result(PATIENCE_S) for run in runs] == [EXPECTED] * 12


def test_a_worn_out_process_is_replaced_before_the_call_begins(pool: sky.ComputePool) -> None:
    worn = wear_out() @ pool
    fresh = soon(lambda: gang_pid() @ pool)
    assert not set(worn) & set(fresh)
    assert soon(lambda: gang_pid() @ pool) == fresh


def test_two_pools_do_not_meet(pool: sky.ComputePool) -> None:
    with (
        sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as other,
        ThreadPoolExecutor(2) as threads,
    ):
        here, there = threads.submit(lambda: inside() @ pool), threads.submit(lambda: inside() @ other)
        assert here.result(PATIENCE_S) == EXPECTED
        assert there.result(PATIENCE_S) == ((0, 2, 0, 0, 2), (1, 2, 0, 1, 2))
