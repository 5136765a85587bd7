"""The driver of a pool's nodes: performs what the lifecycle decides, and never leaves a machine behind."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, assert_never, cast

from skyward._waiting import SYSTEM_CLOCK, Clock, NotYet, wait_until
from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    TerminationError,
)
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceProvisioned,
    InstanceStopping,
    ProviderName,
    SkywardEvent,
)
from skyward.node.config import NodeConfig
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer, Provider
from skyward.provision.choose import choose
from skyward.provision.cost import CostReport, Usage
from skyward.provision.ledger import Ledger
from skyward.provision.lifecycle import (
    Action,
    Begin,
    End,
    Ended,
    EndNodes,
    Event,
    Join,
    Joined,
    Launch,
    Launched,
    Lifecycle,
    NodeState,
    Prepare,
    Prepared,
    Start,
    Started,
)
from skyward.provision.nodes import NodeHandle, NodeListener, open_node
from skyward.provision.termination import end_instances
from skyward.spec.request import PoolRequest
from skyward.wire.frames import TlsIdentity

__all__ = ["Fleet", "OpenNode"]

T = TypeVar("T")
OpenNode = Callable[[Instance, int, NodeListener], NodeHandle]
"""Makes the handle of a running machine; tests give another."""

_RUNNING_DEADLINE_S = 900.0
_STOP_TIMEOUT_S = 10.0
_REFUSALS = (AuthenticationError, CapacityError, ConfigurationError, QuotaError, RateLimitError)
"""What a provider raises instead of creating anything; after any other error there may be a machine."""
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    instance: Instance
    usage: Usage


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
        self._provider = provider
        self._provider_name: ProviderName = cast("Any", provider.name)
        self._request = request
        self._pool_id = pool_id
        self._tls = tls
        self._publish = publish
        self._on_node_message = on_node_message
        self._ledger = ledger
        self._clock = clock
        self._open_node = open_node
        self._lifecycle = Lifecycle(request.nodes)
        self._machines: dict[int, _Machine] = {}
        self._nodes: dict[int, NodeHandle] = {}

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        """The nodes reached so far, by rank; all of them once :meth:`start` has returned."""
        return tuple(self._nodes[rank] for rank in sorted(self._nodes))

    def cost(self, now: float) -> CostReport:
        """What the fleet has cost until ``now``, a reading of its clock in seconds."""
        return CostReport(usages=tuple(machine.usage for machine in self._machines.values()), now=now)

    async def start(self) -> None:
        """Launch, prepare and start every node; all are ready when it returns.

        When any of it fails, or is cancelled, everything that was created is terminated and confirmed gone before the
        error is raised. What cannot be is a :class:`~skyward.errors.TerminationError`, with the first error in a note.
        """
        try:
            await self._bring_up()
        except BaseException as error:
            await self._clean_up_after(error)
            raise

    async def stop(self) -> None:
        """Stop every supervisor, terminate every machine, confirm it. Idempotent; a cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; their ledger
        entries stay open, and calling again tries again.
        """
        for action in self._lifecycle.handle(End()):
            event = await _to_its_end(self._perform(action))
            self._lifecycle.handle(event)

    async def _clean_up_after(self, error: BaseException) -> None:
        try:
            await self.stop()
        except TerminationError as left:
            left.add_note(f"this was to clean up after {type(error).__name__}: {error}")
            raise

    async def _bring_up(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._follow(Begin(), tasks)
        except BaseExceptionGroup as group:
            first, *others = group.exceptions
            for other in others:
                first.add_note(f"at the same time: {type(other).__name__}: {other}")
            raise first from first.__cause__
        # A task group takes a node's own CancelledError for success.
        if missing := [rank for rank, state in enumerate(self._lifecycle.states) if state is not NodeState.READY]:
            raise SkywardError(f"nodes {missing} of pool {self._pool_id} were cancelled while they were starting")

    def _follow(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        for action in self._lifecycle.handle(event):
            tasks.create_task(self._act(action, tasks))

    async def _act(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        self._follow(await self._perform(action), tasks)

    async def _perform(self, action: Action) -> Event:
        match action:
            case Launch(ranks=ranks):
                await self._launch(ranks)
                return Launched(ranks=ranks)
            case Prepare(rank=rank):
                await self._prepare(rank)
                return Prepared(rank=rank)
            case Start(rank=rank):
                await self._start_node(rank)
                return Started(rank=rank)
            case Join(rank=rank):
                head = self._nodes[0]
                await self._nodes[rank].join(scheduler=head.ready.scheduler, head_addr=head.access.address)
                return Joined(rank=rank)
            case EndNodes(ranks=ranks):
                await self._end(ranks)
                return Ended(ranks=ranks)
            case _:
                assert_never(action)

    async def _launch(self, ranks: Sequence[int]) -> None:
        self._publish(InfraCreating())
        offers = await self._provider.offers(self._request)
        choice = choose(self._request, offers, provider=self._provider.name)
        if choice.note:
            _logger.info("%s", choice.note)
        self._publish(InfraCreated(choice.batches[0].offers[0].region))
        for batch in choice.batches:
            ours, ranks = ranks[: batch.nodes], ranks[batch.nodes :]
            await self._launch_first(batch.offers, ours)

    async def _launch_first(self, offers: Sequence[Offer], ranks: Sequence[int]) -> None:
        """Launch the best offer that is really to be had."""
        refused: CapacityError | None = None
        for offer in offers:
            try:
                return await _to_its_end(self._create(offer, ranks))
            except CapacityError as error:
                refused = error
        names = ", ".join(offer.spec.name for offer in offers)
        raise CapacityError(f"{self._provider.name} has none of its offers now ({names}); last: {refused}") from refused

    async def _create(self, offer: Offer, ranks: Sequence[int]) -> None:
        self._publish(InstanceLaunching(len(ranks), offer.spec.name, self._provider_name))
        keys = {f"{self._pool_id}-{rank}-{uuid.uuid4().hex[:8]}": rank for rank in ranks}
        await asyncio.to_thread(
            self._ledger.reserve, keys, pool_id=self._pool_id, provider=self._provider.name, region=offer.region
        )
        usage = Usage(
            launched_at=self._clock.monotonic(),
            spot=offer.spot,
            price_per_hour=offer.price_per_hour,
            on_demand_price_per_hour=offer.on_demand_price_per_hour,
        )
        order = LaunchOrder(pool_id=self._pool_id, keys=tuple(keys), timeout_s=self._request.timeout_s)
        try:
            instances = await self._provider.launch(offer, order)
        except _REFUSALS:
            await asyncio.to_thread(self._ledger.close, keys)
            raise
        self._machines |= {keys[each.key]: _Machine(instance=each, usage=usage) for each in instances}
        for instance in instances:
            await asyncio.to_thread(self._ledger.record, instance.key, instance.id)
        if len(instances) < len(keys):
            raise SkywardError(
                f"{self._provider.name} launched {len(instances)} of {len(keys)} machines without an error; "
                "this is a fault of the provider's adapter, please report it"
            )

    async def _prepare(self, rank: int) -> None:
        instance = await self._running(self._machines[rank])
        self._machines[rank] = replace(self._machines[rank], instance=instance)
        offer = instance.offer
        self._publish(
            InstanceProvisioned(
                instance.id,
                rank,
                offer.spot,
                self._provider_name,
                ip=instance.access.address if instance.access else None,
                instance_type=offer.spec.name,
                price_on_demand=offer.on_demand_price_per_hour if offer.spot else offer.price_per_hour,
                price_spot=offer.price_per_hour if offer.spot else None,
            )
        )
        node = self._nodes[rank] = self._open_node(instance, rank, self._on_node_message)
        self._publish(BootstrapStarting(instance.id))
        await node.prepare(self._request.image, lambda step: self._publish(BootstrapProgress(instance.id, step)))

    async def _running(self, machine: _Machine) -> Instance:
        instance = machine.instance

        async def look() -> Instance | NotYet:
            (seen,) = await self._provider.describe([instance.id])
            if seen.state in (InstanceState.FAILED, InstanceState.GONE, InstanceState.STOPPING):
                raise CapacityError(
                    f"{self._provider.name} could not run instance {instance.id}: it is {seen.state.value}"
                )
            if seen.state is InstanceState.RUNNING and seen.access is not None:
                return seen
            return NotYet(seen.state.value)

        if instance.state is InstanceState.RUNNING and instance.access is not None:
            return instance
        return await wait_until(
            look,
            deadline_s=_RUNNING_DEADLINE_S,
            interval_s=1.0,
            what=f"{self._provider.name} to run instance {instance.id}",
            clock=self._clock,
        )

    async def _start_node(self, rank: int) -> None:
        node = self._nodes[rank]
        self._publish(BootstrapProgress(node.instance.id, "server"))
        await node.start(_config(node, self._request, self._pool_id, self._tls))
        self._publish(BootstrapCompleted(node.instance.id))

    async def _end(self, ranks: Sequence[int]) -> None:
        ours = {rank: machine for rank, machine in self._machines.items() if rank in ranks}
        for machine in ours.values():
            self._publish(InstanceStopping(machine.instance.id))
        await asyncio.gather(*(self._stop_node(rank) for rank in ours if rank in self._nodes))
        try:
            await end_instances(self._provider, [machine.instance.id for machine in ours.values()])
        except TerminationError as error:
            gone = {rank: each for rank, each in ours.items() if each.instance.id not in error.instance_ids}
            await self._note_ended(gone)
            raise
        await self._note_ended(ours)

    async def _stop_node(self, rank: int) -> None:
        try:
            await self._nodes[rank].stop(_STOP_TIMEOUT_S)
        except Exception as error:
            _logger.warning("node %d did not stop by itself and is terminated as it is: %s", rank, error)

    async def _note_ended(self, ended: dict[int, _Machine]) -> None:
        now = self._clock.monotonic()
        for rank, machine in ended.items():
            self._machines[rank] = replace(machine, usage=replace(machine.usage, ended_at=now))
        await asyncio.to_thread(self._ledger.close, [machine.instance.key for machine in ended.values()])


def _config(node: NodeHandle, request: PoolRequest, pool_id: str, tls: TlsIdentity) -> NodeConfig:
    return NodeConfig(
        pool_id=pool_id,
        instance_id=node.instance.id,
        node=node.rank,
        total_nodes=request.nodes,
        workers=request.workers_per_node,
        head=node.rank == 0,
        address=node.access.address,
        workdir=node.access.workdir,
        env=dict(request.env),
        tls_ca=tls.ca,
        tls_cert=tls.cert,
        tls_key=tls.key,
        timeout_s=request.timeout_s,
        lease_s=request.lease_s,
        away_s=request.away_s,
        collect_metrics=request.collect_metrics,
        accelerators=_accelerator_names(request),
    )


def _accelerator_names(request: PoolRequest) -> tuple[str, ...]:
    if request.accelerator is None:
        return ()
    return (request.accelerator.name,) * request.accelerator.count


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even when the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            interruption = error
    result = task.result()
    if interruption is not None:
        raise interruption
    return result
