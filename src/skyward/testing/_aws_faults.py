"""What can go wrong between a client and AWS, and when it does."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from skyward.errors import ConfigurationError

__all__ = ["AwsFault", "Faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsFault:
    """One way for a call to fail.

    Attributes:
        code: AWS's error code; the call has no effect then. Empty if nothing is answered.
        status: the HTTP status that goes with it.
        message: what the error says; empty means that it was told to.
        dropped: the connection ends without an answer, before the call took effect, or after it.
    """

    code: str = ""
    status: int = 400
    message: str = ""
    dropped: Literal["", "before", "after"] = ""

    def __post_init__(self) -> None:
        if bool(self.code) == bool(self.dropped):
            raise ConfigurationError("a fault has either a code or a dropped connection")


@dataclass(slots=True)
class _Planned:
    fault: AwsFault
    action: str
    after: int
    times: int


class Faults:
    """Which calls fail. Safe to use from several threads."""

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self._lock = threading.Lock()

    def add(self, fault: AwsFault, *, action: str = "", nth: int = 1, times: int = 1) -> None:
        """Have calls fail from the ``nth`` on, counted from now, ``times`` of them.

        Args:
            fault: how.
            action: counts and affects only calls of this action; empty means every call.
            nth: 1 is the next one.
            times: how many fail, one after another.

        Raises:
            ConfigurationError: a number is not positive.
        """
        if nth < 1 or times < 1:
            raise ConfigurationError(f"nth and times count from 1, got {nth} and {times}")
        with self._lock:
            self._planned.append(_Planned(fault, action, nth - 1, times))

    def clear(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._planned.clear()

    def met(self, action: str) -> AwsFault | None:
        """What this call meets: the oldest plan that has come to it. Every plan counts the call."""
        with self._lock:
            found: AwsFault | None = None
            for planned in self._planned:
                if planned.action not in ("", action):
                    continue
                if planned.after:
                    planned.after -= 1
                elif found is None:
                    found = planned.fault
                    planned.times -= 1
            self._planned = [planned for planned in self._planned if planned.times]
            return found
