"""Thread-safe entrance of the engine: calls from any thread, and done-callbacks back."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from skyward._concurrency.loop import LoopThread
from skyward.engine.calls import CallGang, CallNumbers, CallObserver, LiveCall
from skyward.engine.cluster import Cluster
from skyward.engine.dispatch import WorkerId
from skyward.engine.futures import CallBatch, OutcomeSink, RemoteFuture
from skyward.engine.slots import out_of_reach
from skyward.errors import ConfigurationError, PoolStateError, SkywardError
from skyward.events import Callback, current_callbacks
from skyward.events.bus import Courier
from skyward.shipping.parcels import Parcel
from skyward.submission import CallLimits
from skyward.wire.messages import CallHeader

__all__ = ["Intake"]

log = logging.getLogger("skyward.engine")

_GIB = 1 << 30
# Closing a pool must not hang because one of the user's callbacks does.
_CALLBACKS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _BroadcastTarget:
    """Worker and header of one call of a broadcast."""

    worker: WorkerId
    header: CallHeader


class Intake:
    """Queue of calls from any thread to the cluster's event loop, and of done-callbacks back from it.

    Calls of many threads are handed over together.
    """

    def __init__(
        self,
        cluster: Cluster,
        loop: LoopThread,
        *,
        subscribed: tuple[Callback, ...],
        observer: CallObserver | None = None,
    ) -> None:
        self._cluster = cluster
        self._subscribed = subscribed
        self._observer = observer
        self._thread = loop
        self._loop = loop.loop
        self._ids = itertools.count(1)
        self._numbers = CallNumbers()
        self._waiting: deque[LiveCall] = deque()
        self._due = False
        self._lock = threading.RLock()  # reentrant: a finalizer in the thread that holds it may cancel a future
        self._closed = False
        self._reason = ""
        self._callbacks = Courier("skyward-callbacks", what="a done-callback of a call")

    def submit(self, parcels: Sequence[Parcel]) -> list[RemoteFuture]:
        """Queue calls, each for any worker."""
        self._refuse_lone_ranks(parcels)
        return self._enter_with_futures([self._with_future(parcel) for parcel in parcels])

    def submit_batch(self, parcels: Sequence[Parcel], batch: CallBatch) -> None:
        """Queue calls, each for any worker, for a caller that waits for all of them."""
        self._refuse_lone_ranks(parcels)
        callbacks = self._callbacks_in_force()
        batch.expect(len(parcels))
        batch.calls = calls = [self._call(parcel, batch, callbacks, None, i) for i, parcel in enumerate(parcels)]
        self._enter(calls)

    def broadcast(self, parcel: Parcel) -> list[RemoteFuture]:
        """Queue one call on every worker, ordered by (node, worker)."""
        with self._cluster.members.lock:
            targets = self._targets(parcel)
            return self._enter_with_futures(_bound([self._with_future(parcel, target) for target in targets]))

    def broadcast_batch(self, parcel: Parcel, batch: CallBatch) -> None:
        """Queue one call on every worker, for a caller that waits for all of them."""
        with self._cluster.members.lock:  # a leaving node must not look idle before it has these calls
            targets, callbacks = self._targets(parcel), self._callbacks_in_force()
            batch.expect(len(targets))
            batch.calls = calls = [self._call(parcel, batch, callbacks, target, i) for i, target in enumerate(targets)]
            self._enter(_bound(calls))

    def cancel(self, calls: Iterable[Any], *, kill: bool = True) -> None:
        """See :meth:`skyward.engine.cluster.Cluster.cancel`; calls that have not come in yet are cancelled too."""
        self._on_loop(self._cancel, list(calls), kill)

    def close(self, reason: SkywardError | None = None) -> None:
        """Refuse further calls, with ``reason`` if there is one, and hand over the queued ones. On the loop."""
        with self._lock:
            self._closed = True
            self._reason = str(reason or "open it with `with ComputePool(...) as pool:`")
        self.take_in()

    def join(self) -> None:
        """Wait up to 10 s for running callbacks. Not on the loop."""
        if not self._callbacks.close(_CALLBACKS_TIMEOUT_S):
            log.warning("a done-callback is still busy %g s after its pool was closed", _CALLBACKS_TIMEOUT_S)

    def _with_future(self, parcel: Parcel, target: _BroadcastTarget | None = None) -> LiveCall:
        future = RemoteFuture(drop=self._drop, run_callback=self._run_callback)
        future.call = call = self._call(parcel, future, self._callbacks_in_force(), target)
        return call

    def _call(
        self,
        parcel: Parcel,
        sink: OutcomeSink,
        callbacks: tuple[Callback, ...],
        target: _BroadcastTarget | None,
        index: int = 0,
    ) -> LiveCall:
        call = LiveCall(
            id=next(self._ids),
            kind=parcel.function.id,
            retries=parcel.retries,
            pinned=target.worker if target else None,
            together=parcel.gang,
            parcel=parcel,
            sink=sink,
            index=index,
            number=next(self._numbers[parcel.label]),
            header=_header(target, parcel.limits) if target is not None or parcel.limits is not None else None,
            callbacks=callbacks,
            work=sink.work,
        )
        if self._observer is not None:
            self._observer.begin(call)
        return call

    def _callbacks_in_force(self) -> tuple[Callback, ...]:
        callbacks = current_callbacks()
        return tuple(c for c in callbacks if c not in self._subscribed) if callbacks else ()

    def _refuse_lone_ranks(self, parcels: Sequence[Parcel]) -> None:
        lone = next((parcel for parcel in parcels if parcel.gang), None)
        if lone is not None and (count := len(self._cluster.members.places)) > 1:
            raise ConfigurationError(
                f"{lone.label} is decorated with skyward.distributed: all {count} workers of the pool run it together; "
                f"use @, as in {lone.label}(...) @ pool"
            )

    def _targets(self, parcel: Parcel) -> list[_BroadcastTarget]:
        workers = self._cluster.members.places
        if not workers:
            raise PoolStateError("every node of the pool is gone")
        if parcel.gang and (apart := self._cluster.members.separation()):
            raise out_of_reach(parcel.label, apart)
        # One seed and one port for all ranks: they have to agree on both without a message between them.
        seed, port = random.getrandbits(32), self._cluster.members.call_port()
        counts = Counter(worker.node for worker in workers)
        firsts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        return [
            _BroadcastTarget(
                worker=worker,
                header=CallHeader(
                    world=len(workers),
                    rank=rank,
                    seed=seed,
                    head_port=port,
                    nodes=len(counts),
                    local_rank=rank - firsts[worker.node],
                    gang=parcel.gang,
                ),
            )
            for rank, worker in enumerate(workers)
        ]

    def _enter(self, calls: Sequence[LiveCall]) -> None:
        with self._lock:
            if self._closed:
                raise PoolStateError(f"the pool is closed; {self._reason}")
            self._waiting.extend(calls)
            # One wake-up for all calls queued before the loop runs: each costs about 25 µs (decision 007).
            if not self._due:
                self._loop.call_soon_threadsafe(self.take_in)
                self._due = True  # afterwards: Ctrl-C in between would leave all later calls waiting for it

    def take_in(self) -> None:
        """Hand queued calls over to the cluster. On the loop."""
        with self._lock:
            self._due = False
            calls = list(self._waiting)
            self._waiting.clear()
        self._cluster.enter(calls)

    def _enter_with_futures(self, calls: list[LiveCall]) -> list[RemoteFuture]:
        self._enter(calls)
        return [cast("RemoteFuture", call.sink) for call in calls]

    def _drop(self, call: LiveCall) -> None:
        self._on_loop(self._cluster.drop, call)

    def _cancel(self, calls: list[LiveCall], kill: bool) -> None:  # noqa: FBT001 - called by the loop
        self.take_in()
        self._cluster.cancel(calls, kill=kill)

    def _on_loop(self, work: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(work, *args)

    def _run_callback(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Run a done-callback, never on the loop: callbacks may block and take locks."""
        if self._thread.is_current:
            self._callbacks.run(partial(fn, future))
        else:
            fn(future)


def _header(target: _BroadcastTarget | None, limits: CallLimits | None) -> CallHeader | None:
    header = target.header if target is not None else None
    if limits is None:
        return header
    memory_bytes = round((limits.memory_gib or 0) * _GIB)
    return replace(header or CallHeader(), timeout_s=limits.timeout_s or 0.0, memory_bytes=memory_bytes)


def _bound(calls: list[LiveCall]) -> list[LiveCall]:
    """Return the calls of a broadcast, joined to a gang if they run together."""
    if calls[0].together:
        CallGang(calls)
    return calls
