"""Tests of a cluster's start and end, and of its leftovers."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from operator import add
from typing import Any, Final

import psutil
import pytest
from distributed import Client

from skyward.testing._cluster_base import ClusterSuite

__all__ = ["ClusterLifecycle"]

_ROUNDS = 2
_SHARED_THREADS: Final = ("Dask-Offload", "asyncio_")
"""Prefixes of the names of threads that a process starts once, or at any time."""

_LEAVES_IT_OPEN: Final = """
import runpy, sys
from distributed import Client
cluster = runpy.run_path(sys.argv[1])[sys.argv[2]]().make_cluster(workers=int(sys.argv[3]))
client = Client(cluster)
print("ADDRESSES", client.scheduler.address, *client.scheduler_info(n_workers=-1)["workers"])
"""


class ClusterLifecycle(ClusterSuite):
    """Start and close, in both ways of use, by hand and by accident."""

    @pytest.fixture(scope="class")
    @classmethod
    def ended(cls) -> Any:
        """Return a cluster that was closed by hand."""
        cluster = cls().make_cluster(workers=0)
        assert cluster.status.name == "running"
        assert cluster.close() is None
        return cluster

    def test_start_work_and_with_print_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Neither here nor in the processes started from here. ``with`` closes the cluster."""
        with self.make_cluster(workers=self.count(1)) as cluster, Client(cluster) as client:
            self.check_works(client)
        assert cluster.status.name == "closed"
        assert capfd.readouterr() == ("", "")

    def test_close_closes(self, ended: Any) -> None:
        """The status is closed, and the representation is still there."""
        assert ended.status.name == "closed"
        assert ended.name in repr(ended)

    def test_closing_again_does_nothing(self, ended: Any) -> None:
        """Nor is there anything to await."""
        assert ended.close() is None
        assert ended.close(timeout=1) is None
        assert ended.status.name == "closed"

    def test_closed_cluster_takes_no_client(self, ended: Any) -> None:
        """The error has the reason."""
        with pytest.raises(RuntimeError, match="closed"):
            Client(ended)

    @pytest.mark.usefixtures("cluster")  # starts the things that a process starts once
    def test_starting_and_closing_again_and_again_leaves_nothing(self) -> None:
        """No thread, process, listening socket or open file."""
        before = self.until(_ProcessResources, bool, what="a first look")
        for _ in range(_ROUNDS):
            with self.make_cluster(workers=self.count(1)) as cluster, Client(cluster) as client:
                self.check_works(client)
            del cluster, client
            gc.collect()
            self.until(lambda: _ProcessResources().beyond(before), lambda more: not more, what="nothing to be left")

    @pytest.mark.usefixtures("cluster")  # as above
    def test_failed_start_raises_and_leaves_nothing(self) -> None:
        """Although nobody has a cluster to close."""
        before = self.until(_ProcessResources, bool, what="a first look")
        with pytest.raises(Exception, match=r"\S"):
            self.make_broken_cluster()
        gc.collect()
        self.until(lambda: _ProcessResources().beyond(before), lambda more: not more, what="nothing to be left")

    def test_process_that_ends_takes_its_cluster_with_it(self) -> None:
        """Without an error, though nobody closed it."""
        where = [inspect.getfile(type(self)), type(self).__name__, str(self.count(1))]
        done = subprocess.run(
            [sys.executable, "-c", _LEAVES_IT_OPEN, *where],
            capture_output=True,
            text=True,
            timeout=self.patience_s,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        named = re.search(r"^ADDRESSES (.+)$", done.stdout, re.MULTILINE)
        assert named is not None
        addresses = named[1].split()
        assert len(addresses) == 1 + self.count(1)
        self.until(
            lambda: [address for address in addresses if _listens(address)],
            lambda left: not left,
            what="all to be gone",
        )

    async def test_async_with_starts_and_closes(self) -> None:
        """No task is left running."""
        before = asyncio.all_tasks()
        async with self.make_cluster(workers=self.count(1), asynchronous=True) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(add, "a", "b") == "ab"
            assert cluster.status.name == "running"
        assert cluster.status.name == "closed"
        await self.eventually(lambda: asyncio.all_tasks() - before, lambda left: not left, what="all tasks to end")

    async def test_await_starts_and_close_may_be_awaited_twice(self) -> None:
        """Clients see the closing: they do not go on as if there were a scheduler."""
        cluster = await self.make_cluster(workers=0, asynchronous=True)
        assert cluster.status.name == "running"
        client: Any = Client(cluster, asynchronous=True)
        await client
        await cluster.close()
        await cluster.close()
        assert cluster.status.name == "closed"
        await self.eventually(lambda: client.status, lambda status: status == "closed", what="the client to be closed")

    async def test_scale_may_be_awaited(self) -> None:
        """As everything may that an asynchronous cluster does."""
        async with self.make_cluster(workers=0, asynchronous=True) as cluster:
            await cluster.scale(self.above(1))
            await cluster.wait_for_workers(self.above(1), timeout=self.patience_s)
            assert len(cluster.observed) == self.above(1)

    async def test_with_on_an_asynchronous_cluster_names_async_with(self) -> None:
        """Instead of blocking the event loop that it needs."""
        cluster = self.make_cluster(workers=0, asynchronous=True)
        with pytest.raises(TypeError, match="async with"), cluster:
            pass
        await cluster.close()

    async def test_synchronous_cluster_works_where_a_loop_runs(self, client: Any) -> None:
        """As in a notebook. Closing it leaves other clusters alone."""
        with self.make_cluster(workers=self.count(1)) as another, Client(another, set_as_default=False) as its_client:
            self.check_works(its_client)
        self.check_works(client)

    async def test_cluster_that_is_forgotten_unclosed_warns(self) -> None:
        """By its name."""
        clusters = [self.make_cluster(workers=0, asynchronous=True, name="a-forgotten-one")]
        with pytest.warns(ResourceWarning, match="a-forgotten-one"):
            _forget(clusters)


class _ProcessResources:
    """Resources of this process: threads, child processes, listening sockets, and open files (an event loop is one)."""

    def __init__(self) -> None:
        process = psutil.Process()
        self._each = {
            *(f"thread {each.name} {each.ident}" for each in _threads()),
            *(f"process {each.pid}" for each in process.children(recursive=True)),
            *(f"socket {each.laddr}" for each in process.net_connections() if each.status == psutil.CONN_LISTEN),
        }
        self._files = process.num_fds() - len(process.net_connections("all"))

    def beyond(self, before: _ProcessResources) -> set[str]:
        """Return the resources that ``before`` lacks."""
        more = self._files - before._files
        return self._each - before._each | ({f"{more} more open files"} if more > 0 else set())


def _threads() -> Iterator[threading.Thread]:
    return (each for each in threading.enumerate() if not each.name.startswith(_SHARED_THREADS))


def _forget(clusters: list[Any]) -> None:
    clusters.clear()
    gc.collect()


def _listens(address: str) -> bool:
    host, port = address.partition("://")[2].rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
