"""The limits of a pool's cost and of a machine's price: ``max_cost`` and ``max_price_per_hour``."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from skyward.errors import BudgetError, ConfigurationError
from skyward.market.choose import Batch, describe_place
from skyward.market.cost import CostReport, Usage
from skyward.providers.base import Instance, Offer
from skyward.request.request import PoolRequest

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


# --- the price of single machines -----------------------------------------------------------------------------------

_NOTICED = 1.01
"""A charged price of up to so many times the offered one is no news: vendors round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceLimit:
    """Limit on the price of each machine: ``max_price_per_hour``.

    Attributes:
        max_price_per_hour: USD an hour; infinite without a limit.
    """

    max_price_per_hour: float = math.inf

    @classmethod
    def of(cls, request: PoolRequest) -> PriceLimit:
        """Return the limit of a pool."""
        limit = request.max_price_per_hour
        return cls() if limit is None else cls(max_price_per_hour=limit)

    def allows(self, price_per_hour: float | None) -> bool:
        """Return True if a machine may have this price; an unknown one only without a limit."""
        if math.isinf(self.max_price_per_hour):
            return True
        return price_per_hour is not None and price_per_hour <= self.max_price_per_hour

    def among(self, batches: Sequence[Batch], bought: Iterable[Instance], *, provider: str) -> list[Batch]:
        """Return the batches with only the offers that the limit allows.

        Args:
            batches: the offers to choose from.
            bought: machines so far. Offers that turned out dearer than the limit come into question only where there
                are no others, and if the machines' hosts are known, which are avoided.
            provider: name of the provider, for messages.

        Raises:
            ConfigurationError: a batch has no other offers; the message names the cheapest, or states that the
                provider publishes no price.
        """
        if math.isinf(self.max_price_per_hour):
            return list(batches)
        dearer: dict[Offer, list[Instance]] = {}
        for each in bought:
            if self.excess(each):
                dearer.setdefault(_without_price(each.offer), []).append(each)
        return [self._allowed(batch, dearer, provider) for batch in batches]

    def excess(self, instance: Instance) -> str:
        """Return why a machine that costs more than the limit is unfit; empty if it does not."""
        price = charged_price(instance)
        if price is None or self.allows(price):
            return ""
        return f"costs {_dollars(price)}, more than max_price_per_hour={self.max_price_per_hour:g}"

    def _allowed(self, batch: Batch, dearer: dict[Offer, list[Instance]], provider: str) -> Batch:
        within = [
            (offer, dearer.get(_without_price(offer), []))
            for offer in batch.offers
            if self.allows(offer.price_per_hour)
        ]
        offers = [offer for offer, failed in within if not failed]
        if offers := offers or [offer for offer, failed in within if all(each.host for each in failed)]:
            return replace(batch, offers=tuple(offers))
        real = [_at_real_price(offer, dearer.get(_without_price(offer), [])) for offer in batch.offers]
        known = [offer for offer in real if offer.price_per_hour is not None]
        if not known:
            raise _no_price(batch.offers[0], provider)
        best = min(known, key=lambda offer: offer.price_per_hour or 0.0)
        cheapest = describe_place(best)
        raise ConfigurationError(
            f"max_price_per_hour={self.max_price_per_hour:g} is below every offer of {provider} for this request; the "
            f"cheapest is {cheapest}: raise max_price_per_hour, or try another accelerator, machine, region, spot "
            "strategy or provider"
        )


def charged_price(instance: Instance) -> float | None:
    """Return the price of a machine in USD an hour: as charged, else as offered; None is unknown."""
    return instance.offer.price_per_hour if instance.price_per_hour is None else instance.price_per_hour


def notes_on_bill(provider: str, instances: Iterable[Instance], *, kept: bool = False) -> Sequence[str]:
    """Return notes for the user on machines, maybe of a kept fleet, that cost more or cannot end their own bill."""
    notes: list[str] = []
    for instance in instances:
        vendor = instance.offer.provider or provider
        name, offered, charged = instance.offer.spec.name, instance.offer.price_per_hour, charged_price(instance)
        if offered is not None and charged is not None and charged > offered * _NOTICED:
            notes.append(
                f"{vendor} charges {_dollars(charged)} for {name}, offered at {_dollars(offered)}: "
                "that counts in costs and limits"
            )
        if not instance.ends_itself and charged != 0:
            notes.append(
                f"machines of {vendor} cannot end their own bill: after `keep` a process on this computer ends them; "
                "while the computer is off or has no network, they cost money on"
                if kept
                else f"machines of {vendor} cannot end their own bill: should this program die, they cost money "
                f"until `skyward sweep` ends them, or the next pool that opens with {vendor} on this computer"
            )
    return list(dict.fromkeys(notes))


def _at_real_price(offer: Offer, bought: Sequence[Instance]) -> Offer:
    """Return the offer at the price that was charged for it last, if any was bought."""
    return replace(offer, price_per_hour=charged_price(bought[-1])) if bought else offer


def _without_price(offer: Offer) -> Offer:
    """Return the offer without its price, which may change between two requests for offers."""
    return replace(offer, price_per_hour=None, on_demand_price_per_hour=None, note="")


def _no_price(offer: Offer, provider: str) -> ConfigurationError:
    why = f" ({offer.note})" if offer.note else ""
    return ConfigurationError(
        f"max_price_per_hour needs a known price, and {provider} gives none for {offer.spec.name}{why}; "
        "leave max_price_per_hour out, or name another machine"
    )


def _dollars(price: float) -> str:
    return f"${price:.4g} an hour"
