"""The calls that one joblib call makes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from skyward.submission import ArgumentMemo, CallFuture, Invocation, TaskSubmitter

__all__ = ["CallWindow"]

_Done = Callable[[CallFuture[Any]], object]


class CallWindow:
    """Keeps at most ``limit`` calls in the fleet, whose workers may be more; further ones wait here.

    Thread-safe; nothing blocks. What a submission raises becomes the outcome of its future: joblib submits from
    callbacks too, where an exception would be lost and the joblib call would wait for ever.

    Args:
        submitter: where calls go.
        limit: how many at a time; None leaves that to the fleet.
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
        """Queue a call; ``callback`` gets its future once, whatever the outcome, and never before this returns."""
        if self._limit is None:
            return self._send(call, callback)
        future: CallFuture[Any] = CallFuture()
        future.add_done_callback(callback)  # pyright: ignore[reportArgumentType]
        with self._lock:
            self._waiting.append((call, future))
            self._send_waiting(self._limit)
        return future

    def close(self) -> None:
        """Give up what waits and what runs, and whatever is submitted later. Idempotent; the fleet stays usable."""
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
        """In the fleet; or done, where it was refused or comes too late."""
        with self._lock:  # what is sent while the window closes is in it, or is not sent
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
    """Give a call that waited the outcome that it had in the fleet."""
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
