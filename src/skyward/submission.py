"""The task-submission interface: all that a front-end may know of a fleet.

The native operators, the executor and the joblib backend are written against :class:`TaskSubmitter` and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from skyward.errors import ConfigurationError
from skyward.events import SkywardEvent

__all__ = ["ArgumentMemo", "CallFuture", "Invocation", "TaskSubmitter"]

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
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 3
    label: str = ""

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
