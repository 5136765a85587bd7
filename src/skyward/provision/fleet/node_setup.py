"""Set-up of nodes: wait for a machine, reach it, prepare it, start its supervisor; spare machines in advance."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, wait_until
from skyward.errors import AuthenticationError, UnreachableError
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    Error,
    InstanceProvisioned,
    Notice,
    ProviderName,
    SkywardEvent,
)
from skyward.providers.base import Instance, InstanceState, Provider
from skyward.provision.buying.price import charged_price
from skyward.provision.buying.unfit import UnfitMachineError, blamed
from skyward.provision.fleet.admission import Admission, AdmittedTransport
from skyward.provision.fleet.end_check import refusal_of_end, warning_of_bill
from skyward.provision.fleet.entrusting import MachineSecrets
from skyward.provision.fleet.looks import OVER, SharedLooks
from skyward.provision.fleet.machines import Machine, Machines
from skyward.provision.preparing.node_handle import NodeHandle, NodeListener, NodeLoss, unless_gone
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.transport.access import Access
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig

__all__ = ["MachineStatus", "OpenNode", "Starter"]

_GIB = 1 << 30
_STATUS_EVERY_S = 5.0
_STATUS_TIMEOUT_S = 20.0
_logger = logging.getLogger("skyward")

OpenNode = Callable[[Instance, int, NodeListener], NodeHandle]
"""Maker of the handle of a running machine; tests pass their own."""


class MachineStatus:
    """Status of one machine at its provider, requested every five seconds at most, or at once.

    Args:
        looks: looks at the fleet's machines.
        instance: the machine.
        provider: name of its provider.
        follow: receives its access whenever it runs.
        clock: the time between two requests.
    """

    def __init__(
        self,
        looks: SharedLooks,
        instance: Instance,
        *,
        provider: str,
        follow: Callable[[Access], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._looks = looks
        self._instance = instance
        self._provider = provider
        self._follow = follow
        self._clock = clock
        self._asked_at = -math.inf

    async def __call__(self, *, at_once: bool = False) -> NodeLoss | None:
        """Return how the machine was lost; None if it was not, or without an answer.

        An error of the provider is no sign of the machine's end: taking it for one would buy a machine in vain.
        """
        if not at_once and self._clock.monotonic() - self._asked_at < _STATUS_EVERY_S:
            return None
        self._asked_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                seen = await self._looks.at(self._instance.id)
        except Exception as error:
            _logger.debug("%s gives no status of %s: %r", self._provider, self._instance.id, error)
            return None
        if seen.state is InstanceState.RUNNING and seen.access is not None:
            self._follow(seen.access)
        if seen.state not in OVER:
            return None
        reason = f"{self._provider} reports that it is {seen.state.value}" + (f": {seen.reason}" if seen.reason else "")
        return NodeLoss(reason=reason, preempted=seen.preempted, machine_over=True)


@dataclass(frozen=True, slots=True)
class _Spare:
    """A machine launched in advance.

    Attributes:
        earlier: number of machines that the fleet had had before it.
        launching: buys it.
        preparing: prepares it, or another one if it is unfit; returns the prepared one.
    """

    earlier: int
    launching: asyncio.Task[Machine]
    preparing: asyncio.Task[Machine]


class Starter:
    """Makes nodes of a fleet's machines, in advance where a machine is about to be taken back.

    Args:
        provider: the provider of the machines.
        request: the pool's parameters.
        machines: buys machines and waits until they run.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: receives the progress of each; must not block.
        on_node_message: receives the reports of the nodes; must not block.
        clock: the time.
        open_node: makes the handle of a running machine.
        discard: ends a machine in the background.
        check_reach: raises if the machines that run have to reach each other and do not.

    Attributes:
        secrets: those that the machines get.
    """

    def __init__(
        self,
        provider: Provider,
        request: PoolRequest,
        machines: Machines,
        *,
        pool_id: str,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        on_node_message: NodeListener,
        clock: Clock,
        open_node: OpenNode,
        discard: Callable[[Machine], None],
        check_reach: Callable[[], None],
    ) -> None:
        self._provider = provider
        self._request = request
        self._machines = machines
        self._pool_id = pool_id
        self._tls = tls
        self._publish = publish
        self._on_node_message = on_node_message
        self._clock = clock
        self._open_node = open_node
        self._discard = discard
        self._check_reach = check_reach
        self._rented = not provider.own_machines
        self._admission = Admission(provider, pool_id, publish=publish, clock=clock)
        self.secrets = MachineSecrets(provider, lambda: machines.all, clock=clock)
        self._spares: dict[int, _Spare] = {}
        self._begun: dict[Machine, asyncio.Task[Machine]] = {}

    def begin_spare(self, rank: int, beside: Sequence[Machine]) -> None:
        """Launch and prepare a machine for ``rank`` in the background, next to those of the other ranks.

        A failure is an ``Error`` event; :meth:`take_spare` then returns None.
        """
        if rank not in self._spares:
            launching = asyncio.ensure_future(self._launch_spare(rank, beside))
            preparing = asyncio.ensure_future(self._prepare_spare(launching, beside))
            self._spares[rank] = _Spare(len(self._machines.all), launching, preparing)

    async def take_spare(self, rank: int) -> Machine | None:
        """Return the machine launched in advance for ``rank``, once it is; None if there is none."""
        if (spare := self._spares.get(rank)) is None:
            return None
        await asyncio.wait((spare.launching,))
        if spare.launching.cancelled() or spare.launching.exception() is not None:
            return None
        del self._spares[rank]
        machine = spare.launching.result()
        self._begun[machine] = spare.preparing
        return machine

    async def settle(self, ranks: Sequence[int]) -> list[Machine]:
        """Stop all preparation for these ranks; return their machines since each spare that was not taken.

        Must run to its end: do not cancel it.
        """
        spares = {rank: spare for rank in ranks if (spare := self._spares.pop(rank, None)) is not None}
        begun = [self._begun.pop(machine) for machine in tuple(self._begun) if machine.rank in ranks]
        tasks: list[asyncio.Task[Any]] = [*begun, *(spare.preparing for spare in spares.values())]
        tasks += [spare.launching for spare in spares.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Not the tasks' results: a cancelled launch runs to its end and leaves its machine among ``all``.
        return [
            machine
            for rank, spare in spares.items()
            for machine in self._machines.all[spare.earlier :]
            if machine.rank == rank and not machine.rejected
        ]

    async def prepare(self, machine: Machine) -> Machine:
        """Wait until the machine runs, reach it, give it its environment and volumes, and return it.

        Where that began in advance, wait for it, return the machine that came of it, and raise its error.

        Raises:
            UnfitMachineError: the machine cannot become a node, for a fault of its own.
        """
        begun = self._begun.pop(machine, None)
        if begun is not None:
            return await begun
        await self._prepare(machine)
        return machine

    async def _launch_spare(self, rank: int, beside: Sequence[Machine]) -> Machine:
        earlier = len(self._machines.all)
        try:
            (machine,) = await self._machines.launch([rank], beside=beside)
        except Exception as error:
            for each in self._machines.all[earlier:]:  # of an order that could not be undone
                if each.rank == rank and not each.ended:
                    self._discard(each)
            self._publish(Error(f"no machine could be launched in advance for node {rank}: {error}"))
            raise
        return machine

    async def _prepare_spare(self, launching: asyncio.Task[Machine], beside: Sequence[Machine]) -> Machine:
        machine = await asyncio.shield(launching)
        while True:
            try:
                await self._prepare(machine)
            except UnfitMachineError as error:
                self._machines.reject(machine, error)
                self._discard(machine)
                machine = await self._machines.instead_of(machine, beside=beside)
            else:
                return machine

    async def _prepare(self, machine: Machine) -> None:
        await self._machines.running(machine)
        instance = machine.instance
        self._publish(_provisioned(instance, machine.rank, cast("Any", self._provider.name)))
        node = machine.node = self._open_node(instance, machine.rank, self._on_node_message)
        node.transport = AdmittedTransport(node.transport, self._admission)
        node.machine_status = MachineStatus(
            self._machines.looks, instance, provider=self._provider.name, follow=node.follow, clock=self._clock
        )
        self._check_reach()  # before the environment, which takes minutes
        await self._unless_over(node, self._equip(machine, node))

    async def _equip(self, machine: Machine, node: NodeHandle) -> None:
        """Reach a running machine, judge its size, and give it its environment and volumes.

        The first contact has to succeed within the offer's time. The environment has as long as its steps may take,
        since a slow package index is not the machine's fault.
        """
        instance_id, fresh = node.instance.id, node.fresh
        self._publish(BootstrapStarting(instance_id))
        try:
            size = await node.reach(self._machines.left_s(machine))
            if size is not None and (shortfall := size.shortfall(node.instance.offer.spec)):
                raise UnfitMachineError(shortfall)
            fresh = False
            await self.secrets.deliver(node)
            await self._check_end(machine, node)
            await node.prepare(self._request.image, lambda step: self._publish(BootstrapProgress(instance_id, step)))
        except (AuthenticationError, UnreachableError) as error:
            if (fault := blamed(error, fresh=fresh)) is None:
                raise
            raise fault from error
        if self._request.volumes:
            await self._provide(node)

    async def _check_end(self, machine: Machine, node: NodeHandle) -> None:
        """Have a machine confirm that it may end its own bill; without that, it counts as one that cannot."""
        if machine.instance.end_check:
            reason = await refusal_of_end(node)
            await self._machines.note_end(machine, may_end=not reason)
            if reason:
                self._publish(Notice(warning_of_bill(node, reason), node.instance.id))

    async def _unless_over(self, node: NodeHandle, work: Coroutine[Any, Any, None]) -> None:
        """Wait for ``work`` on a node whose supervisor does not run yet, unless its provider ends its machine."""
        await (unless_gone(node, work, loss=_reported_loss(node)) if self._rented else work)

    async def _provide(self, node: NodeHandle) -> None:
        instance_id = node.instance.id
        self._publish(BootstrapProgress(instance_id, "volumes"))
        for note in await node.provide(await self._machines.grants.to(node.access)):
            self._publish(Notice(f"node {node.rank}: {note}", instance_id))

    async def start(self, machine: Machine, size: int, *, head: bool) -> None:
        """Start the supervisor of a prepared machine, in a fleet of ``size`` nodes.

        With ``head`` the workers join the node's own scheduler at once, else the one that :class:`Start` will name.
        """
        node = machine.node
        assert node is not None
        self._publish(BootstrapProgress(node.instance.id, "server"))
        config = _config(node, self._request, size, self._pool_id, self._tls)
        own = not self._rented
        bought = {} if own else _bought(node.instance.offer.spec)
        config = replace(config, head=head, own_machine=own, **_share(node, self._request, size), **bought)
        # A rented machine costs money from its launch on: the timeout counts from there.
        age_s = 0.0 if own else self._clock.elapsed() - machine.usage.launched_at
        config = replace(config, timeout_s=self._machines.timeout_s(age_s=age_s))
        if config.timeout_s < self._request.timeout_s - age_s:
            node.cap = "max_cost"
        await self._unless_over(node, node.start(config))
        self._publish(BootstrapCompleted(node.instance.id))


async def _reported_loss(node: NodeHandle) -> NodeLoss:
    """Return the loss of a node's machine once its provider reports it."""
    await SYSTEM_CLOCK.sleep(_STATUS_EVERY_S)  # it ran a moment ago
    what = f"the machine of node {node.rank} to end"
    return await wait_until(node.machine_status, deadline_s=math.inf, interval_s=1.0, what=what)


def _provisioned(instance: Instance, rank: int, provider: ProviderName) -> InstanceProvisioned:
    offer, price = instance.offer, charged_price(instance)
    return InstanceProvisioned(
        instance.id,
        rank,
        offer.spot,
        provider,
        ip=instance.access.address if instance.access else None,
        instance_type=offer.spec.name,
        price_on_demand=offer.on_demand_price_per_hour if offer.spot else price,
        price_spot=price if offer.spot else None,
    )


def _config(node: NodeHandle, request: PoolRequest, size: int, pool_id: str, tls: TlsIdentity) -> NodeConfig:
    return NodeConfig(
        pool_id=pool_id,
        instance_id=node.instance.id,
        node=node.rank,
        total_nodes=size,
        workers=request.workers_per_node,
        head=False,
        address=node.address,
        bind=node.bind,
        workdir=node.access.workdir,
        files=node.files,
        imports_files=bool(request.image.includes),
        env=dict(request.env),
        tls_ca=tls.ca,
        tls_cert=tls.cert,
        tls_key=tls.key,
        lease_s=request.lease_s,
        away_s=request.away_s,
        collect_metrics=request.collect_metrics,
        accelerators=_accelerator_names(request),
        mig=request.accelerator.mig if request.accelerator else (),
        watch=node.instance.watch,
        power_off=node.instance.power_off,
        volumes=node.volumes,
    )


def _share(node: NodeHandle, request: PoolRequest, size: int) -> dict[str, int]:
    """Return the shares of this machine, if the pool is local: its nodes are all on this machine, or none is."""
    if not node.access.on_this_machine:
        return {}
    wish = request.wish
    return {
        "sharers": size,
        "least_cpu": wish.cpu or 0,
        "least_memory_bytes": int((wish.memory_gib or 0) * _GIB),
    }


def _bought(spec: InstanceSpec) -> dict[str, int]:
    """Return the size that a rented machine was bought with; 0 is not known."""
    return {"bought_cpu": spec.cpu, "bought_memory_bytes": int(spec.memory_gib * _GIB)}


def _accelerator_names(request: PoolRequest) -> tuple[str, ...]:
    if request.accelerator is None:
        return ()
    return (request.accelerator.name,) * request.accelerator.count
