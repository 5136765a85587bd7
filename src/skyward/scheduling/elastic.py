"""Growing, shrinking and healing of a pool's fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import ConfigurationError, FetchError, PoolStateError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.fleet import Fleet, NodeState
from skyward.fleet.node_handle import NodeHandle
from skyward.fleet.outputs import fetch_files, joined
from skyward.fleet.topology import HEAD
from skyward.market.cost import charged_price
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services, worker_names
from skyward.submission import FleetStatus, NodeStatus
from skyward.wire.frames import TlsIdentity

_FIRST_ANSWER_S = 120.0
_STATES = {
    NodeState.LAUNCHING: "launching",
    NodeState.PREPARING: "starting",
    NodeState.STARTING: "starting",
    NodeState.JOINING: "starting",
    NodeState.READY: "ready",
    NodeState.ENDING: "ending",
}


class Elastic:
    """Elastic fleet: keeps nodes at their target number, and the cluster's workers in step. Belongs to the event loop.

    Args:
        fleet: the nodes.
        cluster: the calls on them.
        tls: the pool's certificates.
        publish: receiver of notices; must not block.
        workers_per_node: workers on each.
        opened_with: name and module of the service that the pool is opened with; empty for none.
    """

    def __init__(
        self,
        fleet: Fleet,
        cluster: Scheduler,
        *,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        workers_per_node: int,
        opened_with: tuple[str, str] = ("", ""),
    ) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._workers_per_node = workers_per_node
        self._publish = publish
        self.services = Services(self, tls=tls, publish=publish, opened_with=opened_with)

    @property
    def wanted(self) -> int:
        """Target number of nodes."""
        return len(self._fleet.wanted)

    def scale(self, nodes: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        """See :meth:`skyward.fleet.fleet.Fleet.scale`."""
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

    async def forward(self, address: str) -> str:
        """Return the ``host:port`` through which this process reaches ``host:port`` of the head node."""
        host, _, port = address.rpartition(":")
        here, port_here = await self.head().transport.forward(host, int(port))
        return f"{here}:{port_here}"

    # --- ServedNodes ------------------------------------------------------------------------------------------------

    def started_nodes(self) -> Sequence[NodeHandle]:
        """See :class:`~skyward.scheduling.services.ServedNodes`."""
        states = (NodeState.JOINING, NodeState.READY)
        return [node for node in self._fleet.nodes if self._fleet.members[node.rank].state in states]

    def separation(self) -> str:
        """See :class:`~skyward.scheduling.services.ServedNodes`."""
        return self._cluster.separation()

    def _ready_nodes(self) -> list[NodeHandle]:
        return [node for node in self._fleet.nodes if self._fleet.members[node.rank].state is NodeState.READY]

    def head(self) -> NodeHandle:
        """See :class:`~skyward.scheduling.services.ServedNodes`."""
        if HEAD not in self._fleet.wanted:
            raise PoolStateError("node 0, where the scheduler runs, is gone for good; pool.scale() brings another")
        for node in self._ready_nodes():
            if node.rank == HEAD:
                return node
        raise PoolStateError("the head node, where the scheduler runs, is being replaced; try again in a moment")

    # --- FleetUser --------------------------------------------------------------------------------------------------

    def expect(self, ranks: Iterable[int]) -> None:
        """See :class:`~skyward.fleet.fleet.FleetUser`."""
        self._cluster.expect(ranks)

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """See :class:`~skyward.fleet.fleet.FleetUser`."""
        self._cluster.retire(ranks, comes_back=comes_back)

    async def attach(self, node: NodeHandle) -> None:
        """See :class:`~skyward.fleet.fleet.FleetUser`."""
        self.services.order(node)
        await self._cluster.attach(node, _FIRST_ANSWER_S)

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        """See :class:`~skyward.fleet.fleet.FleetUser`."""
        self._cluster.detach(rank, reason, for_good=for_good, preempted=preempted)

    async def drain(self, rank: int) -> None:
        """See :class:`~skyward.fleet.fleet.FleetUser`."""
        await self._cluster.idle(rank)
        await self.services.drain(rank, worker_names(rank, self._workers_per_node))
