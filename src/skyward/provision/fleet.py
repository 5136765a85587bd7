"""The driver of a pool's nodes: performs what the lifecycle decides, and never leaves a machine behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_never, cast

from skyward._waiting import SYSTEM_CLOCK, Clock
from skyward.errors import PoolStateError, SkywardError, TerminationError
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    InstanceProvisioned,
    ProviderName,
    SkywardEvent,
)
from skyward.node.config import NodeConfig
from skyward.providers.base import Instance, Provider
from skyward.provision.cost import CostReport
from skyward.provision.heralding import Herald, spawn
from skyward.provision.ledger import Ledger
from skyward.provision.lifecycle import (
    HEAD,
    Action,
    Discard,
    End,
    Ended,
    EndNodes,
    Event,
    Join,
    Joined,
    Launch,
    Launched,
    Lifecycle,
    Lost,
    NodeState,
    Prepare,
    Prepared,
    Start,
    Started,
    Want,
)
from skyward.provision.machines import Machine, Machines, to_its_end
from skyward.provision.nodes import NodeHandle, NodeListener, open_node, unless_gone
from skyward.spec.request import PoolRequest
from skyward.wire.frames import TlsIdentity

__all__ = ["Fleet", "OpenNode"]

OpenNode = Callable[[Instance, int, NodeListener], NodeHandle]
"""Makes the handle of a running machine; tests give another."""

_UP = (NodeState.JOINING, NodeState.READY)
_logger = logging.getLogger("skyward")


class Fleet:
    """A pool's nodes, from nothing to ready and back to nothing. Not thread-safe: one event loop runs it.

    Args:
        provider: who has the machines.
        request: what the pool asks for.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: hears the events of provisioning and shutdown; must not block.
        on_node_message: hears what the nodes report; must not block.
        ledger: where machines are written down before they are asked for.
        clock: the time, for deadlines and cost.
        open_node: makes the handle of a running machine.
    """

    def __init__(
        self,
        provider: Provider,
        request: PoolRequest,
        *,
        pool_id: str,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        on_node_message: NodeListener,
        ledger: Ledger,
        clock: Clock = SYSTEM_CLOCK,
        open_node: OpenNode = open_node,
    ) -> None:
        self._provider_name: ProviderName = cast("Any", provider.name)
        self._request = request
        self._pool_id = pool_id
        self._tls = tls
        self._publish = publish
        self._on_node_message = on_node_message
        self._open_node = open_node
        self._lifecycle = Lifecycle()
        self._machines = Machines(provider, request, pool_id=pool_id, publish=publish, ledger=ledger, clock=clock)
        self.unended = self._machines.unended
        self._current: dict[int, Machine] = {}
        self._failures: dict[int, BaseException] = {}
        self._moved = asyncio.Event()
        self._headless: Exception | None = None
        self._herald = Herald(request.nodes, self._current, self._lifecycle.states)
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        """The nodes that were reached and are not on their way out, by rank."""
        return tuple(machine.node for _, machine in sorted(self._current.items()) if machine.node is not None)

    @property
    def machines(self) -> Mapping[int, Machine]:
        """The present machine of each rank that has one."""
        return self._current

    @property
    def states(self) -> Mapping[int, NodeState]:
        """Each node's state, by rank, of all ranks there ever were."""
        return self._lifecycle.states

    def cost(self, now: float) -> CostReport:
        """What the fleet has cost until ``now``, a reading of its clock in seconds."""
        return CostReport(usages=tuple(machine.usage for machine in self._machines.all), now=now)

    async def start(self) -> None:
        """Launch, prepare and start as many nodes as were asked for; all are ready when it returns.

        When any of it fails, or is cancelled, everything that was created is terminated and confirmed gone before the
        error is raised. What cannot be is a :class:`~skyward.errors.TerminationError`, with the first error in a note.
        """
        ranks = tuple(range(self._request.nodes))
        try:
            await self._launch(ranks)
            await _all_or_the_first_error({rank: self._come_up(rank) for rank in ranks})
        except BaseException as error:
            await self._clean_up_after(error, self.stop())
            raise

    async def launch(self, ranks: Sequence[int]) -> None:
        """Have machines for more nodes, all or none; :meth:`bring_up` makes nodes of them.

        Raises what the provider does, after what was created is terminated and confirmed gone.
        """
        try:
            await self._launch(tuple(ranks))
        except BaseException as error:
            await self._clean_up_after(error, self.end(ranks))
            raise

    async def bring_up(self, rank: int) -> NodeHandle:
        """Make a ready node of a launched machine.

        When that fails, or is cancelled, the machine is terminated and confirmed gone before the error is raised.
        """
        try:
            return await self._come_up(rank)
        except BaseException as error:
            await self._clean_up_after(error, self.end((rank,)))
            raise

    async def end(self, ranks: Sequence[int]) -> None:
        """Stop these nodes' supervisors, terminate their machines, confirm it. A cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; ending them is
        tried again every minute.
        """
        for action in self._handle(End(ranks=tuple(rank for rank in ranks if rank in self.states))):
            assert isinstance(action, EndNodes)
            ours = [each for each in self._machines.all if each.rank in action.ranks and not each.ended]
            try:
                await to_its_end(self._end_machines(ours))
            finally:  # what is not confirmed gone keeps no other from its rank
                self._handle(Ended(ranks=action.ranks))
                for machine in ours:
                    if not machine.ended:
                        spawn(self._machines.end_at_last(machine, told=True), self._ending)

    def discard(self, rank: int) -> None:
        """A node was lost: end what is left of it in the background; its rank may be launched again at once."""
        self._handle(Lost(rank=rank))

    def fail_joining(self, error: Exception) -> None:
        """No scheduler will come unless a head is launched again: until then, who needs one fails with ``error``."""
        self._headless = error
        for rank in [rank for rank, state in self.states.items() if state is NodeState.JOINING]:
            self._not_joined(rank, error)

    def resize(self, size: int) -> None:
        """The fleet is meant to have ``size`` nodes: tell those there are."""
        self._herald.size = size
        self._herald.tell_all()

    async def stop(self) -> None:
        """Stop every supervisor, terminate every machine, confirm it. Idempotent; a cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; their ledger
        entries stay open, and calling again tries again.
        """
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        await self._herald.close()
        self._handle(End())
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._end_machines([machine for machine in self._machines.all if not machine.ended])

    async def _clean_up_after(self, error: BaseException, ending: Coroutine[Any, Any, None]) -> None:
        try:
            await ending
        except TerminationError as left:
            left.add_note(f"this was to clean up after {type(error).__name__}: {error}")
            raise

    def _handle(self, event: Event) -> Sequence[Action]:
        """The actions that follow from ``event``, but for those that are done here and now, or in the background."""
        actions: list[Action] = []
        for action in self._lifecycle.handle(event):
            match action:
                case Join(rank=rank):
                    self._herald.join(rank, self._joined, self._not_joined)
                case Discard(rank=rank):
                    if (machine := self._current.pop(rank, None)) is not None:
                        self._herald.forget(machine.node)
                        spawn(self._machines.end_at_last(machine), self._ending)
                case _:
                    actions.append(action)
        self._stir()
        return actions

    def _stir(self) -> None:
        """Wake who waits for something to happen to a node, once."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _launch(self, ranks: tuple[int, ...]) -> None:
        if HEAD in ranks:
            self._headless = None
        for action in self._handle(Want(ranks=ranks)):
            assert isinstance(action, Launch)
            await self._machines.launch(action.ranks)
            for machine in self._machines.all:  # the last one of each rank is the present one
                if machine.rank in action.ranks:
                    self._current[machine.rank] = machine

    async def _come_up(self, rank: int) -> NodeHandle:
        self._failures.pop(rank, None)  # an earlier machine's
        actions = self._handle(Launched(ranks=(rank,)))
        while actions:
            (action,) = actions
            actions = self._handle(await self._perform(action))
        node = self._current[rank].node if rank in self._current else None
        if node is not None and self.states[rank] in _UP:
            await unless_gone(node, self._ready(rank))
            return node
        raise SkywardError(f"node {rank} of pool {self._pool_id} was ended while it was starting")

    async def _perform(self, action: Action) -> Event:
        match action:
            case Prepare(rank=rank):
                await self._prepare(self._current[rank])
                return Prepared(rank=rank)
            case Start(rank=rank):
                await self._start_node(rank)
                return Started(rank=rank)
            case Launch() | Join() | Discard() | EndNodes():
                raise PoolStateError(f"{action} does not bring a node up")
            case _:
                assert_never(action)

    async def _ready(self, rank: int) -> None:
        """Wait until the node was told of the scheduler, for which the head has to be there."""
        while self.states[rank] is NodeState.JOINING:
            if (error := self._failures.pop(rank, None) or self._headless) is not None:
                raise error
            await self._moved.wait()

    def _joined(self, rank: int) -> None:
        self._handle(Joined(rank=rank))
        if rank == HEAD:
            self._herald.tell_all()

    def _not_joined(self, rank: int, error: Exception) -> None:
        self._failures[rank] = error
        self._stir()

    async def _prepare(self, machine: Machine) -> None:
        await self._machines.running(machine)
        instance = machine.instance
        self._publish(_provisioned(instance, machine.rank, self._provider_name))
        node = machine.node = self._open_node(instance, machine.rank, self._on_node_message)
        self._publish(BootstrapStarting(instance.id))
        await node.prepare(self._request.image, lambda step: self._publish(BootstrapProgress(instance.id, step)))

    async def _start_node(self, rank: int) -> None:
        node = self._current[rank].node
        assert node is not None
        self._publish(BootstrapProgress(node.instance.id, "server"))
        await node.start(_config(node, self._request, self._herald.size, self._pool_id, self._tls))
        self._publish(BootstrapCompleted(node.instance.id))

    async def _end_machines(self, machines: Sequence[Machine]) -> None:
        try:
            await self._machines.end(machines)
        finally:
            for machine in machines:
                if self._current.get(machine.rank) is machine:  # even if it is not confirmed gone: it is no node now
                    del self._current[machine.rank]
                self._herald.forget(machine.node)


async def _all_or_the_first_error(work: Mapping[int, Coroutine[Any, Any, object]]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            starting = {rank: tasks.create_task(coming_up) for rank, coming_up in work.items()}
    except BaseExceptionGroup as group:
        first, *others = group.exceptions
        for other in others:
            first.add_note(f"at the same time: {type(other).__name__}: {other}")
        raise first from first.__cause__
    # A task group takes a node's own CancelledError for success.
    if cancelled := [rank for rank, task in starting.items() if task.cancelled()]:
        raise SkywardError(f"nodes {cancelled} were cancelled while they were starting")


def _provisioned(instance: Instance, rank: int, provider: ProviderName) -> InstanceProvisioned:
    offer = instance.offer
    return InstanceProvisioned(
        instance.id,
        rank,
        offer.spot,
        provider,
        ip=instance.access.address if instance.access else None,
        instance_type=offer.spec.name,
        price_on_demand=offer.on_demand_price_per_hour if offer.spot else offer.price_per_hour,
        price_spot=offer.price_per_hour if offer.spot else None,
    )


def _config(node: NodeHandle, request: PoolRequest, size: int, pool_id: str, tls: TlsIdentity) -> NodeConfig:
    return NodeConfig(
        pool_id=pool_id,
        instance_id=node.instance.id,
        node=node.rank,
        total_nodes=size,
        workers=request.workers_per_node,
        head=node.rank == HEAD,
        address=node.access.address,
        workdir=node.access.workdir,
        files=node.files if request.image.includes else "",
        env=dict(request.env),
        tls_ca=tls.ca,
        tls_cert=tls.cert,
        tls_key=tls.key,
        timeout_s=request.timeout_s,
        lease_s=request.lease_s,
        away_s=request.away_s,
        collect_metrics=request.collect_metrics,
        accelerators=_accelerator_names(request),
        watch=node.instance.watch,
    )


def _accelerator_names(request: PoolRequest) -> tuple[str, ...]:
    if request.accelerator is None:
        return ()
    return (request.accelerator.name,) * request.accelerator.count
