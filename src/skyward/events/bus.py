"""Delivery of a pool's events to its subscribers, in threads that a stuck callback does not block."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol, overload

from skyward.events import Callback, E, LogLine, SkywardEvent, deliver, flatten

_logger = logging.getLogger("skyward")

PATIENCE_S: Final = 1.0
"""Seconds for which an action may block others before another thread takes them over."""
_THREADS = 16


class Courier:
    """Queue of actions with one thread, which runs them in order and starts with the first of them.

    An action that takes longer than ``patience_s`` while others wait keeps its thread; another thread takes over the
    rest, in order again. Exceptions of actions, ``SystemExit`` included, are logged.

    Args:
        name: name of the threads.
        what: name of an action, for the log: ``"a done-callback"``.
        patience_s: time for which an action may block others; up to twice that, because it is checked periodically.
        threads: maximum number of threads; when all of them are stuck, further actions wait.
    """

    def __init__(self, name: str, *, what: str, patience_s: float = PATIENCE_S, threads: int = _THREADS) -> None:
        self._name = name
        self._what = what
        self._patience_s = patience_s
        self._bound = threads
        # Reentrant: a finalizer may enqueue an action while this thread holds the lock.
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._running: Callable[[], object] | None = None
        self._runs = self._queued = 0
        self._held = False
        self._leader: threading.Thread | None = None
        self._lookout: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._over = threading.Event()

    @property
    def queued(self) -> int:
        """Number of actions enqueued so far, for :meth:`wait_past`."""
        return self._queued

    def wait_past(self, queued: int, timeout_s: float) -> None:
        """Wait until so many actions have run, or were found to be stuck. Returns at once in an action."""
        if self._runs > queued or (self._runs == queued and self._running is None):
            return
        passed = threading.Event()
        if threading.current_thread() not in self._threads and self.run(passed.set):
            passed.wait(timeout_s)

    def run(self, action: Callable[[], object]) -> bool:
        """Enqueue an action. Never blocks; does nothing and returns False once closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(action)
            self._queued += 1
            if self._leader is None:
                self._leader = self._start(self._lead, self._name)
            if self._running is not None:
                self._watch()
            elif not self._held:
                self._changed.notify()
        return True

    @contextmanager
    def together(self) -> Generator[None]:
        """Wake the thread once, at the end, for all actions enqueued meanwhile. In one thread at a time."""
        self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                if self._waiting and self._running is None:
                    self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Run the queued actions and end the threads; return False if a thread is still running. Idempotent.

        A call from an action does not wait.
        """
        with self._changed:
            self._closed = True
            if self._leader is None and self._waiting:
                self._leader = self._start(self._lead, self._name)
            if self._leader is None:
                self._over.set()
            self._changed.notify()
        deadline = monotonic() + timeout_s
        if threading.current_thread() in self._threads:
            return True
        while threads := [thread for thread in tuple(self._threads) if thread.is_alive()]:
            left_s = deadline - monotonic()
            if left_s <= 0:
                return False
            threads[0].join(left_s)
        return True

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread | None:
        """Start a thread; return None if the system refuses one, so that the next action tries again."""
        thread = threading.Thread(target=self._live, args=(work,), name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            _logger.warning("%s is delayed: %s", self._what, error)
            return None
        return thread

    def _live(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._threads.discard(threading.current_thread())

    def _lead(self) -> None:
        me = threading.current_thread()
        while (action := self._next(me)) is not None:
            try:
                action()
            except BaseException:  # SystemExit of user code must not end this thread either
                with suppress(Exception):  # of a user's handler, which may be what raised before
                    _logger.exception("%s raised", self._what)
            del action

    def _next(self, me: threading.Thread) -> Callable[[], object] | None:
        """Return the next action for the leader; None if it has to end, or is no longer the leader."""
        with self._changed:
            if self._leader is not me:
                return None
            self._running = None
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                self._over.set()
                return None
            self._running = self._waiting.popleft()
            self._runs += 1
            self._watch()
            return self._running

    def _watch(self) -> None:
        """Start the lookout if an action blocks others; the caller holds the lock."""
        if self._running is not None and self._waiting and self._lookout is None:
            self._lookout = self._start(self._look_out, f"{self._name}-lookout")

    def _look_out(self) -> None:
        me = threading.current_thread()
        while True:
            runs = self._runs
            self._over.wait(self._patience_s)
            with self._changed:
                if self._running is None or not self._waiting:
                    self._lookout = None
                    return
                if self._runs != runs or len(self._threads) > self._bound:
                    continue
                _logger.warning("%s takes long: another thread continues with the following ones", self._what)
                self._leader, self._lookout = me, None
                me.name = self._name
                break
        self._lead()


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
        self._busy: dict[int, deque[_Delivery]] = {}

    def publish(self, event: SkywardEvent, also: tuple[Callback, ...] = ()) -> None:
        """Enqueue ``event`` for the subscribers and for the callbacks ``also``; once closed, do nothing."""
        if type(event) is LogLine:
            if self.recorder is not None:
                self.recorder(event)
            if not also and not self._subscriptions:
                return  # a turn of the event thread costs 8 µs
        self._courier.run(partial(self._deliver, _Delivery(self, event, also)))

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
        queued = self._courier.queued

        def wait() -> None:
            if self.recorder is not None:
                self.recorder.write()
            self._courier.wait_past(queued, _DELIVERY_S)

        return wait

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
            delivery = _Delivery(self, event, received_by=received_by, depth=depth)
            self._courier.run(partial(self._deliver, delivery))

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

    def _deliver(self, delivery: _Delivery) -> None:
        _handled.delivery = delivery
        subscribed = (each for each in self._subscriptions if each.callback not in delivery.received_by)
        callbacks = (*subscribed, *delivery.also)
        deliver(delivery.event, tuple(partial(self._call_in_turn, callback) for callback in callbacks))

    def _call_in_turn(self, callback: Callback, event: SkywardEvent) -> SkywardEvent | None:
        """Call ``callback``, or leave the event to the thread that is still running it."""
        with self._lock:
            if (missed := self._busy.get(id(callback))) is not None:
                missed.append(replace(_handled.delivery, event=event))
                return None
            missed = self._busy[id(callback)] = deque()
        try:
            return callback(event)
        finally:
            self._catch_up(callback, missed)

    def _catch_up(self, callback: Callback, missed: deque[_Delivery]) -> None:
        present = _handled.delivery
        while True:
            with self._lock:
                if not missed:
                    del self._busy[id(callback)]
                    _handled.delivery = present
                    return
                late = missed.popleft()
            _handled.delivery = late
            deliver(late.event, (callback,))


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
        """Return the callback's representation, which messages show."""
        return repr(self.callback)
