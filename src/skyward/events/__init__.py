"""What happens to a pool, as values, and how callbacks hear of it.

Events are plain frozen values. Everywhere in them ``instance_id`` is the provider's id of an instance, ``node`` the
rank of a node in its fleet, ``worker`` the index of a worker on its node and ``instance_type`` the provider's name for
a kind of machine. Costs are in USD, prices in USD per hour, memory in MiB, temperatures in degrees Celsius; None means
unknown, or that there is none.

A callback takes an event and returns nothing, or another event, which is then emitted too. What it raises is logged and
breaks nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

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

ProviderName: TypeAlias = Literal["aws", "digitalocean", "local", "runpod", "ssh", "vastai", "verda"]
"""The providers' names, as events, ledger and documentation write them."""


@dataclass(frozen=True)
class InfraCreating:
    """The pool begins to make what its instances need: keys, networks, certificates."""


@dataclass(frozen=True)
class InfraCreated:
    """What the instances need exists in ``region``, which is empty where it has no meaning."""

    region: str


@dataclass(frozen=True)
class InstanceLaunching:
    """``count`` instances are being asked for.

    Attributes:
        region: where; empty where it has no meaning.
        spot: whether on the spot market; None where there are no markets.
        price_per_hour: USD for one of them; 0.0 is free, None is unknown.
        workers_per_node: worker processes on each.
        cpu_per_worker: cores asked for, for each worker; None is any number.
        memory_gib_per_worker: main memory asked for, for each worker; None is any amount.
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


@dataclass(frozen=True)
class InstanceProvisioned:
    """An instance runs.

    Attributes:
        spot: whether the provider may take it back.
        ip: its address.
        price_on_demand: what such a machine costs on demand.
        price_spot: what it costs on the spot market.
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
    """A node's environment is about to be prepared."""

    instance_id: str


@dataclass(frozen=True)
class BootstrapProgress:
    """Preparing a node reached a step: ``uv``, ``apt``, ``deps``, ``skyward``, ``server`` or ``volumes``."""

    instance_id: str
    step: str


@dataclass(frozen=True)
class BootstrapCompleted:
    """A node is prepared."""

    instance_id: str


@dataclass(frozen=True)
class PoolStarted:
    """The pool takes calls, on ``workers`` workers of ``nodes`` nodes."""

    nodes: int = 1
    workers: int = 1


@dataclass(frozen=True)
class GpuMetrics:
    """One GPU's part of :class:`Metrics`.

    Attributes:
        index: the GPU's number on its node.
        name: its model, as the driver says it.
        utilization: percent of the time it was busy; None where the driver does not tell, as under MIG.
    """

    index: int
    name: str
    utilization: float | None
    memory_used_mb: float
    memory_total_mb: float
    temperature: float | None = None


@dataclass(frozen=True)
class Metrics:
    """Load of a node.

    Attributes:
        cpu_percent: of all cores together, 0 to 100.
        gpu_utilization: mean over the node's GPUs, 0 to 100.
        gpu_memory_used_mb: sum over the GPUs.
        gpu_memory_total_mb: sum over the GPUs.
        gpu_temperature: of the hottest GPU.
        gpus: each GPU by itself.
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
    """Cost of the pool since its first instance was asked for, and the price of those that run now."""

    elapsed_seconds: float
    accumulated_cost: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int


@dataclass(frozen=True)
class CostFinal:
    """Cost of the pool in all, from the request for its first instance to the end of the last.

    Attributes:
        hourly_rate: while all instances ran.
        savings_vs_ondemand: how much more the same machines cost on demand.
    """

    total_cost: float
    total_seconds: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int
    savings_vs_ondemand: float


@dataclass(frozen=True)
class LogLine:
    """A line that a call printed.

    Attributes:
        line: the text, without its line end.
        timestamp: when, in seconds since the epoch, by the node's clock.
    """

    node: int
    instance_id: str
    line: str
    timestamp: float


@dataclass(frozen=True)
class Progress:
    """A piece of work, such as a ``gather`` or a joblib call, got further.

    The last one has ``done == total``; work that is given up says so by lowering ``total`` to ``done``.

    Attributes:
        label: what the work is called; tells it from other work going on in the pool.
        done: calls that have ended.
        total: calls it consists of; None while that is unknown.
    """

    label: str
    done: int
    total: int | None = None


@dataclass(frozen=True)
class WorkerLost:
    """A worker process ended without being asked to; its calls go elsewhere and it is replaced.

    Attributes:
        reason: exit code, signal or memory limit, in words.
    """

    node: int
    worker: int
    instance_id: str
    reason: str


@dataclass(frozen=True)
class WorkerReplaced:
    """The replacement of a worker that was lost, or restarted, takes calls."""

    node: int
    worker: int
    instance_id: str


@dataclass(frozen=True)
class WorkerRestarting:
    """A worker process was ended on purpose, such as with a cancelled call; :class:`WorkerReplaced` follows.

    Attributes:
        reason: why it was ended.
    """

    node: int
    worker: int
    instance_id: str
    reason: str


@dataclass(frozen=True)
class NodeUnreachable:
    """The client cannot reach a node for now. Calls there go on; it is waited for."""

    instance_id: str
    node: int
    reason: str


@dataclass(frozen=True)
class NodeReachable:
    """A node that could not be reached for ``seconds`` is back; results from there follow."""

    instance_id: str
    node: int
    seconds: float


@dataclass(frozen=True)
class InstancePreempted:
    """The provider takes a spot machine back: in ``seconds_left`` it ends. Its calls go on until then.

    What is unfinished then runs elsewhere, at no cost of a retry, and another machine is on its way.
    """

    instance_id: str
    node: int
    seconds_left: float


@dataclass(frozen=True)
class TimeoutApproaching:
    """A tenth of a node's ``timeout`` is left: in ``seconds_left`` it ends, calls or not."""

    instance_id: str
    seconds_left: float


@dataclass(frozen=True)
class InstanceStopping:
    """An instance is being terminated."""

    instance_id: str


@dataclass(frozen=True)
class PoolStopping:
    """The pool takes no more calls and ends its nodes."""


@dataclass(frozen=True)
class PoolStopped:
    """Every node is gone; ``calls`` calls have ended, failed ones included. The pool's last event."""

    calls: int


@dataclass(frozen=True)
class Notice:
    """Something worth knowing that is no error, such as what was bought instead of what was asked for.

    Attributes:
        message: what, where, and why.
        instance_id: the provider's id; None where it concerns no single instance.
    """

    message: str
    instance_id: str | None = None


@dataclass(frozen=True)
class Error:
    """Something went wrong that the pool survives, or that ends it; the exception, if any, is raised elsewhere.

    Attributes:
        message: what, where, and what to do next.
        instance_id: the provider's id; None where it concerns no single instance.
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
"""Hears events. An event it returns is emitted too, unless it is the very one it was given."""

E = TypeVar("E", bound=SkywardEvent)

_CHAIN_LIMIT = 32
# Of the open pools. A list, not a context variable: threads that emit may be older than the pool.
_forwards: list[Callable[[SkywardEvent, tuple[Callback, ...]], None]] = []
_callbacks: ContextVar[tuple[Callback, ...]] = ContextVar("skyward_callbacks", default=())


def compose(*callbacks: Callback) -> Callback:
    """One callback that hands every event to each of ``callbacks``, in order.

    One of them failing does not keep the event from the others; what one of them returns is emitted.
    """
    return _Composed(flatten(callbacks))


def emit(event: SkywardEvent) -> None:
    """Hand ``event`` to every callback in force here, in this thread, before returning, and to all open pools.

    An open pool hands it to its own callbacks in its event thread; each callback receives it once. In a callback of a
    pool, only that pool receives it. In a call on a node the event goes to the client, to the pool's callbacks.
    """
    callbacks = current_callbacks()
    deliver(event, callbacks)
    for forward in tuple(_forwards):
        forward(event, callbacks)


def forward_emitted(forward: Callable[[SkywardEvent, tuple[Callback, ...]], None]) -> Callable[[], None]:
    """Call ``forward`` with every event emitted from now on, and with the callbacks that have received it.

    Returns a function that ends this; calling it again does nothing.
    """
    _forwards.append(forward)

    def stop() -> None:
        if forward in _forwards:
            _forwards.remove(forward)

    return stop


@contextmanager
def use_callback(callback: Callback) -> Generator[None]:
    """Add ``callback`` to those in force, for the block and for what it starts.

    It hears what is emitted there and the events of calls submitted there.
    """
    token = _callbacks.set((*_callbacks.get(), *flatten([callback])))
    try:
        yield
    finally:
        _callbacks.reset(token)


def current_callbacks() -> tuple[Callback, ...]:
    """The callbacks in force here, the outermost first."""
    return _callbacks.get()


@dataclass(frozen=True, slots=True)
class _Composed:
    callbacks: tuple[Callback, ...]

    def __call__(self, event: SkywardEvent) -> SkywardEvent | None:
        deliver(event, self.callbacks)


def flatten(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Take composed callbacks apart, so that each part's answer is seen by whoever delivers."""
    parts = ((callback.callbacks if isinstance(callback, _Composed) else (callback,)) for callback in callbacks)
    return tuple(part for group in parts for part in group)


def deliver(event: SkywardEvent, callbacks: tuple[Callback, ...]) -> None:
    """Hand ``event``, and then every event that came in answer, to all ``callbacks``."""
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
        _logger.warning("callbacks keep answering %s with new events; dropped the rest", type(event).__name__)


def _call(callback: Callback, event: SkywardEvent) -> object:
    try:
        return callback(event)
    except BaseException as error:
        # Ctrl-C arrives in the main thread, and is for whoever works there.
        if not isinstance(error, Exception | SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        _logger.exception("callback %r failed on %s", callback, type(event).__name__)
        return None
