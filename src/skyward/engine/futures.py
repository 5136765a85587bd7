"""Futures of calls: completed on the event loop with raw bytes, decoded where somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from skyward.submission import CallFuture
from skyward.wire.pickling import PackedError, unpack, unpack_error

__all__ = ["BatchWatch", "RawOutcome", "RemoteFuture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOutcome:
    """How a call ended, undecoded.

    Attributes:
        data: the result's pickle; meaningless if there was an error.
        buffers: its out-of-band buffers, writable.
        error: the exception as the worker sent it, or one of ours.
        seconds: what the call took on its worker; None if none ran it to its end.
        where: "node 0, worker 1", for the exception's note.
    """

    data: bytes | memoryview = b""
    buffers: tuple[Any, ...] = ()
    error: PackedError | Exception | None = field(default=None)
    seconds: float | None = None
    where: str = ""


class _Failed(Exception):
    """Marks a failed future for those who only look at its state."""


class BatchWatch:
    """Wakes a caller when all of its calls are done, or one has failed."""

    def __init__(self) -> None:
        self.remaining = 0
        self.failed: RemoteFuture | None = None
        self._event = threading.Event()

    def expect(self, calls: int) -> None:
        """So many calls are about to be queued."""
        self.remaining = calls
        if not calls:
            self._event.set()

    def note(self, future: RemoteFuture, *, failed: bool) -> None:
        """One more is done. Called on the event loop only."""
        self.remaining -= 1
        if failed and self.failed is None:
            self.failed = future
        if failed or not self.remaining:
            self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether all are done or one has failed."""
        return self._event.wait(timeout_s)

    def rearm(self) -> None:
        """Wait on, although one has failed."""
        self._event.clear()
        if not self.remaining:
            self._event.set()


class RemoteFuture(CallFuture[Any]):
    """A call's future. The result is unpickled by the first who asks, in their thread, once."""

    def __init__(
        self, *, drop: Callable[[], None], run_callback: Callable[..., None], watch: BatchWatch | None = None
    ) -> None:
        super().__init__()
        self._drop = drop
        self._run_callback = run_callback
        self._decoding = threading.Lock()
        self._begun: bool | None = None
        self._raw: RawOutcome | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._watch = watch

    def begin(self) -> bool:
        """The call leaves the queue; False if the future was cancelled. Called on the event loop only."""
        if self._begun is None:
            self._begun = self.set_running_or_notify_cancel()
        return self._begun

    def deliver(self, raw: RawOutcome) -> None:
        """Complete the future. Called on the event loop only, once."""
        if self.begin():
            self._raw = raw
            self.worker_seconds = raw.seconds
            if raw.error is None:
                super().set_result(None)
            else:
                super().set_exception(_Failed())
        if self._watch is not None:
            self._watch.note(self, failed=raw.error is not None)

    def cancel(self) -> bool:
        """See :meth:`concurrent.futures.Future.cancel`: True while the call waits in the queue."""
        cancelled = super().cancel()
        if cancelled:
            self._drop()
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
                self._decode(self._raw)
                self._raw = None
        return self._error

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """See :meth:`concurrent.futures.Future.add_done_callback`; it never runs on the event loop."""
        super().add_done_callback(lambda future: self._run_callback(fn, future))

    def _decode(self, raw: RawOutcome) -> None:
        match raw.error:
            case PackedError() as packed:
                self._error = unpack_error(packed, where=raw.where)
            case None:
                try:
                    self._value = unpack(raw.data, raw.buffers)
                except Exception as error:  # any class may do anything here
                    error.add_note(f"while rebuilding the result of a call that ran on {raw.where}")
                    self._error = error
            case error:
                self._error = error
