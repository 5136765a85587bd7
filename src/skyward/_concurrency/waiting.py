"""The one way to wait: a probe, a deadline, a clock that tests can replace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from skyward._concurrency.linux_parts import BOOT_CLOCK
from skyward.errors import UnreachableError

__all__ = ["EAGER_S", "PROMPT_S", "SYSTEM_CLOCK", "Clock", "NotYet", "SystemClock", "to_its_end", "wait_until"]

T = TypeVar("T")

PROMPT_S: Final = 0.001
"""After a reply within this time, busy-wait for the next one."""
EAGER_S: Final = 0.0005
"""Length of a busy-wait. A processor that slept needs 20 to 40 µs to wake, and its caches are cold (decision 007)."""

_GROWTH = 1.5
_LONGEST_PAUSE = 10


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
        return time.time() if BOOT_CLOCK is None else time.clock_gettime(BOOT_CLOCK)

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
