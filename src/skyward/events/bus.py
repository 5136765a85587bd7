"""Delivery of a pool's events to its subscribers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, overload

from skyward.events import Callback, E, LogLine, SkywardEvent, deliver, flatten
from skyward.events.courier import PATIENCE_S, Courier

__all__ = ["EventBus", "Recorder"]

_logger = logging.getLogger("skyward")
_EMITTED_CHAIN = 32
_DELIVERY_S = 5.0
_handled = threading.local()  # the delivery that the current event thread is busy with


class Recorder(Protocol):
    """Receiver of all lines of a pool, which no subscriber delays."""

    def __call__(self, line: LogLine, /) -> object:
        """Take a line. Must not block."""
        ...

    def write(self) -> None:
        """Write the lines taken so far."""
        ...


class EventBus:
    """Event bus of a pool: it calls subscribers in order, one at a time, in its own thread.

    Publishing never blocks and is allowed from any thread, event loops and the subscribers themselves included. The
    thread starts with the first event and ends with :meth:`close`.

    A subscriber that is stuck in an event for longer than ``patience_s`` does not delay the other subscribers: another
    thread delivers the following events to them. Events for the stuck subscriber queue up, in order.

    Attributes:
        recorder: receives every published line at once, in the thread that publishes it; None for none.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.recorder: Recorder | None = None
        self._lock = threading.Lock()
        self._courier = Courier("skyward-events", what="a callback for events", patience_s=patience_s)
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._busy: dict[int, deque[_Missed]] = {}

    def publish(self, event: SkywardEvent, also: tuple[Callback, ...] = ()) -> None:
        """Enqueue ``event`` for the subscribers and for the callbacks ``also``; once closed, do nothing."""
        if type(event) is LogLine:
            if self.recorder is not None:
                self.recorder(event)
            if not also and not self._subscriptions:
                return  # a turn of the event thread costs 8 µs
        self._queue(_Delivery(self, event, also))

    def run(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the event thread, after the events published so far; once closed, do nothing."""
        self._courier.run(action)

    def together(self) -> AbstractContextManager[None]:
        """Wake the event thread once, at the end, for all events published meanwhile. In one thread at a time."""
        # Without it the thread wakes for every line, and kept lines are written one by one.
        return self._courier.together()

    def delivery(self) -> Callable[[], None]:
        """Return a function that waits until the subscribers have received everything published so far.

        It waits 5 s at most, for none that is stuck, and not in a subscriber. The recorder has written the lines then.
        """
        return partial(self._wait_past, self._courier.queued)

    def _wait_past(self, queued: int) -> None:
        if self.recorder is not None:
            self.recorder.write()
        self._courier.wait_past(queued, _DELIVERY_S)

    def publish_emitted(self, event: SkywardEvent, received_by: tuple[Callback, ...]) -> None:
        """Enqueue an event emitted anywhere in this process for the subscribers not in ``received_by``.

        A subscriber's ``emit`` stays on its bus, and a chain of them ends after :data:`_EMITTED_CHAIN` events. Without
        both limits, two pools whose subscribers answer each event with another one would run forever.
        """
        source: _Delivery | None = getattr(_handled, "delivery", None)
        depth = source.depth + 1 if source else 0
        if source and source.bus is not self:
            return
        if depth > _EMITTED_CHAIN:
            _logger.warning("callbacks keep emitting %s events; one is dropped", type(event).__name__)
        else:
            self._queue(_Delivery(self, event, received_by=received_by, depth=depth))

    @overload
    def subscribe(self, event_type: None, callback: Callback) -> Callable[[], None]: ...
    @overload
    def subscribe(self, event_type: type[E], callback: Callable[[E], SkywardEvent | None]) -> Callable[[], None]: ...
    def subscribe(self, event_type: type[Any] | None, callback: Callable[[Any], Any]) -> Callable[[], None]:
        """Call ``callback`` with every event of ``event_type`` (None: with every event) from now on.

        Returns a function that ends the subscription. Idempotent.
        """
        added = tuple(_Subscription(event_type or object, part) for part in flatten([callback]))
        with self._lock:
            self._subscriptions += added

        def unsubscribe() -> None:
            with self._lock:
                self._subscriptions = tuple(kept for kept in self._subscriptions if kept not in added)

        return unsubscribe

    def close(self, timeout_s: float = 10.0) -> None:
        """Deliver all published events and end the thread. Idempotent.

        A subscriber that is still busy after ``timeout_s`` is abandoned with a warning in the log. A call from a
        subscriber itself does not wait.
        """
        if not self._courier.close(timeout_s):
            _logger.warning("a callback is still busy %g s after its pool was closed; later events are lost", timeout_s)

    def _queue(self, delivery: _Delivery) -> None:
        self._courier.run(partial(self._deliver, delivery))

    def _deliver(self, delivery: _Delivery) -> None:
        _handled.delivery = delivery
        subscribed = (each for each in self._subscriptions if each.callback not in delivery.received_by)
        callbacks = (*subscribed, *delivery.also)
        deliver(delivery.event, tuple(partial(self._call_in_turn, callback) for callback in callbacks))

    def _call_in_turn(self, callback: Callback, event: SkywardEvent) -> SkywardEvent | None:
        """Call ``callback``, or leave the event to the thread that is still running it."""
        with self._lock:
            if (missed := self._busy.get(id(callback))) is not None:
                missed.append(_Missed(event, _handled.delivery))
                return None
            missed = self._busy[id(callback)] = deque()
        try:
            return callback(event)
        finally:
            self._catch_up(callback, missed)

    def _catch_up(self, callback: Callback, missed: deque[_Missed]) -> None:
        present = _handled.delivery
        while True:
            with self._lock:
                if not missed:
                    del self._busy[id(callback)]
                    _handled.delivery = present
                    return
                late = missed.popleft()
            _handled.delivery = late.delivery
            deliver(late.event, (callback,))


@dataclass(frozen=True, slots=True)
class _Delivery:
    bus: EventBus
    event: SkywardEvent
    also: tuple[Callback, ...] = ()
    received_by: tuple[Callback, ...] = ()
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Missed:
    """Event for a busy callback, and its delivery."""

    event: SkywardEvent
    delivery: _Delivery


@dataclass(frozen=True, slots=True, eq=False)
class _Subscription:
    event_type: type[Any]
    callback: Callback

    def __call__(self, event: SkywardEvent) -> SkywardEvent | None:
        return self.callback(event) if isinstance(event, self.event_type) else None

    def __repr__(self) -> str:
        """Return the callback's representation, which messages show."""
        return repr(self.callback)
