"""Set-up of nodes: reach a running machine, prepare it, start its supervisor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from skyward.base.waiting import SYSTEM_CLOCK, Clock, wait_until
from skyward.errors import AuthenticationError, UnreachableError
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    InstanceProvisioned,
    Notice,
    ProviderName,
    SkywardEvent,
)
from skyward.fleet.machines import STATUS_EVERY_S, Machine, Machines
from skyward.fleet.node import Node, NodeListener, NodeLoss, unless_gone
from skyward.machine.access import Completed, Transport
from skyward.market.budget import charged_price
from skyward.market.choose import UnfitMachineError, blamed
from skyward.providers.base import Instance, Provider
from skyward.request.request import PoolRequest
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig

_GIB = 1 << 30
_ADMIT_EVERY_S, _ADMIT_TIMEOUT_S = 15.0, 30.0
_SECRET_LOOK_S, _SECRET_AGAIN_S, _SECRET_TIMEOUT_S = 15.0, 60.0, 60.0
_CHECK_TIMEOUT_S = 120.0
_UNSURE = "unsure: "
"""Start of the reason if the provider refused the check, and perhaps not the end."""
_LONGEST_REASON = 300
"""Most characters of a machine's output in the warning."""
_logger = logging.getLogger("skyward")

OpenNode = Callable[[Instance, int, NodeListener], Node]
"""Maker of the handle of a running machine; tests pass their own."""


@dataclass(slots=True, kw_only=True, eq=False)
class Admission:
    """Requests to the provider to admit this machine's address, every 15 seconds at most for a whole pool.

    No-op where the provider does not restrict connections.

    Attributes:
        provider: the provider of the machines.
        pool_id: the pool's id.
        publish: receives a notice of each new address; must not block.
        clock: the time between two attempts.
    """

    provider: Provider
    pool_id: str
    publish: Callable[[SkywardEvent], None]
    clock: Clock
    _asked_at: float = -math.inf

    async def renew(self) -> None:
        """Have the present address admitted. Raises nothing: without a network, the next attempt may succeed."""
        provider = self.provider
        if not provider.supports("admit") or self.clock.elapsed() - self._asked_at < _ADMIT_EVERY_S:
            return
        self._asked_at = self.clock.elapsed()
        try:
            async with asyncio.timeout(_ADMIT_TIMEOUT_S):
                changed = await provider.admit(self.pool_id)
        except Exception as error:
            _logger.debug("%s does not admit this machine's address: %r", provider.name, error)
            return
        if changed:
            self.publish(
                Notice(f"this machine's address is now {changed}: {provider.name} admits it, and no former one")
            )


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedTransport:
    """A transport that renews the admission whenever its machine does not answer; its caller retries.

    Attributes:
        transport: the transport to the machine.
        admission: the pool's admission.
    """

    transport: Transport
    admission: Admission

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """See :meth:`Transport.run`."""
        try:
            return await self.transport.run(argv, env=env, stdin=stdin, timeout_s=timeout_s)
        except UnreachableError:
            await self.admission.renew()
            raise

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """See :meth:`Transport.put`."""
        try:
            await self.transport.put(data, path, mode=mode)
        except UnreachableError:
            await self.admission.renew()
            raise

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """See :meth:`Transport.forward`."""
        return await self.transport.forward(host, port)

    async def close(self) -> None:
        """See :meth:`Transport.close`."""
        await self.transport.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MachineSecrets:
    """Delivery of secrets to a fleet's machines. No-op where the provider has none.

    Attributes:
        provider: the provider of the machines.
        machines: the fleet's machines.
        clock: the time between two deliveries.
    """

    provider: Provider
    machines: Machines
    clock: Clock
    _due_at: dict[str, float] = field(default_factory=dict[str, float])

    async def deliver(self, node: Node) -> None:
        """Deliver the secret to a machine that admits logins.

        Raises:
            UnfitMachineError: it does not take the secret, so that it would bill on without its client.
        """
        if (secret := await self.provider.secret(node.instance)) is None:
            return
        sent_at = self.clock.elapsed()
        done = await node.transport.run(secret.command, stdin=secret.value.encode(), timeout_s=_SECRET_TIMEOUT_S)
        if done.exit_code:
            raise UnfitMachineError(
                f"does not take the secret by which it ends itself: {secret.command[0]} ended with exit status "
                f"{done.exit_code}"
            )
        self._due_at[node.instance.id] = sent_at + secret.renewed_s

    async def renew(self) -> None:
        """Deliver newer secrets before the former ones expire, until cancelled. A failed delivery is repeated."""
        while self.provider.supports("secret"):
            await self.clock.sleep(_SECRET_LOOK_S)
            now = self.clock.elapsed()
            await asyncio.gather(
                *(
                    self._renew(machine.node)
                    for machine in self.machines.all
                    if machine.node is not None
                    and not machine.ended
                    and self._due_at.get(machine.instance.id, now + 1) <= now
                )
            )

    async def _renew(self, node: Node) -> None:
        try:
            await self.deliver(node)
        except Exception as error:  # the machine may be unreachable for a while, and is looked after by its keeper
            self._due_at[node.instance.id] = self.clock.elapsed() + _SECRET_AGAIN_S
            _logger.warning("node %d did not get the secret by which it ends itself: %s", node.rank, error)


@dataclass(kw_only=True, eq=False)
class NodeSetup:
    """Makes nodes of running machines: reaches them, prepares them, starts their supervisors.

    Attributes:
        provider: the provider of the machines.
        request: the pool's parameters.
        machines: the pool's machines.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: receives the progress of each; must not block.
        on_node_message: receives the reports of the nodes; must not block.
        clock: the time.
        open_node: makes the handle of a running machine.
    """

    provider: Provider
    request: PoolRequest
    machines: Machines
    pool_id: str
    tls: TlsIdentity
    publish: Callable[[SkywardEvent], None]
    on_node_message: NodeListener
    clock: Clock
    open_node: OpenNode

    def __post_init__(self) -> None:
        self._admission = Admission(
            provider=self.provider, pool_id=self.pool_id, publish=self.publish, clock=self.clock
        )
        self.secrets = MachineSecrets(provider=self.provider, machines=self.machines, clock=self.clock)

    def open(self, machine: Machine) -> Node:
        """Make the node of a running machine; nothing is sent to it yet."""
        self.publish(_provisioned(machine.instance, machine.rank, cast("Any", self.provider.name)))
        node = machine.node = self.open_node(machine.instance, machine.rank, self.on_node_message)
        node.transport = AdmittedTransport(node.transport, self._admission)
        node.machine_status = partial(self.machines.loss_of, machine)
        return node

    async def equip(self, machine: Machine, node: Node) -> None:
        """Reach a running machine, judge its size, and give it its environment and volumes.

        The first contact has to succeed within the offer's time. The environment has as long as its steps may take,
        since a slow package index is not the machine's fault.

        Raises:
            UnfitMachineError: the machine cannot become a node, for a fault of its own.
        """
        await self._unless_over(node, self._equip(machine, node))

    async def _equip(self, machine: Machine, node: Node) -> None:
        instance_id, fresh = node.instance.id, node.fresh
        self.publish(BootstrapStarting(instance_id))
        try:
            size = await node.reach(self.machines.left_s(machine))
            if size is not None and (shortfall := size.shortfall(node.instance.offer.spec)):
                raise UnfitMachineError(shortfall)
            fresh = False
            await self.secrets.deliver(node)
            await self._check_end(machine, node)
            await node.prepare(self.request.image, lambda step: self.publish(BootstrapProgress(instance_id, step)))
        except (AuthenticationError, UnreachableError) as error:
            if (fault := blamed(error, fresh=fresh)) is None:
                raise
            raise fault from error
        if self.request.volumes:
            self.publish(BootstrapProgress(instance_id, "volumes"))
            for note in await node.provide(await self.machines.grants.to(node.access)):
                self.publish(Notice(f"node {node.rank}: {note}", instance_id))

    async def _check_end(self, machine: Machine, node: Node) -> None:
        """Have a machine confirm that it may end its own bill; without that, it counts as one that cannot."""
        if machine.instance.end_check:
            reason = await refusal_of_end(node)
            await self.machines.note_end(machine, may_end=not reason)
            if reason:
                self.publish(Notice(warning_of_bill(node, reason), node.instance.id))

    async def _unless_over(self, node: Node, work: Coroutine[Any, Any, None]) -> None:
        """Wait for ``work`` on a node whose supervisor does not run yet, unless its provider ends its machine."""
        await (work if self.provider.own_machines else unless_gone(node, work, loss=_reported_loss(node)))

    async def start(self, machine: Machine, node: Node, size: int, *, head: bool) -> None:
        """Start the supervisor of a prepared machine, in a fleet of ``size`` nodes.

        With ``head`` its workers start at once, else with the order that names the head.
        """
        self.publish(BootstrapProgress(node.instance.id, "server"))
        # A rented machine costs money from its launch on: the timeout counts from there.
        age_s = 0.0 if self.provider.own_machines else self.clock.elapsed() - machine.usage.launched_at
        timeout_s = self.machines.timeout_s(age_s=age_s)
        if timeout_s < self.request.timeout_s - age_s:
            node.cap = "max_cost"
        await self._unless_over(node, node.start(self._config(node, size, head=head, timeout_s=timeout_s)))
        self.publish(BootstrapCompleted(node.instance.id))

    def _config(self, node: Node, size: int, *, head: bool, timeout_s: float) -> NodeConfig:
        request, accelerator, spec = self.request, self.request.accelerator, node.instance.offer.spec
        rented = not self.provider.own_machines
        shared = node.access.on_this_machine  # of the nodes of a pool, all are on this machine, or none is
        return NodeConfig(
            pool_id=self.pool_id,
            instance_id=node.instance.id,
            node=node.rank,
            total_nodes=size,
            workers=request.workers_per_node,
            head=head,
            address=node.address,
            bind=node.bind,
            workdir=node.access.workdir,
            files=node.files,
            imports_files=bool(request.image.includes),
            env=dict(request.env),
            tls_ca=self.tls.ca,
            tls_cert=self.tls.cert,
            tls_key=self.tls.key,
            timeout_s=timeout_s,
            lease_s=request.lease_s,
            away_s=request.away_s,
            collect_metrics=request.collect_metrics,
            accelerators=(accelerator.name,) * accelerator.count if accelerator else (),
            mig=accelerator.mig if accelerator else (),
            own_machine=not rented,
            watch=node.instance.watch,
            power_off=node.instance.power_off,
            volumes=node.volumes,
            sharers=size if shared else 1,
            least_cpu=request.wish.cpu or 0 if shared else 0,
            least_memory_bytes=int((request.wish.memory_gib or 0) * _GIB) if shared else 0,
            bought_cpu=spec.cpu if rented else 0,
            bought_memory_bytes=int(spec.memory_gib * _GIB) if rented else 0,
            service=request.service,
            service_name=request.service_name,
            packages=request.packages,
        )


async def refusal_of_end(node: Node) -> str:
    """Run the machine's end check; return the reason for which it may not end its bill, empty if it may."""
    check = node.instance.end_check
    try:
        done = await node.transport.run(check, timeout_s=_CHECK_TIMEOUT_S)
    except UnreachableError as error:
        return str(error)
    if not done.exit_code:
        return ""
    printed = " ".join((done.stdout + done.stderr).split())[:_LONGEST_REASON]
    return printed or f"{check[0]} ended with exit status {done.exit_code}"


def warning_of_bill(node: Node, reason: str) -> str:
    """Return the warning about a machine whose end check failed for ``reason``."""
    may = "may be unable to end" if reason.startswith(_UNSURE) else "cannot end"
    return (
        f"node {node.rank}: machine {node.instance.id} {may} its own bill ({reason}): its timeout and max_cost "
        "hold only while this program runs. It bills on if this program dies: the next pool's opening or "
        "`skyward sweep` removes it"
    )


async def _reported_loss(node: Node) -> NodeLoss:
    """Return the loss of a node's machine once its provider reports it."""
    await SYSTEM_CLOCK.sleep(STATUS_EVERY_S)  # it ran a moment ago
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
