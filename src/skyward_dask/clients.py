"""Dask clients of a cluster: certificates found by its address, versions compared, direct connections refused.

Some libraries take an address and no certificates, such as tsfresh's ``ClusterDaskDistributor``. Dask has one connector
for all ``tls://`` addresses. :func:`admit_by_address` replaces it with one that adds missing certificates, for the
addresses of open clusters in this process only. They stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakSet

from distributed import Client, Security, Status

from skyward.api.dask_clients import bring_modules
from skyward.errors import ConfigurationError
from skyward.wire.dask_parts import (
    Cluster,
    Comm,
    FatalCommClosedError,
    TLSBackend,
    TLSConnector,
    add_client_extension,
    backends,
)

__all__ = [
    "NO_DIRECT_ACCESS",
    "DirectAccess",
    "LocalModules",
    "admit_by_address",
    "check_versions",
    "refuse_past_tunnel",
]

NO_DIRECT_ACCESS = (
    "cannot work here: this process reaches only the scheduler of the pool, through a tunnel, and none of its workers. "
    "Leave it out: data then comes through the scheduler"
)

_SAME = ("dask", "distributed", "cloudpickle")
_clusters: WeakSet[Cluster] = WeakSet()
_admitted: set[str] = set()
"""Addresses to which connections were made without certificates."""
_tunnelled: WeakSet[Cluster] = WeakSet()


def admit_by_address(cluster: Cluster) -> None:
    """Accept connections to ``cluster`` by its address alone while it is running. Idempotent."""
    _clusters.add(cluster)
    add_client_extension("skyward_modules", LocalModules)
    if type(backends["tls"]) is TLSBackend:  # leave another library's backend
        backends["tls"] = _Backend()


def _security_of(address: str) -> Security | None:
    for cluster in list(_clusters):
        if cluster.status == Status.running and cluster.scheduler_address == address:
            security: Security | None = getattr(cluster, "security", None)
            return security
    return None


class _Connector(TLSConnector):
    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:  # noqa: FBT001, FBT002 - Dask's
        if connection_args.get("ssl_context") is None:
            if (security := _security_of(full := self.prefix + address)) is not None:
                _admitted.add(full)
                connection_args |= security.get_connection_args("client")
            elif full in _admitted:  # a client that was left open dials on, for ever after any error that is no OSError
                raise FatalCommClosedError(f"the SkywardCluster at {full} is closed")
        return cast("Comm", await super().connect(address, deserialize=deserialize, **connection_args))


class _Backend(TLSBackend):
    _connector_class = _Connector


class LocalModules:
    """Extension of a new Dask client that sends the user's own modules along with graphs, to open clusters only.

    Dask adds it to every client; it ignores clients of other clusters.
    """

    def __init__(self, client: Client) -> None:
        address = getattr(client, "_start_arg", None)
        if client.cluster in _clusters or (isinstance(address, str) and _security_of(address) is not None):
            bring_modules(client)


class DirectAccess:
    """Extension of a new Dask client that refuses direct connections to workers past a tunnel.

    Without it such a client would wait half a minute for workers. It is an extension because a cluster cannot see its
    clients' options. Dask adds it to every client; it ignores clients of other clusters.

    Raises:
        ConfigurationError: the client requires direct connections to unreachable workers.
    """

    def __init__(self, client: Client) -> None:
        if not client.direct_to_workers or client.cluster not in _tunnelled:
            return
        if (changed := getattr(client, "_set_config", None)) is not None:
            with changed:  # undo its registration as Dask's default scheduler
                pass
        raise ConfigurationError(f"direct_to_workers=True {NO_DIRECT_ACCESS}")


def refuse_past_tunnel(cluster: Cluster) -> None:
    """Refuse clients of ``cluster`` with ``direct_to_workers`` from now on."""
    _tunnelled.add(cluster)
    add_client_extension("skyward", DirectAccess)


def check_versions(versions: Mapping[str, Any]) -> None:
    """Refuse a client whose Python, dask, distributed or cloudpickle are not those of the nodes.

    Of Python only the minor version counts.

    Args:
        versions: result of :meth:`distributed.Client.get_versions`: the versions of client, scheduler and workers.

    Raises:
        ConfigurationError: they differ; the message names both sides and the remedy.
    """
    here = _relevant(versions["client"])
    there = {"the scheduler": versions["scheduler"], **versions["workers"]}
    for where, remote in there.items():
        found = _relevant(remote)
        if different := [name for name in here if here[name] != found[name]]:
            mine = ", ".join(f"{name} {here[name]}" for name in different)
            theirs = ", ".join(f"{name} {found[name]}" for name in different)
            raise ConfigurationError(
                f"this process has {mine}, but {where} has {theirs}: one may be unable to load the pickles of the "
                f"other. {_remedy(different, here)}"
            )


def _remedy(different: list[str], here: Mapping[str, str]) -> str:
    if "python" in different:
        return f"Run this process with the nodes' Python, or ask for nodes with yours: Image(python={here['python']!r})"
    pins = ", ".join(f'"{name}=={here[name]}"' for name in different)
    return f"Install the nodes' versions here, or yours there: pip=[{pins}]"


def _relevant(versions: Mapping[str, Any]) -> dict[str, str]:
    packages: Mapping[str, str | None] = versions["packages"]
    python = ".".join((packages.get("python") or "unknown").split(".")[:2])
    return {"python": python, **{name: packages.get(name) or "missing" for name in _SAME}}
