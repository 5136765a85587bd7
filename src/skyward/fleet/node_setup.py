"""Set-up of nodes: reach a running machine, prepare it, start its supervisor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

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
from skyward.fleet.machines import Machines
from skyward.fleet.node import STATUS_EVERY_S, Node, NodeLoss, unless_gone
from skyward.machine.access import Completed, Transport
from skyward.market.budget import charged_price
from skyward.market.choose import UnfitMachineError, blamed
from skyward.providers.base import Provider
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig

T = TypeVar("T")

_GIB = 1 << 30
_ADMIT_EVERY_S, _ADMIT_TIMEOUT_S = 15.0, 30.0
_SECRET_LOOK_S, _SECRET_AGAIN_S, _SECRET_TIMEOUT_S = 15.0, 60.0, 60.0
_CHECK_TIMEOUT_S = 120.0
_UNSURE = "unsure: "
"""Start of the reason if the provider refused the check, and perhaps not the end."""
_LONGEST_REASON = 300
"""Most characters of a machine's output in the warning."""
_logger = logging.getLogger("skyward")


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

    async def perform(self, call: Coroutine[Any, Any, T]) -> T:
        """Perform a call to a machine, and renew the admission if it does not answer; the caller retries."""
        try:
            return await call
        except UnreachableError:
            await self.renew()
            raise


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedTransport:
    """A transport that renews the admission whenever its machine does not answer.

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
        return await self.admission.perform(self.transport.run(argv, env=env, stdin=stdin, timeout_s=timeout_s))

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """See :meth:`Transport.put`."""
        await self.admission.perform(self.transport.put(data, path, mode=mode))

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """See :meth:`Transport.forward`."""
        return await self.transport.forward(host, port)

    async def close(self) -> None:
        """See :meth:`Transport.close`."""
        await self.transport.close()


async def deliver_secret(machines: Machines, node: Node) -> None:
    """Deliver the secret to a machine that admits logins. No-op where its provider has none.

    Raises:
        UnfitMachineError: it does not take the secret, so that it would bill on without its client.
    """
    if (secret := await machines.provider_of(node.instance).secret(node.instance)) is None:
        return
    sent_at = machines.clock.elapsed()
    done = await node.transport.run(secret.command, stdin=secret.value.encode(), timeout_s=_SECRET_TIMEOUT_S)
    if done.exit_code:
        raise UnfitMachineError(
            f"does not take the secret by which it ends itself: {secret.command[0]} ended with exit status "
            f"{done.exit_code}"
        )
    node.secret_due_at = sent_at + secret.renewed_s


async def renew_secrets(machines: Machines) -> None:
    """Deliver newer secrets before the former ones expire, until cancelled. A failed delivery is repeated."""

    async def renew(node: Node) -> None:
        try:
            await deliver_secret(machines, node)
        except Exception as error:  # the machine may be unreachable for a while, and is looked after by its keeper
            node.secret_due_at = machines.clock.elapsed() + _SECRET_AGAIN_S
            _logger.warning("node %d did not get the secret by which it ends itself: %s", node.rank, error)

    while any(each.supports("secret") for each in machines.provider.members):
        await machines.clock.sleep(_SECRET_LOOK_S)
        now = machines.clock.elapsed()
        await asyncio.gather(*(renew(node) for node in machines.unended() if node.secret_due_at <= now))


class NodeSetup:
    """Makes nodes of running machines: reaches them, prepares them, starts their supervisors.

    Args:
        machines: the pool's machines.
        tls: the certificates every node gets.
    """

    def __init__(self, machines: Machines, tls: TlsIdentity) -> None:
        self._machines = machines
        self._tls = tls
        self._request, self._publish = machines.request, machines.publish
        self._admissions: dict[int, Admission] = {}

    def open(self, node: Node) -> None:
        """Open the transport to a running machine; nothing is sent to it yet."""
        label = node.instance.offer.provider or self._machines.provider.name
        self._publish(_provisioned(node, cast("Any", label)))
        node.open()
        node.transport = AdmittedTransport(node.transport, self._admission_to(node))

    def _admission_to(self, node: Node) -> Admission:
        """Return the admission to the machines of a node's provider."""
        machines, provider = self._machines, self._machines.provider_of(node.instance)
        if id(provider) not in self._admissions:
            self._admissions[id(provider)] = Admission(
                provider=provider, pool_id=machines.pool_id, publish=machines.publish, clock=machines.clock
            )
        return self._admissions[id(provider)]

    def _is_own(self, node: Node) -> bool:
        """Return whether a node's machine is the user's own, not rented."""
        return self._machines.provider_of(node.instance).own_machines

    async def equip(self, node: Node) -> None:
        """Reach a running machine, judge its size, and give it its environment and volumes.

        The first contact has to succeed within the offer's time. The environment has as long as its steps may take,
        since a slow package index is not the machine's fault.

        Raises:
            UnfitMachineError: the machine cannot become a node, for a fault of its own.
        """
        await self._unless_over(node, self._equip(node))

    async def _equip(self, node: Node) -> None:
        instance_id, fresh = node.instance.id, node.fresh
        self._publish(BootstrapStarting(instance_id))
        try:
            size = await node.reach(node.left_s)
            if size is not None and (shortfall := size.shortfall(node.instance.offer.spec)):
                raise UnfitMachineError(shortfall)
            fresh = False
            await deliver_secret(self._machines, node)
            await self._check_end(node)
            await node.prepare(self._request.image, lambda step: self._publish(BootstrapProgress(instance_id, step)))
        except (AuthenticationError, UnreachableError) as error:
            if (fault := blamed(error, fresh=fresh)) is None:
                raise
            raise fault from error
        if self._request.volumes:
            self._publish(BootstrapProgress(instance_id, "volumes"))
            for note in await node.provide(await self._machines.grants.to(node.access)):
                self._publish(Notice(f"node {node.rank}: {note}", instance_id))

    async def _check_end(self, node: Node) -> None:
        """Have a machine confirm that it may end its own bill; without that, it counts as one that cannot."""
        if node.instance.end_check:
            reason = await refusal_of_end(node)
            await self._machines.note_end(node, may_end=not reason)
            if reason:
                self._publish(Notice(warning_of_bill(node, reason), node.instance.id))

    async def _unless_over(self, node: Node, work: Coroutine[Any, Any, None]) -> None:
        """Wait for ``work`` on a node whose supervisor does not run yet, unless its provider ends its machine."""
        await (work if self._is_own(node) else unless_gone(node, work, loss=_reported_loss(node)))

    async def start(self, node: Node, size: int, *, head: bool) -> None:
        """Start the supervisor of a prepared machine, in a fleet of ``size`` nodes.

        With ``head`` its workers start at once, else with the order that names the head.
        """
        self._publish(BootstrapProgress(node.instance.id, "server"))
        # A rented machine costs money from its launch on: the timeout counts from there.
        age_s = 0.0 if self._is_own(node) else self._machines.clock.elapsed() - node.usage.launched_at
        timeout_s = self._machines.timeout_s(age_s=age_s)
        if timeout_s < self._request.timeout_s - age_s:
            node.cap = "max_cost"
        await self._unless_over(node, node.start(self._config(node, size, head=head, timeout_s=timeout_s)))
        self._publish(BootstrapCompleted(node.instance.id))

    def _config(self, node: Node, size: int, *, head: bool, timeout_s: float) -> NodeConfig:
        request, spec = self._request, node.instance.offer.spec
        accelerator = request.accelerator_of(spec)
        rented = not self._is_own(node)
        shared = node.access.on_this_machine
        return NodeConfig(
            pool_id=self._machines.pool_id,
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
            tls_ca=self._tls.ca,
            tls_cert=self._tls.cert,
            tls_key=self._tls.key,
            timeout_s=timeout_s,
            cap=node.cap,
            lease_s=request.lease_s,
            away_s=request.away_s,
            keep_s=request.keep_s,
            results=request.results,
            collect_metrics=request.collect_metrics,
            accelerators=(accelerator.name,) * accelerator.count if accelerator else (),
            mig=accelerator.mig if accelerator else (),
            own_machine=not rented,
            watch=node.instance.watch,
            power_off=node.instance.power_off,
            volumes=node.volumes,
            sharers=(request.nodes if request.elastic else size) if shared else 1,
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


def _provisioned(node: Node, provider: ProviderName) -> InstanceProvisioned:
    instance = node.instance
    offer, price = instance.offer, charged_price(instance)
    return InstanceProvisioned(
        instance.id,
        node.rank,
        offer.spot,
        provider,
        ip=instance.access.address if instance.access else None,
        instance_type=offer.spec.name,
        price_on_demand=offer.on_demand_price_per_hour if offer.spot else price,
        price_spot=price if offer.spot else None,
    )
