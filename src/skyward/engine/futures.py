"""Where calls' outcomes go: completed on the event loop with raw bytes, decoded where somebody asks."""

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
from skyward.submission import CallFuture
from skyward.wire.pickling import PackedError, unpack, unpack_error

__all__ = ["CallBatch", "OutcomeSink", "RawOutcome", "RemoteFuture"]


@dataclass(slots=True, eq=False)
class RawOutcome:
    """How a call ended, undecoded. Not frozen, as that doubles its price, and it is paid for every call.

    Attributes:
        data: the result's pickle; meaningless if there was an error.
        seconds: what the call took on its worker; None if none ran it to its end.
        worker: where it ran; None if nowhere.
        buffers: the pickle's out-of-band buffers, writable.
        error: the exception as the worker sent it, or one of ours.
    """

    data: bytes | memoryview = b""
    seconds: float | None = None
    worker: WorkerId | None = None
    buffers: tuple[Any, ...] = ()
    error: PackedError | Exception | None = field(default=None)

    def value(self) -> Any:
        """The result, unpickled, or the exception raised."""
        match self.error:
            case None:
                try:
                    return unpack(self.data, self.buffers)
                except SystemExit as error:
                    raise UnpicklingError(f"{self._rebuilding} ended with SystemExit: {error}") from error
                except Exception as error:  # any class may do anything here
                    error.add_note(f"while {self._rebuilding}")
                    raise
            case PackedError() as packed:
                raise unpack_error(packed, where=self._where)
            case error:
                raise error

    @property
    def _rebuilding(self) -> str:
        return f"rebuilding the result of a call that ran on {self._where}"

    @property
    def _where(self) -> str:
        return f"node {self.worker.node}, worker {self.worker.worker}" if self.worker else "no worker"


class OutcomeSink(Protocol):
    """Takes the outcomes of calls, each once. Called on the event loop only."""

    def begin(self) -> bool:
        """A call leaves the queue; False if nobody waits for it any more."""
        ...

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """The call that is number ``index`` here is over."""
        ...


class CallBatch:
    """The outcomes of calls that one caller waits for.

    Attributes:
        calls: the calls, for whoever cancels them.
        remaining: how many are not over.
        failed: the number of the first that failed.
    """

    def __init__(self, calls: int) -> None:
        self.calls: Sequence[Any] = ()
        self.remaining = calls
        self.failed: int | None = None
        self._outcomes: list[RawOutcome | None] = [None] * calls
        self._over = not calls
        self._signals: SimpleQueue[None] = SimpleQueue()  # an Event costs several times as much

    def __len__(self) -> int:
        return len(self._outcomes)

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
        """Wait until all are over or one has failed; whether that is so. It may return early."""
        if not self._over:
            with suppress(Empty):
                self._signals.get(timeout=timeout_s)
        return self._over

    def rearm(self) -> None:
        """Wait on, although one has failed."""
        self._over = False
        if not self.remaining:  # the last one may have ended in between
            self._over = True

    def result(self, index: int) -> Any:
        """The result of a call that is over, or its exception raised."""
        raw, self._outcomes[index] = self._outcomes[index], None
        assert raw is not None, "it is not over, or was asked for before"
        return raw.value()


class _Failed(Exception):
    """Marks a failed future for those who only look at its state."""


class RemoteFuture(CallFuture[Any]):
    """A call's future. The result is unpickled by the first who asks, in their thread, once.

    Attributes:
        call: the call, for whoever cancels it; None once it is over, so that no cycle keeps the result alive.
    """

    def __init__(self, *, drop: Callable[[Any], None], run_callback: Callable[..., None]) -> None:
        super().__init__()
        self.call: Any = None
        self._drop = drop
        self._run_callback = run_callback
        self._decoding = threading.Lock()
        self._begun: bool | None = None
        self._raw: RawOutcome | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def begin(self) -> bool:
        """See :class:`OutcomeSink`; False if the future was cancelled."""
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
        self.call = None

    def cancel(self) -> bool:
        """See :meth:`concurrent.futures.Future.cancel`: True while the call waits in the queue."""
        call = self.call
        cancelled = super().cancel()
        if cancelled and call is not None:
            self._drop(call)
        return cancelled

    def result(self, timeout: float | None = None) -> Any:
        """The call's result, or its exception raised; see :meth:`concurrent.futures.Future.result`."""
        error = self.exception(timeout)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            error = None  # no cycle through the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The call's exception, if it raised; see :meth:`concurrent.futures.Future.exception`."""
        super().exception(timeout)
        with self._decoding:
            if self._raw is not None:
                try:
                    self._value = self._raw.value()
                except Exception as error:
                    self._error = error.with_traceback(None)
                self._raw = None
        return self._error

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """See :meth:`concurrent.futures.Future.add_done_callback`; it never runs on the event loop."""
        super().add_done_callback(lambda future: self._run_callback(fn, future))
