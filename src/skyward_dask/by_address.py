"""Clients made from a cluster's address alone, in the process that has the cluster.

Some libraries take an address and no certificates, such as tsfresh's ``ClusterDaskDistributor``. Dask has one connector
for all ``tls://`` addresses. This one adds the certificates that a connection lacks, for addresses of open clusters
only. They stay in memory.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

from distributed import Security, Status
from distributed.comm.core import Comm
from distributed.comm.registry import backends
from distributed.comm.tcp import TLSBackend, TLSConnector
from distributed.deploy.cluster import Cluster

__all__ = ["admit_by_address"]

_clusters: WeakSet[Cluster] = WeakSet()


def admit_by_address(cluster: Cluster) -> None:
    """From now on, connect to ``cluster`` by its address alone, while it is running. Idempotent."""
    _clusters.add(cluster)
    if type(backends["tls"]) is TLSBackend:  # else ours, or another library's
        backends["tls"] = _Backend()


def _security_of(address: str) -> Security | None:
    for cluster in list(_clusters):
        if cluster.status == Status.running and cluster.scheduler_address == address:
            security: Security | None = getattr(cluster, "security", None)
            return security
    return None


class _Connector(TLSConnector):
    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:  # noqa: FBT001, FBT002 - Dask's
        if connection_args.get("ssl_context") is None and (security := _security_of(self.prefix + address)):
            connection_args |= security.get_connection_args("client")
        return cast("Comm", await super().connect(address, deserialize=deserialize, **connection_args))


class _Backend(TLSBackend):
    _connector_class = _Connector
