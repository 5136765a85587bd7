"""Growing, shrinking and healing of a pool's fleet, and the Dask scheduler on its head."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.engine.scheduler import Scheduler
from skyward.errors import ConfigurationError, FetchError, PoolStateError
from skyward.events import Notice, SkywardEvent
from skyward.provision.buying.cost import charged_price
from skyward.provision.fleet.fleet import Fleet, NodeState
from skyward.provision.fleet.outputs import fetch_files, joined
from skyward.provision.fleet.topology import HEAD, dask_out_of_reach
from skyward.provision.preparing.node_handle import NodeHandle
from skyward.submission import FleetStatus, NodeStatus, SchedulerInfo
from skyward.wire.dask_parts import is_dask_here, needs_dask
from skyward.wire.frames import TlsIdentity

if TYPE_CHECKING:
    from distributed import Security

__all__ = ["Elastic", "worker_names"]

_FIRST_ANSWER_S = 120.0
_RETIRE_S = 300.0  # Dask moves the node's data meanwhile; after this it is computed again instead
# Dask pickles its messages with these: other versions at the other end fail later, and less clearly.
_COUNTERPARTS = ("dask", "distributed", "cloudpickle")
_STATES = {
    NodeState.LAUNCHING: "launching",
    NodeState.PREPARING: "starting",
    NodeState.STARTING: "starting",
    NodeState.JOINING: "starting",
    NodeState.READY: "ready",
    NodeState.ENDING: "ending",
}
_logger = logging.getLogger("skyward")


class Elastic:
    """Elastic fleet: keeps nodes at their target number, and the cluster's workers in step. Belongs to the event loop.

    Args:
        fleet: the nodes.
        cluster: the calls on them.
        tls: the pool's certificates.
        publish: receiver of notices; must not block.
        workers_per_node: workers on each.
    """

    def __init__(
        self,
        fleet: Fleet,
        cluster: Scheduler,
        *,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        workers_per_node: int,
    ) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._tls = tls
        self._workers_per_node = workers_per_node
        self._publish = publish
        self._dask_in_use = False

    @property
    def wanted(self) -> int:
        """Target number of nodes."""
        return len(self._fleet.wanted)

    def scale(self, nodes: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        """See :meth:`skyward.provision.fleet.fleet.Fleet.scale`."""
        return self._fleet.scale(nodes, drop)

    def status(self) -> FleetStatus:
        """Return the present state of the fleet. Thread-safe."""
        members = dict(self._fleet.members)  # a copy, because the loop changes it while another thread reads
        nodes: list[NodeStatus] = []
        for rank, member in sorted(members.items()):
            machine = member.machine
            instance = machine.instance if machine is not None else None
            offer = instance.offer if instance else None
            nodes.append(
                NodeStatus(
                    rank=rank,
                    state=_STATES[member.state] if member.wanted else "ending",
                    workers=worker_names(rank, self._workers_per_node),
                    instance_id=instance.id if instance else "",
                    instance_type=offer.spec.name if offer else "",
                    accelerators=(offer.spec.accelerator,) * offer.spec.accelerator_count
                    if offer and offer.spec.accelerator
                    else (),
                    spot=offer.spot if offer else False,
                    price_per_hour=charged_price(instance) if instance else None,
                )
            )
        return FleetStatus(
            wanted=self.wanted,
            workers_per_node=self._workers_per_node,
            nodes=tuple(nodes),
            cost=self._fleet.cost(SYSTEM_CLOCK.elapsed()).total,
        )

    async def fetch(self, patterns: Sequence[str], to: Path, node: int | None) -> list[Path]:
        """See :meth:`skyward.api.pool.ComputePool.fetch`."""
        nodes = self._ready_nodes()
        if node is not None:
            ranks = ", ".join(str(each.rank) for each in nodes) or "none"
            nodes = [each for each in nodes if each.rank == node]
            if not nodes:
                raise ConfigurationError(f"node must be the rank of a node that is ready ({ranks}), got {node!r}")
        fetched = await fetch_files(nodes, patterns, to, apart=node is None and self.wanted > 1)
        if fetched.left_out:
            self._publish(Notice(f"not fetched: {joined(fetched.left_out)}"))
        if fetched.failures:
            others = f"; {len(fetched.paths)} others are in {to}" if fetched.paths else ""
            raise FetchError(f"{joined(fetched.failures, '; ')}{others}")
        return list(fetched.paths)

    async def scheduler(self) -> SchedulerInfo:
        """Return the address and certificates of the present scheduler.

        Raises:
            ConfigurationError: Dask is not installed here, versions of Dask or Python differ between this process and
                the nodes, or nodes do not reach each other.
            PoolStateError: the head node is being replaced, or was given up.
        """
        if not is_dask_here():
            raise ConfigurationError(needs_dask("a Dask client of a pool", extra="dask"))
        if apart := self._cluster.separation():
            raise dask_out_of_reach(apart)
        return await self._scheduler()

    async def _scheduler(self) -> SchedulerInfo:
        self._head()  # raises at once while there is none
        for difference in _differences(self._ready_nodes()):
            raise ConfigurationError(difference)
        self._dask_in_use = True
        security = await asyncio.to_thread(_security, self._tls)
        # Read after the import, which takes seconds: the head may have been replaced meanwhile.
        ready = self._head().ready
        # The way leads over the machine itself, where the port is bound.
        own = f"{ready.control.rpartition(':')[0]}:{ready.scheduler.rpartition(':')[2]}"
        address = await self.forward(own)
        return SchedulerInfo(f"tls://{address}", security, tunnelled=address != own)

    async def forward(self, address: str) -> str:
        """Return the ``host:port`` through which this process reaches ``host:port`` of the head node."""
        host, _, port = address.rpartition(":")
        here, port_here = await self._head().transport.forward(host, int(port))
        return f"{here}:{port_here}"

    def _ready_nodes(self) -> list[NodeHandle]:
        return [node for node in self._fleet.nodes if self._fleet.members[node.rank].state is NodeState.READY]

    def _head(self) -> NodeHandle:
        if HEAD not in self._fleet.wanted:
            raise PoolStateError("node 0, where the scheduler runs, is gone for good; pool.scale() brings another")
        for node in self._ready_nodes():
            if node.rank == HEAD:
                return node
        raise PoolStateError("the head node, where the scheduler runs, is being replaced; try again in a moment")

    # --- FleetUser --------------------------------------------------------------------------------------------------

    def expect(self, ranks: Iterable[int]) -> None:
        """See :class:`~skyward.provision.fleet.fleet.FleetUser`."""
        self._cluster.expect(ranks)

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """See :class:`~skyward.provision.fleet.fleet.FleetUser`."""
        self._cluster.retire(ranks, comes_back=comes_back)

    async def attach(self, node: NodeHandle) -> None:
        """See :class:`~skyward.provision.fleet.fleet.FleetUser`."""
        await self._cluster.attach(node, _FIRST_ANSWER_S)

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        """See :class:`~skyward.provision.fleet.fleet.FleetUser`."""
        self._cluster.detach(rank, reason, for_good=for_good, preempted=preempted)

    async def drain(self, rank: int) -> None:
        """See :class:`~skyward.provision.fleet.fleet.FleetUser`."""
        await self._cluster.idle(rank)
        if self._dask_in_use:
            try:
                await self._retire_in_dask(rank)
            except (OSError, PoolStateError) as error:
                _logger.warning("Dask's data on node %d could not be moved and is computed again: %s", rank, error)

    async def _retire_in_dask(self, rank: int) -> None:
        info = await self._scheduler()
        rpc = await asyncio.to_thread(_import_rpc)
        async with (
            asyncio.timeout(_RETIRE_S),
            rpc(info.address, connection_args=info.security.get_connection_args("client")) as scheduler,
        ):
            names = worker_names(rank, self._workers_per_node)
            await scheduler.retire_workers(names=list(names), close_workers=False, remove=True)


def worker_names(rank: int, workers: int) -> tuple[str, ...]:
    """Return the names of a node's workers in Dask."""
    return tuple(f"node{rank}-worker{worker}" for worker in range(workers))


def _security(tls: TlsIdentity) -> Security:
    from skyward.wire.security import PoolSecurity  # imports distributed

    return PoolSecurity(tls)


def _import_rpc() -> Any:
    from skyward.wire.dask_parts import rpc

    return rpc


def _differences(nodes: Iterable[NodeHandle]) -> Iterator[str]:
    """Yield one message per node whose versions are incompatible with this process's Dask."""
    here = {"python": _minor(platform.python_version())} | {name: version(name) for name in _COUNTERPARTS}
    for node in nodes:
        there = {**node.ready.packages, "python": _minor(node.ready.python)}
        wrong = [f"{name} {mine} here, {there[name]} there" for name, mine in here.items() if there.get(name) != mine]
        if wrong:
            yield (
                f"Dask needs the same versions in this process and on node {node.rank}: {'; '.join(wrong)}. "
                "Leave these packages out of the image, or install its versions in this process's environment"
            )


def _minor(python: str) -> str:
    return python.rpartition(".")[0]
