"""A fleet whose provider, nodes and clock are fakes, and this machine as a provider of several networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyward.events import SkywardEvent
from skyward.fleet.fleet import Fleet, FleetUser
from skyward.fleet.node import Node
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.providers.local import Local
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from skyward.wire.frames import TlsIdentity
from support.clock import FakeClock
from support.nodes import FakeNodes

__all__ = ["FleetStage", "IdleEngine", "LocalNetworks", "StagedFleet"]


class IdleEngine:
    """User of nodes that has no work for them."""

    def expect(self, ranks: Iterable[int]) -> None:
        """See :meth:`FleetUser.expect`."""

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """See :meth:`FleetUser.retire`."""

    async def attach(self, node: Node) -> None:
        """See :meth:`FleetUser.attach`."""

    async def drain(self, rank: int) -> None:
        """See :meth:`FleetUser.drain`."""

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        """See :meth:`FleetUser.detach`."""


class StagedFleet(Fleet):
    """A fleet that may be used by nobody in particular."""

    async def start(self, user: FleetUser | None = None) -> None:
        """See :meth:`Fleet.start`."""
        await super().start(user or IdleEngine())


@dataclass(kw_only=True)
class FleetStage:
    """What a fleet stands on: fakes of everything but the ledger.

    Attributes:
        ledger: where its machines are written down.
        provider: who has them.
        nodes: opens them.
        clock: the time.
        events: what was published, in order.
        one_network: whether its nodes have to reach each other.
    """

    ledger: Ledger
    provider: FakeProvider = field(default_factory=FakeProvider)
    nodes: FakeNodes = field(default_factory=FakeNodes)
    clock: FakeClock = field(default_factory=FakeClock)
    events: list[SkywardEvent] = field(default_factory=list[SkywardEvent])
    one_network: bool = False

    def fleet(self, **request: Any) -> StagedFleet:
        """A fleet of two nodes that is not started; ``request`` says otherwise, as ``ComputePool`` takes it."""
        self.provider.clock = self.clock
        self.nodes.hardware = lambda instance: self.provider.hardware(instance.id)
        asked: dict[str, Any] = {"nodes": 2} | request
        return StagedFleet(
            self.provider,
            replace(parse_request(**asked), one_network=self.one_network),
            pool_id="pool",
            tls=TlsIdentity(ca="ca", cert="cert", key="key"),
            publish=self.events.append,
            ledger=self.ledger,
            clock=self.clock,
            make_node=self.nodes,
        )


@dataclass(frozen=True)
class LocalNetworks(Local):
    """This machine as a provider whose nodes are on the networks given; without any, all are islands.

    Attributes:
        networks: the network of each rank that is on one. Machines launched later follow its changes.
    """

    networks: dict[int, str] = field(default_factory=dict[int, str], repr=False)
    _known: dict[str, str] = field(default_factory=dict[str, str], repr=False)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """See :meth:`Local.offers`."""
        return [replace(offer, island=not self.networks) for offer in await super().offers(request)]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`Local.launch`."""
        made = await super().launch(offers, order)
        self._known.update({each.id: self.networks.get(int(each.key.split("-")[-2]), "") for each in made})
        return [self._placed(each) for each in made]

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`Local.describe`."""
        return [self._placed(each) for each in await super().describe(instance_ids)]

    def _placed(self, instance: Instance) -> Instance:
        return replace(instance, network=self._known.get(instance.id, ""))
