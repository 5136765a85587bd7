"""Nodes of a kept fleet by its record, for programs that only read from it: beside its client, or without one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from skyward.fleet.node_jobs import NodeJobs
from skyward.ledger.fleet_record import FleetFolder


@asynccontextmanager
async def recorded_nodes(fleet: str, pool_id: str) -> AsyncGenerator[Sequence[NodeJobs]]:
    """Yield the nodes of a fleet, for their jobs; none if the fleet of that pool has ended."""
    record = FleetFolder(fleet).read()
    async with AsyncExitStack() as stack:
        nodes: list[NodeJobs] = []
        for node in record.nodes if record is not None and record.pool_id == pool_id else ():
            access = node.instance.access
            assert access is not None  # of a node that has started
            transport = access.open()
            stack.push_async_callback(transport.close)
            nodes.append(NodeJobs(transport, access, node.environment, instance_id=node.instance.id, node=node.rank))
        yield nodes
