"""Receivers of calls' outcomes: completed on the event loop with raw bytes, unpickled in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pickle import UnpicklingError
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from skyward.engine.dispatch import WorkerId
from skyward.events.works import WorkCount
from skyward.shipping.pickling import add_note, unpack, unpack_error
from skyward.submission import CallFuture, bearable, named
from skyward.tracebacks import hide_frames, is_explained
from skyward.wire.messages import PackedError

__all__ = ["CallBatch", "OutcomeSink", "RawOutcome", "RemoteFuture", "call_name", "short_label"]


@dataclass(slots=True, eq=False)
class RawOutcome:
    """End of a call, still pickled.

    Attributes:
        data: the result's pickle; meaningless if there was an error.
        seconds: duration on the worker in seconds; None if no worker ran the call to its end.
        worker: id of the worker; None if the call ran on none.
        buffers: the pickle's out-of-band buffers, writable.
        error: the exception as the worker sent it, or one of the client's own.
        shown: waits until the call's lines were delivered to the subscribers; None if it has printed nothing.
        complete: returns an error about a missing module with all that are missing; None if nothing can.
    """

    # Not frozen, as that doubles the price of an instance, and it is paid for every call.

    data: bytes | memoryview = b""
    seconds: float | None = None
    worker: WorkerId | None = None
    buffers: tuple[Any, ...] = ()
    error: PackedError | Exception | None = field(default=None)
    shown: Callable[[], None] | None = None
    complete: Callable[[ModuleNotFoundError], ModuleNotFoundError] | None = None

    def show(self) -> None:
        """Wait once until the call's lines were delivered."""
        if (shown := self.shown) is not None:
            shown()
            self.shown = None

    def value(self) -> Any:
        """Return the unpickled result, or raise the exception; the call's lines are delivered before."""
        if self.shown is not None:
            self.show()
        match self.error:
            case None:
                try:
                    return unpack(self.data, self.buffers)
                except (KeyboardInterrupt, Exception) as error:  # from the user's own classes, so of any type
                    if isinstance(error, StopIteration | CancelledError):
                        raise UnpicklingError(f"{self._rebuilding} ended with {named(error)}") from error
                    add_note(error, f"while {self._rebuilding}")
                    raise
                except BaseException as error:
                    raise UnpicklingError(f"{self._rebuilding} ended with {named(error)}") from error
            case PackedError() as packed:
                error = unpack_error(packed, where=self._where)
                if self.complete is not None and isinstance(error, ModuleNotFoundError):
                    error = self.complete(error)
                raise error
            case error:
                raise error

    @property
    def _rebuilding(self) -> str:
        return f"rebuilding the result of a call that ran on {self._where}"

    @property
    def _where(self) -> str:
        return f"node {self.worker.node}, worker {self.worker.worker}" if self.worker else "no worker"


def call_name(label: str, number: int) -> str:
    """Return the name of a call, such as ``"train#3"``: the end of its label, and its number."""
    return f"{short_label(label)}#{number}"


def short_label(label: str) -> str:
    """Return the end of a label, without the number of tasks in a batch of joblib's."""
    return label.partition(" (")[0].rpartition(".")[2]


class OutcomeSink(Protocol):
    """Receiver of outcomes, each exactly once. Called on the event loop only; must not block.

    Attributes:
        work: the piece of work that its calls count for; None counts them with others of their label.
    """

    work: WorkCount | None

    def begin(self) -> bool:
        """Mark a call as started; return False if it was cancelled and must not be sent."""
        ...

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """Store the outcome of call number ``index``."""
        ...


class CallBatch:
    """Outcomes of calls that one caller waits for.

    Attributes:
        calls: the calls, for cancelling them.
        remaining: number of unfinished calls.
        failed: index of the first call that failed; None if none has.
        work: counts of the calls.
    """

    def __init__(self, calls: int = 0) -> None:
        self.work: WorkCount | None = WorkCount()
        self.calls: Sequence[Any] = ()
        self.failed: int | None = None
        self.expect(calls)
        self._signals: SimpleQueue[None] = SimpleQueue()  # an Event costs several times as much to set and wait for

    def __len__(self) -> int:
        return len(self._outcomes)

    def expect(self, calls: int) -> None:
        """Set the number of calls, before the first is queued."""
        self.remaining = calls
        self._outcomes: list[RawOutcome | None] = [None] * calls
        self._over = not calls

    def begin(self) -> bool:
        """See :class:`OutcomeSink`."""
        return True

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """See :class:`OutcomeSink`."""
        self._outcomes[index] = raw
        self.remaining -= 1
        if raw.error is not None and self.failed is None:
            self.failed = index
        if not self._over and (not self.remaining or raw.error is not None):
            self._over = True
            self._signals.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls are over or one has failed; return True if so. May return early."""
        if not self._over:
            with suppress(Empty):
                self._signals.get(timeout=timeout_s)
        return self._over

    def rearm(self) -> None:
        """Reset the wait after a failure, so that :meth:`wait` covers the other calls."""
        self._over = False
        if not self.remaining:  # the last call may have ended in between, without a signal
            self._over = True

    def result(self, index: int) -> Any:
        """Return the result of a finished call, once, or raise its exception."""
        # Dropped here, so that the pickle and the rebuilt result are not both kept until the whole batch is read.
        raw, self._outcomes[index] = self._outcomes[index], None
        assert raw is not None, f"call {index} is not over, or its result was taken before"
        return raw.value()


class _Failed(Exception):
    """Placeholder exception of a failed future; the real one is unpickled on request."""


class RemoteFuture(CallFuture[Any]):
    """Future of one call. The result is unpickled once, in the first thread that requests it.

    Attributes:
        call: the call, for cancelling it; None once it is over, so that no cycle keeps the result alive.
        work: see :class:`OutcomeSink`.
    """

    work: WorkCount | None = None

    def __init__(self, *, drop: Callable[[Any], None], run_callback: Callable[..., None]) -> None:
        super().__init__()
        self.call: Any = None
        self._named: tuple[str, int] | None = None
        self._drop = drop
        self._run_callback = run_callback
        self._decoding = threading.Lock()
        self._begun: bool | None = None
        self._raw: RawOutcome | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def name(self) -> str:
        """See :attr:`~skyward.submission.CallFuture.name`."""
        call = self.call
        if call is not None:
            return call.name
        return call_name(*self._named) if self._named else ""

    def begin(self) -> bool:
        """See :class:`OutcomeSink`."""
        if self._begun is None:
            self._begun = self.set_running_or_notify_cancel()
        return self._begun

    def deliver(self, index: int, raw: RawOutcome) -> None:  # noqa: ARG002 - a sink of one call
        """See :class:`OutcomeSink`."""
        if isinstance(raw.error, CancelledError) and self._begun is None:
            super().cancel()
        if self.begin():
            self._raw = raw
            self.worker_seconds = raw.seconds
            if raw.error is None:
                super().set_result(None)
            else:
                super().set_exception(_Failed())
        if (call := self.call) is not None:
            self._named, self.call = (call.parcel.label, call.number), None  # worded on request: that takes 1 µs

    def cancel(self) -> bool:
        """Cancel the call while it waits in the queue; see :meth:`concurrent.futures.Future.cancel`."""
        call = self.call
        cancelled = super().cancel()
        if cancelled and call is not None:
            self._drop(call)
        return cancelled

    def result(self, timeout: float | None = None) -> Any:
        """Return the call's result, or raise its exception; see :meth:`concurrent.futures.Future.result`."""
        error = self._outcome(timeout)
        if error is None:
            return self._value
        try:
            raise error.with_traceback(None)  # each reader's own, or the frames of all of them would add up
        except BaseException as raised:
            if is_explained(raised):
                hide_frames(raised)
            raise
        finally:
            error = None  # otherwise its traceback refers to this frame, and this frame to it: a cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's exception, None if it returned; see :meth:`concurrent.futures.Future.exception`."""
        return bearable(self._outcome(timeout))

    def _outcome(self, timeout: float | None) -> BaseException | None:
        super().exception(timeout)
        if (raw := self._raw) is not None:
            raw.show()  # without the lock: the subscriber that this waits for may request the result too
            del raw
        with self._decoding:
            if self._raw is not None:
                try:
                    self._value = self._raw.value()
                except Exception as error:
                    self._error = error.with_traceback(None)
                self._raw = None  # the pickle is not kept next to the result
        return self._error

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Add a callback that never runs on the event loop; see :meth:`concurrent.futures.Future.add_done_callback`."""
        super().add_done_callback(lambda future: self._run_callback(fn, future))
