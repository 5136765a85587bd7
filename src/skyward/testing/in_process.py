"""A fleet without machines: calls run in threads of this process, pickled as they would be for a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from skyward.errors import ConfigurationError, PoolStateError
from skyward.events import SkywardEvent
from skyward.shipping.pickling import Packed, pack, pack_result, unpack, unpack_call
from skyward.shipping.remote_exceptions import pack_error, unpack_error
from skyward.submission import ArgumentMemo, CallFuture, Invocation

__all__ = ["InProcessSubmitter"]


class InProcessSubmitter:
    """A :class:`~skyward.submission.TaskSubmitter` for tests, as fast as threads are.

    Functions, arguments, results and exceptions are pickled and rebuilt, so an object that cannot be pickled fails here
    as well. A thread stands for each worker; threads cannot be killed, so a running call that is cancelled is only
    abandoned. Closing it waits for the calls that run; use it in a ``with`` block.

    Args:
        workers: the number of calls that run at a time.

    Attributes:
        events: the published events, in order.
    """

    def __init__(self, workers: int = 2) -> None:
        if workers < 1:
            raise ConfigurationError(f"workers must be a whole number ≥ 1, got {workers!r}")
        self._workers = workers
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="in-process-worker")
        self._is_open = True
        self.events: list[SkywardEvent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the calls that wait, let the others finish, end the threads. Idempotent."""
        self._is_open = False
        self._threads.shutdown(cancel_futures=True)

    @property
    def capacity(self) -> int:
        """The number of workers."""
        return self._workers

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.submit_calls`."""
        del memo  # nothing is hashed here
        if not self._is_open:
            raise PoolStateError("this InProcessSubmitter is closed")
        packed = [pack((call.fn, call.args, call.kwargs), what=call.label or "the call") for call in calls]
        return [self._start(call) for call in packed]

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.broadcast_call`."""
        return self.submit_calls([call] * self._workers)

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.cancel_calls`."""
        for future in futures:
            if not future.cancel():
                with suppress(InvalidStateError):  # it is done
                    future.set_exception(CancelledError())

    def publish(self, event: SkywardEvent) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.publish`."""
        self.events.append(event)

    def _start(self, packed: Packed) -> CallFuture[Any]:
        future: CallFuture[Any] = CallFuture()
        job = self._threads.submit(_run, packed, future)
        # Shutting the threads down cancels a waiting job, and with it the call.
        job.add_done_callback(lambda done: done.cancelled() and future.cancel())
        return future


def _run(packed: Packed, future: CallFuture[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    where = threading.current_thread().name
    started_s = time.perf_counter()
    try:
        result, error = _travelled(_called(packed), what="the result"), None
    except BaseException as raised:  # as a worker does: nothing that a call raises ends it
        result, error = None, unpack_error(pack_error(raised), where=where)
    future.worker_seconds = time.perf_counter() - started_s
    with suppress(InvalidStateError):  # cancelled meanwhile
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _called(packed: Packed) -> Any:
    fn, args, kwargs = unpack_call(packed.data, _writable(packed))
    return fn(*args, **kwargs)


def _travelled(value: Any, *, what: str) -> Any:
    packed = pack_result(value, what=what)
    return unpack(packed.data, _writable(packed))


def _writable(packed: Packed) -> list[bytearray]:
    """Buffers that are nobody else's, as on a worker."""
    return [bytearray(buffer) for buffer in packed.buffers]
