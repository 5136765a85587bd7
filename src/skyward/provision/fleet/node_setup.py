"""Makes a node of a machine: waits until it runs, opens it, prepares it, starts its supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from skyward._concurrency.waiting import Clock
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    InstanceProvisioned,
    Notice,
    ProviderName,
    SkywardEvent,
)
from skyward.providers.base import Instance, Provider
from skyward.providers.registry import OWN
from skyward.provision.fleet.admission import Admission, AdmittedTransport
from skyward.provision.fleet.lifecycle import HEAD
from skyward.provision.fleet.machines import Machine, Machines
from skyward.provision.preparing.machine_status import Inquiry
from skyward.provision.preparing.node_handle import NodeHandle, NodeListener
from skyward.request.request import PoolRequest
from skyward.transport.access import LocalAccess
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig

__all__ = ["OpenNode", "Starter"]

_GIB = 1 << 30

OpenNode = Callable[[Instance, int, NodeListener], NodeHandle]
"""Makes the handle of a running machine; tests give another."""


class Starter:
    """Makes nodes of a fleet's machines.

    Args:
        provider: who has the machines.
        request: what the pool asks for.
        machines: waits until they run.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: hears how far each is; must not block.
        on_node_message: hears what the nodes report; must not block.
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
        self._admission = Admission(provider, pool_id, publish=publish, clock=clock)

    async def prepare(self, machine: Machine) -> None:
        """Wait until the machine runs, reach it, and give it its environment and volumes."""
        await self._machines.running(machine)
        instance = machine.instance
        self._publish(_provisioned(instance, machine.rank, cast("Any", self._provider.name)))
        node = machine.node = self._open_node(instance, machine.rank, self._on_node_message)
        node.transport = AdmittedTransport(node.transport, self._admission)
        node.inquire = Inquiry(self._provider, instance.id, clock=self._clock)
        self._publish(BootstrapStarting(instance.id))
        await node.prepare(self._request.image, lambda step: self._publish(BootstrapProgress(instance.id, step)))
        if self._request.volumes:
            await self._provide(node)

    async def _provide(self, node: NodeHandle) -> None:
        told = node.instance.id
        self._publish(BootstrapProgress(told, "volumes"))
        for note in await node.provide(await self._machines.grants.to(node.access)):
            self._publish(Notice(f"node {node.rank}: {note}", told))

    async def start(self, machine: Machine, size: int) -> None:
        """Start the supervisor of a machine that is prepared; the fleet is meant to have ``size`` nodes."""
        node = machine.node
        assert node is not None
        self._publish(BootstrapProgress(node.instance.id, "server"))
        config = _config(node, self._request, size, self._pool_id, self._tls)
        config = replace(config, own_machine=self._provider.name in OWN, **_share(node, self._request, size))
        # One that was made for this pool counts from its launch, by which its own time-to-live was armed.
        age_s = self._clock.elapsed() - machine.usage.launched_at if node.instance.power_off else 0.0
        await node.start(replace(config, timeout_s=self._machines.timeout_s(age_s=age_s)))
        self._publish(BootstrapCompleted(node.instance.id))


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
    """Divide this machine among the nodes that share it: all of the pool's are local, or none is."""
    if not isinstance(node.access, LocalAccess):
        return {}
    wish = request.wish
    return {
        "sharers": size,
        "least_cpu": wish.cpu or 0,
        "least_memory_bytes": int((wish.memory_gib or 0) * _GIB),
    }


def _accelerator_names(request: PoolRequest) -> tuple[str, ...]:
    if request.accelerator is None:
        return ()
    return (request.accelerator.name,) * request.accelerator.count
