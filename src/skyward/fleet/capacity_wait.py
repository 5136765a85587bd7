"""Waiting for machines that no provider has now."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from skyward.base.waiting import Clock
from skyward.errors import CapacityError, SkywardError
from skyward.events import Notice, SkywardEvent

_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 60.0
_COSTLY_PAUSE_S, _LONGEST_COSTLY_PAUSE_S = 300.0, 1800.0
"""Pauses after an attempt in which machines were bought and ended."""
_MINUTE_S, _IN_MINUTES_FROM_S = 60.0, 120.0


@dataclass(slots=True)
class WaitReports:
    """What a pool's users read while it waits for capacity: each text once a minute, however many launches wait.

    Attributes:
        publish: receives the notices; must not block.
        clock: the time.
    """

    publish: Callable[[SkywardEvent], None]
    clock: Clock
    _told_at: dict[str, float] = field(default_factory=dict[str, float])

    def report_refusal(self, refusal: str) -> None:
        """Publish why nothing was bought."""
        self._tell_once_a_minute(refusal, refusal)

    def report_time(self, waited_s: float, limit_s: float) -> None:
        """Publish that one launch waits."""
        unit, unit_s = ("minute", _MINUTE_S) if limit_s >= _IN_MINUTES_FROM_S else ("second", 1.0)
        self._tell_once_a_minute(
            "time", f"waiting for capacity: {unit} {waited_s / unit_s:.0f} of {limit_s / unit_s:.0f}"
        )

    def _tell_once_a_minute(self, key: str, text: str) -> None:
        now = self.clock.elapsed()
        if now - self._told_at.get(key, -math.inf) >= _MINUTE_S:
            self._told_at[key] = now
            self.publish(Notice(text))


@dataclass(slots=True, kw_only=True)
class CapacityWait:
    """Wait for capacity of one launch, which begins now.

    Attributes:
        limit_s: seconds until it is over; 0 for no wait.
        reports: what users read meanwhile.
        clock: the time, also while this machine sleeps.
    """

    limit_s: float
    reports: WaitReports
    clock: Clock
    _began: float = field(init=False)
    _pause_s: float = _PAUSE_S
    _costly_pause_s: float = _COSTLY_PAUSE_S
    _reported: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._began = self.clock.elapsed()

    @property
    def _waited_s(self) -> float:
        return self.clock.elapsed() - self._began

    async def pause(self, error: SkywardError, *, costly: bool = False) -> None:
        """Wait after an attempt that failed with ``error``; longer if it was ``costly``. Publish a line a minute.

        Raises:
            SkywardError: ``error`` without a wait; the same with the time waited once that is over.
        """
        if not self.limit_s:
            raise error
        if self._waited_s >= self.limit_s:
            in_minutes = self.limit_s >= _IN_MINUTES_FROM_S
            waited = f"{self._waited_s / _MINUTE_S:.0f} min" if in_minutes else f"{self._waited_s:.0f} s"
            raise CapacityError(f"in {waited} of wait_for_capacity: {error}") from error
        if (refusal := str(error)) not in self._reported:
            self._reported.add(refusal)
            self.reports.report_refusal(refusal)
        until = min(self.clock.elapsed() + self._next_pause_s(costly=costly), self._began + self.limit_s)
        while (left_s := until - self.clock.elapsed()) > 0:
            self.reports.report_time(self._waited_s, self.limit_s)
            await self.clock.sleep(min(left_s, _MINUTE_S))

    def _next_pause_s(self, *, costly: bool) -> float:
        if costly:
            pause_s, self._costly_pause_s = self._costly_pause_s, min(2 * self._costly_pause_s, _LONGEST_COSTLY_PAUSE_S)
            return pause_s
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s
