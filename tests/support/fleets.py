"""A fleet whose provider, nodes and clock are fakes, and this machine as a provider of several networks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from skyward.events import SkywardEvent
from skyward.fleet.fleet import Fleet, FleetUser
from skyward.fleet.node import Node
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.providers.local import Local
from skyward.providers.several import parse_provider
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Ending
from skyward.wire.frames import TlsIdentity
from support.clock import FakeClock
from support.nodes import FakeNodes

__all__ = ["FakeEngine", "FleetStage", "LocalNetworks", "StagedFleet", "until"]


@dataclass(kw_only=True)
class FakeEngine:
    """User of nodes that has no work for them, and writes down what it is told.

    Attributes:
        log: each call, its name and its arguments.
        attached: the nodes that it uses, or has used, in order.
        busy: ranks whose nodes have work left until this is set.
        refuses: makes the error of the next node of a rank that it is to use.
        breaks: errors of the next nodes that it is to give up.
        cancels_itself: ranks whose nodes cancel the task that has it use them.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    attached: list[Node] = field(default_factory=list[Node])
    busy: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])
    refuses: dict[int, Callable[[], Exception]] = field(default_factory=dict[int, Callable[[], Exception]])
    breaks: list[Exception] = field(default_factory=list[Exception])
    cancels_itself: set[int] = field(default_factory=set[int])

    def expect(self, ranks: Iterable[int]) -> None:
        """See :meth:`FleetUser.expect`."""
        self.log.append(("expect", *ranks))

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """See :meth:`FleetUser.retire`."""
        self.log.append(("retire", *ranks))

    async def attach(self, node: Node) -> None:
        """See :meth:`FleetUser.attach`."""
        if (refuse := self.refuses.pop(node.rank, None)) is not None:
            raise refuse()
        if node.rank in self.cancels_itself:
            raise asyncio.CancelledError
        self.attached.append(node)
        self.log.append(("attach", node.rank))

    def busy_for_s(self, rank: int) -> float:
        """See :meth:`FleetUser.busy_for_s`."""
        return math.inf if rank in self.busy else 0.0

    async def drain(self, rank: int) -> None:
        """See :meth:`FleetUser.drain`."""
        self.log.append(("drain", rank))
        if rank in self.busy:
            await self.busy[rank].wait()

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False, unpaid: object = None) -> None:
        """See :meth:`FleetUser.detach`."""
        if self.breaks:
            raise self.breaks.pop()
        self.log.append(("detach", rank, reason, for_good))

    def of(self, verb: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of one name."""
        return [entry[1:] for entry in self.log if entry[0] == verb]


class StagedFleet(Fleet):
    """A fleet that may be used by nobody in particular."""

    async def start(self, user: FleetUser | None = None) -> None:
        """See :meth:`Fleet.start`."""
        await super().start(user or FakeEngine())


@dataclass(kw_only=True)
class FleetStage:
    """What a fleet stands on: fakes of everything but the ledger.

    Attributes:
        ledger: where its machines are written down.
        provider: who has them.
        others: further providers, each with a name of its own.
        nodes: opens them.
        clock: the time.
        events: what was published, in order.
        one_network: whether its nodes have to reach each other.
        engine: uses its nodes, if it is :meth:`kept`.
    """

    ledger: Ledger
    provider: FakeProvider = field(default_factory=FakeProvider)
    others: Sequence[FakeProvider] = ()
    nodes: FakeNodes = field(default_factory=FakeNodes)
    clock: FakeClock = field(default_factory=FakeClock)
    events: list[SkywardEvent] = field(default_factory=list[SkywardEvent])
    one_network: bool = False
    engine: FakeEngine = field(default_factory=FakeEngine)

    def fleet(self, **request: Any) -> StagedFleet:
        """A fleet of two nodes that is not started; ``request`` says otherwise, as ``ComputePool`` takes it."""
        providers = [self.provider, *self.others]
        for provider in providers:
            provider.clock = self.clock
        self.nodes.hardware = lambda instance: next(
            provider.hardware(instance.id) for provider in providers if instance.id in provider.instances
        )
        asked: dict[str, Any] = {"nodes": 2} | request
        return StagedFleet(
            parse_provider(providers),
            replace(parse_request(**asked), one_network=self.one_network),
            pool_id="pool",
            tls=TlsIdentity(ca="ca", cert="cert", key="key"),
            publish=self.events.append,
            ledger=self.ledger,
            clock=self.clock,
            make_node=self.nodes,
        )

    @asynccontextmanager
    async def kept(self, **request: Any) -> AsyncGenerator[StagedFleet]:
        """A fleet that is open for the block; then nothing is left of it."""
        fleet = self.fleet(**request)
        try:
            await fleet.start(self.engine)
            yield fleet
        finally:
            await fleet.stop()
        assert [provider.alive for provider in (self.provider, *self.others) if provider.alive] == []
        assert self.ledger.open_entries() == ()

    async def open_and_close(self, **request: Any) -> list[str]:
        """Open a fleet and close it; return the ids of the machines that became nodes."""
        async with self.kept(**request) as fleet:
            return [node.instance.id for node in fleet.nodes]

    def lose(self, rank: int, *, reason: str = "struck by lightning", timed_out: bool = False) -> None:
        """The latest node of a rank says that it ends."""
        node = [node for node in self.nodes.opened if node.rank == rank][-1]
        node.hear(Ending(reason=reason, timed_out=timed_out))


async def until(is_true: Callable[[], bool]) -> None:
    """Return once it is so; raise after ten seconds."""
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


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
