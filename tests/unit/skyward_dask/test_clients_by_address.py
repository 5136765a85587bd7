"""Clients made from an address, in the process that has the cluster."""

from __future__ import annotations

import gc

import dask.config
from distributed import Client, Security

from skyward_dask import SkywardCluster
from skyward_dask.clients import load_security, scheduler_of

LOADER = "distributed.client.security-loader"


def test_a_clients_certificates_are_those_of_the_running_cluster_at_its_address(cluster):
    with Client(cluster.scheduler_address) as client:
        assert client.submit(pow, 2, 4).result() == 16


def test_certificates_can_be_given_with_the_address(cluster):
    with Client(cluster.scheduler_address, security=cluster.security) as client:
        assert client.submit(pow, 2, 5).result() == 32


def test_a_forgotten_clusters_address_has_no_certificates(fleet):
    with SkywardCluster(fleet) as cluster:
        address = cluster.scheduler_address
        assert isinstance(load_security({"address": address}), Security)

    del cluster
    gc.collect()
    assert load_security({"address": address}) is None


def test_the_users_own_loader_of_certificates_stays(fleet):
    with dask.config.set({LOADER: "theirs.load"}):
        scheduler_of(fleet)
        assert dask.config.get(LOADER) == "theirs.load"
