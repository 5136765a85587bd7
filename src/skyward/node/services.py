"""Services of front-ends on nodes: a process beside the workers of the head, and a guest in every worker's process.

A service is a module with two coroutines. The node loads it when the client orders it
(:class:`~skyward.wire.control.RunService`), or before its workers start (:attr:`NodeConfig.service`). A node runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from skyward.events import Progress
from skyward.node.plan import NodePlan
from skyward.wire.control import ServiceRunning
from skyward.wire.frames import TlsIdentity

RunTask = Callable[[Callable[[], str], Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Type of :attr:`WorkerHost.run_task`: takes a function that returns the task's name, the user's function, and its
positional and keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProgram:
    """The process of a service beside the workers. It ends with its supervisor.

    Attributes:
        plan: the node: its identity, the address to bind to (``plan.ready.service``), its folders.
        report: sends the client a message. Does not block.
    """

    plan: NodePlan = field(repr=False)
    report: Callable[[ServiceRunning | Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHost:
    """A worker's process, as the guest of a service in it sees it. Its functions are thread-safe.

    Attributes:
        name: name of the worker in its pool, such as ``node0-worker1``; its successors have the same.
        address: ``host:port`` at which others reach the guest; the port is the guest's for the life of the node.
        bind: address to which the guest binds that port.
        identity: certificates and key of the node.
        memory_limit_bytes: memory that this process may use; it is killed at 95 % of that.
        folder: folder for the guest's own files. It is removed when the node ends.
        accelerators: number of accelerators of this worker, a fraction where workers share one.
        running_call: returns the running call and its duration, such as ``"train, 12 s"``; empty while none runs.
        run_task: runs user code in the present thread, as calls are run; its output is labelled with the task's name.
        end_process: ends this process; the node starts another. The client learns the reason, which it takes.
    """

    name: str
    address: str
    bind: str
    identity: TlsIdentity = field(repr=False)
    memory_limit_bytes: int
    folder: str
    accelerators: float
    running_call: Callable[[], str]
    run_task: RunTask
    end_process: Callable[[str], NoReturn]


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
