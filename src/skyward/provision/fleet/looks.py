"""Shared status requests for a fleet's machines: one provider call serves all waiting callers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.providers.base import Instance, InstanceState, Provider

__all__ = ["OVER", "SharedLooks"]

OVER = (InstanceState.STOPPING, InstanceState.GONE, InstanceState.FAILED)
"""States of a machine that is not, and will not be, a node."""
_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Look:
    """One call of ``describe``: ids requested so far, callers that wait for it, and the task that performs it."""

    ids: list[str] = field(default_factory=list[str])
    waiting: int = 0
    task: asyncio.Task[Mapping[str, Instance]] | None = None


class SharedLooks:
    """Present records of machines; any number of callers cost one call of ``describe`` an interval.

    Requests that arrive before a call begins are part of it. An error of a call reaches every caller that waits for it,
    and nobody else. Belongs to the event loop.

    Args:
        provider: the provider of the machines; its own pace counts where that is slower than a call a second.
        clock: the time between two calls.
    """

    def __init__(self, provider: Provider, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._provider = provider
        self._clock = clock
        self._interval_s = max(_INTERVAL_S, provider.look_interval_s)
        self._due_at = -math.inf
        self._next: _Look | None = None

    async def at(self, instance_id: str) -> Instance:
        """Return a record of the machine that is read after this call. Raises the provider's errors."""
        look = self._next
        if look is None:
            look = self._next = _Look()
            look.task = asyncio.ensure_future(self._perform(look))
        assert look.task is not None
        look.ids.append(instance_id)
        look.waiting += 1
        try:
            seen = await asyncio.shield(look.task)  # the other callers' too
        finally:
            look.waiting -= 1
            if not look.waiting and not look.task.done():
                await self._abandon(look, look.task)
        return seen[instance_id]

    async def _perform(self, look: _Look) -> Mapping[str, Instance]:
        if (early_s := self._due_at - self._clock.monotonic()) > 0:
            await self._clock.sleep(early_s)
        self._next = None  # later requests are the next call's, even if this one never returns
        self._due_at = self._clock.monotonic() + self._interval_s
        ids = list(dict.fromkeys(look.ids))
        return dict(zip(ids, await self._provider.describe(ids), strict=True))

    async def _abandon(self, look: _Look, task: asyncio.Task[Mapping[str, Instance]]) -> None:
        """End a call without a waiting caller: it may never return."""
        if self._next is look:
            self._next = None
        task.cancel()
        await asyncio.wait((task,))
