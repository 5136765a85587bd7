"""Dask clients of a cluster: certificates found by its address, versions compared, direct connections refused.

Some libraries take an address and no certificates, such as tsfresh's ``ClusterDaskDistributor``. Dask has one connector
for all ``tls://`` addresses. :func:`admit_by_address` replaces it with one that adds missing certificates, for the
addresses of open clusters in this process only. They stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakSet

import distributed.client
from distributed import Client, Security, Status
from distributed.comm.core import Comm
from distributed.comm.registry import backends
from distributed.comm.tcp import TLSBackend, TLSConnector
from distributed.deploy.cluster import Cluster

from skyward.errors import ConfigurationError

__all__ = ["NO_DIRECT_ACCESS", "DirectAccess", "admit_by_address", "check_versions", "refuse_past_tunnel"]

NO_DIRECT_ACCESS = (
    "cannot work here: only the scheduler of this pool is reached from this process, through a tunnel; its workers are "
    "not. Leave it out: data then comes through the scheduler"
)

_SAME = ("dask", "distributed", "cloudpickle")
_clusters: WeakSet[Cluster] = WeakSet()
_tunnelled: WeakSet[Cluster] = WeakSet()


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


class DirectAccess:
    """Looks at one client while it is made.

    Raises:
        ConfigurationError: it would reach for workers that it cannot reach.
    """

    def __init__(self, client: Client) -> None:
        if not client.direct_to_workers or client.cluster not in _tunnelled:
            return
        if (changed := getattr(client, "_set_config", None)) is not None:
            with changed:  # it has made itself Dask's default scheduler: leaving takes that back
                pass
        raise ConfigurationError(f"direct_to_workers=True {NO_DIRECT_ACCESS}")


def refuse_past_tunnel(cluster: Cluster) -> None:
    """From now on, refuse clients of ``cluster`` that ask for ``direct_to_workers``."""
    _tunnelled.add(cluster)
    distributed.client.DEFAULT_EXTENSIONS["skyward"] = DirectAccess


def check_versions(versions: Mapping[str, Any]) -> None:
    """Refuse a client whose Python, dask, distributed or cloudpickle are not those of the nodes.

    Of Python only the minor version counts.

    Args:
        versions: what :meth:`distributed.Client.get_versions` returns: the versions of the client, the scheduler and
            the workers.

    Raises:
        ConfigurationError: they differ; names both sides, and what to do.
    """
    here = _relevant(versions["client"])
    there = {"the scheduler": versions["scheduler"], **versions["workers"]}
    for where, told in there.items():
        found = _relevant(told)
        if different := [name for name in here if here[name] != found[name]]:
            mine = ", ".join(f"{name} {here[name]}" for name in different)
            theirs = ", ".join(f"{name} {found[name]}" for name in different)
            raise ConfigurationError(
                f"this process has {mine}, but {where} has {theirs}: what one of them pickles, the other cannot be "
                f"trusted to load. {_remedy(different, here)}"
            )


def _remedy(different: list[str], here: Mapping[str, str]) -> str:
    if "python" in different:
        return f"Run this process with the nodes' Python, or ask for nodes with yours: Image(python={here['python']!r})"
    pins = ", ".join(f'"{name}=={here[name]}"' for name in different)
    return f"Install the nodes' versions here, or yours there: pip=[{pins}]"


def _relevant(told: Mapping[str, Any]) -> dict[str, str]:
    packages: Mapping[str, str | None] = told["packages"]
    python = ".".join((packages.get("python") or "unknown").split(".")[:2])
    return {"python": python, **{name: packages.get(name) or "missing" for name in _SAME}}
