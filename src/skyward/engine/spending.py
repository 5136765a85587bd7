"""What an open pool costs: told now and then, and watched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from skyward._concurrency.recurring import keep
from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import BudgetError
from skyward.events import Error, SkywardEvent
from skyward.provision.buying.budget import Budget
from skyward.provision.buying.cost import CostReport

__all__ = ["Spending"]

_REPORT_S = 30.0
_LOOK_S = 5.0
"""The rate changes with the machines: a projection holds no longer."""


class Spending:
    """Belongs to the event loop on which it is made.

    Args:
        cost: what the pool has cost until a reading of the clock.
        max_cost: USD that it may cost; None is no limit.
        publish: hears what it costs; must not block.
        on_spent: called once, when the pool has to be ended for not to cost more.
        clock: its ``elapsed`` reading is the one that the costs are read by.
    """

    def __init__(
        self,
        cost: Callable[[float], CostReport],
        *,
        max_cost: float | None,
        publish: Callable[[SkywardEvent], None],
        on_spent: Callable[[BudgetError], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cost = cost
        self._budget = None if max_cost is None else Budget(max_cost=max_cost)
        self._publish = publish
        self._on_spent = on_spent
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        """Look from now on whether the sum is about to be reached."""
        if self._budget is not None:
            budget = self._budget
            self._begin("watching the costs", lambda: self._watch(budget))

    def report(self) -> None:
        """Tell from now on what it costs."""
        self._begin("reporting the costs", self._report)

    def close(self) -> None:
        """Look and tell no more, but for :meth:`tell_final`. Idempotent."""
        for task in self._tasks:
            task.cancel()

    def tell_final(self) -> None:
        """Tell what it cost in all."""
        self._publish(self._cost(self._clock.elapsed()).final())

    def _begin(self, what: str, live: Callable[[], Awaitable[None]]) -> None:
        def report(why: str) -> None:
            self._publish(Error(why))

        self._tasks.append(asyncio.ensure_future(keep(live, what=what, report=report, clock=self._clock)))

    async def _report(self) -> None:
        while True:
            self._publish(self._cost(self._clock.elapsed()).update())
            await self._clock.sleep(_REPORT_S)

    async def _watch(self, budget: Budget) -> None:
        while True:
            now = self._clock.elapsed()
            usages = self._cost(now).usages
            left_s = budget.seconds_left(usages, now)
            if left_s <= 0:
                self._on_spent(budget.spent(usages, now))
                return
            await self._clock.sleep(min(left_s, _LOOK_S))
