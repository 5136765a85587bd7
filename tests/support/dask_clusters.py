"""Contract of a cluster manager for users of ``distributed``, as a suite to subclass.

Dask's own ``LocalCluster`` is its control. It is written against the public interface of
``distributed.deploy.Cluster``, and one private name that notebooks call: ``_widget``.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import isawaitable
from operator import add
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import psutil
import pytest
from distributed import Client
from distributed.security import Security

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until

__all__ = ["ClusterConformance", "ClusterSuite", "StrictClusterConformance"]

T = TypeVar("T")

_GLANCE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMembers:
    """Names of a cluster's workers.

    Attributes:
        plan: workers that the cluster should have.
        requested: workers that were requested.
        observed: workers that are registered with the scheduler.
    """

    plan: frozenset[Hashable]
    requested: frozenset[Hashable]
    observed: frozenset[Hashable]

    def is_settled(self, workers: int) -> bool:
        """Return True if all three are the same ``workers`` names."""
        return self.plan == self.requested == self.observed and len(self.plan) == workers


def membership(cluster: Any) -> ClusterMembers:
    """Return the workers of ``cluster``, a synchronous one, at one moment of its event loop."""

    async def look() -> ClusterMembers:
        return ClusterMembers(
            plan=frozenset(cluster.plan), requested=frozenset(cluster.requested), observed=frozenset(cluster.observed)
        )

    return cluster.sync(look)


class ClusterSuite:
    """Description of a cluster manager, for subclasses to fill in, and the shared part of the suites.

    Attributes:
        workers_per_step: workers come and go in steps of this many: 4 where every machine has 4.
        fewest_workers: the workers left after ``scale(0)``: 1 where the scheduler's machine always has a worker.
        threads_per_worker: the threads of each worker of :meth:`make_cluster`.
        finds_by_name: True if ``from_name`` finds the open clusters of this process; if not, it must raise
            ``NotImplementedError``.
        patience_s: limit of every wait, such as for a new worker or for the end of a process.
    """

    workers_per_step: ClassVar[int] = 1
    fewest_workers: ClassVar[int] = 0
    threads_per_worker: ClassVar[int] = 1
    finds_by_name: ClassVar[bool] = False
    patience_s: ClassVar[float] = 60.0

    def make_cluster(self, *, workers: int, **options: Any) -> Any:
        """Return a cluster with ``workers`` workers, or ``fewest_workers`` if these are more.

        Must work without fixtures: one test calls it in a process of its own. Quiet: no output of its own.

        Args:
            workers: a multiple of ``workers_per_step``, or 0.
            options: ``asynchronous``, ``name`` and ``scheduler_sync_interval``, which every ``Cluster`` takes, and
                ``security=True``: with temporary certificates. A manager that always has them may ignore this.
        """
        raise NotImplementedError

    def make_broken_cluster(self) -> Any:
        """Try to make a synchronous cluster that cannot start; raise its manager's exception."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Any]:
        """Two steps of workers, with certificates, for all tests that only look."""
        suite = cls()
        with suite.make_cluster(workers=suite.count(2), security=True) as cluster:
            yield cluster

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, cluster: Any) -> Iterator[Any]:
        """Of ``cluster``; not the default client."""
        with Client(cluster, set_as_default=False) as client:
            yield client

    @pytest.fixture(scope="class")
    @classmethod
    def resting_client(cls) -> Iterator[Any]:
        """Of a cluster with the fewest workers."""
        with cls().make_cluster(workers=0) as cluster, Client(cluster, set_as_default=False) as client:
            yield client

    @pytest.fixture
    def elastic_client(self, resting_client: Any) -> Iterator[Any]:
        """Of a cluster (its ``cluster``) that may be scaled; it has the fewest workers before and after each test."""
        yield resting_client
        resting_client.cluster.scale(0)
        self.settle(resting_client.cluster, self.fewest_workers)

    @pytest.fixture
    def elastic(self, elastic_client: Any) -> Any:
        """Return the cluster of ``elastic_client``."""
        return elastic_client.cluster

    def count(self, steps: int) -> int:
        """Return the number of workers of a cluster that has ``steps`` steps, the fewest included."""
        return max(self.whole(self.fewest_workers), steps * self.workers_per_step)

    def above(self, steps: int) -> int:
        """Return the number of workers that is ``steps`` steps above the fewest."""
        return self.fewest_workers + steps * self.workers_per_step

    def whole(self, workers: int) -> int:
        """Return ``workers``, rounded up to whole steps."""
        return math.ceil(workers / self.workers_per_step) * self.workers_per_step

    def check_works(self, client: Any) -> None:
        """Assert that ``client`` gets its work done."""
        assert client.submit(add, "a", "b", pure=False).result(timeout=self.patience_s) == "ab"

    def settle(self, cluster: Any, workers: int) -> ClusterMembers:
        """Wait until ``cluster`` has exactly ``workers`` workers and no others are planned."""
        return self.until(
            lambda: membership(cluster), lambda seen: seen.is_settled(workers), what=f"{workers} workers to be settled"
        )

    def until(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """Call ``look`` until ``wanted`` accepts its result; return that.

        Raises:
            UnreachableError: ``patience_s`` passed; the message has ``what`` and the last result.
        """
        return asyncio.run(self.eventually(look, wanted, what=what))

    async def eventually(self, look: Callable[[], T], wanted: Callable[[T], bool], *, what: str) -> T:
        """Do the same as :meth:`until` where an event loop runs."""

        async def probe() -> tuple[T] | NotYet:
            seen = look()
            return (seen,) if wanted(seen) else NotYet(repr(seen))

        return (await wait_until(probe, deadline_s=self.patience_s, interval_s=_GLANCE_S, what=what))[0]

    def stays(self, look: Callable[[], T], wanted: Callable[[T], bool], *, for_s: float) -> None:
        """Assert that ``wanted`` accepts every observation for ``for_s`` seconds."""

        async def watch() -> None:
            end = SYSTEM_CLOCK.monotonic() + for_s
            while SYSTEM_CLOCK.monotonic() < end:
                assert wanted(look()), look()
                await SYSTEM_CLOCK.sleep(_GLANCE_S)

        asyncio.run(watch())


_BLIPS = 3


class ClusterFacts(ClusterSuite):
    """Work, names, numbers, representations, logs and clients. One cluster serves all of it."""

    def test_submitted_work_runs(self, client: Any) -> None:
        """On every worker."""
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        futures = [client.submit(add, 1, rank, workers=[worker]) for rank, worker in enumerate(workers)]
        assert client.gather(futures) == [1 + rank for rank in range(self.count(2))]

    def test_workers_have_the_threads_they_should(self, client: Any) -> None:
        """The cores that ``scale(cores=)`` counts are these."""
        assert list(client.nthreads().values()) == [self.threads_per_worker] * self.count(2)

    def test_plan_requested_and_observed_are_the_same_names(self, cluster: Any, client: Any) -> None:
        """Sets in the scheduler's own namespace; otherwise adapting never comes to rest."""
        names = {each["name"] for each in client.scheduler_info(n_workers=-1)["workers"].values()}
        seen = self.settle(cluster, self.count(2))
        assert {type(each) for each in (cluster.plan, cluster.requested, cluster.observed)} == {set}
        assert seen.observed == names

    def test_scheduler_info_knows_the_workers(self, cluster: Any, client: Any) -> None:
        """By address, with their threads."""
        known = {address: info["nthreads"] for address, info in cluster.scheduler_info["workers"].items()}
        assert known == client.nthreads()

    def test_scheduler_address_is_where_clients_are(self, cluster: Any, client: Any) -> None:
        """With its protocol."""
        assert cluster.scheduler_address == client.scheduler.address
        assert re.match(r"\w+://.+", cluster.scheduler_address)

    def test_repr_tells_what_there_is(self, cluster: Any) -> None:
        """Name, address, workers, threads."""
        for part in (
            cluster.name,
            cluster.scheduler_address,
            f"workers={self.count(2)}",
            f"threads={self.count(2) * self.threads_per_worker}",
        ):
            assert part in repr(cluster)

    def test_html_names_the_cluster_and_its_workers(self, cluster: Any) -> None:
        """By address."""
        html = cluster._repr_html_()
        assert cluster.name in html
        assert [address for address in cluster.scheduler_info["workers"] if address not in html] == []

    def test_widget_is_built_where_there_are_widgets(self, cluster: Any) -> None:
        """None elsewhere, so that the representation is shown."""
        built = cluster._widget()
        assert (built is not None) == (find_spec("ipywidgets") is not None)

    def test_dashboard_link_is_a_link_or_nothing(self, cluster: Any) -> None:
        """Text in any case."""
        assert re.fullmatch(r"(https?://\S+)?", cluster.dashboard_link)

    async def test_given_name_is_kept(self) -> None:
        """Names are the caller's."""
        cluster = self.make_cluster(workers=0, asynchronous=True, name="a-name-of-its-own")
        assert cluster.name == "a-name-of-its-own"
        assert cluster.name in repr(cluster)
        await cluster.close()

    async def test_cluster_that_is_not_connected_says_so(self) -> None:
        """Its representations are there all the same."""
        cluster = self.make_cluster(workers=0, asynchronous=True)
        assert "Not Connected" in cluster.scheduler_address
        assert "workers=0" in repr(cluster)
        assert cluster.name in cluster._repr_html_()
        await cluster.close()

    async def test_clusters_of_one_name_are_equal(self) -> None:
        """Of one type, too. They may be put into sets, where each is itself."""
        first, same, other = (
            self.make_cluster(workers=0, asynchronous=True, name=name) for name in ("one", "one", "two")
        )
        assert first == same
        assert first != other
        assert first != "one"
        assert {first: "first", same: "same"}[first] == "first"
        for each in (first, same, other):
            await each.close()

    def test_name_leads_to_the_cluster_if_it_is_said_to(self, cluster: Any) -> None:
        """Otherwise that is not implemented, as in Dask's own."""
        if self.finds_by_name:
            assert type(cluster).from_name(cluster.name).scheduler_address == cluster.scheduler_address
        else:
            with pytest.raises(NotImplementedError):
                type(cluster).from_name(cluster.name)

    def test_logs_are_those_asked_for(self, cluster: Any) -> None:
        """Cluster, scheduler, and workers by address; all as text."""
        workers = set(cluster.scheduler_info["workers"])
        logs = cluster.get_logs()
        assert set(logs) == {"Cluster", "Scheduler"} | workers
        assert [name for name, log in logs.items() if not isinstance(log, str)] == []
        assert set(cluster.get_logs(workers=False)) == {"Cluster", "Scheduler"}
        one = min(workers)
        assert set(cluster.get_logs(cluster=False, scheduler=False, workers=[one])) == {one}

    def test_logs_quote_the_workers(self, cluster: Any, client: Any) -> None:
        """A worker's log has its own lines, and no other worker's."""
        worker = next(iter(cluster.scheduler_info["workers"]))
        mark = secrets.token_hex(8)
        client.run(logging.getLogger("distributed.worker").warning, mark, workers=[worker])
        assert [name for name, log in cluster.get_logs().items() if mark in log] == [worker]

    def test_wait_for_workers_returns_when_they_are_there(self, cluster: Any) -> None:
        """None."""
        assert cluster.wait_for_workers(self.count(2), timeout=self.patience_s) is None

    def test_wait_for_workers_ends_in_time(self, cluster: Any) -> None:
        """With the numbers."""
        with pytest.raises(TimeoutError, match=rf"{self.count(2)}\D+{self.count(2) + 1}"):
            cluster.wait_for_workers(self.count(2) + 1, timeout=0.1)

    @pytest.mark.parametrize("workers", [0, -1, "x"])
    def test_wait_for_workers_refuses_what_is_no_number_of_them(self, cluster: Any, workers: Any) -> None:
        """By the parameter's name."""
        with pytest.raises(ValueError, match="n_workers"):
            cluster.wait_for_workers(workers)

    def test_get_client_makes_one(self, cluster: Any) -> None:
        """Closing it leaves the cluster open."""
        with cluster.get_client() as made:
            self.check_works(made)
        assert cluster.status.name == "running"

    def test_get_client_returns_the_current_one(self, cluster: Any, client: Any) -> None:
        """If it is of this cluster."""
        with client.as_current():
            assert cluster.get_client() is client

    def test_what_the_cluster_tells_the_scheduler_survives_a_blip(self) -> None:
        """It is sent again as soon as the scheduler can be reached."""
        with self.make_cluster(workers=0, scheduler_sync_interval="20ms") as cluster, cluster.get_client() as client:
            reached = cluster.scheduler_comm
            cluster.scheduler_comm = blip = _Blip(reached)
            cluster.name = "renamed-meanwhile"
            self.until(lambda: blip.failed, lambda failed: failed == _BLIPS, what="the blip to be over")
            self.until(
                lambda: client.get_metadata(["cluster-manager-info", "name"]),
                lambda name: name == "renamed-meanwhile",
                what="the scheduler to know the new name",
            )
            cluster.scheduler_comm = reached

    def test_clusters_live_side_by_side(self, cluster: Any, client: Any, elastic: Any, elastic_client: Any) -> None:
        """Each with its own name, address and workers."""
        assert elastic != cluster
        assert elastic.name != cluster.name
        assert elastic.scheduler_address != cluster.scheduler_address
        elastic.scale(self.above(1))
        self.settle(elastic, self.above(1))
        assert not set(elastic.scheduler_info["workers"]) & set(cluster.scheduler_info["workers"])
        self.check_works(elastic_client)
        self.check_works(client)
        assert len(membership(cluster).observed) == self.count(2)


class _Blip:
    """Connection to a scheduler whose first few messages fail."""

    def __init__(self, reached: Any) -> None:
        self.failed = 0
        self._reached = reached

    async def set_metadata(self, **message: Any) -> None:
        if self.failed < _BLIPS:
            self._fail()
        await self._reached.set_metadata(**message)

    def _fail(self) -> NoReturn:
        self.failed += 1
        raise OSError("a blip, made for a test")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reached, name)


class ClusterSecurity(ClusterSuite):
    """Mutual TLS: the cluster and its peers authenticate by certificates."""

    def test_certificates_encrypt_everything(self, cluster: Any, client: Any) -> None:
        """The scheduler's and every worker's address begin with ``tls://``."""
        addresses = [cluster.scheduler_address, *client.scheduler_info(n_workers=-1)["workers"]]
        assert [address for address in addresses if not address.startswith("tls://")] == []

    def test_cluster_hands_out_its_certificates(self, cluster: Any) -> None:
        """A client that has them gets answers."""
        with Client(cluster.scheduler_address, security=cluster.security, set_as_default=False) as client:
            self.check_works(client)
        assert self._answer(cluster.scheduler_address, _context(cluster.security)) != b""

    def test_client_without_certificates_is_refused(self, cluster: Any) -> None:
        """Even one that does not check the cluster's certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        assert self._answer(cluster.scheduler_address, _trusting(context)) == b""

    def test_client_with_other_certificates_is_refused(self, cluster: Any) -> None:
        """Even one that does not check the cluster's certificate."""
        context = _context(Security.temporary())
        assert self._answer(cluster.scheduler_address, _trusting(context)) == b""

    def test_workers_refuse_other_certificates(self, cluster: Any) -> None:
        """As their scheduler does."""
        for worker in cluster.scheduler_info["workers"]:
            assert self._answer(worker, _context(cluster.security)) != b""
            assert self._answer(worker, _trusting(_context(Security.temporary()))) == b""

    async def test_refused_client_raises(self, cluster: Any) -> None:
        """Within its own timeout. A client without certificates may be given the cluster's, in its own process."""
        security = Security.temporary()
        client: Any = Client(cluster.scheduler_address, security=security, timeout=0.5, asynchronous=True)
        with pytest.raises((OSError, TypeError)):
            await client
        await client.close()

    def _answer(self, address: str, context: ssl.SSLContext) -> bytes:
        """Return the first bytes sent to a silent client with ``context``; empty if it is refused."""
        host, port = address.removeprefix("tls://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=self.patience_s) as plain:
            try:
                with context.wrap_socket(plain) as link:
                    return link.recv(16)
            except (ssl.SSLError, ConnectionError):
                return b""


def _context(security: Any) -> ssl.SSLContext:
    context = security.get_connection_args("client")["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    return context


def _trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


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


_TASK_S = 0.1
_HELD_S = 0.3
_LOOK_S = 0.2


class ClusterScaling(ClusterSuite):
    """Scaling by hand, and workers that are lost."""

    def test_scale_returns_before_the_workers_are_there(self, elastic: Any) -> None:
        """They are in the plan by then, and come: no fewer than asked for, in whole steps."""
        target = self.whole(self.above(1) + 1)
        assert elastic.scale(self.above(1) + 1) is None
        before = membership(elastic)
        assert len(before.plan) == target
        assert len(before.observed) < target
        elastic.wait_for_workers(target, timeout=self.patience_s)
        self.settle(elastic, target)

    def test_scale_down_ends_workers(self, elastic: Any) -> None:
        """As many as are too many; the others are the same as before."""
        elastic.scale(self.above(2))
        before = self.settle(elastic, self.above(2))
        assert elastic.scale(self.above(1)) is None
        after = self.settle(elastic, self.above(1))
        assert after.observed < before.observed

    def test_last_word_counts(self, elastic: Any) -> None:
        """The last call of ``scale`` counts, even while earlier ones are under way."""
        for steps in (2, 1, 3, 1):
            elastic.scale(self.above(steps))
        self.settle(elastic, self.above(1))
        self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(1), for_s=_HELD_S)

    def test_work_waits_for_workers(self, elastic: Any, elastic_client: Any) -> None:
        """It runs as soon as somebody is there, if there was nobody."""
        waiting = elastic_client.submit(add, "a", "b", pure=False)
        elastic.scale(self.above(1))
        assert waiting.result(timeout=self.patience_s) == "ab"

    def test_scale_by_cores_and_memory(self, elastic: Any) -> None:
        """The workers that have them, no fewer: where both are given, that have both."""
        elastic.scale(cores=(self.above(1) - 1) * self.threads_per_worker + 1)
        self.settle(elastic, self.above(1))
        limit = min(each["memory_limit"] for each in elastic.scheduler_info["workers"].values())
        elastic.scale(cores=1, memory=f"{math.ceil(limit * (self.above(2) - 0.5))} B")
        self.settle(elastic, self.above(2))

    def test_scale_down_by_name_takes_those(self, elastic: Any) -> None:
        """And nobody else."""
        elastic.scale(self.above(1))
        first = self.settle(elastic, self.above(1)).observed
        elastic.scale(self.above(2))
        second = self.settle(elastic, self.above(2)).observed - first
        _scale_down(elastic, second)
        assert self.settle(elastic, self.above(1)).observed == first

    def test_work_goes_on_while_workers_come_and_go(self, elastic: Any, elastic_client: Any) -> None:
        """No task is lost."""
        elastic.scale(self.above(1))
        naps = _load(elastic_client, self.above(2))
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        elastic.scale(self.above(1))
        assert elastic_client.gather(naps) == [None] * len(naps)

    def test_killed_worker_is_replaced(self, elastic: Any, elastic_client: Any) -> None:
        """Other workers do its tasks."""
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        naps = _load(elastic_client, self.above(2))
        self.kill_one(elastic_client)
        elastic_client.gather(naps)
        self.settle(elastic, self.above(2))

    def hold_results(self, client: Any) -> dict[Any, str]:
        """One result per worker, held by it alone; each would be another if it were computed again."""
        held = [
            client.submit(secrets.token_hex, 8, pure=False, workers=[worker], allow_other_workers=True)
            for worker in client.scheduler_info(n_workers=-1)["workers"]
        ]
        return dict(zip(held, client.gather(held), strict=True))

    def kill_one(self, client: Any) -> None:
        """Kill a worker that is not among the fewest, and wait until another process does its work."""
        before = _pids(client)
        worker = list(before)[-1]
        client.run(signal.raise_signal, signal.SIGKILL, workers=[worker], on_error="return")
        self.until(
            lambda: set(_pids(client).values()),
            lambda pids: before[worker] not in pids and len(pids) == len(before),
            what=f"{len(before)} processes without {before[worker]}",
        )


class ClusterAdapting(ClusterScaling):
    """Scaling by itself."""

    def test_adapt_grows_under_load_and_shrinks_after_it(self, elastic: Any, elastic_client: Any) -> None:
        """It keeps to its limits."""
        low, high = self.above(1), self.above(3)
        seen: list[int] = []

        def plan() -> int:
            seen.append(len(membership(elastic).plan))
            return seen[-1]

        with self.adapting(elastic, minimum=low, maximum=high):
            self.settle(elastic, low)
            naps = _load(elastic_client, high, tasks_per_worker=200)
            self.until(plan, lambda workers: workers == high, what=f"{high} workers under load")
            elastic_client.cancel(naps)
            self.until(plan, lambda workers: workers == low, what=f"{low} workers after it")
            self.settle(elastic, low)
            self.stays(plan, lambda workers: workers == low, for_s=_HELD_S)
        assert max(seen) == high

    def test_adapt_replaces_a_killed_worker(self, elastic: Any, elastic_client: Any) -> None:
        """And keeps the number it should."""
        with self.adapting(elastic, minimum=self.above(2), maximum=self.above(2)):
            self.settle(elastic, self.above(2))
            self.kill_one(elastic_client)
            self.settle(elastic, self.above(2))

    def test_next_adapt_has_the_last_word(self, elastic: Any, elastic_client: Any) -> None:
        """The first one's limits are forgotten. Results of workers that must go are moved, not computed again."""
        with self.adapting(elastic, minimum=self.above(2), maximum=self.above(3)):
            self.settle(elastic, self.above(2))
            held = self.hold_results(elastic_client)
            with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1)):
                self.settle(elastic, self.above(1))
                assert elastic_client.gather(list(held)) == list(held.values())
                self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(1), for_s=_HELD_S)

    def test_scale_after_adapting_has_stopped_holds(self, elastic: Any) -> None:
        """Nothing adapts any more."""
        with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1)):
            self.settle(elastic, self.above(1))
        elastic.scale(self.above(2))
        self.settle(elastic, self.above(2))
        self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(2), for_s=_HELD_S)

    @contextmanager
    def adapting(self, cluster: Any, *, minimum: int, maximum: int, interval: str = "50ms") -> Generator[None]:
        """Let ``cluster`` adapt quickly; stop it afterwards, and let the look that is under way end."""
        adaptive = cluster.adapt(
            minimum=minimum, maximum=maximum, interval=interval, wait_count=3, target_duration="200ms"
        )
        try:
            yield
        finally:
            _stop(cluster, adaptive)
            self.stays(lambda: adaptive.state, lambda state: state == "stopped", for_s=_LOOK_S)


class StrictScaling(ClusterAdapting):
    """Checks that ``LocalCluster`` leaves to its user."""

    @pytest.mark.parametrize("workers", [-1, 1.5, "x"])
    def test_scale_refuses_what_is_no_number_of_workers(self, elastic: Any, workers: Any) -> None:
        """By the parameter's name, and nothing changes."""
        with pytest.raises((TypeError, ValueError), match=r"\bn\b|workers"):
            elastic.scale(workers)
        assert membership(elastic).is_settled(self.fewest_workers)

    @pytest.mark.parametrize(
        ("name", "wanted"), [("cores", -1), ("cores", "x"), ("memory", "-1 GB"), ("memory", "much")]
    )
    def test_scale_refuses_what_is_no_amount(self, elastic: Any, name: str, wanted: Any) -> None:
        """By the parameter's name, and nothing changes."""
        with pytest.raises((TypeError, ValueError), match=name):
            elastic.scale(**{name: wanted})
        assert membership(elastic).is_settled(self.fewest_workers)

    @pytest.mark.parametrize("limits", [{"minimum": 3, "maximum": 2}, {"minimum": -1}, {"maximum": "x"}])
    def test_adapt_refuses_limits_that_make_no_sense(self, elastic: Any, limits: dict[str, Any]) -> None:
        """By the parameter's name, and nothing adapts."""
        with pytest.raises((TypeError, ValueError), match="|".join(limits)):
            elastic.adapt(**limits)
        assert membership(elastic).is_settled(self.fewest_workers)

    def test_results_outlive_workers_that_scaling_ends(self, elastic: Any, elastic_client: Any) -> None:
        """They are moved, not computed again."""
        elastic.scale(self.above(3))
        self.settle(elastic, self.above(3))
        held = self.hold_results(elastic_client)
        elastic.scale(self.above(1))
        self.settle(elastic, self.above(1))
        assert elastic_client.gather(list(held)) == list(held.values())

    def test_scale_ends_adapting(self, elastic: Any) -> None:
        """``scale`` counts even while adapting is computing another number."""
        with self.adapting(elastic, minimum=self.above(1), maximum=self.above(1), interval="5ms"):
            self.settle(elastic, self.above(1))
            elastic.scale(self.above(2))
            self.settle(elastic, self.above(2))
            self.stays(lambda: membership(elastic), lambda seen: len(seen.plan) == self.above(2), for_s=_HELD_S)


def _load(client: Any, workers: int, *, tasks_per_worker: int = 8) -> list[Any]:
    """Submit tasks that keep ``workers`` workers busy for a while; each returns None."""
    naps = [_TASK_S] * (tasks_per_worker * workers)
    return client.map(time.sleep, naps, pure=False)


def _pids(client: Any) -> dict[str, int]:
    """Return the process id of every worker that answers, by address."""
    answers = client.run(os.getpid, on_error="return")
    return {address: pid for address, pid in answers.items() if isinstance(pid, int)}


def _scale_down(cluster: Any, names: frozenset[Hashable]) -> None:
    async def on_its_loop() -> None:
        scaled = cluster.scale_down(list(names))
        if isawaitable(scaled):
            await scaled

    cluster.sync(on_its_loop)


def _stop(cluster: Any, adaptive: Any) -> None:
    async def on_its_loop() -> None:
        adaptive.stop()

    cluster.sync(on_its_loop)


class ClusterConformance(ClusterFacts, ClusterSecurity, ClusterLifecycle, ClusterAdapting):
    """Behaviours of ``LocalCluster`` that every cluster manager should have: subclass it, define :meth:`make_cluster`.

    The attributes of :class:`ClusterSuite` declare the limits of a manager; all other behaviours are tested.
    """


class StrictClusterConformance(StrictScaling, ClusterConformance):
    """The same, and further behaviours that ``LocalCluster`` lacks.

    Wrong numbers are refused by name, before anything happens, and scaling by hand ends adapting.
    """
