"""The interface that front-ends are written against: all they may know of a fleet.

The native operators, the executor and the joblib backend need a :class:`TaskSubmitter`; the Dask front-end, which has
a scheduler of its own, an :class:`ElasticFleet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from skyward.errors import ConfigurationError
from skyward.events import SkywardEvent

if TYPE_CHECKING:
    from distributed import Security

__all__ = [
    "ArgumentMemo",
    "CallFuture",
    "ElasticFleet",
    "FleetStatus",
    "Invocation",
    "NodeStatus",
    "SchedulerInfo",
    "TaskSubmitter",
]

R = TypeVar("R")


class ArgumentMemo:
    """Remembers, for one submission or one joblib call, which large argument has which content id.

    An array that thousands of calls share is hashed once, while one of them is unfinished; the memo itself keeps no
    array alive. It must not outlive the submission: between two of them the array's contents may change.
    """

    def __init__(self) -> None:
        self.ids: dict[tuple[int, int], str] = {}

    @cached_property
    def blobs(self) -> WeakValueDictionary[str, Any]:
        """What the ids name. Most submissions have nothing large."""
        return WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One function with its arguments, not yet on its way.

    Attributes:
        fn: the function to run on a worker.
        retries: how often the call is run again after its worker was lost; 0 means never.
        label: what logs, progress and errors call it.
        gang: whether all workers run it together: as a broadcast, or on a fleet of one.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 3
    label: str = ""
    gang: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigurationError(f"fn must be callable, got {type(self.fn).__name__}")


class CallFuture(Future[R]):
    """A :class:`concurrent.futures.Future` of one call; also awaitable from asyncio.

    ``cancel()`` succeeds while the call waits in the queue. Done-callbacks run in the pool's callback thread, never on
    its event loop.

    Attributes:
        worker_seconds: time the call took on its worker, unpickling and pickling included; None until it is done.
    """

    worker_seconds: float | None = None

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self).__await__()


class TaskSubmitter(Protocol):
    """Submits calls to a fleet. Thread-safe; never blocks on the network; raises before anything is sent.

    Every method raises :class:`~skyward.errors.PoolStateError` when the pool is not open and
    :class:`~skyward.errors.SerializationError` when a call cannot be pickled. Lost workers are handled below this
    interface: callers never retry.
    """

    @property
    def capacity(self) -> int:
        """Planned number of workers: the fleet's wanted size, whether or not all of them are up."""
        ...

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        """Queue calls, each for any worker; the futures are in the order of the calls."""
        ...

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        """Queue one call on every worker; the futures are ordered by (node, worker)."""
        ...

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        """Drop those that wait and end those that run by killing their worker, which comes back. Idempotent."""
        ...

    def publish(self, event: SkywardEvent) -> None:
        """Let the pool's callbacks and its display hear of ``event``. Does nothing when the pool is not open."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerInfo:
    """How to reach a pool's Dask scheduler: ``Client(info.address, security=info.security)``.

    Attributes:
        address: ``tls://host:port``, as reached from this process.
        security: the pool's certificates; the scheduler talks to nobody without them.
        tunnelled: whether only the scheduler is reached from this process, and workers are not.
    """

    address: str
    security: Security = field(repr=False)
    tunnelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node of a fleet, as it is now.

    Attributes:
        rank: the node's rank, 0-based; a replacement has the rank of the node it replaces.
        state: ``"launching"``, ``"starting"``, ``"ready"`` or ``"ending"``.
        workers: names of its workers in Dask, by index: ``node0-worker0``.
        instance_id: the provider's id of its machine; empty before there is one.
        instance_type: the provider's name of what it is.
        accelerators: names of the accelerators on it, one per device.
        spot: whether it was bought on the spot market.
        price_per_hour: USD; None is unknown.
    """

    rank: int
    state: str
    workers: tuple[str, ...]
    instance_id: str = ""
    instance_type: str = ""
    accelerators: tuple[str, ...] = ()
    spot: bool = False
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet as it is now.

    Attributes:
        wanted: how many nodes it is meant to have.
        workers_per_node: workers on each.
        nodes: those there are or will be, by rank, and those on their way out.
        cost: USD so far; machines of unknown price count as nothing.
    """

    wanted: int
    workers_per_node: int
    nodes: tuple[NodeStatus, ...] = ()
    cost: float = 0.0


class ElasticFleet(Protocol):
    """A fleet that grows and shrinks under a Dask scheduler. Thread-safe.

    Every method raises :class:`~skyward.errors.PoolStateError` when the pool is not open.
    """

    @property
    def scheduler(self) -> SchedulerInfo:
        """The present scheduler; another one after the head node was replaced. May block for a moment."""
        ...

    @property
    def status(self) -> FleetStatus:
        """What there is. Never blocks."""
        ...

    def scale(self, nodes: int, *, drop: Collection[int] = ()) -> Future[None]:
        """Have the fleet grow or shrink to ``nodes`` nodes.

        Returns at once; a later call overrides an earlier one. Nodes are added in parallel. Those that go are drained
        first: their calls end and Dask's data moves to others.

        Args:
            nodes: at least 1: the scheduler runs on node 0, which stays.
            drop: ranks of those to go first when the fleet shrinks; without them the highest go.

        Returns:
            Done when the fleet has that size; its exception is why it cannot be reached.
        """
        ...

    def forward(self, address: str) -> str:
        """The ``host:port`` through which this process reaches ``host:port`` of the head node. May block."""
        ...
