"""How a pool's events reach those who want to hear them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, overload

from skyward.events import Callback, E, SkywardEvent, deliver, flatten

__all__ = ["EventBus"]

_logger = logging.getLogger("skyward")
_EMITTED_CHAIN = 32
_handled = threading.local()  # the delivery that the current event thread is busy with


class EventBus:
    """Carries a pool's events to its subscribers: in order, one at a time, in a thread of its own.

    Publishing never blocks and is allowed from any thread, event loops and the subscribers themselves included. The
    thread starts with the first event and ends with :meth:`close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Delivery | None] = SimpleQueue()
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._thread: threading.Thread | None = None
        self._closed = False

    def publish(self, event: SkywardEvent, also: tuple[Callback, ...] = ()) -> None:
        """Queue ``event`` for the subscribers and for the callbacks ``also``; once closed, do nothing."""
        if self._thread is None:
            self._start()
        if not self._closed:
            self._queue.put(_Delivery(self, event, also))

    def publish_emitted(self, event: SkywardEvent, received_by: tuple[Callback, ...]) -> None:
        """Queue an event that was emitted anywhere in this process for the subscribers not in ``received_by``.

        A subscriber's own ``emit`` stays on its bus, and a chain of them ends after :data:`_EMITTED_CHAIN`: else two
        pools whose subscribers answer each event with another one would never come to rest.
        """
        source: _Delivery | None = getattr(_handled, "delivery", None)
        depth = source.depth + 1 if source else 0
        if source and source.bus is not self:
            return
        if depth > _EMITTED_CHAIN:
            _logger.warning("callbacks keep emitting %s events; dropped one", type(event).__name__)
        elif not self._closed:
            if self._thread is None:
                self._start()
            self._queue.put(_Delivery(self, event, received_by=received_by, depth=depth))

    @overload
    def subscribe(self, event_type: None, callback: Callback) -> Callable[[], None]: ...
    @overload
    def subscribe(self, event_type: type[E], callback: Callable[[E], SkywardEvent | None]) -> Callable[[], None]: ...
    def subscribe(self, event_type: type[Any] | None, callback: Callable[[Any], Any]) -> Callable[[], None]:
        """Call ``callback`` with every event of ``event_type`` (None: with every event) from now on.

        Returns a function that ends the subscription; calling it again does nothing.
        """
        added = tuple(_Subscription(event_type or object, part) for part in flatten([callback]))
        with self._lock:
            self._subscriptions += added

        def unsubscribe() -> None:
            with self._lock:
                self._subscriptions = tuple(kept for kept in self._subscriptions if kept not in added)

        return unsubscribe

    def close(self, timeout_s: float = 10.0) -> None:
        """Deliver what was published and end the thread. Idempotent.

        A subscriber that is still busy after ``timeout_s`` is left behind, and the log says so. Called by a subscriber
        itself it does not wait.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            _logger.warning("a callback is still busy %g s after its pool was closed; later events are lost", timeout_s)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="skyward-events", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while delivery := self._queue.get():
            _handled.delivery = delivery
            subscribed = (each for each in self._subscriptions if each.callback not in delivery.received_by)
            deliver(delivery.event, (*subscribed, *delivery.also))


@dataclass(frozen=True, slots=True)
class _Delivery:
    bus: EventBus
    event: SkywardEvent
    also: tuple[Callback, ...] = ()
    received_by: tuple[Callback, ...] = ()
    depth: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Subscription:
    event_type: type[Any]
    callback: Callback

    def __call__(self, event: SkywardEvent) -> SkywardEvent | None:
        return self.callback(event) if isinstance(event, self.event_type) else None

    def __repr__(self) -> str:
        """Return the callback's, which is what messages are about."""
        return repr(self.callback)
