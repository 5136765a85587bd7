"""Services of front-ends on a pool's nodes: ordered, reached, and emptied before a node leaves."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version

from skyward.base.waiting import NotYet, wait_until
from skyward.errors import ConfigurationError, PoolStateError, UnreachableError
from skyward.events import Progress, SkywardEvent
from skyward.fleet.fleet import Fleet
from skyward.fleet.node import Node
from skyward.fleet.topology import HEAD, service_out_of_reach
from skyward.submission import NodeService, ServiceAccess, worker_names
from skyward.wire.control import ServiceExit, ServiceRunning
from skyward.wire.frames import TlsIdentity

_START_S = 120.0
_FAILED_STARTS = 3
_JOIN_S = 30.0  # a worker that is restarting joins later
_DRAIN_S = 300.0  # the service moves the node's data meanwhile; after this it is computed again instead
_FORGET_S = 30.0
_logger = logging.getLogger("skyward")


class Services:
    """Services on the nodes of a pool. Belongs to the event loop.

    Args:
        nodes: the nodes.
        tls: the pool's certificates.
        publish: receiver of progress; must not block.
        opened_with: name and module of the service that the nodes were opened with; empty for none.
    """

    def __init__(
        self,
        nodes: Fleet,
        *,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        opened_with: tuple[str, str] = ("", ""),
    ) -> None:
        self._nodes = nodes
        self._tls = tls
        self._publish = publish
        self._ordered: dict[str, str] = {opened_with[0]: opened_with[1]} if all(opened_with) else {}
        self._used: dict[str, NodeService] = {}
        self._running: dict[str, str] = {}
        self._exits: dict[str, list[str]] = {}
        self._joined: dict[str, str] = {}
        self._works: dict[str, Progress] = {}
        self._works_of = ""

    @property
    def in_use(self) -> bool:
        """True once a service was ordered."""
        return bool(self._ordered)

    async def use(self, service: NodeService) -> ServiceAccess:
        """Return the access to a service, which is started on its first use.

        Raises:
            ConfigurationError: versions differ between this process and the nodes, or nodes do not reach each other.
            PoolStateError: the head node is being replaced, or was given up.
            UnreachableError: the service does not start; the message gives the reason.
        """
        if apart := self._nodes.separation():
            raise service_out_of_reach(service.name, apart)
        self._nodes.head()  # raises at once while there is none
        nodes = self._nodes.started_nodes()
        for difference in await asyncio.to_thread(lambda: list(_differences(service, nodes))):
            raise ConfigurationError(difference)
        self._used[service.name] = service
        if service.name not in self._ordered:
            self._ordered[service.name] = service.module
            self.order(self._nodes.head())
        await wait_until(
            lambda: self._probe(service.name),
            deadline_s=_START_S,
            interval_s=0.01,
            what=f"the service {service.name} on the head node to start",
        )
        head = self._nodes.head()
        # The way leads over the machine itself, where the port is bound.
        host, port = head.ready.control.rpartition(":")[0], int(head.ready.service.rpartition(":")[2])
        address = "{}:{}".format(*await head.transport.forward(host, port))
        access = ServiceAccess(address=address, identity=self._tls, tunnelled=address != f"{host}:{port}")
        await self._wait_until_joined(service, access)
        return access

    async def _wait_until_joined(self, service: NodeService, access: ServiceAccess) -> None:
        """Wait once, at the service's present address, until the workers that run now have joined."""
        if self._joined.get(service.name) == access.address:
            return
        nodes = self._nodes.started_nodes()
        names = [name for node in nodes for name in worker_names(node.rank, len(node.ready.guests))]
        try:
            async with asyncio.timeout(_JOIN_S):
                await service.wait_joined(access, names)
        except TimeoutError:
            _logger.info("not all workers have joined the service %s yet", service.name)
        self._joined[service.name] = access.address

    async def _probe(self, name: str) -> bool | NotYet:
        if self._running.get(name) == self._nodes.head().ready.service:
            return True
        exits = self._exits.get(name, [])
        if len(exits) >= _FAILED_STARTS:
            raise UnreachableError(f"{name.capitalize()} does not start on the head node: its process {exits[-1]}")
        return NotYet(exits[-1] if exits else "it has not started")

    def order(self, node: Node) -> None:
        """Order the services on a node that has started; on all nodes if it is the head."""
        try:
            head = node if node.rank == HEAD else self._nodes.head()
        except PoolStateError:
            return  # the next head's start orders them
        for name, module in self._ordered.items():
            for other in self._nodes.started_nodes() if node is head else (node,):
                other.run_service(name=name, module=module, address=head.ready.service)

    async def drain(self, rank: int, workers: Sequence[str]) -> None:
        """Have the services move what they keep on a node that leaves, or is about to be replaced."""
        for service in list(self._used.values()):
            try:
                async with asyncio.timeout(_DRAIN_S):
                    await service.drain(await self.use(service), workers)
            except (OSError, PoolStateError) as error:
                _logger.warning(
                    "%s's data on node %d could not be moved and is computed again: %s",
                    service.name.capitalize(),
                    rank,
                    error,
                )

    async def forget(self, workers: Sequence[str]) -> None:
        """Tell the services that these workers are gone for good."""
        for service in list(self._used.values()):
            with suppress(OSError, PoolStateError):  # the next process of the service knows none of them
                async with asyncio.timeout(_FORGET_S):
                    await service.forget(await self.use(service), workers)

    def handle(self, node: Node, message: object) -> None:
        """Note what a node says about services; ignore other messages."""
        match message:
            case Progress():
                self._works_of = node.instance.id
                self._works.pop(message.label, None)
                if not message.over:
                    self._works[message.label] = message
                self._publish(message)
            case ServiceRunning():
                self._running[message.name] = message.address
                self._exits.pop(message.name, None)
                if node.instance.id != self._works_of:
                    self._end_works()
            case ServiceExit():
                self._exits.setdefault(message.name, []).append(message.reason)
                if self._running.get(message.name) == node.ready.service:
                    del self._running[message.name]
                if node.instance.id == self._works_of:
                    self._end_works()
            case _:
                pass

    def _end_works(self) -> None:
        """Publish the end of unfinished work: a service that ends takes its work along."""
        unfinished, self._works = self._works, {}
        for event in unfinished.values():
            rest = (event.total or 0) - event.ended
            self._publish(replace(event, running=0, cancelled=event.cancelled + rest))


def _differences(service: NodeService, nodes: Iterable[Node]) -> Iterator[str]:
    """Yield one message per node whose versions are incompatible with those of this process."""
    here = {"python": _minor(platform.python_version())} | {name: version(name) for name in service.distributions}
    for node in nodes:
        there = {**node.ready.packages, "python": _minor(node.ready.python)}
        wrong = [
            f"{name} {mine} here, {there.get(name, 'none')} there"
            for name, mine in here.items()
            if there.get(name) != mine
        ]
        if wrong:
            yield (
                f"{service.name.capitalize()} needs the same versions in this process and on node {node.rank}: "
                f"{'; '.join(wrong)}. Leave these packages out of the image, or install its versions in this process's "
                "environment"
            )


def _minor(python: str) -> str:
    return python.rpartition(".")[0]
