"""A pool in memory: the real fleet, engine, lanes and ledger, on a provider, nodes and workers that are simulated."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import skyward.scheduling.scheduler
import skyward.wire.lane
from skyward.base.waiting import SystemClock
from skyward.events import SkywardEvent
from skyward.fleet.fleet import Fleet
from skyward.fleet.node import LinkDown, LinkUp, Node
from skyward.ledger.ledger import Ledger
from skyward.providers.base import LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import SpotLike, parse_request
from skyward.scheduling.calls import LiveCall, RemoteFuture
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.elastic import ElasticSize
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services
from skyward.submission import ArgumentMemo, Invocation
from skyward.wire.control import Message
from skyward.wire.frames import TlsIdentity
from support.faults import FaultyProvider
from support.simulation import SimulatedClock
from support.supervisors import SimulatedNode, SimulatedNodes
from support.workers import SimulatedLink, SimulatedNetwork, SimulatedWorker

__all__ = ["Call", "SimulatedPool", "Ticket", "simulated_time"]

_REBALANCE_S = 5.0
_OFFERS = tuple(Offer(spec=InstanceSpec(name=name, cpu=2, memory_gib=4)) for name in ("small", "large"))
_TLS = TlsIdentity(ca="ca", cert="cert", key="key")


def _only_the_loop_reads(_connection: object) -> None:
    """Open no gate, as on a system without epoll: a simulated connection has no descriptor."""


@contextmanager
def simulated_time() -> Generator[None]:
    """Everywhere in this process, lanes are simulated ones and time is that of :class:`SimulatedLoop`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skyward.scheduling.scheduler, "WorkerLink", SimulatedLink)
        patch.setattr(skyward.wire.lane, "_open_gate", _only_the_loop_reads)
        patch.setattr(SystemClock, "monotonic", SimulatedClock.monotonic)
        patch.setattr(SystemClock, "elapsed", SimulatedClock.monotonic)
        patch.setattr(skyward.scheduling.scheduler, "_REBALANCE_S", _REBALANCE_S)  # else 9/10 of all that happens
        yield


@dataclass(frozen=True)
class Call:
    """What a call does.

    Attributes:
        seconds: how long it takes.
        held: whether it waits for :attr:`SimulatedPool.released` before that.
        raises: whether it raises ``ValueError`` with its number, instead of returning that.
        kills: in how many attempts it kills its worker instead.
        retries: how many losses of its worker it survives.
    """

    seconds: float = 0.0
    held: bool = False
    raises: bool = False
    kills: int = 0
    retries: int = 3


@dataclass(eq=False)
class Ticket:
    """A call that was submitted, and what became of it.

    Attributes:
        number: of its call; those of one broadcast have the same.
        ran_on: the processes that began it, in order.
        cancelled: whether somebody cancelled it; whoever does says so here.
        live: the engine's record of the call, which its future drops once the call is over.
    """

    number: int
    call: Call
    future: RemoteFuture
    live: LiveCall
    cancelled: bool = False
    ran_on: list[SimulatedWorker] = field(default_factory=list[SimulatedWorker])


class _WatchedScheduler(Scheduler):
    """Knows which ranks the fleet may have machines for, and which nodes were taken from the engine."""

    nodes: SimulatedNodes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expected: set[int] = set()
        self.detached: set[str] = set()

    def expect(self, ranks: Iterable[int]) -> None:
        self.expected.update(ranks)
        super().expect(ranks)

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False, unpaid: Any = None) -> None:
        self.detached.update(node.instance.id for node in self.nodes.opened if node.rank == rank)
        if for_good:
            self.expected.discard(rank)
        super().detach(rank, reason, for_good=for_good, preempted=preempted, unpaid=unpaid)


class SimulatedPool:
    """A pool that exists in simulated time. Made on a :class:`SimulatedLoop`, within :func:`simulated_time`.

    Attributes:
        pool_id: the pool's id.
        network: between client and workers.
        provider: who has the machines.
        nodes: all there ever were.
        fleet: see :class:`Fleet`.
        scheduler: see :class:`Scheduler`; ``expected`` are the ranks there may be machines for, ``detached`` the ids
            of the instances that it was told to forget.
        events: what the pool published.
        tickets: the calls submitted, in order.
        released: until it is set, calls that are held do not go on.
        serves: whether a service of a front-end runs on the nodes of an elastic pool, as far as its size is concerned.

    Args:
        ledger: where machines are written down.
        nodes: as ``ComputePool`` takes it.
        idle: likewise.
        workers: on each node.
        away_s: after how long a node that cannot be reached is given up.
        latency_s: from client to worker, one way.
        control_s: from supervisor to client.
        on_order: hears of every order before the provider does anything.
        on_begin: hears of every call that a worker is about to begin.
        offers: what the provider has; machines of unknown price where nothing is said.
        spot: as ``ComputePool`` takes it.
        max_cost: as ``ComputePool`` takes it; nothing here enforces it.
        wait_for_capacity: as ``ComputePool`` takes it.
        max_price_per_hour: as ``ComputePool`` takes it.
    """

    _ids = itertools.count()

    def __init__(
        self,
        ledger: Ledger,
        *,
        nodes: int | tuple[int, int],
        idle: float | None = None,
        workers: int = 1,
        away_s: float = 300.0,
        latency_s: float = 0.001,
        control_s: float = 0.001,
        on_order: Callable[[LaunchOrder], None] = lambda _: None,
        on_begin: Callable[[Ticket, SimulatedWorker], None] = lambda _, __: None,
        offers: Sequence[Offer] = _OFFERS,
        spot: SpotLike = "never",
        max_cost: float | None = None,
        wait_for_capacity: str | None = None,
        max_price_per_hour: float | None = None,
    ) -> None:
        self.pool_id = f"pool{next(self._ids)}"
        self.events: list[SkywardEvent] = []
        self.tickets: list[Ticket] = []
        self.released = asyncio.Event()
        self._on_begin = on_begin
        self.network = SimulatedNetwork(latency_s)
        self.nodes = SimulatedNodes(self.network, self._work, control_s=control_s)
        self.provider = FaultyProvider(offers=offers, on_order=on_order, on_gone=self.nodes.vanish)
        self.nodes.hardware = lambda instance: self.provider.hardware(instance.id)
        request = parse_request(
            nodes=nodes,
            idle=idle,
            concurrency=workers,
            spot=spot,
            away=away_s,
            max_cost=max_cost,
            max_price_per_hour=max_price_per_hour,
            wait_for_capacity=wait_for_capacity,
        )
        self.fleet = Fleet(
            self.provider,
            request,
            pool_id=self.pool_id,
            tls=_TLS,
            publish=self.events.append,
            ledger=ledger,
            make_node=partial(self.nodes, on_message=self._hear),
        )
        bus: Any = SimpleNamespace(publish=self._publish, together=nullcontext)
        network: Any = self.network
        loop: Any = SimpleNamespace(loop=asyncio.get_running_loop(), is_current=True)
        services = Services(self.fleet, tls=_TLS, publish=self.events.append)
        self.scheduler = _WatchedScheduler(
            network,
            bus,
            workers_per_node=workers,
            thread=loop,
            services=services,
            bring_node=(lambda: None) if request.elastic else None,
        )
        self.scheduler.nodes = self.nodes
        self.serves = False
        self._size = request.elastic and ElasticSize(
            self.fleet,
            request.elastic,
            workload=self.scheduler.workload,
            per_node=workers,
            serves=lambda: self.serves,
            publish=self.events.append,
        )

    async def open(self) -> None:
        """Bring its fleet up."""
        await self.fleet.start(self.scheduler)
        if self._size is not None:
            self._size.begin()

    async def close(self) -> None:
        """End it, as a pool does."""
        if self._size is not None:
            self._size.close()
        self.fleet.close()
        try:
            await self.scheduler.close()
        finally:
            await self.fleet.stop()

    async def destroy(self) -> None:
        """Nothing of what was simulated goes on."""
        for node in self.nodes.simulated:
            node.vanish()
        await SystemClock().sleep(1)

    def submit(self, call: Call) -> None:
        """Submit a call."""
        self._enter(call, lambda invocation: self.scheduler.submit([invocation], ArgumentMemo()))

    def broadcast(self, call: Call) -> None:
        """Submit a call to every worker there is to be."""
        if self.scheduler.places:
            self._enter(call, self.scheduler.broadcast)

    def cancel(self, tickets: Sequence[Ticket], *, kill: bool) -> None:
        """Cancel calls."""
        self.scheduler.cancel([ticket.live for ticket in tickets], kill=kill)

    def preempt(self, node: SimulatedNode, seconds_left: float) -> None:
        """The provider says that it takes a node's machine back, and does."""
        node.be_preempted(seconds_left)
        asyncio.get_running_loop().call_later(seconds_left, self.provider.lose, node.instance.id)

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        self.provider.heal()
        self.nodes.mend()
        self.network.lost_greetings = 0
        self.released.set()

    def _enter(self, call: Call, enter: Callable[[Invocation], list[RemoteFuture]]) -> None:
        number = len(self.tickets)
        invocation = Invocation(fn=abs, args=(number,), label="f", retries=call.retries)
        self.tickets += [Ticket(number, call, future, future.call) for future in enter(invocation)]

    async def _work(self, data: bytes, worker: SimulatedWorker) -> int:
        (number,), _ = pickle.loads(data)
        ticket = self._ticket(number, worker)
        self._on_begin(ticket, worker)
        ticket.ran_on.append(worker)
        if ticket.call.held:
            await self.released.wait()
        await SystemClock().sleep(ticket.call.seconds)
        if len(ticket.ran_on) <= ticket.call.kills:
            worker.die("killed by its call")
            await asyncio.Event().wait()
        if ticket.call.raises:
            raise ValueError(ticket.number)
        return ticket.number

    def _ticket(self, number: int, worker: SimulatedWorker) -> Ticket:
        """Calls of a broadcast are one pickle: each is told apart by where it runs."""
        of_call = [ticket for ticket in self.tickets[number:] if ticket.number == number]
        if of_call[0].live.pinned is None:
            return of_call[0]
        (rank,) = {node.rank for node in self.nodes.opened if node.instance.id == worker.host}
        return next(each for each in of_call if each.live.pinned == WorkerId(rank, worker.index))

    def _publish(self, event: SkywardEvent, _callbacks: object = ()) -> None:
        self.events.append(event)

    def _hear(self, node: Node, message: Message | LinkDown | LinkUp) -> None:
        self.scheduler.handle(node, message)
