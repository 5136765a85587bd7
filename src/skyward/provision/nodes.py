"""One node as the client sees it: its machine, the way to it, and the control connection to its supervisor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, assert_never

from skyward._waiting import wait_until
from skyward.errors import BootstrapError, PoolStateError, UnreachableError
from skyward.node.config import NodeConfig, NodeReady
from skyward.node.control import Ending, Kill, Message, Start
from skyward.providers.base import Instance
from skyward.provision.control import ControlClient
from skyward.provision.environment import prepare_environment
from skyward.spec.image import Image
from skyward.transport.access import Access, LocalAccess, SSHAccess
from skyward.transport.base import Transport
from skyward.transport.local import LocalTransport
from skyward.wire.frames import TlsIdentity

__all__ = ["NodeHandle", "NodeListener", "NodeLoss", "open_node", "open_transport", "unless_gone"]

_START_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 30.0
_JUDGE_S = 0.5
_JUDGE_TIMEOUT_S = 30.0
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A node is certainly gone.

    Attributes:
        reason: why, in plain English.
        timed_out: whether its hard ``timeout`` is over: then no other node takes its place.
    """

    reason: str
    timed_out: bool = False


class NodeHandle:
    """One node. Its verbs are called in order: ``prepare``, ``start``, ``join``; ``stop`` at any time.

    Attributes:
        instance: the provider's record of its machine.
        rank: the node's rank, 0-based.
        access: how the machine is reached.
        transport: the way to the machine.
    """

    def __init__(self, *, instance: Instance, rank: int, transport: Transport, on_message: NodeListener) -> None:
        if instance.access is None:
            raise PoolStateError(f"instance {instance.id} of node {rank} cannot be reached yet")
        self.instance = instance
        self.rank = rank
        self.access: Access = instance.access
        self.transport = transport
        self._on_message = on_message
        self._python = ""
        self._ready: NodeReady | None = None
        self._control: ControlClient | None = None
        self._unlinked = asyncio.Event()
        self._loss: NodeLoss | None = None

    @property
    def linked(self) -> bool:
        """Whether its supervisor is connected, and has not said that it ends."""
        return self._loss is None and self._control is not None and self._control.connected

    @property
    def ready(self) -> NodeReady:
        """The node's ports and size; raises :class:`~skyward.errors.PoolStateError` before it has started."""
        if self._ready is None:
            raise PoolStateError(f"node {self.rank} has not started")
        return self._ready

    async def prepare(self, image: Image, progress: Callable[[str], None]) -> None:
        """Give the node its Python environment; ``progress`` hears of each bootstrap step as it begins.

        Raises :class:`~skyward.errors.BootstrapError`.
        """
        self._python = await prepare_environment(image, self.transport, node=self.rank, progress=progress)

    async def start(self, config: NodeConfig) -> None:
        """Start the supervisor and connect to it; returns once its ports are known.

        Raises :class:`~skyward.errors.BootstrapError` with what the supervisor said.
        """
        self._ready = await self._start_supervisor(config)
        identity = TlsIdentity(ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key)
        host, _, port = self._ready.control.rpartition(":")
        host, here = await self.transport.forward(host, int(port))
        self._control = ControlClient(f"{host}:{here}", identity, on_message=self._hear, on_lost=self._connection_lost)
        await self._control.connect(_CONNECT_TIMEOUT_S)

    async def join(self, *, scheduler: str, head_addr: str, total_nodes: int) -> None:
        """Have the supervisor start the workers, which register with ``scheduler`` (``tls://host:port``).

        Workers that run already follow: they register there, and know of the fleet what they are told now. While the
        connection is lost, it is said as soon as it is back.
        """
        self._connection.keep_saying(Start(scheduler=scheduler, head_addr=head_addr, total_nodes=total_nodes))

    async def wait_gone(self) -> NodeLoss:
        """Return once the node is certainly gone.

        Either it says so itself, or it takes two independent signals: the control connection is lost, and the machine
        says that its supervisor does not run. A machine that cannot be asked is merely away.
        """
        while self._loss is None:
            await self._unlinked.wait()
            self._unlinked.clear()
            reason = await wait_until(
                self._judge, deadline_s=math.inf, interval_s=_JUDGE_S, what=f"node {self.rank} to come back"
            )
            if reason and self._loss is None:
                self._loss = NodeLoss(reason=reason)
        return self._loss

    async def kill_worker(self, worker: int, incarnation: str) -> None:
        """SIGKILL one worker, unless it is another incarnation by now; its supervisor starts it again."""
        await self._connection.send(Kill(worker=worker, incarnation=incarnation))

    async def stop(self, timeout_s: float) -> None:
        """Ask the supervisor to end everything and wait for it; then give up the connection, in any case. Idempotent.

        Raises :class:`~skyward.errors.UnreachableError` when the node did not end in time: terminating its machine
        is what ends it then.
        """
        control, self._control = self._control, None
        try:
            if control is not None and self._loss is None:
                await control.stop_node(timeout_s)
        finally:
            if control is not None:
                await control.close()
            await self.transport.close()

    @property
    def _connection(self) -> ControlClient:
        if self._control is None:
            raise PoolStateError(f"node {self.rank} is not connected")
        return self._control

    async def _start_supervisor(self, config: NodeConfig) -> NodeReady:
        path = f"{config.workdir}/node.json"
        await self.transport.put(config.to_json().encode(), path, mode=0o600)
        completed = await self.transport.run(
            [self._python, "-m", "skyward.node.supervisor", path],
            env={"SKYWARD_INSTANCE": config.instance_id},
            timeout_s=_START_TIMEOUT_S,
        )
        try:
            return NodeReady.from_json(completed.stdout)
        except (ValueError, KeyError, TypeError) as error:
            log_path = f"{config.workdir}/supervisor.log"
            raise BootstrapError(
                f"the supervisor of node {self.rank} did not start (exit code {completed.exit_code}); "
                f"its log is {log_path}\n{completed.stderr.strip() or completed.stdout.strip()}",
                node=self.rank,
                step="server",
                log_tail=completed.stderr,
                log_path=log_path,
            ) from error

    def _hear(self, message: Message) -> None:
        if isinstance(message, Ending):
            self._loss = NodeLoss(reason=message.reason, timed_out=message.timed_out)
            self._unlinked.set()
        self._on_message(self, message)

    async def _judge(self) -> str | None:
        """Why the node is gone; empty if it is back; None while nobody can tell."""
        if self._loss is not None or self._control is None or self._control.connected:
            return ""
        check = f"import os; os.kill({self.ready.pid}, 0)"
        try:
            completed = await self.transport.run([self._python, "-c", check], timeout_s=_JUDGE_TIMEOUT_S)
        except (UnreachableError, OSError) as error:
            _logger.debug("cannot tell whether node %d is gone: %s", self.rank, error)
            return None
        return "its supervisor is gone" if completed.exit_code else None

    def _connection_lost(self) -> None:
        self._unlinked.set()
        _logger.info("lost the control connection to node %d", self.rank)


NodeListener = Callable[[NodeHandle, Message], None]
"""Hears what nodes report, on the event loop."""


async def unless_gone(node: NodeHandle, work: Coroutine[Any, Any, None]) -> None:
    """Wait for ``work``, which needs the node.

    Raises:
        BootstrapError: the node was lost meanwhile.
    """
    gone, working = asyncio.ensure_future(node.wait_gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BootstrapError(
                f"node {node.rank} ended while it started: {gone.result().reason}", node=node.rank, step="server"
            )
        working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


def open_transport(access: Access) -> Transport:
    """The transport for a way to reach a machine."""
    match access:
        case LocalAccess():
            return LocalTransport(access)
        case SSHAccess():
            raise NotImplementedError("the transport over SSH")
        case _:
            assert_never(access)


def open_node(instance: Instance, rank: int, on_message: NodeListener) -> NodeHandle:
    """The node of a machine that is running; nothing has been sent to it yet."""
    if instance.access is None:
        raise PoolStateError(f"instance {instance.id} of node {rank} cannot be reached yet")
    return NodeHandle(instance=instance, rank=rank, transport=open_transport(instance.access), on_message=on_message)
