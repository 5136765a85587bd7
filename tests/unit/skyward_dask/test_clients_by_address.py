"""Clients made from an address, in the process that has the cluster."""

from __future__ import annotations

import pytest
from distributed import Client, Security
from distributed.comm import connect
from distributed.comm.registry import backends
from distributed.comm.tcp import TLSBackend

from skyward_dask import SkywardCluster
from skyward_dask.clients import admit_by_address


def test_a_clients_certificates_are_those_of_the_running_cluster_at_its_address(cluster):
    with Client(cluster.scheduler_address) as client:
        assert client.submit(pow, 2, 4).result() == 16


def test_certificates_can_be_given_with_the_address(cluster):
    with Client(cluster.scheduler_address, security=cluster.security) as client:
        assert client.submit(pow, 2, 5).result() == 32


async def test_a_closed_clusters_address_admits_nobody(fleet):
    with SkywardCluster(fleet) as cluster:
        address = cluster.scheduler_address

    with pytest.raises(TypeError, match="ssl_context"):
        await connect(address, **Security().get_connection_args("client"))


async def test_a_client_that_outlives_its_cluster_is_told_so_and_stops_dialling(fleet):
    """Dask's client dials again after OSErrors until its timeout, after others for ever: its program never ended."""
    arguments = Security().get_connection_args("client")
    with SkywardCluster(fleet) as cluster:
        address = cluster.scheduler_address
        comm = await connect(address, **arguments)
        await comm.close()

    with pytest.raises(OSError, match=f"the SkywardCluster at {address} is closed"):
        await connect(address, **arguments)


def test_another_librarys_backend_for_tls_stays(cluster, monkeypatch):
    class Theirs(TLSBackend):
        pass

    monkeypatch.setitem(backends, "tls", Theirs())
    admit_by_address(cluster)

    assert type(backends["tls"]) is Theirs
