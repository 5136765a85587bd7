"""Offers for a request: the cheapest few of each market, with remarks for the user (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from skyward.providers.base import Offer
from skyward.request.request import PoolRequest

__all__ = ["cheapest_offers", "spread"]

T = TypeVar("T")

_OFFERED: Final = 10
"""Number of offers on each market."""


def cheapest_offers(offers: Iterable[Offer], request: PoolRequest, *, vendor: str) -> Sequence[Offer]:
    """Return the ten cheapest offers on spot, then the ten cheapest on demand; those of unknown price come last.

    Offers with more accelerators than requested get a note that says so. ``vendor`` is the name for that.
    """
    every = sorted(offers, key=_rank)
    chosen = [each for spot in (True, False) for each in [each for each in every if each.spot is spot][:_OFFERED]]
    return [replace(each, note="; ".join(filter(None, (_more(each, request, vendor), each.note)))) for each in chosen]


def spread(items: Iterable[T], host: Callable[[T], str], used: Mapping[str, int]) -> list[T]:
    """Return items with those of the hosts used least first, else in their order; ``used`` are uses until now."""
    uses = Counter(used)
    turns: list[tuple[int, T]] = []
    for each in items:
        turns.append((uses[host(each)], each))
        uses[host(each)] += 1
    return [each for _, each in sorted(turns, key=lambda turn: turn[0])]


def _rank(offer: Offer) -> tuple[float, float, float]:
    price = offer.price_per_hour
    return float("inf") if price is None else price, offer.spec.cpu, offer.spec.memory_gib


def _more(offer: Offer, request: PoolRequest, vendor: str) -> str:
    wanted, spec = request.accelerator, offer.spec
    if request.machine is not None or wanted is None or spec.accelerator_count <= wanted.count:
        return ""
    cost = "price unknown" if offer.price_per_hour is None else f"${offer.price_per_hour:,.2f}/h"
    number = "single" if wanted.count == 1 else str(wanted.count)
    return f"no {number} {wanted.name} on {vendor}: {spec.name} has {spec.accelerator_count}, {cost}"
