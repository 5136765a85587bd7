"""Where calls come in: the thread-safe side of the engine."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from skyward._loop import LoopThread
from skyward.engine.calls import LiveCall
from skyward.engine.cluster import Cluster
from skyward.engine.dispatch import CallState, WorkerId
from skyward.engine.futures import BatchWatch, RemoteFuture
from skyward.engine.packing import Parcel
from skyward.engine.receiving import Incoming
from skyward.errors import PoolStateError
from skyward.events import Callback, current_callbacks
from skyward.wire.messages import CallHeader

__all__ = ["Intake"]

log = logging.getLogger("skyward.engine")

_CALLBACKS_TIMEOUT_S = 10.0


class Intake:
    """Hands calls from any thread to the cluster's event loop, coalesced, and done-callbacks back from it."""

    def __init__(self, cluster: Cluster, loop: LoopThread, *, subscribed: tuple[Callback, ...]) -> None:
        self._cluster = cluster
        self._subscribed = subscribed
        self._thread = loop
        self._loop = loop.loop
        self._ids = itertools.count(1)
        self._waiting: deque[LiveCall] = deque()
        self._due = False
        self._lock = threading.Lock()
        self._closed = False
        self._callbacks = _CallbackThread()

    def submit(self, parcels: Sequence[Parcel], watch: BatchWatch | None = None) -> list[RemoteFuture]:
        """Queue calls, each for any worker."""
        return self._enter([self._call(parcel, CallHeader(label=parcel.label), watch) for parcel in parcels], watch)

    def broadcast(self, parcel: Parcel, watch: BatchWatch | None = None) -> list[RemoteFuture]:
        """Queue one call on every worker, ordered by (node, worker)."""
        workers = sorted(self._cluster.slots)
        if not workers:
            raise PoolStateError("every node of the pool is gone")
        seed, port = random.getrandbits(32), next(self._cluster.slots[workers[0]].node.call_ports)
        headers = (
            CallHeader(label=parcel.label, world=len(workers), rank=rank, seed=seed, head_port=port)
            for rank in range(len(workers))
        )
        calls = [
            self._call(parcel, header, watch, pinned=worker) for worker, header in zip(workers, headers, strict=True)
        ]
        return self._enter(calls, watch)

    def cancel(self, futures: Iterable[Future[Any]], *, kill: bool = True) -> None:
        """See :meth:`skyward.engine.cluster.Cluster.cancel`; a call that has not come in yet is cancelled too."""
        unwanted = {future for future in futures if not future.done()}
        if unwanted:
            self._on_loop(partial(self._cancel, unwanted, kill=kill))

    def close(self) -> None:
        """On the loop: take nothing more, and hand over what has come in."""
        with self._lock:
            self._closed = True
        self.take_in()

    def join(self) -> None:
        """Wait for callbacks that run, though not for ever. Not on the loop."""
        self._callbacks.close(_CALLBACKS_TIMEOUT_S)

    def _call(
        self, parcel: Parcel, header: CallHeader, watch: BatchWatch | None, pinned: WorkerId | None = None
    ) -> LiveCall:
        state = CallState(id=next(self._ids), kind=parcel.function_id, retries=parcel.retries, pinned=pinned)
        future = RemoteFuture(
            drop=lambda: self._on_loop(self._cluster.drop, state.id), run_callback=self._run_callback, watch=watch
        )
        incoming = Incoming(callbacks=tuple(c for c in current_callbacks() if c not in self._subscribed))
        return LiveCall(state=state, parcel=parcel, header=header, future=future, incoming=incoming)

    def _enter(self, calls: list[LiveCall], watch: BatchWatch | None) -> list[RemoteFuture]:
        if watch is not None:
            watch.expect(len(calls))
        with self._lock:
            if self._closed:
                raise PoolStateError("the pool is closed; open it with `with ComputePool(...) as pool:`")
            self._waiting.extend(calls)
            due, self._due = self._due, True
        if not due:
            self._loop.call_soon_threadsafe(self.take_in)
        return [call.future for call in calls]

    def take_in(self) -> None:
        """On the loop: hand over what has come in."""
        with self._lock:
            self._due = False
            calls = list(self._waiting)
            self._waiting.clear()
        self._cluster.enter(calls)

    def _cancel(self, futures: set[Future[Any]], *, kill: bool) -> None:
        self.take_in()
        self._cluster.cancel(futures, kill=kill)

    def _on_loop(self, work: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(work, *args)

    def _run_callback(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Callbacks may block and take locks: never on the loop."""
        if self._thread.is_current:
            self._callbacks.run(partial(fn, future))
        else:
            fn(future)


class _CallbackThread:
    """One thread that runs callbacks in order. It starts with the first of them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, callback: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="skyward-callbacks", daemon=True)
            self._thread.start()
        self._queue.put(callback)

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("a done-callback is still busy %g s after its pool was closed", timeout_s)

    def _work(self) -> None:
        while callback := self._queue.get():
            try:
                callback()
            except Exception:
                log.exception("a done-callback of a call raised")
