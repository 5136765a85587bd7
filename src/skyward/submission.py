"""Interface between a fleet and its front-ends: the only part of a fleet that front-ends use.

The native operators, the executor and the joblib backend need a :class:`TaskSubmitter`; the Dask front-end, which has
a scheduler of its own, an :class:`ElasticFleet`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

from skyward.errors import RemoteTraceback
from skyward.hidden_frames import from_callers_line
from skyward.wire.frames import TlsIdentity

if TYPE_CHECKING:
    from skyward.events import SkywardEvent
    from skyward.request.request import NodeRange

__all__ = [
    "OPERATIONS",
    "ArgumentMemo",
    "CallFuture",
    "CallLimits",
    "ElasticFleet",
    "FleetStatus",
    "Invocation",
    "NodeService",
    "NodeStatus",
    "SchedulerInfo",
    "ServiceAccess",
    "TaskSubmitter",
    "bearable",
    "named",
    "refuse_operations",
    "worker_names",
]

R = TypeVar("R")
C = TypeVar("C", bound=type[Any])

_COMPUTE = "no part in arithmetic"
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "or", "xor", "lshift")
OPERATIONS: Final[Mapping[str, str]] = {
    "__getitem__": "no items",
    "__contains__": "no items",
    "__int__": "no number",
    "__float__": "no number",
    "__index__": "no number",
    "__round__": "no number",
    **dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), "no order"),
    **{f"__{side}{name}__": _COMPUTE for name in _BINARY for side in ("", "r")},
    **dict.fromkeys(("__neg__", "__pos__", "__abs__", "__invert__"), _COMPUTE),
}
"""Operations of a result that its stand-ins, a pending call or a future, refuse; each with what they lack for it."""


def refuse_operations(cls: C, lacks: Mapping[str, str], error: Callable[[Any, str], BaseException]) -> C:
    """Have operations raise an error that tells the next step; return the class.

    Args:
        cls: the class.
        lacks: names of the special methods, each with what the class lacks for it.
        error: makes the error of an object and what it lacks.
    """

    # Set at run time only: a type checker goes on to report these uses as errors.
    def refusal(lack: str) -> Callable[..., NoReturn]:
        @from_callers_line
        def refuse(self: object, *_: object) -> NoReturn:
            raise error(self, lack)

        return refuse

    for name, lack in lacks.items():
        setattr(cls, name, refusal(lack))
    return cls


@dataclass(eq=False)
class ArgumentMemo:
    """Content ids of the large arguments of one submission, or of one joblib call.

    An array that thousands of calls share is hashed once, while one of them is unfinished; the memo itself keeps no
    array alive. It must not outlive the submission: between two of them the array's contents may change.
    """

    ids: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    @cached_property
    def blobs(self) -> WeakValueDictionary[str, Any]:
        """Blobs by id. Made on first use, as most submissions have nothing large."""
        return WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one run of a call, which ends with its worker when it exceeds one of them.

    Attributes:
        timeout_s: seconds that it may take, from its beginning on the worker; None is no limit.
        memory_gib: memory that it may add to its worker's, in GiB; None is no limit besides the worker's own.
        grace_s: seconds before that time at which :class:`~skyward.errors.TimeLimit` is raised in it; None raises none.
    """

    timeout_s: float | None = None
    memory_gib: float | None = None
    grace_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Invocation:
    """Function with its arguments, not yet submitted.

    Attributes:
        fn: the function to run on a worker.
        args: positional arguments.
        kwargs: keyword arguments.
        retries: number of runs after the first, each after the loss of a worker; 0 allows none. With 1 or
            more, preemptions are not counted.
        label: name for logs, progress and errors; empty takes the function's.
        gang: True if all workers run the call together: as a broadcast, or on a fleet of one.
        work: label of the progress that a front-end publishes for the call; empty leaves that to the pool.
        tasks: number of the user's items in the call, for the pool's progress.
        limits: limits of a run; None if there are none.
    """

    # Not frozen, as that costs 1 µs, and it is paid for every call.

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 3
    label: str = ""
    gang: bool = False
    work: str = ""
    tasks: int = 1
    limits: CallLimits | None = None


class CallFuture(Future[R]):
    """Future of one call, as in :mod:`concurrent.futures`; also awaitable from asyncio.

    ``cancel()`` succeeds while the call waits in the queue. Done-callbacks run in the pool's callback thread, never on
    its event loop.

    Attributes:
        worker_seconds: seconds on the worker, unpickling and pickling included; None until the call is done.
    """

    worker_seconds: float | None = None

    @property
    def name(self) -> str:
        """Name of the call; empty if it has none."""
        return ""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's exception, None if it returned; see :meth:`concurrent.futures.Future.exception`.

        Args:
            timeout: seconds to wait; None waits until the call has ended.
        """
        return bearable(super().exception(timeout))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self._facts())}>"

    def _repr_html_(self) -> str:
        """Return the call's name, state and duration, and the last line of its error, for notebooks."""
        name, *facts = map(escape, self._facts())
        if self.done() and not self.cancelled() and (error := self.exception()) is not None:
            *_, last = str(error).strip().splitlines() or [""]
            facts.append(f"<code>{escape(f'{type(error).__name__}: {last}')}</code>")
        return f"<div>{' · '.join([f'<b>{name}</b>', *facts])}</div>"

    def _facts(self) -> list[str]:
        """Return name, state and duration. No exception is unpickled for it."""
        state = {"PENDING": "queued", "RUNNING": "running"}.get(self._state, "")  # as in the base's own repr
        if not state:
            failed = not self.cancelled() and super().exception() is not None
            state = "cancelled" if self.cancelled() else "failed" if failed else "finished"
        seconds = [] if self.worker_seconds is None else [f"{self.worker_seconds:.3g} s on its worker"]
        return [self.name or "call", state, *seconds]

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self).__await__()

    if not TYPE_CHECKING:  # a type checker knows that results' attributes are not there

        @from_callers_line
        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else f"; write future.result().{name} for that of its result"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def bearable(error: BaseException | None) -> BaseException | None:
    """Return an exception as the present thread can hand it on: in an event loop, some as a RuntimeError of that cause.

    There a StopIteration would end the coroutine that waits, or, before Python 3.12, leave it waiting for ever; a
    CancelledError that a call has raised would look as if the coroutine were cancelled.

    Args:
        error: the exception of a call; None if it has none.
    """
    if error is None:
        return None
    is_calls = isinstance(error, CancelledError) and isinstance(error.__cause__, RemoteTraceback)
    if not (is_calls or isinstance(error, StopIteration)) or not _is_in_event_loop():
        return error
    unlike = RuntimeError(f"the call raised {named(error)}")
    unlike.__cause__ = error
    return unlike


def named(error: BaseException) -> str:
    """Return class and text of an exception.

    Args:
        error: the exception.
    """
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _no_result(future: CallFuture[Any], lacks: str) -> TypeError:
    name = f" of {future.name}" if future.name else ""
    return TypeError(f"the future{name} is not its result, and has {lacks}; write future.result()")


refuse_operations(CallFuture, OPERATIONS, _no_result)


class TaskSubmitter(Protocol):
    """Fleet that takes calls. Thread-safe; never blocks on the network; raises before anything is sent.

    Every method raises :class:`~skyward.errors.PoolStateError` when the pool is not open and
    :class:`~skyward.errors.SerializationError` when a call cannot be pickled. Lost workers are handled below this
    interface: callers never retry.
    """

    @property
    def capacity(self) -> int:
        """Planned number of workers: the target size of the fleet, even while some of them are not up.

        Of an elastic pool, the maximum.
        """
        ...

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        """Queue ``calls``, each for any worker; the futures are in the order of the calls.

        Args:
            calls: the calls.
            memo: content ids of large arguments, shared by several submissions; None is one for these calls.
        """
        ...

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        """Queue one call on every worker; the futures are ordered by (node, worker)."""
        ...

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        """Drop the queued calls of ``futures``, and end running ones by killing their worker, which comes back.

        Idempotent.
        """
        ...

    def publish(self, event: SkywardEvent) -> None:
        """Publish ``event`` to the pool's callbacks and display. Does nothing when the pool is not open."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerInfo:
    """Access to a pool's Dask scheduler: ``Client(info.address, security=info.security)``.

    Attributes:
        address: ``tls://host:port``, as reached from this process.
        security: the pool's certificates, as a :class:`distributed.Security`; without them the scheduler
            refuses connections.
        tunnelled: True if this process reaches only the scheduler, and not the workers.
    """

    address: str
    security: Any = field(repr=False)
    tunnelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccess:
    """Access to the process of a service on the head node.

    Attributes:
        address: ``host:port``, as reached from this process.
        identity: the pool's certificates; the process refuses connections without them.
        tunnelled: True if this process reaches only the service's process, and not the workers.
    """

    address: str
    identity: TlsIdentity = field(repr=False)
    tunnelled: bool = False


class NodeService(Protocol):
    """Service of a front-end on the nodes of pools: a process on the head node, and a guest in every worker."""

    @property
    def name(self) -> str:
        """Name for messages, such as ``dask``."""
        ...

    @property
    def module(self) -> str:
        """Name of the module that nodes import, with the two coroutines of ``skyward.node.services.Service``."""
        ...

    @property
    def distributions(self) -> tuple[str, ...]:
        """Distributions that must have the same versions in this process and on the nodes."""
        ...

    async def wait_joined(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """Return once these workers take part in the service. Called on the pool's event loop, and cancelled in time.

        Args:
            access: the service's process.
            workers: names of workers.
        """
        ...

    async def drain(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """Move what the service keeps in workers that leave. Called on the pool's event loop.

        Args:
            access: access to the service's process.
            workers: names of the workers.

        Raises:
            OSError: that was not possible.
        """
        ...

    async def forget(self, access: ServiceAccess, workers: Sequence[str]) -> None:
        """Wait for these workers no longer: no other will take their names. Called on the pool's event loop.

        Args:
            access: access to the service's process.
            workers: names of workers whose node left, or was lost and is not replaced.

        Raises:
            OSError: that was not possible.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Present state of one node of a fleet.

    Attributes:
        rank: the node's rank, 0-based; a replacement has the rank of the node it replaces.
        state: ``"launching"``, ``"starting"``, ``"ready"`` or ``"ending"``.
        workers: names of its workers in Dask, by index: ``node0-worker0``.
        instance_id: the provider's id of its machine; empty before there is one.
        instance_type: the provider's name of the machine type.
        accelerators: names of the accelerators on it, one per device.
        spot: True if the machine was bought on the spot market.
        price_per_hour: price in USD; None is unknown.
    """

    rank: int
    state: str
    workers: tuple[str, ...]
    instance_id: str = ""
    instance_type: str = ""
    accelerators: tuple[str, ...] = ()
    spot: bool = False
    price_per_hour: float | None = None


def worker_names(rank: int, workers: int) -> tuple[str, ...]:
    """Return the names of a node's workers, by index.

    Args:
        rank: the node's rank.
        workers: number of its workers.
    """
    return tuple(f"node{rank}-worker{worker}" for worker in range(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Present state of a fleet.

    Attributes:
        wanted: target number of nodes.
        workers_per_node: workers on each node.
        nodes: present, coming and leaving nodes, by rank.
        cost: USD so far; machines of unknown price count as nothing.
        cost_by_provider: its shares, in USD by provider.
        boot_s: seconds from the launch of the latest node until it took calls.
        elastic: limits of an elastic pool's size; None for a pool of a fixed size.
    """

    wanted: int
    workers_per_node: int
    nodes: tuple[NodeStatus, ...] = ()
    cost: float = 0.0
    cost_by_provider: Mapping[str, float] = field(default_factory=dict[str, float])
    boot_s: float = 60.0
    elastic: NodeRange | None = None


class ElasticFleet(Protocol):
    """Fleet that grows and shrinks under the scheduler of a service. Thread-safe.

    Every method raises :class:`~skyward.errors.PoolStateError` when the pool is not open.
    """

    def service(self, service: NodeService) -> ServiceAccess:
        """Return the access to a service, started on its first use; another one after the head node was replaced.

        Blocks until its process accepts connections.
        """
        ...

    @property
    def is_active(self) -> bool:
        """True while the pool is open. Raises nothing."""
        ...

    @property
    def status(self) -> FleetStatus:
        """Present state. Never blocks."""
        ...

    def scale(self, nodes: int, *, drop: Collection[int] = ()) -> Future[None]:
        """Grow or shrink the fleet to ``nodes`` nodes.

        Returns at once; a later call overrides an earlier one. Nodes are added in parallel. Leaving nodes are drained
        first: their calls end and Dask's data moves to other nodes.

        Args:
            nodes: target number, at least 1: the scheduler runs on node 0, which stays.
            drop: ranks of the nodes to remove first when the fleet shrinks; the highest ranks by default.

        Returns:
            A future, done when the fleet has that size; its exception states why the size cannot be reached.
        """
        ...

    def forward(self, address: str) -> str:
        """Return the ``host:port`` through which this process reaches ``address`` from the head node. May block.

        Args:
            address: ``host:port``, as the head node reaches it.
        """
        ...
