"""Limit of a pool's cost. Pure: times are passed in, ``elapsed`` readings of one clock, in seconds."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from skyward.errors import BudgetError, ConfigurationError
from skyward.providers.base import Offer
from skyward.provision.buying.choose import Batch
from skyward.provision.buying.cost import CostReport, Usage

__all__ = ["ENDING_S", "Budget", "expected_usages"]

ENDING_S = 60.0
"""Seconds allowed for ending a pool's machines and confirming it."""
_ALONE_S = 30.0
"""Seconds allowed for a node that ends itself."""
_HORIZON_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limit of a pool's total cost.

    Attributes:
        max_cost: USD; infinite without a limit.
    """

    max_cost: float = math.inf

    def seconds_left(self, usages: Iterable[Usage], now: float) -> float:
        """Return the seconds until a pool with these machines must be ended for the limit; negative if past."""
        return self._lasts_s(tuple(usages), now) - ENDING_S

    def covers(self, usages: Sequence[Usage], now: float) -> bool:
        """Return True if a pool with these machines, ended now, stays below the limit; False for an unknown price."""
        if math.isinf(self.max_cost):
            return True
        priced = all(each.price_per_hour is not None for each in usages)
        return priced and CostReport(usages=tuple(usages), now=now + ENDING_S).total <= self.max_cost

    def cap_s(self, usages: Iterable[Usage], now: float) -> float:
        """Return the seconds for which nodes may run on without their client; at least 1."""
        return max(1.0, self._lasts_s(tuple(usages), now) - _ALONE_S)

    def spent(self, usages: Iterable[Usage], now: float) -> BudgetError:
        """Return the error of a pool whose limit is reached."""
        cost = CostReport(usages=tuple(usages), now=now).total
        return BudgetError(
            f"the pool has cost ${cost:.2f}, and ends now so as not to cost more than max_cost=${self.max_cost:.2f}; "
            "raise max_cost to have more",
            max_cost=self.max_cost,
            cost=cost,
        )

    def afford(self, batches: Sequence[Batch], usages: Sequence[Usage], now: float, *, provider: str) -> list[Batch]:
        """Return the batches with only the offers that are certain to stay below the limit.

        Raises:
            ConfigurationError: the provider publishes no price; or the limit is too low for a pool's first machines
                (the message names the least sum).
            BudgetError: the limit leaves too little for further machines.
        """
        if math.isinf(self.max_cost):
            return list(batches)
        priced = [_priced(batch, provider) for batch in batches]
        least = [min(_least(offer, batch.nodes) for offer in batch.offers) for batch in priced]
        committed = CostReport(usages=tuple(usages), now=now + ENDING_S).total
        spare = self.max_cost - committed - sum(least)
        if spare < 0:
            raise self._too_little(priced, sum(least), committed, provider)
        affordable: list[Batch] = []
        for batch, needed in zip(priced, least, strict=True):
            offers = tuple(offer for offer in batch.offers if _least(offer, batch.nodes) <= needed + spare)
            affordable.append(replace(batch, offers=offers))
        return affordable

    def _lasts_s(self, usages: tuple[Usage, ...], now: float) -> float:
        """Return the seconds for which running machines may go on until the limit; infinite if they never reach it."""
        if math.isinf(self.max_cost) or not any(each.ended_at is None and each.price_per_hour for each in usages):
            return math.inf
        whole = range(_HORIZON_S)
        return bisect.bisect_right(whole, self.max_cost, key=lambda s: CostReport(usages=usages, now=now + s).total) - 1

    def _too_little(
        self, batches: Sequence[Batch], least: float, committed: float, provider: str
    ) -> ConfigurationError | BudgetError:
        nodes = sum(batch.nodes for batch in batches)
        name = batches[0].offers[0].spec.name
        what = (
            f"{nodes} of {name} or the like at {provider} cost at least ${least:.4f}, "
            "for the minute that ending them may take, or for what is billed at least"
        )
        if not committed:
            return ConfigurationError(f"max_cost must be at least {least:.4f}, got {self.max_cost:g}: {what}")
        left = max(0.0, self.max_cost - committed)
        return BudgetError(
            f"max_cost=${self.max_cost:g} leaves ${left:.4f}, and {what}; raise max_cost to have them",
            max_cost=self.max_cost,
            cost=committed,
        )


def expected_usages(batches: Iterable[Batch], now: float) -> list[Usage]:
    """Return the usages of these batches, if each machine is launched now as its best offer."""
    return [Usage.of(batch.offers[0], now) for batch in batches for _ in range(batch.nodes)]


def _priced(batch: Batch, provider: str) -> Batch:
    offers = tuple(offer for offer in batch.offers if offer.price_per_hour is not None)
    if not offers:
        first = batch.offers[0]
        why = f" ({first.note})" if first.note else ""
        raise ConfigurationError(
            f"max_cost needs a known price, and {provider} gives none for {first.spec.name}{why}; "
            "leave max_cost out and set timeout, or name another machine"
        )
    return replace(batch, offers=offers)


def _least(offer: Offer, nodes: int) -> float:
    """Return the least cost of so many machines, in USD, even if they are ended at once."""
    return nodes * Usage.of(offer, 0.0).cost(ENDING_S)
