"""Create calls whose outcome stayed unknown: their machines may still be listed, and must end then."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyward._concurrency.waiting import Clock
from skyward.providers.base import Instance, Provider

__all__ = ["CreateCall", "LostCreates"]

_LOOK_EVERY_S = 30.0
_LOOK_S = 60.0
_CERTAIN_S = 600.0
"""Time after which a machine that is not listed was certainly never made, however late its provider lists it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCall:
    """A create call of one machine.

    Attributes:
        rank: rank of the node for which it was made.
        began: ``elapsed`` reading of the clock before the call.
    """

    rank: int
    began: float


class LostCreates:
    """The create calls of a pool whose outcome is unknown, by ledger key. Belongs to the event loop.

    Args:
        provider: the provider of the machines.
        clock: the time.
    """

    def __init__(self, provider: Provider, *, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._creates: dict[str, CreateCall] = {}
        self._added = asyncio.Event()

    def __contains__(self, key: str) -> bool:
        """Return whether the outcome of the call with that ledger key is unknown."""
        return key in self._creates

    def add_calls(self, creates: Mapping[str, CreateCall]) -> None:
        """Add calls, by their ledger keys."""
        self._creates |= creates
        if self._creates:
            self._added.set()

    async def wait_due(self) -> None:
        """Return when the next look is due: some time after the last one, if there are any calls."""
        await self._added.wait()
        await self._clock.sleep(_LOOK_EVERY_S)

    async def take_listed(self) -> Sequence[tuple[CreateCall, Instance]]:
        """Return the machines of these calls that are listed now; the calls are known from then on.

        Raises the provider's errors, and :class:`TimeoutError`.
        """
        if not self._creates or not self._provider.supports("tagged"):
            return ()
        async with asyncio.timeout(_LOOK_S):
            listed = [each for each in await self._provider.tagged() if each.key in self._creates]
        found = [(self._creates[each.key], each) for each in listed]
        self._forget([each.key for each in listed])
        return found

    async def settle(self) -> tuple[Sequence[tuple[CreateCall, Instance]], Sequence[str]]:
        """Look for the last time; return the machines as :meth:`take_listed`, and the keys of calls without effect.

        Machines of recent calls may still come: these are in neither. Raises as :meth:`take_listed`.
        """
        made_by = self._clock.elapsed() - _CERTAIN_S
        found = await self.take_listed()
        if not self._provider.supports("tagged"):
            return found, ()
        never_made = [key for key, create in self._creates.items() if create.began <= made_by]
        self._forget(never_made)
        return found, never_made

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._creates.pop(key, None)
        if not self._creates:
            self._added.clear()
