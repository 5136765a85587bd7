"""Services of front-ends on nodes: a process beside the workers of the head, and a guest in every worker's process.

A service is a module with two coroutines. The node loads it when the client orders it
(:class:`~skyward.wire.control.RunService`), or before its workers start (:attr:`NodeConfig.service`). A node runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from skyward.node.supervisor.plan import NodePlan
from skyward.wire.control import ServiceRunning, WorkProgress
from skyward.wire.frames import TlsIdentity


class ServiceProgram(Protocol):
    """The process of a service beside the workers. It ends with its supervisor."""

    @property
    def plan(self) -> NodePlan:
        """The node: its identity, the address to bind to (``plan.ready.service``), its folders."""
        ...

    def report(self, message: ServiceRunning | WorkProgress) -> None:
        """Send the client a message. Does not block."""
        ...


class WorkerHost(Protocol):
    """A worker's process, as the guest of a service in it sees it. Its methods are thread-safe."""

    @property
    def name(self) -> str:
        """Name of the worker in its pool, such as ``node0-worker1``; its successors have the same."""
        ...

    @property
    def address(self) -> str:
        """``host:port`` at which others reach the guest; the port is the guest's for the life of the node."""
        ...

    @property
    def bind(self) -> str:
        """Address to which the guest binds that port."""
        ...

    @property
    def identity(self) -> TlsIdentity:
        """Certificates and key of the node."""
        ...

    @property
    def memory_limit_bytes(self) -> int:
        """Memory that this process may use; it is killed at 95 % of that."""
        ...

    @property
    def folder(self) -> str:
        """Folder for the guest's own files. It is removed when the node ends."""
        ...

    @property
    def accelerators(self) -> float:
        """Number of accelerators of this worker, a fraction where workers share one."""
        ...

    def running_call(self) -> str:
        """Return the running call and its duration, such as ``"train, 12 s"``; empty while none runs."""
        ...

    def run_task(
        self, name: Callable[[], str], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run user code in the present thread, as calls are run: its output is labelled with what ``name`` returns."""
        ...

    def end_process(self, reason: str) -> NoReturn:
        """End this process; the node starts another. The client learns the reason."""
        ...


class Service(Protocol):
    """Module of a service."""

    async def serve(self, program: ServiceProgram) -> None:
        """Run the process beside the workers; it is started again whenever this returns or raises."""
        ...

    async def join(self, host: WorkerHost, address: str) -> None:
        """Run the guest of a worker until cancelled, on an event loop of its own.

        Called again, after a pause, when it returns or raises, and with another address after the service has moved.

        Args:
            host: the worker.
            address: ``host:port`` of the service's process.
        """
        ...
