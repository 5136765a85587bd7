"""Clients that would dial workers past a tunnel are refused, before they wait half a minute for nothing.

A client does not tell its cluster what it was made with, and what goes wrong when it starts is only logged. So this is
one of the extensions that Dask gives every client it makes: it leaves those alone that are on other clusters.
"""

from __future__ import annotations

from weakref import WeakSet

import distributed.client
from distributed import Client
from distributed.deploy.cluster import Cluster

from skyward.errors import ConfigurationError

__all__ = ["REASON", "DirectAccess", "refuse_past_tunnel"]

REASON = (
    "cannot work here: only the scheduler of this pool is reached from this process, through a tunnel; its workers are "
    "not. Leave it out: data then comes through the scheduler"
)

_tunnelled: WeakSet[Cluster] = WeakSet()


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
        raise ConfigurationError(f"direct_to_workers=True {REASON}")


def refuse_past_tunnel(cluster: Cluster) -> None:
    """From now on, refuse clients of ``cluster`` that ask for ``direct_to_workers``."""
    _tunnelled.add(cluster)
    distributed.client.DEFAULT_EXTENSIONS["skyward"] = DirectAccess
