"""Events of a pool, as values, and their delivery to callbacks.

Events are plain frozen values. Everywhere in them ``instance_id`` is the provider's id of an instance, ``node`` the
rank of a node in its fleet, ``worker`` the index of a worker on its node and ``instance_type`` the provider's name for
a machine type. Costs are in USD, prices in USD per hour, memory in MiB, temperatures in degrees Celsius; None means
unknown or absent.

A callback takes an event and returns None, or another event, which is then emitted too. Its exceptions are logged and
have no other effect.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

__all__ = [
    "BootstrapCompleted",
    "BootstrapProgress",
    "BootstrapStarting",
    "Callback",
    "CostFinal",
    "CostUpdate",
    "Error",
    "GpuMetrics",
    "InfraCreated",
    "InfraCreating",
    "InstanceLaunching",
    "InstancePreempted",
    "InstanceProvisioned",
    "InstanceStopping",
    "LogLine",
    "Metrics",
    "NodeReachable",
    "NodeUnreachable",
    "Notice",
    "PoolStarted",
    "PoolStopped",
    "PoolStopping",
    "Progress",
    "ProviderName",
    "SkywardEvent",
    "TimeoutApproaching",
    "WorkerLost",
    "WorkerReplaced",
    "WorkerRestarting",
    "compose",
    "current_callbacks",
    "deliver",
    "emit",
    "flatten",
    "forward_emitted",
    "use_callback",
]

_logger = logging.getLogger("skyward")

ProviderName: TypeAlias = str
"""Name of a provider in events, ledger and documentation, such as ``"local"``; packages may add providers."""


@dataclass(frozen=True)
class InfraCreating:
    """The pool begins to create the prerequisites of its instances: keys, networks, certificates."""


@dataclass(frozen=True)
class InfraCreated:
    """The prerequisites of the instances exist in ``region``, which is empty for providers without regions.

    Attributes:
        region: the provider's region; empty for providers without regions.
    """

    region: str


@dataclass(frozen=True)
class InstanceLaunching:
    """The pool requests ``count`` instances.

    Attributes:
        count: number of requested instances.
        instance_type: the provider's name of the machine type.
        provider: name of the provider.
        region: the provider's region; empty for providers without regions.
        spot: True on the spot market, False on demand; None for providers without markets.
        price_per_hour: USD for one instance; 0.0 is free, None is unknown.
        workers_per_node: worker processes on each node.
        cpu_per_worker: requested cores for each worker; None is any number.
        memory_gib_per_worker: requested main memory for each worker, in GiB; None is any amount.
        accelerator: name of the accelerators of each instance; empty if it has none.
        accelerators: number of accelerators of each instance.
        accelerators_asked: number of accelerators that were asked for on each; 0 is none.
        at_most: USD that these instances can cost until ``timeout`` or ``max_cost`` ends them; None is unknown.
    """

    count: int
    instance_type: str
    provider: ProviderName
    region: str = ""
    spot: bool | None = None
    price_per_hour: float | None = None
    workers_per_node: int = 1
    cpu_per_worker: int | None = None
    memory_gib_per_worker: float | None = None
    accelerator: str = ""
    accelerators: int = 0
    accelerators_asked: int = 0
    at_most: float | None = None


@dataclass(frozen=True)
class InstanceProvisioned:
    """An instance is running.

    Attributes:
        instance_id: the provider's id of the instance.
        node: rank of its node in the fleet.
        spot: True if the provider may take it back.
        provider: name of the provider.
        ip: its address; None if it has none of its own.
        instance_type: the provider's name of the machine type; None is unknown.
        price_on_demand: on-demand price of this machine type, in USD per hour; None is unknown.
        price_spot: spot price of this machine type, in USD per hour; None is unknown.
    """

    instance_id: str
    node: int
    spot: bool
    provider: ProviderName
    ip: str | None = None
    instance_type: str | None = None
    price_on_demand: float | None = None
    price_spot: float | None = None


@dataclass(frozen=True)
class BootstrapStarting:
    """The preparation of a node's environment begins.

    Attributes:
        instance_id: the provider's id of the instance.
    """

    instance_id: str


@dataclass(frozen=True)
class BootstrapProgress:
    """The preparation of a node reached a step: ``uv``, ``apt``, ``deps``, ``skyward``, ``server`` or ``volumes``.

    Attributes:
        instance_id: the provider's id of the instance.
        step: name of the step.
    """

    instance_id: str
    step: str


@dataclass(frozen=True)
class BootstrapCompleted:
    """The preparation of a node is complete.

    Attributes:
        instance_id: the provider's id of the instance.
    """

    instance_id: str


@dataclass(frozen=True)
class PoolStarted:
    """The pool accepts calls, on ``workers`` workers of ``nodes`` nodes.

    Attributes:
        nodes: number of nodes.
        workers: number of workers on all nodes.
    """

    nodes: int = 1
    workers: int = 1


@dataclass(frozen=True)
class GpuMetrics:
    """One GPU's part of :class:`Metrics`.

    Attributes:
        index: the GPU's number on its node.
        name: its model, as reported by the driver.
        utilization: busy time in percent; None if the driver does not report it, as in MIG mode.
        memory_used_mb: used memory, in MiB.
        memory_total_mb: memory of the GPU, in MiB.
        temperature: degrees Celsius; None if the driver does not report it.
        uuid: the driver's id of the GPU, such as ``GPU-…``; the same after a restart.
    """

    index: int
    name: str
    utilization: float | None
    memory_used_mb: float
    memory_total_mb: float
    temperature: float | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Metrics:
    """Load of a node.

    Attributes:
        instance_id: the provider's id of the instance.
        node: rank of the node in its fleet.
        cpu_percent: utilization of all cores together, 0 to 100.
        memory_percent: used share of the main memory, 0 to 100.
        memory_used_mb: used main memory, in MiB.
        memory_total_mb: main memory of the node, in MiB.
        gpu_utilization: mean over the node's GPUs, 0 to 100; None without GPUs, or if unknown.
        gpu_memory_used_mb: sum over the GPUs, in MiB.
        gpu_memory_total_mb: sum over the GPUs, in MiB.
        gpu_temperature: temperature of the hottest GPU, in degrees Celsius.
        gpus: readings of each GPU; empty without GPUs.
    """

    instance_id: str
    node: int
    cpu_percent: float
    memory_percent: float
    memory_used_mb: float
    memory_total_mb: float
    gpu_utilization: float | None = None
    gpu_memory_used_mb: float | None = None
    gpu_memory_total_mb: float | None = None
    gpu_temperature: float | None = None
    gpus: tuple[GpuMetrics, ...] = ()

    @property
    def cpu(self) -> float:
        """Short for ``cpu_percent``."""
        return self.cpu_percent

    @property
    def memory(self) -> float:
        """Short for ``memory_percent``."""
        return self.memory_percent

    @property
    def gpu(self) -> float | None:
        """Short for ``gpu_utilization``."""
        return self.gpu_utilization


@dataclass(frozen=True)
class CostUpdate:
    """Cost of the pool since the request for its first instance, and the price of its running instances.

    Attributes:
        elapsed_seconds: seconds since the request for the first instance.
        accumulated_cost: cost so far, in USD.
        hourly_rate: price of the running instances together, in USD per hour.
        spot_count: number of running spot instances.
        ondemand_count: number of running on-demand instances.
        cost_by_provider: shares of the cost, in USD by provider.
    """

    elapsed_seconds: float
    accumulated_cost: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int
    cost_by_provider: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)


@dataclass(frozen=True)
class CostFinal:
    """Total cost of the pool, from the request for its first instance to the end of the last.

    Attributes:
        total_cost: cost of all instances, in USD.
        total_seconds: seconds from the first request to the end of the last instance.
        hourly_rate: price of all instances together, in USD per hour.
        spot_count: number of spot instances over the whole time.
        ondemand_count: number of on-demand instances over the whole time.
        savings_vs_ondemand: difference to the on-demand cost of the same machines.
        cost_by_provider: shares of the cost, in USD by provider.
    """

    total_cost: float
    total_seconds: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int
    savings_vs_ondemand: float
    cost_by_provider: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)


@dataclass(frozen=True)
class LogLine:
    """A line that a call printed, or a record that it logged.

    Attributes:
        node: rank of the node.
        instance_id: the provider's id of the instance.
        line: the text, without its line end.
        timestamp: time of the line, in seconds since the epoch, by the node's clock.
        worker: index of the worker on its node; None if the event was made by other code.
        call: name of the call, such as ``"train#3"``; empty for output between calls, and for late output.
        stream: ``"stdout"`` or ``"stderr"``. Output of subprocesses and C code is ``"stdout"``.
        level: level of a record of :mod:`logging`, such as ``"INFO"``; empty for printed text.
        logger: name of the record's logger; empty for printed text.
        state: True for a progress bar's state, one a second; the next line of this worker and stream replaces it.
    """

    node: int
    instance_id: str
    line: str
    timestamp: float
    worker: int | None = None
    call: str = ""
    stream: str = "stdout"
    level: str = ""
    logger: str = ""
    state: bool = False

    @property
    def place(self) -> str:
        """Node, worker and call, as ``0/1 train#3``."""
        return f"{self.node}/{self.worker} {self.call}".rstrip() if self.worker is not None else f"node {self.node}"


@dataclass(frozen=True)
class Progress:
    """Progress of a piece of work: a ``gather``, the submitted calls of a function, a joblib call, tasks of Dask.

    Each call counts once: ``done``, ``failed`` and ``cancelled`` add up to ``total`` in the last event. ``running`` may
    fall, because the calls of a lost worker wait again; so may ``done`` of Dask's tasks, whose results can be lost. The
    rest of the calls are queued.

    Attributes:
        label: name of the work, unique among the current work of the pool.
        done: number of calls that have returned a result.
        total: number of calls; None while that is unknown.
        failed: number of calls that have failed.
        running: number of calls that run now.
        cancelled: number of calls that were cancelled, or dropped because another one of the work failed.
    """

    label: str
    done: int
    total: int | None = None
    failed: int = 0
    running: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        """Number of calls that are over, in whatever way."""
        return self.done + self.failed + self.cancelled

    @property
    def over(self) -> bool:
        """True in the last event of the work."""
        return self.total is not None and self.ended >= self.total


@dataclass(frozen=True)
class WorkerLost:
    """A worker process ended unexpectedly; its calls move to other workers and it is replaced.

    Attributes:
        node: rank of the node in its fleet.
        worker: index of the worker on its node.
        instance_id: the provider's id of the instance.
        reason: exit code, signal or memory limit, in words.
        call: name of the call that ran there, such as ``"train#3"``; empty if none did.
        runs_again: whether that call is run again.
        retry: number of its retry; 0 if it uses up none, as after a preemption.
        retries: maximum number of its retries.
    """

    node: int
    worker: int
    instance_id: str
    reason: str
    call: str = ""
    runs_again: bool = False
    retry: int = 0
    retries: int = 0

    @property
    def outlook(self) -> str:
        """What becomes of the call, for a message; empty if none ran."""
        if not self.call:
            return ""
        if not self.runs_again:
            return f"; {self.call} ran there, and is not run again"
        return f"; {self.call} is run again" + (f", retry {self.retry} of {self.retries}" if self.retry else "")


@dataclass(frozen=True)
class WorkerReplaced:
    """The replacement of a lost or restarted worker accepts calls.

    Attributes:
        node: rank of the node in its fleet.
        worker: index of the worker on its node.
        instance_id: the provider's id of the instance.
    """

    node: int
    worker: int
    instance_id: str


CALL_CANCELLED: Final = "a cancelled call was ended"
"""Reason of a restart of a worker: the end of its process is how a running call ends."""


@dataclass(frozen=True)
class WorkerRestarting:
    """A worker process was ended on purpose, such as for a cancelled call; :class:`WorkerReplaced` follows.

    Attributes:
        node: rank of the node in its fleet.
        worker: index of the worker on its node.
        instance_id: the provider's id of the instance.
        reason: the reason for the restart.
    """

    node: int
    worker: int
    instance_id: str
    reason: str


@dataclass(frozen=True)
class NodeUnreachable:
    """The client lost its connection to a node and reconnects. Calls on the node continue.

    Attributes:
        instance_id: the provider's id of the instance.
        node: rank of the node in its fleet.
        reason: the connection's error.
    """

    instance_id: str
    node: int
    reason: str


@dataclass(frozen=True)
class NodeReachable:
    """A node is reachable again after ``seconds``; its results follow.

    Attributes:
        instance_id: the provider's id of the instance.
        node: rank of the node in its fleet.
        seconds: time without a connection.
    """

    instance_id: str
    node: int
    seconds: float


@dataclass(frozen=True)
class InstancePreempted:
    """The provider takes a spot machine back: it ends in ``seconds_left``. Its calls continue until then.

    Calls that are unfinished then run elsewhere without using up a retry, and a replacement is launched.

    Attributes:
        instance_id: the provider's id of the instance.
        node: rank of its node in the fleet.
        seconds_left: seconds until its end; 0 if it has ended without notice.
    """

    instance_id: str
    node: int
    seconds_left: float


@dataclass(frozen=True)
class TimeoutApproaching:
    """A tenth of a node's ``timeout`` is left: it ends in ``seconds_left``, with or without running calls.

    Attributes:
        instance_id: the provider's id of the instance.
        seconds_left: seconds until its end.
    """

    instance_id: str
    seconds_left: float


@dataclass(frozen=True)
class InstanceStopping:
    """An instance is being terminated.

    Attributes:
        instance_id: the provider's id of the instance.
    """

    instance_id: str


@dataclass(frozen=True)
class PoolStopping:
    """The pool refuses further calls and ends its nodes."""


@dataclass(frozen=True)
class PoolStopped:
    """All nodes are gone; ``calls`` calls have ended, failed ones included. The pool's last event.

    Attributes:
        calls: number of calls that have ended, with a result or an error.
    """

    calls: int


@dataclass(frozen=True)
class Notice:
    """Information that is no error, such as a deviation of the purchased machine from the request.

    Attributes:
        message: the fact, its place and its reason.
        instance_id: the provider's id; None if no single instance is concerned.
    """

    message: str
    instance_id: str | None = None


@dataclass(frozen=True)
class Error:
    """A failure that the pool survives, or that ends it; the exception, if any, is raised in the caller.

    Attributes:
        message: the failure, its place and the next step.
        instance_id: the provider's id; None if no single instance is concerned.
    """

    message: str
    instance_id: str | None = None


SkywardEvent: TypeAlias = (
    InfraCreating
    | InfraCreated
    | InstanceLaunching
    | InstanceProvisioned
    | BootstrapStarting
    | BootstrapProgress
    | BootstrapCompleted
    | PoolStarted
    | Metrics
    | LogLine
    | Progress
    | WorkerLost
    | WorkerReplaced
    | WorkerRestarting
    | NodeUnreachable
    | NodeReachable
    | InstancePreempted
    | TimeoutApproaching
    | InstanceStopping
    | PoolStopping
    | PoolStopped
    | CostUpdate
    | CostFinal
    | Notice
    | Error
)
"""Any event."""

Callback: TypeAlias = Callable[[SkywardEvent], SkywardEvent | None]
"""Function of one event. An event that it returns is emitted too, unless it is the same object."""

E = TypeVar("E", bound=SkywardEvent)

_CHAIN_LIMIT = 32
# Forwarding functions of the open pools. No context variable, because emitting threads may be older than the pool.
_forwards: list[Callable[[SkywardEvent, tuple[Callback, ...]], None]] = []
_callbacks: ContextVar[tuple[Callback, ...]] = ContextVar("skyward_callbacks", default=())
current_callbacks: Callable[[], tuple[Callback, ...]] = _callbacks.get
"""Returns the callbacks in force here, the outermost first."""


def compose(*callbacks: Callback) -> Callback:
    """Return a callback that passes every event to each of ``callbacks``, in order.

    A failure of one does not keep the event from the others. Events that they return are emitted.
    """
    return _Composed(flatten(callbacks))


def emit(event: SkywardEvent) -> None:
    """Deliver ``event`` to the callbacks in force here, in this thread, before returning, and to all open pools.

    An open pool passes it to its own callbacks in its event thread; each callback receives it once. In a callback of a
    pool, only that pool receives it. In a call on a node the event travels to the client, to the pool's callbacks.
    """
    callbacks = current_callbacks()
    deliver(event, callbacks)
    for forward in tuple(_forwards):
        forward(event, callbacks)


def forward_emitted(forward: Callable[[SkywardEvent, tuple[Callback, ...]], None]) -> Callable[[], None]:
    """Call ``forward`` with every event emitted from now on, and with the callbacks that have received it.

    Returns a function that ends the forwarding. Idempotent.
    """
    _forwards.append(forward)

    def stop() -> None:
        if forward in _forwards:
            _forwards.remove(forward)

    return stop


@contextmanager
def use_callback(callback: Callback) -> Generator[None]:
    """Add ``callback`` to those in force, for the block and for calls and pools started in it.

    It receives the events emitted in the block and those of calls submitted there.
    """
    token = _callbacks.set((*_callbacks.get(), *flatten([callback])))
    try:
        yield
    finally:
        _callbacks.reset(token)


@dataclass(frozen=True, slots=True)
class _Composed:
    callbacks: tuple[Callback, ...]

    def __call__(self, event: SkywardEvent) -> SkywardEvent | None:
        deliver(event, self.callbacks)


def flatten(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Split composed callbacks, so that the sender receives the answer of each part."""
    parts = ((callback.callbacks if isinstance(callback, _Composed) else (callback,)) for callback in callbacks)
    return tuple(part for group in parts for part in group)


def deliver(event: SkywardEvent, callbacks: tuple[Callback, ...]) -> None:
    """Deliver ``event``, then every event returned in answer, to all ``callbacks``."""
    waiting = deque([event])
    for _ in range(_CHAIN_LIMIT):
        if not waiting:
            return
        current = waiting.popleft()
        for callback in callbacks:
            answer = _call(callback, current)
            if answer is not current and isinstance(answer, SkywardEvent):
                waiting.append(answer)
    if waiting:
        _logger.warning("callbacks keep answering %s with new events; the rest is dropped", type(event).__name__)


def _call(callback: Callback, event: SkywardEvent) -> object:
    try:
        return callback(event)
    except BaseException as error:
        # Ctrl-C arrives in the main thread, and belongs to the code that runs there.
        if not isinstance(error, Exception | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        _logger.exception("callback %r failed on %s", callback, type(event).__name__)
        return None
