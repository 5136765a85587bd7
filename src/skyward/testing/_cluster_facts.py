"""Tests of an open cluster: names, numbers, representations, logs, clients, and access to it."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import ssl
from importlib.util import find_spec
from operator import add
from typing import Any, NoReturn

import pytest
from distributed import Client
from distributed.security import Security

from skyward.testing._cluster_base import ClusterSuite, membership

__all__ = ["ClusterFacts", "ClusterSecurity"]

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
        built = cluster._widget()  # noqa: SLF001 - Dask makes the view of a notebook here
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
