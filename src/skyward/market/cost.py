"""Cost of machines: what they have cost so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from skyward.events import CostFinal, CostUpdate
from skyward.providers.base import Offer


def charge(
    seconds: float, price_per_hour: float | None, *, minimum_billed_s: float = 0.0, minimum_charge: float = 0.0
) -> float:
    """Return the USD charged for a machine that existed for so many seconds; 0 if its price is 0 or unknown.

    Every begun second counts, and at least the billed minimum; the sum is at least the least charge.
    """
    if not price_per_hour:
        return 0.0
    # 0.1 + 0.2 - 0.3 is 5.6e-17, not 0: such noise must not add a billed second
    billed_s = max(math.ceil(round(seconds, 6)), minimum_billed_s)
    return max(billed_s / 3600 * price_per_hour, minimum_charge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Billed time of one machine. Times are ``elapsed`` readings, in seconds, of one clock.

    Attributes:
        launched_at: time of its request.
        ended_at: time at which it was confirmed gone; None while it may still bill.
        spot: True if it was bought on the spot market.
        price_per_hour: USD, as charged where the provider reports that, else as offered; None is unknown and counts as
            nothing.
        on_demand_price_per_hour: USD for the same machine on demand; None is unknown: no savings are claimed.
        minimum_billed_s: least number of seconds billed.
        minimum_charge: least USD charged.
        provider: label of its provider in a pool of several; empty in a pool of one.
    """

    launched_at: float
    ended_at: float | None = None
    spot: bool = False
    price_per_hour: float | None = None
    on_demand_price_per_hour: float | None = None
    minimum_billed_s: float = 0.0
    minimum_charge: float = 0.0
    provider: str = ""

    @classmethod
    def of(cls, offer: Offer, launched_at: float) -> Usage:
        """Return the usage of a machine launched as ``offer``."""
        return cls(
            launched_at=launched_at,
            spot=offer.spot,
            price_per_hour=offer.price_per_hour,
            on_demand_price_per_hour=offer.on_demand_price_per_hour,
            minimum_billed_s=offer.minimum_billed_s,
            minimum_charge=offer.minimum_charge,
            provider=offer.provider,
        )

    @classmethod
    def past(cls, usd: float, now: float, *, provider: str) -> Usage:
        """Return the usage of a provider's former machines, which have cost so much."""
        return cls(launched_at=now, ended_at=now, price_per_hour=0.01, minimum_charge=usd, provider=provider)

    def charged(self, price_per_hour: float | None) -> Usage:
        """Return the usage at a price read back, in USD an hour, from its launch on; None changes nothing."""
        if price_per_hour is None:
            return self
        on_demand = self.on_demand_price_per_hour if self.spot else price_per_hour
        return replace(self, price_per_hour=price_per_hour, on_demand_price_per_hour=on_demand)

    def cost(self, now: float) -> float:
        """Return the cost until ``now`` in USD."""
        return self._at(self.price_per_hour, now)

    def savings(self, now: float) -> float:
        """Return the savings over the same time on demand in USD; 0 if a price is unknown."""
        if self.price_per_hour is None or self.on_demand_price_per_hour is None:
            return 0.0
        return self._at(self.on_demand_price_per_hour, now) - self.cost(now)

    def _at(self, price_per_hour: float | None, now: float) -> float:
        return charge(
            (now if self.ended_at is None else self.ended_at) - self.launched_at,
            price_per_hour,
            minimum_billed_s=self.minimum_billed_s,
            minimum_charge=self.minimum_charge,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """Cost of a fleet until now.

    Attributes:
        usages: every machine that it has had.
        now: the present reading of the usages' clock, in seconds.
        provider: name of the provider of usages without a label.
    """

    usages: tuple[Usage, ...]
    now: float
    provider: str = ""

    @property
    def total(self) -> float:
        """USD so far."""
        return sum(usage.cost(self.now) for usage in self.usages)

    @property
    def by_provider(self) -> Mapping[str, float]:
        """USD so far by provider, in the order of their first machines; the sum is the total."""
        costs: defaultdict[str, float] = defaultdict(float)
        for usage in self.usages:
            costs[usage.provider or self.provider] += usage.cost(self.now)
        return dict(costs)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first launch until now, or until the last machine ended."""
        ends = [self.now if usage.ended_at is None else usage.ended_at for usage in self.usages]
        return max(ends, default=self.now) - min((usage.launched_at for usage in self.usages), default=self.now)

    def update(self) -> CostUpdate:
        """Return the event of a running pool; rate and counts are those of the machines that run now."""
        running = [usage for usage in self.usages if usage.ended_at is None]
        return CostUpdate(
            elapsed_seconds=self.elapsed_s,
            accumulated_cost=self.total,
            hourly_rate=sum(usage.price_per_hour or 0.0 for usage in running),
            spot_count=sum(usage.spot for usage in running),
            ondemand_count=sum(not usage.spot for usage in running),
            cost_by_provider=self.by_provider,
        )

    def final(self) -> CostFinal:
        """Return the event of an ended pool; rate and counts are those of all machines together."""
        return CostFinal(
            total_cost=self.total,
            total_seconds=self.elapsed_s,
            hourly_rate=sum(usage.price_per_hour or 0.0 for usage in self.usages),
            spot_count=sum(usage.spot for usage in self.usages),
            ondemand_count=sum(not usage.spot for usage in self.usages),
            savings_vs_ondemand=sum(usage.savings(self.now) for usage in self.usages),
            cost_by_provider=self.by_provider,
        )
