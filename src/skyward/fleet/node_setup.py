"""Set-up of nodes: reach a running machine, prepare it, start its supervisor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
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
from skyward.fleet.machines import OVER, Machine, Machines, SharedLooks
from skyward.fleet.node_handle import NodeHandle, NodeListener, NodeLoss, unless_gone
from skyward.machine.access import Access, Completed, Transport
from skyward.market.choose import UnfitMachineError, blamed
from skyward.market.cost import charged_price
from skyward.providers.base import Instance, InstanceState, Provider
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig

_GIB = 1 << 30
_STATUS_EVERY_S, _STATUS_TIMEOUT_S = 5.0, 20.0
_ADMIT_EVERY_S, _ADMIT_TIMEOUT_S = 15.0, 30.0
_SECRET_LOOK_S, _SECRET_AGAIN_S, _SECRET_TIMEOUT_S = 15.0, 60.0, 60.0
_CHECK_TIMEOUT_S = 120.0
_UNSURE = "unsure: "
"""Start of the reason if the provider refused the check, and perhaps not the end."""
_LONGEST_REASON = 300
"""Most characters of a machine's output in the warning."""
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


class Admission:
    """Requests to the provider to admit this machine's address, every 15 seconds at most for a whole pool.

    No-op where the provider does not restrict connections.

    Args:
        provider: the provider of the machines.
        pool_id: the pool's id.
        publish: receives a notice of each new address; must not block.
        clock: the time between two attempts.
    """

    def __init__(
        self,
        provider: Provider,
        pool_id: str,
        *,
        publish: Callable[[SkywardEvent], None],
        clock: Clock,
    ) -> None:
        self._provider = provider
        self._pool_id = pool_id
        self._publish = publish
        self._clock = clock
        self._asked_at = -math.inf

    async def renew(self) -> None:
        """Have the present address admitted. Raises nothing: without a network, the next attempt may succeed."""
        provider = self._provider
        if not provider.supports("admit") or self._clock.elapsed() - self._asked_at < _ADMIT_EVERY_S:
            return
        self._asked_at = self._clock.elapsed()
        try:
            async with asyncio.timeout(_ADMIT_TIMEOUT_S):
                changed = await provider.admit(self._pool_id)
        except Exception as error:
            _logger.debug("%s does not admit this machine's address: %r", provider.name, error)
            return
        if changed:
            self._publish(
                Notice(f"this machine's address is now {changed}: {provider.name} admits it, and no former one")
            )


class AdmittedTransport:
    """A transport that renews the admission whenever its machine does not answer; its caller retries.

    Args:
        transport: the transport to the machine.
        admission: the pool's admission.
    """

    def __init__(self, transport: Transport, admission: Admission) -> None:
        self._transport = transport
        self._admission = admission

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
            return await self._transport.run(argv, env=env, stdin=stdin, timeout_s=timeout_s)
        except UnreachableError:
            await self._admission.renew()
            raise

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """See :meth:`Transport.put`."""
        try:
            await self._transport.put(data, path, mode=mode)
        except UnreachableError:
            await self._admission.renew()
            raise

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """See :meth:`Transport.forward`."""
        return await self._transport.forward(host, port)

    async def close(self) -> None:
        """See :meth:`Transport.close`."""
        await self._transport.close()


class MachineSecrets:
    """Delivery of secrets to a fleet's machines. No-op where the provider has none.

    Args:
        provider: the provider of the machines.
        machines: the fleet's machines.
        clock: the time between two deliveries.
    """

    def __init__(self, provider: Provider, machines: Machines, *, clock: Clock) -> None:
        self._provider = provider
        self._machines = machines
        self._clock = clock
        self._due_at: dict[str, float] = {}

    async def deliver(self, node: NodeHandle) -> None:
        """Deliver the secret to a machine that admits logins.

        Raises:
            UnfitMachineError: it does not take the secret, so that it would bill on without its client.
        """
        provider = self._provider
        if (secret := await provider.secret(node.instance)) is None:
            return
        sent_at = self._clock.elapsed()
        done = await node.transport.run(secret.command, stdin=secret.value.encode(), timeout_s=_SECRET_TIMEOUT_S)
        if done.exit_code:
            raise UnfitMachineError(
                f"does not take the secret by which it ends itself: {secret.command[0]} ended with exit status "
                f"{done.exit_code}"
            )
        self._due_at[node.instance.id] = sent_at + secret.renewed_s

    async def renew(self) -> None:
        """Deliver newer secrets before the former ones expire, until cancelled. A failed delivery is repeated."""
        while self._provider.supports("secret"):
            await self._clock.sleep(_SECRET_LOOK_S)
            now = self._clock.elapsed()
            await asyncio.gather(
                *(
                    self._renew(machine.node)
                    for machine in self._machines.all
                    if machine.node is not None
                    and not machine.ended
                    and self._due_at.get(machine.instance.id, now + 1) <= now
                )
            )

    async def _renew(self, node: NodeHandle) -> None:
        try:
            await self.deliver(node)
        except Exception as error:  # the machine may be unreachable for a while, and is looked after by its keeper
            self._due_at[node.instance.id] = self._clock.elapsed() + _SECRET_AGAIN_S
            _logger.warning("node %d did not get the secret by which it ends itself: %s", node.rank, error)


class NodeSetup:
    """Makes nodes of running machines: reaches them, prepares them, starts their supervisors.

    Args:
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
        self._rented = not provider.own_machines
        self._admission = Admission(provider, pool_id, publish=publish, clock=clock)
        self._secrets = MachineSecrets(provider, machines, clock=clock)

    async def renew_secrets(self) -> None:
        """See :meth:`MachineSecrets.renew`."""
        await self._secrets.renew()

    def open(self, machine: Machine) -> NodeHandle:
        """Make the node of a running machine; nothing is sent to it yet."""
        instance = machine.instance
        self._publish(_provisioned(instance, machine.rank, cast("Any", self._provider.name)))
        node = machine.node = self._open_node(instance, machine.rank, self._on_node_message)
        node.transport = AdmittedTransport(node.transport, self._admission)
        node.machine_status = MachineStatus(
            self._machines.looks, instance, provider=self._provider.name, follow=node.follow, clock=self._clock
        )
        return node

    async def equip(self, machine: Machine, node: NodeHandle) -> None:
        """Reach a machine, give it its environment and volumes.

        Raises:
            UnfitMachineError: the machine cannot become a node, for a fault of its own.
        """
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
            await self._secrets.deliver(node)
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

    async def start(self, machine: Machine, node: NodeHandle, size: int, *, head: bool) -> None:
        """Start the supervisor of a prepared machine, in a fleet of ``size`` nodes.

        With ``head`` the workers join the node's own scheduler at once, else the one that :class:`Start` will name.
        """
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


async def refusal_of_end(node: NodeHandle) -> str:
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


def warning_of_bill(node: NodeHandle, reason: str) -> str:
    """Return the warning about a machine whose end check failed for ``reason``."""
    may = "may be unable to end" if reason.startswith(_UNSURE) else "cannot end"
    return (
        f"node {node.rank}: machine {node.instance.id} {may} its own bill ({reason}): its timeout and max_cost "
        "hold only while this program runs. It bills on if this program dies: the next pool's opening or "
        "`skyward sweep` removes it"
    )


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
        service=request.service,
        service_name=request.service_name,
        packages=request.packages,
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
