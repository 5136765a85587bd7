"""Costs of an open pool while it runs: reported, and kept below ``max_cost`` by ending it in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from skyward.base.waiting import SYSTEM_CLOCK, Clock, keep
from skyward.errors import BudgetError
from skyward.events import Error, SkywardEvent
from skyward.market.budget import Budget
from skyward.market.cost import CostReport

_REPORT_S = 30.0
# The rate changes with the machines: a projection of the costs is valid no longer than this.
_LOOK_S = 5.0


class Spending:
    """Costs of an open pool: reported periodically, and kept below their limit. Belongs to the event loop.

    Args:
        cost: returns the costs of the pool up to a reading of the clock.
        max_cost: limit in USD; None is no limit.
        publish: receiver of the cost events; must not block.
        on_spent: called once, when the pool has to end so as not to exceed ``max_cost``.
        clock: the clock of the costs; its ``elapsed`` goes on while the machine sleeps.
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
        """Check from now on that the limit is not about to be reached."""
        if self._budget is not None:
            budget = self._budget
            self._begin("watching the costs", lambda: self._watch(budget))

    def report(self) -> None:
        """Publish the costs from now on, every 30 s."""
        self._begin("reporting the costs", self._report)

    def close(self) -> None:
        """Stop watching and reporting; :meth:`publish_final` still works. Idempotent."""
        for task in self._tasks:
            task.cancel()

    def publish_final(self) -> None:
        """Publish the total costs."""
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
