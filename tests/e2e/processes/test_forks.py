"""Processes that calls fork, and processes that a client forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from support.eventually import eventually

ENDS = {"return": 0, "exit": 0, "exit 3": 3, "exit with a message": 1, "raise": 1}
DEADLINE_S = 60


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        start_callbacks(pool)
        yield pool


def fork(how: str) -> int:
    """Fork a child that ends the given way; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    match how:
        case "exit":
            sys.exit()
        case "exit 3":
            sys.exit(3)
        case "exit with a message":
            sys.exit("no more")
        case "raise":
            raise LookupError(how)
        case _:
            return -1


@pytest.mark.parametrize("how", ENDS)
def test_a_child_that_a_call_forked_ends_where_the_call_ends(pool: sky.ComputePool, how: str) -> None:
    assert pool.submit(fork, how).result(DEADLINE_S) == ENDS[how]
    assert pool.submit(abs, -1).result(DEADLINE_S) == 1


@pytest.mark.parametrize("status", [0, 3])
def test_a_child_that_a_dask_task_forked_ends_where_the_task_ends(pool: sky.ComputePool, status: int) -> None:
    def task() -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return sys.exit(status) if status else status

    with pool.dask_client() as client:
        assert client.submit(task, pure=False).result(DEADLINE_S) == status


CLIENT = """
import os, signal, sys
import skyward as sky

with sky.ComputePool(provider=sky.Local(), lease=10, away=600, display="quiet") as pool:
    assert pool.submit(abs, -1).result() == 1
    if not os.fork():
        os.read(0, 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def nodes_of(state: Path) -> list[str]:
    """Nodes of pools with this state folder that have not ended."""
    return [str(path) for path in (state / "skyward" / "local").glob("*/*/instance.json")]


@pytest.mark.full
def test_a_forked_child_does_not_keep_the_nodes_of_a_killed_client(tmp_path: Path) -> None:
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    held, holds = os.pipe()
    try:
        client = subprocess.Popen([sys.executable, "-c", CLIENT], env=env, stdin=held)
        assert client.wait(DEADLINE_S) == -signal.SIGKILL
        for attempt in eventually(DEADLINE_S):
            with attempt:
                assert nodes_of(tmp_path) == []
    finally:
        os.close(holds)  # the child ends
        os.close(held)
