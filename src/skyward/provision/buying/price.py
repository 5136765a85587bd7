"""Price of single machines: its limit, the price as charged, and the remarks on a bill that lasts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from skyward.errors import ConfigurationError
from skyward.providers.base import Instance, Offer
from skyward.provision.buying.choose import Batch, describe_offer
from skyward.request.request import PoolRequest

__all__ = ["PriceLimit", "charged_price", "notes_on_bill"]

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
                dearer.setdefault(_kind(each.offer), []).append(each)
        return [self._allowed(batch, dearer, provider) for batch in batches]

    def excess(self, instance: Instance) -> str:
        """Return the fault of a machine dearer than the limit, as an unfit machine's reason; empty if it is not."""
        price = charged_price(instance)
        if price is None or self.allows(price):
            return ""
        return f"costs {_dollars(price)}, more than max_price_per_hour={self.max_price_per_hour:g}"

    def _allowed(self, batch: Batch, dearer: dict[Offer, list[Instance]], provider: str) -> Batch:
        within = [(offer, dearer.get(_kind(offer), [])) for offer in batch.offers if self.allows(offer.price_per_hour)]
        offers = [offer for offer, failed in within if not failed]
        if offers := offers or [offer for offer, failed in within if all(each.host for each in failed)]:
            return replace(batch, offers=tuple(offers))
        real = [_at_real_price(offer, dearer.get(_kind(offer), [])) for offer in batch.offers]
        known = [offer for offer in real if offer.price_per_hour is not None]
        if not known:
            raise _no_price(batch.offers[0], provider)
        best = min(known, key=lambda offer: offer.price_per_hour or 0.0)
        cheapest = describe_offer(best) + (f" in {best.region}" if best.region else "")
        raise ConfigurationError(
            f"max_price_per_hour={self.max_price_per_hour:g} is below every offer of {provider} for this request; the "
            f"cheapest is {cheapest}: raise max_price_per_hour, or try another accelerator, machine, region, spot "
            "strategy or provider"
        )


def charged_price(instance: Instance) -> float | None:
    """Return the price of a machine in USD an hour: as charged, else as offered; None is unknown."""
    return instance.offer.price_per_hour if instance.price_per_hour is None else instance.price_per_hour


def notes_on_bill(provider: str, instances: Iterable[Instance]) -> Sequence[str]:
    """Return remarks for the user on machines that are dearer than offered, or cannot end their own bill."""
    notes: list[str] = []
    for instance in instances:
        name, offered, charged = instance.offer.spec.name, instance.offer.price_per_hour, charged_price(instance)
        if offered is not None and charged is not None and charged > offered * _NOTICED:
            notes.append(
                f"{provider} charges {_dollars(charged)} for {name}, offered at {_dollars(offered)}: "
                "that counts in costs and limits"
            )
        if not instance.ends_itself and charged != 0:
            notes.append(
                f"machines of {provider} cannot end their own bill: should this program die, they cost money until "
                f"`skyward sweep` ends them, or the next pool that opens with {provider} on this computer"
            )
    return list(dict.fromkeys(notes))


def _at_real_price(offer: Offer, bought: Sequence[Instance]) -> Offer:
    """Return the offer at the price that was charged for it last, if any was bought."""
    return replace(offer, price_per_hour=charged_price(bought[-1])) if bought else offer


def _kind(offer: Offer) -> Offer:
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
