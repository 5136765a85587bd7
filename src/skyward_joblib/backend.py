"""Parallel backend of joblib on top of the task-submission interface."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from joblib.parallel import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend

from skyward.errors import ConfigurationError, PoolStateError, RemoteError
from skyward.events import Progress
from skyward.submission import ArgumentMemo, CallFuture, Invocation, TaskSubmitter
from skyward_joblib.on_node import Initializer, NodeBackend, batch_runner, run_batch

_PROGRESS_INTERVAL_S = 0.1


class LoopProgress:
    """Progress of one joblib call, published to its pool. Thread-safe.

    Args:
        pool: the pool of the call; None publishes nothing.
        total: number of tasks in the call; None if unknown to joblib.

    Attributes:
        label: name of its tasks; empty before the first batch.
    """

    def __init__(self, pool: TaskSubmitter | None, *, total: int | None) -> None:
        self._publisher = pool
        self._total = total
        self.label = ""
        self._done = 0
        self._failed = 0
        self._due = 0.0
        self._lock = threading.Lock()

    def begin(self, label: str) -> None:
        """Publish the start with the first batch; later calls change nothing."""
        with self._lock:
            if not self.label:
                self.label = label
                self._publish()

    def add(self, tasks: int) -> None:
        """Count finished tasks; published at most ten times a second, and with the last ones."""
        with self._lock:
            self._done += tasks
            now = time.monotonic()
            if now >= self._due or self._done == self._total:
                self._due = now + _PROGRESS_INTERVAL_S
                self._publish()

    def fail(self) -> None:
        """Count a task that failed."""
        with self._lock:
            self._failed += 1

    def end(self) -> None:
        """Publish the end: nothing more follows, and tasks that are left were given up. Idempotent."""
        with self._lock:
            if self._total is None:
                self._total = self._done + self._failed
            elif self._done == self._total:
                self._publisher = None
            self._publish(cancelled=self._total - self._done - self._failed)
            self._publisher = None

    def _publish(self, cancelled: int = 0) -> None:
        if self._publisher is not None and self.label:
            progress = Progress(self.label, self._done, self._total, failed=self._failed, cancelled=cancelled)
            self._publisher.publish(progress)


_Done = Callable[[CallFuture[Any]], object]


class CallWindow:
    """Window of at most ``limit`` calls in a fleet, which may have more workers; further calls wait here.

    Thread-safe; nothing blocks. An exception of a submission becomes the outcome of its future: joblib submits from
    callbacks too, where an exception would be lost and the joblib call would wait for ever.

    Args:
        submitter: the fleet.
        limit: number of calls at a time; None leaves that to the fleet.
    """

    def __init__(self, submitter: TaskSubmitter, *, limit: int | None) -> None:
        self._submitter = submitter
        self._limit = limit
        self._memo = ArgumentMemo()
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Invocation, CallFuture[Any]]] = deque()
        self._in_flight: set[CallFuture[Any]] = set()
        self._closed = False

    def submit(self, call: Invocation, callback: _Done) -> CallFuture[Any]:
        """Queue a call; ``callback`` gets its future exactly once, for any outcome, and never before this returns."""
        if self._limit is None:
            return self._send(call, callback)
        future: CallFuture[Any] = CallFuture()
        future.add_done_callback(callback)  # pyright: ignore[reportArgumentType]
        with self._lock:
            self._waiting.append((call, future))
            self._send_waiting(self._limit)
        return future

    def close(self) -> None:
        """Cancel waiting, running and later calls. Idempotent; the fleet stays usable."""
        with self._lock:
            self._closed = True
            running = list(self._in_flight)
            waiting = [future for _, future in self._waiting]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        if running:
            self._submitter.cancel_calls(running)

    def _send(self, call: Invocation, callback: _Done) -> CallFuture[Any]:
        sent = self._submitted(call)
        _call_when_done(sent, partial(self._finish, callback))
        return sent

    def _submitted(self, call: Invocation) -> CallFuture[Any]:
        """Return the future of a submitted call; a finished one if the call was refused or comes too late."""
        with self._lock:  # a call submitted while the window closes is either cancelled with it or not sent
            sent: CallFuture[Any] = CallFuture()
            if self._closed:
                sent.cancel()
                return sent
            try:
                (sent,) = self._submitter.submit_calls([call], memo=self._memo)
            except Exception as error:
                sent.set_exception(error)
            self._in_flight.add(sent)
        return sent

    def _finish(self, callback: _Done, sent: CallFuture[Any]) -> None:
        with self._lock:
            self._in_flight.discard(sent)
            if self._limit is not None:
                self._send_waiting(self._limit)
        callback(sent)

    def _send_waiting(self, limit: int) -> None:
        while self._waiting and (self._closed or len(self._in_flight) < limit):
            call, future = self._waiting.popleft()
            self._send(call, partial(_hand_over, future))


def _hand_over(future: CallFuture[Any], sent: CallFuture[Any]) -> None:
    """Copy the outcome of a call in the fleet to the future that waited here."""
    future.worker_seconds = sent.worker_seconds
    if sent.cancelled():
        future.cancel()
    elif error := sent.exception():
        future.set_exception(error)
    else:
        future.set_result(sent.result())


def _call_when_done(future: CallFuture[Any], callback: _Done) -> None:
    """Call back once, but never from inside this function: joblib holds its lock and is not done dispatching."""
    registering, registrant = True, threading.get_ident()

    def deliver(done: Any) -> None:
        if registering and threading.get_ident() == registrant:
            threading.Thread(target=callback, args=(done,), name="skyward-joblib-callback", daemon=True).start()
        else:
            callback(done)

    future.add_done_callback(deliver)
    registering = False


_MIN_BATCH_S = AutoBatchingMixin.MIN_IDEAL_BATCH_DURATION
_MAX_BATCH_S = AutoBatchingMixin.MAX_IDEAL_BATCH_DURATION
_STEPS_AT_ONCE = 6
# Larger batches grow no more. joblib holds the tasks of several at once, three objects each: with 16,000 of them the
# garbage collector looked at all objects of the program twice as often, which took 20 ms of 120 for 50,000 tasks.
_MANY_TASKS = 1024


class SkywardBackend(AutoBatchingMixin, ParallelBackendBase):
    """Backend that runs joblib's batches on a fleet's workers.

    joblib makes it from the name ``"skyward"``; an instance may be handed to ``parallel_config`` or ``Parallel`` as
    well, and shared by threads. It contacts nothing until a ``Parallel`` call starts. ``n_jobs`` counts workers; -1,
    the default, is all of them. An explicit ``n_jobs=1`` runs in the caller's process, as everywhere in joblib. A fleet
    with one worker reports 2, so that the work goes to the fleet.

    Args:
        nesting_level: depth inside other parallel loops, as joblib counts it.
        inner_max_num_threads: threads that native libraries may use in each worker; None leaves that to the node.
        pool: the pool; None is the innermost pool that is open when a ``Parallel`` call starts.
        initializer: called on every worker before its first batch; again after the worker was replaced, and for other
            arguments.
        initargs: its arguments.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        pool: TaskSubmitter | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        if pool is not None and not hasattr(pool, "submit_calls"):
            raise ConfigurationError(f"pool must be an open ComputePool, got {type(pool).__name__}")
        self._pool = pool
        self._initializer = Initializer.of(initializer, initargs)
        self._window: CallWindow | None = None
        self._progress = LoopProgress(pool, total=None)
        self._round_trip_s = _MAX_BATCH_S
        self._task_s = 0.0
        self._batch_size = 1
        self._runner: tuple[Any, Callable[..., list[Any]]] = (None, run_batch)
        self._just_retrieved = threading.local()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of batches that may run at once, by the target size of the fleet.

        Raises:
            ValueError: ``n_jobs`` is 0.
            PoolStateError: no pool is open.
        """
        wanted = self._wanted_workers(n_jobs, self._find_pool())
        return 1 if n_jobs == 1 else max(wanted, 2)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **_settings: Any,
    ) -> int:
        """Serve one ``Parallel`` object; others that share this instance get a copy each, so that none ends another."""
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        if self.__dict__.setdefault("parallel", parallel) is not parallel:
            other = SkywardBackend(self.nesting_level, self.inner_max_num_threads, pool=self._pool)
            other._initializer = self._initializer
            raise FallbackToBackend(other)
        self._initializer = Initializer.of(initializer, initargs) or self._initializer
        return self.effective_n_jobs(n_jobs)

    def start_call(self) -> None:
        """Begin a call of the ``Parallel`` object."""
        pool = self._find_pool()
        wanted = self._wanted_workers(self.parallel.n_jobs, pool)
        self._window = CallWindow(pool, limit=wanted if wanted < pool.capacity else None)
        self._progress = LoopProgress(pool, total=getattr(self.parallel, "n_tasks", None))

    def stop_call(self) -> None:
        """End a call, and cancel its remaining batches."""
        self.abort_everything()
        self._progress.end()

    def submit(self, func: Any, callback: Any = None) -> CallFuture[Any]:
        """Queue a batch."""
        if self._window is None:
            raise RuntimeError("joblib submitted a batch outside of a Parallel call")
        functions, arguments, keywords = zip(*func.items, strict=True)
        name = _name_of(functions[0])
        self._progress.begin(name)
        label = name if len(functions) == 1 else f"{name} ({len(functions)} tasks)"
        settings = self.inner_max_num_threads, self._initializer
        tasks = arguments, keywords if any(keywords) else (), *settings
        if (runner := self._shared_runner(functions)) is not None:
            call = Invocation(fn=runner, args=tasks, label=label, work=self._progress.label)
        else:
            call = Invocation(fn=run_batch, args=(functions, *tasks), label=label, work=self._progress.label)
        return self._window.submit(call, callback or _ignore)

    apply_async = submit  # the name in joblib 1.4

    def retrieve_result_callback(self, out: CallFuture[Any]) -> Any:
        """Return the batch's results, or raise its exception with the remote traceback as its cause."""
        self._just_retrieved.worker_s = out.worker_seconds
        try:
            return out.result()
        except Exception as error:
            if not out.cancelled():
                self._progress.fail()
            _refuse_frozen(error)
            raise

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Learn from a batch; joblib calls it after :meth:`retrieve_result_callback`, in the same thread.

        joblib's duration holds the way there and back and the wait for a worker. The time on the worker sizes batches;
        the shortest remainder is the round trip, and batches of twice that keep every worker busy meanwhile.
        """
        worker_s: float | None = getattr(self._just_retrieved, "worker_s", None)
        if worker_s is not None:
            self._round_trip_s = min(self._round_trip_s, max(duration - worker_s, 0.0))
            self.MIN_IDEAL_BATCH_DURATION = min(max(_MIN_BATCH_S, 2 * self._round_trip_s), _MAX_BATCH_S)
            duration = worker_s
        self._task_s = duration / batch_size
        super().batch_completed(batch_size, duration)
        self._progress.add(batch_size)

    def compute_batch_size(self) -> int:
        """Return the number of tasks for the next batch.

        joblib doubles it at a time, because its measurement includes the way to the worker. The worker's own one
        is good enough for six steps at once: with many small tasks, every batch is a round trip.
        """
        if self._batch_size >= _MANY_TASKS and self._batch_size * self._task_s < self.MIN_IDEAL_BATCH_DURATION:
            return self._batch_size
        size = super().compute_batch_size()
        steps = 1
        while self._batch_size < size < _MANY_TASKS and steps < _STEPS_AT_ONCE:
            self._batch_size = size
            super().batch_completed(size, self._task_s * size)  # as the worker would take for it
            size = super().compute_batch_size()
            steps += 1
        self._batch_size = size
        return size

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the call's batches, queued and running ones. Idempotent; the fleet stays usable."""
        if self._window is not None:
            self._window.close()

    def terminate(self) -> None:
        """Reset the state of a call; joblib calls this after every one."""
        self.reset_batch_stats()
        self._batch_size = 1
        self._runner = None, run_batch  # it holds what the function's closure does

    def get_nested_backend(self) -> tuple[ParallelBackendBase, int | None]:
        """Return the backend for a ``Parallel`` inside a batch: loky, inside that threads, inside that nothing.

        It starts at nesting level 0, as a loop of a program on that node would.
        """
        return NodeBackend(nesting_level=0, inner_max_num_threads=self.inner_max_num_threads), None

    def _shared_runner(self, functions: tuple[Any, ...]) -> Callable[..., list[Any]] | None:
        """Return what runs the tasks of a batch on a worker, if all of them call one function; else None."""
        function = functions[0]
        if type(function) is not FunctionType or functions.count(function) != len(functions):
            return None
        last, runner = self._runner
        if last is not function:
            runner = batch_runner(function)
            self._runner = function, runner
        return runner

    def _find_pool(self) -> TaskSubmitter:
        if self._pool is not None:
            return self._pool
        from skyward.api.pool import current_pool  # the client's side: nodes import this module too

        pool = current_pool()
        if pool is None:
            raise PoolStateError(
                "the joblib backend 'skyward' needs an open pool: use it inside `with ComputePool(...)`, "
                "or name one: parallel_config('skyward', pool=pool)"
            )
        return pool

    def _wanted_workers(self, n_jobs: int | None, pool: TaskSubmitter) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        n_jobs = self.default_n_jobs if n_jobs is None else n_jobs
        return min(n_jobs, pool.capacity) if n_jobs > 0 else max(pool.capacity + 1 + n_jobs, 1)


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _refuse_frozen(error: Exception) -> None:
    """Raise a RemoteError in place of an exception whose class refuses a traceback, as a frozen dataclass does."""
    # joblib 1.6 removes the traceback by an assignment, in its callback: the error of that would leave it waiting.
    try:
        error.__traceback__ = error.__traceback__
    except Exception:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        raise RemoteError(f"{kind}: {error}", type_name=kind, remote_traceback=str(error.__cause__ or "")) from error


def _ignore(_future: CallFuture[Any]) -> None:
    return None
