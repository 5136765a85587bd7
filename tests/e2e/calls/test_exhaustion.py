"""A pool whose ports are flooded, or whose processes have no descriptor left, goes on."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

import skyward as sky
from skyward.fleet.node import Node

FLOOD = 1300
ALLOWED = 400
"""Descriptors of a flooded process: a few dozen of its own, and the bound on strangers of each port."""


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


def node_of(pool: sky.ComputePool) -> Node:
    assert pool._running is not None
    (link,) = pool._running.scheduler.links.values()
    return link.node.handle


def cut(pool: sky.ComputePool) -> None:
    """Reset the lane's connection."""
    assert pool._running is not None
    (link,) = pool._running.scheduler.links.values()
    pool._running.loop.loop.call_soon_threadsafe(link.cut)


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """Connect, and never say a word."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        yield


@pytest.mark.parametrize(
    "port", ["lane", *(pytest.param(each, marks=pytest.mark.full) for each in ("control", "blobs"))]
)
def test_idle_connections_cost_a_node_neither_its_descriptors_nor_its_calls(pool: sky.ComputePool, port: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = node_of(pool)
    supervisor, worker = psutil.Process(node.ready.pid), psutil.Process(pool.submit(os.getpid).result(30))
    address = {"control": node.ready.control, "lane": node.ready.lanes[0], "blobs": node.ready.blobs}[port]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with idle_connections(address, FLOOD):
            for _ in range(20):
                assert pool.submit(time.sleep, 0.02).result(30) is None
            assert max(supervisor.num_fds(), worker.num_fds()) < ALLOWED
            cut(pool)
            assert pool.submit(abs, -1).result(30) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert worker.is_running()


def use_up_descriptors(until: str) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        while not os.path.exists(until):
            time.sleep(0.01)
        time.sleep(0.5)  # long enough for the lane to be dialled in vain
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return len(held)


def test_a_worker_without_descriptors_is_reached_again_once_it_has_some(pool: sky.ComputePool, tmp_path: Path) -> None:
    worker = pool.submit(os.getpid).result(30)
    flag = tmp_path / "cut"
    call = pool.submit(use_up_descriptors, str(flag))
    with pytest.raises(TimeoutError):
        call.result(1)
    cut(pool)
    flag.touch()
    assert call.result(60) > 100
    assert pool.submit(os.getpid).result(30) == worker


def test_a_supervisor_without_descriptors_says_so_and_goes_on(pool: sky.ComputePool) -> None:
    supervisor = node_of(pool).ready.pid
    troubles: SimpleQueue[str] = SimpleQueue()
    pool.on(sky.Error, lambda event: troubles.put(event.message))
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert re.search("the supervisor of node 0: .* failed and was started again", troubles.get(timeout=30))
    finally:
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    assert pool.submit(abs, -1).result(30) == 1
    assert psutil.pid_exists(supervisor)
