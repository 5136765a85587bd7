"""An event loop whose time jumps, for tests of what takes minutes: nobody waits, and what hangs is found at once."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from operator import methodcaller
from typing import Any, TypeVar

import msgpack

from skyward.base.waiting import SystemClock
from skyward.wire.lane import Connection

__all__ = ["SimulatedClock", "SimulatedConnection", "SimulatedLoop", "StuckError", "simulate"]

T = TypeVar("T")

_TURNS_BOUND = 400_000


class StuckError(AssertionError):
    """Nothing will ever happen again, or things go on for ever."""


class SimulatedClock(SystemClock):
    """The time of the running loop."""

    def monotonic(self) -> float:
        """See :meth:`skyward.base.waiting.Clock.monotonic`."""
        return asyncio.get_running_loop().time()

    def elapsed(self) -> float:
        """See :meth:`skyward.base.waiting.Clock.elapsed`."""
        return self.monotonic()


class _Selector(selectors.SelectSelector):
    """Waits for nothing but the next timer, for which it moves the time on."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit_s = limit_s
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        self._turns += 1
        if timeout is None:
            raise StuckError(f"at {self.now:g} s everybody waits and no timer is set")
        if self._turns > _TURNS_BOUND or self.now > self._limit_s:
            raise StuckError(f"at {self.now:g} s, after {self._turns} turns of the loop, there is no end in sight")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, then jumps to the next timer. What is given to a thread runs here and now.

    Args:
        limit_s: when this much simulated time has passed, :class:`StuckError` is raised out of the loop; so it is when
            all wait for each other.
    """

    def __init__(self, limit_s: float) -> None:
        self._timing = _Selector(limit_s)
        super().__init__(self._timing)

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._timing.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run ``func`` at once, as a thread that is free would; its result comes a turn later."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_fail, future, error)
        else:
            self.call_soon(_succeed, future, result)
        return future

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """Call back whenever something has come over a :class:`SimulatedConnection`."""
        if not isinstance(fd, SimulatedConnection):
            super().add_reader(fd, callback, *args)
            return
        fd.listen(lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        """No more of that."""
        if not isinstance(fd, SimulatedConnection):
            return super().remove_reader(fd)
        return fd.listen(None)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


_END = object()


class SimulatedConnection(Connection):
    """One end of a connection in memory. Messages take ``latency_s``, and arrive in order or, once it is cut, never.

    Made in pairs, by :meth:`pair`.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._peer = self
        self._callback: Callable[[], object] | None = None
        self._written: list[Any] = []
        self._travelling: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._arrival = asyncio.Event()
        self._broken = False
        self._silent = False

    @classmethod
    def pair(cls, latency_s: float) -> tuple[SimulatedConnection, SimulatedConnection]:
        """Both ends of a new connection."""
        here, there = cls(latency_s), cls(latency_s)
        here._peer, there._peer = there, here
        return here, there

    def fileno(self) -> int:
        """A descriptor of this process's that stays open: there is no socket."""
        return 0

    def listen(self, callback: Callable[[], object] | None) -> bool:
        """Call back whenever there is something to :meth:`receive`; whether somebody was called back before."""
        before, self._callback = self._callback, callback
        if self._arrived or self._broken:
            self._loop.call_soon(self._tell)
        return before is not None

    def cut(self) -> None:
        """What travels is lost, and both ends learn that it is over."""
        self._fall_apart()
        self._peer._fall_apart()

    def silence(self) -> None:
        """From now on nothing arrives, and nobody is told: :meth:`cut` it later."""
        self._fall_silent()
        self._peer._fall_silent()

    def close(self) -> None:
        """See :meth:`Connection.close`; what was sent before still arrives."""
        if not self._broken:
            self._broken = True
            self._peer._set_out(_END)

    def write(self, message: Any) -> None:
        """See :meth:`Connection.write`."""
        self._written.append(msgpack.unpackb(msgpack.packb(message, default=methodcaller("to_wire")), use_list=False))

    def send(self) -> bool:
        """See :meth:`Connection.send`."""
        if self._broken:
            raise ConnectionResetError("the connection was cut")
        written, self._written = self._written, []
        for message in written:
            self._peer._set_out(message)
        return True

    def receive(self) -> list[Any]:
        """See :meth:`Connection.receive`."""
        messages = list(self._arrived)
        self._arrived.clear()
        if self._broken:
            if not messages:
                raise ConnectionResetError("the connection was cut")
            self._loop.call_soon(self._tell)
        return messages

    async def handshake(self) -> None:
        """See :meth:`Connection.handshake`."""

    async def exchange(self, message: Any) -> None:
        """See :meth:`Connection.exchange`."""
        self.write(message)
        self.send()

    async def next_message(self) -> Any:
        """See :meth:`Connection.next_message`."""
        while not self._arrived:
            if self._broken:
                raise ConnectionResetError("the connection was cut")
            self._arrival.clear()
            await self._arrival.wait()
        return self._arrived.popleft()

    def _fall_apart(self) -> None:
        self._travelling.clear()
        self._broken = True
        self._tell()

    def _fall_silent(self) -> None:
        self._travelling.clear()
        self._silent = True

    def _set_out(self, message: Any) -> None:
        if not self._silent:
            self._travelling.append(message)
            self._loop.call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        if not self._travelling:
            return  # it was lost on the way
        message = self._travelling.popleft()
        if message is _END:
            self._broken = True
        else:
            self._arrived.append(message)
        self._tell()

    def _tell(self) -> None:
        self._arrival.set()
        if self._callback is not None:
            self._callback()


def simulate(main: Callable[[], Coroutine[Any, Any, T]], *, limit_s: float = 86_400.0) -> T:
    """Run ``main`` on a loop of its own, in simulated time.

    Raises what ``main`` does, :class:`StuckError` when it does not end, and ``AssertionError`` when it leaves tasks or
    errors behind that nobody heard of.
    """
    loop = SimulatedLoop(limit_s)
    unheard: list[str] = []
    loop.set_exception_handler(lambda _, context: unheard.append(_said(context)))
    task = loop.create_task(main())
    try:
        result = loop.run_until_complete(task)
        left = [each for each in asyncio.all_tasks(loop) if not each.done()]
        assert not left, f"left behind: {left}"
    finally:
        _clear(loop)
    del task
    assert not unheard, f"nobody heard of: {unheard}"
    return result


def _said(context: dict[str, Any]) -> str:
    return f"{context['message']}: {context.get('exception')!r} in {context.get('future') or context.get('handle')}"


def _clear(loop: asyncio.AbstractEventLoop) -> None:
    """Drop what is left, whether or not it would ever end."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    try:
        loop.run_until_complete(asyncio.wait(left, timeout=1)) if left else None
    except StuckError:
        pass  # its reason is on its way to the caller
    finally:
        loop.close()
