"""``ComputePool``: what a user opens. Wiring and lifecycle, nothing else."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from skyward._concurrency.loop import acquire_loop
from skyward.client.display import PoolTag, open_display, parse_display
from skyward.client.executor import CallsByFunction, PoolExecutor
from skyward.client.opening import Opens, innermost
from skyward.client.pending import PendingBatch, PendingCompute, Ts, checked_call
from skyward.client.scaling import Scales
from skyward.distributed.runtime import refuse_inside_call
from skyward.engine.futures import CallBatch, RemoteFuture
from skyward.engine.running import RunningPool
from skyward.errors import ConfigurationError, PoolStateError
from skyward.events import Callback, E, SkywardEvent, current_callbacks, forward_emitted
from skyward.events.bus import EventBus
from skyward.providers.base import Provider, checked_provider
from skyward.request.accelerators import Accelerator
from skyward.request.image import Image
from skyward.request.request import parse_request
from skyward.request.spot import SpotLike
from skyward.request.volume import Volume
from skyward.submission import ArgumentMemo, CallFuture, Invocation

__all__ = ["ComputePool", "current_pool"]

R = TypeVar("R")

_pools_made = itertools.count()


class ComputePool(CallsByFunction, Scales, Opens):
    """Machines for as long as a ``with`` block lasts.

    Entering creates and prepares them; leaving ends them and confirms it, whatever happened in between. A pool may be
    entered again later; it gets new machines then. Methods are thread-safe.

    Args:
        provider: who has the machines, such as ``sky.Local()``.
        image: the environment of the workers.
        nodes: number of machines.
        machine: the provider's name of an instance type, instead of choosing one.
        accelerator: what each machine must have, such as ``"A100"`` or ``Accelerator.NVIDIA.H100(count=8)``.
        cpu: cores that a machine must have at least for each of its workers.
        memory: main memory that it must have at least for each of them, such as ``"32GB"``.
        volume: storage to mount on every node.
        spot: whether machines may be spot machines: ``"always"``, ``"if-available"``, ``"never"``, or the part of
            them that must be, such as ``0.8``. Where there is no spot market, machines are on demand.
        timeout: hard cap on a machine's life from its boot, in seconds.
        env: environment variables of the workers; they override the image's.
        concurrency: worker processes per node (per MIG partition where there are any).
        display: ``"log"``, ``"spinner"`` or ``"quiet"``.
        on_event: hears every event.
        collect_metrics: whether nodes report :class:`~skyward.events.Metrics`.
        pip: shorthand for ``image=Image(pip=…)``, added to the image's.
        lease: how long a node lives on once this process is gone, in seconds: a crash or SIGKILL costs no more.
        away: how long it lives on, and works on, while this process is there and nothing is heard of it, in seconds:
            a laptop that sleeps, a network that is down.
        max_cost: USD that the pool may cost, all in all. It is ended in time not to cost more, and what is unfinished
            then fails with :class:`~skyward.errors.BudgetError`.

    Raises:
        ConfigurationError: a parameter is wrong; nothing was created.
    """

    def __init__(
        self,
        *,
        provider: Provider,
        image: Image | None = None,
        nodes: int = 1,
        machine: str | None = None,
        accelerator: str | Accelerator | None = None,
        cpu: int | None = None,
        memory: str | None = None,
        volume: Sequence[Volume] | None = None,
        spot: SpotLike = "always",
        timeout: int = 3600,
        env: Mapping[str, str] | None = None,
        concurrency: int = 1,
        display: str = "log",
        on_event: Callback | None = None,
        collect_metrics: bool = True,
        pip: Sequence[str] | None = None,
        lease: float = 120,
        away: float = 1800,
        max_cost: float | None = None,
    ) -> None:
        super().__init__()
        self._provider = checked_provider(provider)
        self._request = parse_request(
            image=image,
            nodes=nodes,
            machine=machine,
            accelerator=accelerator,
            cpu=cpu,
            memory=memory,
            volume=volume,
            spot=spot,
            timeout=timeout,
            env=env,
            concurrency=concurrency,
            collect_metrics=collect_metrics,
            pip=pip,
            lease=lease,
            away=away,
            max_cost=max_cost,
        )
        self._display = parse_display(display)
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"on_event must be a function of one event, got {type(on_event).__name__}")
        self._subscriptions: list[tuple[type[Any] | None, Callback]] = [(None, on_event)] if on_event else []
        self._running: RunningPool | None = None
        self._bus: EventBus | None = None
        self._made = next(_pools_made)

    def _open(self, stack: ExitStack) -> None:
        loop = acquire_loop()
        stack.callback(loop.release)
        bus = self._bus = EventBus()
        stack.callback(self._forget)
        stack.callback(bus.close)
        display = open_display(self._display, bus, tag=PoolTag(provider=self._provider.name, made=self._made))
        stack.callback(display.close)
        stack.callback(bus.close)  # the display wants to hear everything before it closes; closing twice is harmless
        outer = current_callbacks()
        for event_type, callback in [*self._subscriptions, *((None, callback) for callback in outer)]:
            bus.subscribe(cast("type[SkywardEvent]", event_type), callback)
        stack.callback(forward_emitted(self._publish_emitted))
        running = RunningPool(
            pool_id=f"sky-{uuid.uuid4().hex[:10]}",
            provider=self._provider,
            request=self._request,
            loop=loop,
            bus=bus,
            subscribed=outer,
        )
        stack.callback(running.close)
        running.open()
        self._running = running

    def _retire(self) -> None:
        self._running = None

    def _forget(self) -> None:
        self._running = self._bus = None

    @property
    def is_active(self) -> bool:
        """Whether the pool is open: provisioned, and not yet on its way out."""
        return self._running is not None

    @property
    def instance_count(self) -> int:
        """Number of machines there are; 0 while the pool is not open."""
        return self._running.instance_count if self._running else 0

    def on(self, event_type: type[E], callback: Callable[[E], SkywardEvent | None]) -> None:
        """Call ``callback`` with every event of ``event_type``, in the pool's event thread, until the pool closes."""
        if not (isinstance(event_type, type) and callable(callback)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError("on takes an event class and a function of one event: pool.on(Metrics, print)")
        self._subscriptions.append((event_type, cast("Callback", callback)))
        if self._bus is not None:
            self._bus.subscribe(event_type, callback)

    def run(self, pending: PendingCompute[R]) -> R:
        """Run one call on any worker and return its result: ``pending >> pool``."""
        batch = self._ready.submit_batch([checked_call(pending).invocation()])
        self._ready.wait(batch, all_of_them=False)
        return batch.result(0)

    def run_batch(self, batch: PendingBatch[*Ts]) -> tuple[*Ts]:
        """Run calls in parallel and return their results in order: ``batch >> pool``.

        The first failure is raised at once; calls still queued are dropped and those running are left to finish,
        unless the batch asks for exceptions as values.
        """
        running = self._ready.submit_batch([call.invocation() for call in batch.calls])
        return cast("tuple[*Ts]", self._results(running, return_exceptions=batch.return_exceptions))

    def broadcast(self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run one call once on every worker and return the results by (node, worker): ``pending @ pool``."""
        running = self._ready.broadcast_batch(checked_call(pending).invocation())
        return self._results(running, return_exceptions=False)

    def executor(self) -> PoolExecutor:
        """The pool as a :class:`concurrent.futures.Executor`; shutting it down leaves the pool open."""
        return PoolExecutor(self)

    def _results(self, batch: CallBatch, *, return_exceptions: bool) -> tuple[Any, ...]:
        self._ready.wait(batch, all_of_them=return_exceptions)
        if return_exceptions:
            return tuple(_outcome_of(batch, index) for index in range(len(batch)))
        if batch.failed is not None:
            batch.result(batch.failed)
        return tuple(map(batch.result, range(len(batch))))

    @property
    def capacity(self) -> int:
        """See :attr:`skyward.submission.TaskSubmitter.capacity`."""
        nodes = self._running.elastic.wanted if self._running else self._request.nodes
        return nodes * self._request.workers_per_node

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.submit_calls`."""
        return list(self._ready.submit(calls, memo or ArgumentMemo()))

    def _submit_all(self, calls: Sequence[Invocation]) -> list[CallFuture[Any]]:
        return self.submit_calls(calls)

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.broadcast_call`."""
        return list(self._ready.broadcast(call))

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.cancel_calls`."""
        remote = (future for future in futures if isinstance(future, RemoteFuture))
        calls = [call for future in remote if (call := future.call) is not None]
        self._ready.cancel(calls)

    def publish(self, event: SkywardEvent) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.publish`."""
        if self._bus is not None:
            self._bus.publish(event)

    def _publish_emitted(self, event: SkywardEvent, received_by: tuple[Callback, ...]) -> None:
        if self._bus is not None:
            self._bus.publish_emitted(event, received_by)

    @property
    def _ready(self) -> RunningPool:
        if self._running is None:
            refuse_inside_call()
            raise PoolStateError("the pool is not open; use it inside `with ComputePool(...) as pool:`")
        return self._running

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a pool cannot be sent to a worker, as an argument or from an enclosing scope: calls do not submit calls"
        )


def _outcome_of(batch: CallBatch, index: int) -> Any:
    try:
        return batch.result(index)
    except Exception as error:
        return error


def current_pool() -> ComputePool | None:
    """The innermost pool in whose ``with`` block this code runs; in other threads, the pool opened last."""
    return cast("ComputePool | None", innermost())
