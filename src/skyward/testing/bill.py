"""A vendor's bill: what the machines of an emulated account cost, by the service's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Bill", "Tariff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """Price of a machine.

    Attributes:
        usd_per_hour: USD an hour.
        minimum_s: least number of seconds billed.
        minimum_usd: least USD charged.
    """

    usd_per_hour: float
    minimum_s: float = 0.0
    minimum_usd: float = 0.0


@dataclass(slots=True)
class _Billed:
    tariff: Tariff
    since: float
    until: float | None = None


class Bill:
    """The vendor's bill, by the second and by the service's clock. Methods take a ``machine`` by its id.

    Attributes:
        clock: returns its time in seconds.
        peak: largest number of machines that were billed at one moment.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.peak = 0
        self.clock = clock
        self._billed: dict[str, _Billed] = {}
        self._charged = 0.0

    def begin(self, machine: str, tariff: Tariff) -> None:
        """Bill a machine from now on, by a ``tariff``."""
        self._billed[machine] = _Billed(tariff, self.clock())
        self.peak = max(self.peak, len(self.open))

    def end(self, machine: str) -> None:
        """Bill a machine up to now. Idempotent."""
        entry = self._billed[machine]
        if entry.until is None:
            entry.until = self.clock()

    def charge(self, usd: float) -> None:
        """Bill ``usd`` for something other than time, such as traffic."""
        self._charged += usd

    @property
    def open(self) -> Sequence[str]:
        """Machines that cost money now."""
        return [machine for machine, entry in self._billed.items() if entry.until is None]

    def seconds(self) -> Mapping[str, int]:
        """Return the billed seconds of each machine, rounded up."""
        now = self.clock()
        return {
            machine: math.ceil(max((now if entry.until is None else entry.until) - entry.since, entry.tariff.minimum_s))
            for machine, entry in self._billed.items()
        }

    def usd(self) -> float:
        """Return the sum so far."""
        seconds = self.seconds()
        of_time = (
            max(entry.tariff.usd_per_hour * seconds[machine] / 3600, entry.tariff.minimum_usd)
            for machine, entry in self._billed.items()
        )
        return sum(of_time, self._charged)
