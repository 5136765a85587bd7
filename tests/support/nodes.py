"""Nodes that exist in memory only, for tests of what drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.fleet.machine_size import MachineSize
from skyward.fleet.node import Node, SharedLooks
from skyward.machine.local import LocalAccess
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.image import ImageSettings
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Message, Start
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig, NodeReady
from support.faults import NO_FAULT, Fault, suffer

__all__ = ["FakeNode", "FakeNodes", "Phase", "node_config", "node_instance", "node_ready", "open_node"]

Phase = Literal["reach", "prepare", "start", "join", "stop"]
"""What a fake node can be told to fail at; its log does not mention that it was reached."""

_GIB = 1 << 30
_NOBODY = TlsIdentity(ca="ca", cert="cert", key="key")


def node_config(identity: TlsIdentity = _NOBODY, **fields: Any) -> NodeConfig:
    """The configuration of the only node of a pool, with one worker, but for ``fields``."""
    usual: dict[str, Any] = {
        "pool_id": "pool",
        "instance_id": "i-1",
        "node": 0,
        "total_nodes": 1,
        "workers": 1,
        "head": False,
        "address": "127.0.0.1",
        "workdir": "/nonexistent",
        "env": {},
        "tls_ca": identity.ca,
        "tls_cert": identity.cert,
        "tls_key": identity.key,
    }
    return NodeConfig(**usual | fields)


def node_ready(workers: int = 1, **fields: Any) -> NodeReady:
    """What the supervisor of such a node would say, were there one, but for ``fields``."""
    usual: dict[str, Any] = {
        "control": "127.0.0.1:1",
        "service": "127.0.0.1:9000",
        "guests": tuple(f"127.0.0.1:{9100 + index}" for index in range(workers)),
        "lanes": tuple(f"127.0.0.1:{9200 + index}" for index in range(workers)),
        "blobs": "",
        "call_ports": (),
        "blob_dir": "",
        "blob_dir_disk": "",
        "blob_budget_bytes": 0,
        "pid": 1,
        "python": "3.11",
        "packages": {},
        "cpu_count": 2,
        "memory_bytes": 1 << 30,
    }
    return NodeReady(**(usual | fields))


def node_instance(address: str = "127.0.0.1", network: str = "here") -> Instance:
    """The running machine of such a node."""
    return Instance(
        id="i-1",
        key="key",
        state=InstanceState.RUNNING,
        offer=Offer(spec=InstanceSpec(name="fake", cpu=1, memory_gib=1)),
        access=LocalAccess(address=address, workdir="/nonexistent"),
        network=network,
    )


def open_node(
    instance: Instance | None = None,
    *,
    transport: Any = None,
    provider: FakeProvider | None = None,
    clock: Clock = SYSTEM_CLOCK,
    **record: Any,
) -> Node:
    """A node on a running machine, and the record of it.

    Args:
        instance: the record of its machine.
        transport: the way to it; None is that of its access.
        provider: who reports its machine; by default one that has it as it is given.
        clock: the time.
        record: further arguments of :class:`Node`.
    """
    instance = instance or node_instance()
    if provider is None:
        provider = FakeProvider()
        provider.instances[instance.id] = instance
    looks = SharedLooks(provider, clock=clock)
    node = _OpenNode(transport, **{"rank": 0, "instance": instance, "launched_at": 0.0, "looks": looks} | record)
    node.open()
    return node


class _OpenNode(Node):
    """A node with another transport than that of its access, if one is given."""

    def __init__(self, transport: Any, **record: Any) -> None:
        super().__init__(**record)
        self._given = transport

    def open(self) -> None:
        super().open()
        self.transport = self._opened = self._given or self.transport


class FakeNode(Node):
    """A node whose machine does not exist. Made by :class:`FakeNodes`, which knows what fails.

    Attributes:
        log: the phases gone through, in order.
        config: what it was started with; None before.
        head_addr: address of the head that it was told of; empty before. Every node has an address of its own.
        service: name, module and address of the service that it was told to run; None before.
        total_nodes: how many nodes it was told there are meant to be.
        hardware: the size of its machine, which its supervisor reports.
    """

    hardware: InstanceSpec

    def __init__(self, maker: FakeNodes, **record: Any) -> None:
        super().__init__(**record)
        self.log: list[Phase] = []
        self.config: NodeConfig | None = None
        self.head_addr = ""
        self.service: tuple[str, str, str] | None = None
        self.total_nodes = 0
        self._maker = maker
        self._predecessors = 0

    def open(self) -> None:
        """See :meth:`Node.open`."""
        super().open()
        self.hardware = self._maker.hardware(self.instance)
        self._predecessors = sum(node.rank == self.rank for node in self._maker.opened)
        self._maker.opened.append(self)

    @property
    def address(self) -> str:
        """See :meth:`Node.address`."""
        return f"127.0.{self.rank}.{1 + self._predecessors}"

    async def reach(self, within_s: float) -> MachineSize | None:
        """See :meth:`Node.reach`."""
        await suffer(self._maker.fault(self, "reach"))
        return MachineSize(cpu=self.hardware.cpu, memory_bytes=int(self.hardware.memory_gib * _GIB))

    async def prepare(self, image: ImageSettings, progress: Callable[[str], None]) -> None:
        """See :meth:`Node.prepare`."""
        await self._enter("prepare")

    async def start(self, config: NodeConfig) -> None:
        """See :meth:`Node.start`."""
        await self._enter("start")
        self.config = config
        size = {"cpu_count": self.hardware.cpu, "memory_bytes": int(self.hardware.memory_gib * _GIB)}
        self._ready = node_ready(config.workers, service=f"{self.address}:9000", **size)
        self.lanes = self._ready.lanes

    def join(self, order: Start) -> None:
        """See :meth:`Node.join`."""
        if (order.head_addr, order.total_nodes) == (self.head_addr, self.total_nodes):
            return
        self.log.append("join")
        if (error := self._maker.fault(self, "join").error) is not None:
            raise error
        self.head_addr, self.total_nodes = order.head_addr, order.total_nodes

    def run_service(self, *, name: str, module: str, address: str) -> None:
        """See :meth:`Node.run_service`."""
        self.service = (name, module, address)

    async def stop(self, timeout_s: float) -> None:
        """See :meth:`Node.stop`."""
        await self._enter("stop")

    def hear(self, message: Message) -> None:
        """Its supervisor says something."""
        self._receive(message)

    async def _enter(self, phase: Phase) -> None:
        self.log.append(phase)
        await suffer(self._maker.fault(self, phase))


class FakeNodes:
    """Makes fake nodes: pass it to a fleet as ``make_node``.

    Attributes:
        opened: the nodes whose machines ran, in order.
        hanging: set once a node hangs that was told to.
        hardware: the real size of a machine.
    """

    def __init__(self) -> None:
        self.hardware: Callable[[Instance], InstanceSpec] = lambda instance: instance.offer.spec
        self.opened: list[FakeNode] = []
        self.hanging = asyncio.Event()
        self._faults: dict[tuple[int, Phase], Fault] = {}

    def fail(self, rank: int, phase: Phase, error: BaseException) -> None:
        """Have the node of ``rank`` raise ``error`` in ``phase``."""
        self._faults[rank, phase] = Fault(error=error)

    def hang(self, rank: int, phase: Phase) -> None:
        """Have the node of ``rank`` never come back from ``phase``."""
        self._faults[rank, phase] = Fault(hangs=True)

    def heal(self, rank: int, phase: Phase) -> None:
        """Have the node of ``rank`` do ``phase`` as it should, from now on."""
        self._faults.pop((rank, phase), None)

    def fault(self, node: FakeNode, phase: Phase) -> Fault:
        """What happens to a node that enters ``phase`` now."""
        fault = self._faults.get((node.rank, phase), NO_FAULT)
        if fault.hangs:
            self.hanging.set()
        return fault

    def logs(self) -> Mapping[int, Sequence[Phase]]:
        """What each node went through, by rank."""
        return {node.rank: node.log for node in self.opened}

    def __call__(self, **record: Any) -> FakeNode:
        """Make a node; see :class:`Node`."""
        return FakeNode(self, **record)
