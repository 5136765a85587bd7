"""The one way to wait: a probe, a deadline, a clock that tests can replace; and loops that are started again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from skyward.base.platform import elapsed_s
from skyward.errors import UnreachableError

T = TypeVar("T")

EAGER_S: Final = 0.0005
"""Length of a busy-wait. A processor that slept needs 20 to 40 µs to wake, and its caches are cold (decision 007)."""
CALL_LIMIT_S: Final[ContextVar[float]] = ContextVar("CALL_LIMIT_S", default=math.inf)
"""Longest wait for one answer of a vendor's API, for calls made in this context. The thread that waits ends then, too,
so that a vendor that hangs delays neither the others nor the end of the program."""
_PROMPT_S = 0.001
_WELL_SPENT_S = 0.0004
_MOST_WITHOUT = 255

_GROWTH = 1.5
_LONGEST_PAUSE = 10


class BusyWaits:
    """Decision whether to busy-wait for the next reply, by how soon the last ones came.

    On a quiet machine a busy-wait halves a round trip. On a busy one it takes the processor that the reply needs: after
    one that was in vain, or long, the next 1, 3, 7 and up to 255 waits are not busy.

    Attributes:
        due: True if the next wait should be busy.
    """

    __slots__ = ("_pause", "_without", "due")

    def __init__(self) -> None:
        self.due = False
        self._pause = self._without = 0

    def replied(self, within_s: float) -> None:
        """Note that a reply came after so many seconds, in a busy-wait if one was :attr:`due`."""
        if not self.due:
            self._without = max(0, self._without - 1)
        elif within_s <= _WELL_SPENT_S:
            self._pause = 0
        else:
            self._pause = self._without = min(2 * self._pause + 1, _MOST_WITHOUT)
        self.due = not self._without and within_s < _PROMPT_S


class Clock(Protocol):
    """Time in two readings, which differ once the machine has slept: one for waiting, one for money and limits."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment that this machine was awake; never goes back.

        For pauses, deadlines and silence: the other side of a conversation must not seem late after a sleep.
        """
        ...

    def elapsed(self) -> float:
        """Return the seconds since some fixed moment, asleep or awake.

        For costs, budgets, timeouts, ages: rented machines run on while this one sleeps.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        """See :meth:`Clock.monotonic`."""
        return time.monotonic()

    def elapsed(self) -> float:
        """See :meth:`Clock.elapsed`."""
        return elapsed_s()

    async def sleep(self, seconds: float) -> None:
        """See :meth:`Clock.sleep`."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK: Final[Clock] = SystemClock()


@dataclass(frozen=True, slots=True)
class NotYet:
    """Result of a probe that has no value yet, with the present state; without a state a probe returns ``None``.

    Attributes:
        observed: the present state, in words; the error at the deadline quotes the last one.
    """

    observed: str


async def wait_until(
    probe: Callable[[], Awaitable[T | NotYet | None]],
    *,
    deadline_s: float,
    interval_s: float,
    what: str,
    clock: Clock = SYSTEM_CLOCK,
) -> T:
    """Call ``probe`` until it returns a value, and return that.

    The pause between two probes starts at ``interval_s`` and grows to ten times that; the last probe is made at the
    deadline, and has ``interval_s`` to answer. A probe that hangs is cancelled.

    Args:
        probe: returns the value, or ``None`` or :class:`NotYet` to be called again; its exceptions end the wait.
        deadline_s: seconds to wait in all. At least one probe is made.
        interval_s: seconds of the first pause.
        what: condition in the words of the error: ``"node 2 to answer over SSH"``.
        clock: clock for the deadline and the pauses.

    Raises:
        UnreachableError: the deadline passed; names ``what`` and the last observation.
    """
    deadline = clock.monotonic() + deadline_s
    pause_s = interval_s
    observed = "nothing"
    while True:
        remaining_s = deadline - clock.monotonic()
        outcome = await _ask(probe, max(remaining_s, interval_s))
        if isinstance(outcome, NotYet):
            observed = outcome.observed
        elif outcome is not None:
            return outcome
        remaining_s = deadline - clock.monotonic()
        if remaining_s <= 0:
            raise UnreachableError(f"waited {round(deadline_s, 2):g} s for {what}; last observed: {observed}")
        await clock.sleep(min(pause_s, remaining_s))  # the last probe is made at the deadline, not before
        # Probes ask machines and providers, which must not be flooded during a long wait.
        pause_s = min(pause_s * _GROWTH, interval_s * _LONGEST_PAUSE)


async def _ask(probe: Callable[[], Awaitable[T | NotYet | None]], limit_s: float) -> T | NotYet | None:
    """Call the probe; a probe that hangs is an observation, too."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await probe()
    except TimeoutError:
        if not limit.expired():  # raised by the probe itself
            raise
        return NotYet(f"no answer within {limit_s:g} s")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even when the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption from (None if task.cancelled() else task.exception())
    return task.result()


_logger = logging.getLogger("skyward")

_FIRST_PAUSE_S = 0.1


async def keep(
    live: Callable[[], Awaitable[None]],
    *,
    what: str,
    report: Callable[[str], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Run ``live`` until it returns; after a failure, run it again.

    Any exception counts as a failure: a lack of descriptors or memory passes, and one bad item or a ``SystemExit`` of
    user code must not end a loop that others depend on. The pause before the next run grows from 0.1 s to 1 s. Only
    the cancellation of the present task ends this.

    Args:
        live: the loop; it is called again for every run.
        what: the loop in words, for the log and the report: ``"the lane to node 0"``.
        report: called with each failure that differs from the previous one, in words; must not block.
        clock: clock for pauses.
    """
    last = ""

    async def run() -> bool | NotYet:
        nonlocal last
        try:
            await live()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | GeneratorExit) and _is_ending():
                raise
            text = f"{what} failed and was started again: {type(error).__name__}: {error}"
            if text != last:  # a lack of memory would fill the log with one message a second
                last = text
                _logger.error("%s", text, exc_info=error)
                if report is not None:
                    report(text)
            return NotYet(text)
        return True

    await wait_until(run, deadline_s=math.inf, interval_s=_FIRST_PAUSE_S, what=what, clock=clock)


def _is_ending() -> bool:
    """Return True if this task is cancelled or closed."""
    # CancelledError alone does not show it: an awaited future may have been cancelled by itself.
    try:
        task = asyncio.current_task()
    except RuntimeError:  # closed after its loop
        return True
    return task is None or task.cancelling() > 0
