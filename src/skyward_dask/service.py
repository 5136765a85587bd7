"""Dask as a service of a pool's nodes, seen from the client; ``on_nodes.py`` is what runs there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from distributed.core import rpc

from skyward.base.waiting import wait_until
from skyward.request.front_ends import FRONT_ENDS
from skyward.request.request import PoolRequest
from skyward.submission import ServiceAccess
from skyward_dask.security import PoolSecurity


class _DaskService:
    """Dask's scheduler on the head node, and its workers as guests; see :class:`skyward.submission.NodeService`."""

    name = "dask"
    module = "skyward_dask.on_nodes"
    distributions = FRONT_ENDS["dask"].counterparts

    async def wait_joined(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """See :class:`~skyward.submission.NodeService`."""

        async def probe() -> Literal[True] | None:
            known = await scheduler.identity()
            return True if {worker["name"] for worker in known["workers"].values()}.issuperset(workers) else None

        async with _rpc_to(access) as scheduler:
            await wait_until(probe, deadline_s=math.inf, interval_s=0.01, what="Dask's workers")

    async def drain(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """See :class:`~skyward.submission.NodeService`."""
        async with _rpc_to(access) as scheduler:
            await scheduler.retire_workers(names=list(workers), close_workers=False, remove=True)

    async def forget(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """See :class:`~skyward.submission.NodeService`."""
        async with _rpc_to(access) as scheduler:
            await scheduler.skyward_forget(workers=list(workers))


def _rpc_to(access: ServiceAccess) -> Any:
    return rpc(f"tls://{access.address}", connection_args=PoolSecurity(access.identity).get_connection_args("client"))


def with_dask(request: PoolRequest) -> PoolRequest:
    """Return the request for nodes that load Dask from the start and reach each other."""
    return replace(request, one_network=True, service=DASK.module, service_name=DASK.name)


DASK = _DaskService()
