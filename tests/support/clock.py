"""A clock that moves only when somebody sleeps on it, or pushes it."""

from __future__ import annotations

import asyncio

__all__ = ["FakeClock"]


class FakeClock:
    """Implements :class:`skyward.base.waiting.Clock` without waiting.

    Attributes:
        slept_s: every pause asked for, in order.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.slept_s: list[float] = []
        self._now = now
        self._suspended_s = 0.0

    def monotonic(self) -> float:
        """The seconds slept and advanced so far."""
        return self._now

    def elapsed(self) -> float:
        """The same, and the seconds for which the machine was suspended."""
        return self._now + self._suspended_s

    async def sleep(self, seconds: float) -> None:
        """Move on by ``seconds`` at once, letting others run."""
        self.slept_s.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self._now += seconds

    def suspend(self, seconds: float) -> None:
        """Have the machine sleep for ``seconds``, of which :meth:`monotonic` counts none."""
        self._suspended_s += seconds
