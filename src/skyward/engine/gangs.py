"""Calls of one broadcast that run together: they meet before they begin, and fail as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyward.engine.calls import LiveCall

__all__ = ["Gang"]


class Gang:
    """The calls of one broadcast, by rank. Belongs to the event loop.

    None of them is ever run again alone: what the others have done with its predecessor would be lost on it.

    Attributes:
        calls: the calls.
        failed: whether one of them has failed, and so all.
        raised: ids of those that raised something, which may be no more than an echo of what another one died of.
    """

    def __init__(self, calls: Sequence[LiveCall]) -> None:
        self.calls = tuple(calls)
        self.failed = False
        self.raised: set[int] = set()
        self._said: dict[int, str] = {}
        for call in self.calls:
            call.gang = self

    def hear(self, rank: int, text: str) -> list[str] | None:
        """What one tells the others; returns what all of them have told, by rank, once the last one has.

        One that begins anew, in a fresh process, tells again: what it said before counts no more.
        """
        self._said[rank] = text
        if len(self._said) < len(self.calls):
            return None
        said, self._said = self._said, {}
        return [said[rank] for rank in range(len(self.calls))]

    def fail(self) -> bool:
        """One has failed; returns whether it is the first one."""
        first, self.failed = not self.failed, True
        return first
