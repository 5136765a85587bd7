"""What an hour of work costs on spot markets, given the interruptions that a pool has seen. Pure; decision 051."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from skyward.providers.base import Offer

_LOST_H = 0.25
"""Hours of a machine that an interruption costs: the boot of the next one, and the calls that run again."""
_EXPECTED_AN_HOUR = 0.05
"""Interruptions of a machine in an hour that an unknown market is expected to have."""
_EXPECTED_FROM_H = 2.0
"""Weight of this expectation beside what was seen, in hours of a machine."""
_HALF_LIFE_H = 8.0
"""Hours after which what was seen counts half: markets change within a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotLife:
    """Life of a spot machine.

    Attributes:
        offer: the offer that it was bought as.
        began_h: hours since its launch.
        ended_h: hours since its end; 0 while it exists.
        preempted: True if its provider took it back.
    """

    offer: Offer
    began_h: float
    ended_h: float = 0.0
    preempted: bool = False


@dataclass(frozen=True)
class Interruptions:
    """The spot machines that a pool has had. A market is a machine type in a region of a provider.

    Attributes:
        lives: the lives of the machines.
    """

    lives: tuple[SpotLife, ...] = ()

    def an_hour(self, offer: Offer) -> float:
        """Return the number of interruptions to be expected in an hour of a machine; 0 on demand."""
        if not offer.spot:
            return 0.0
        lives = self._of_market(offer)
        hours = _EXPECTED_FROM_H + sum(_faded_hours(life) for life in lives)
        taken = _EXPECTED_AN_HOUR * _EXPECTED_FROM_H + sum(_weight(life.ended_h) for life in lives if life.preempted)
        return taken / hours

    def price_of_work(self, offer: Offer) -> float:
        """Return the USD that an hour of work costs; infinite for an unknown price.

        It is the machine's price for the hour, and for what interruptions of that hour cost. On a spot market without a
        known price it is computed from the price on demand, which is seldom exceeded.
        """
        price = offer.on_demand_price_per_hour if offer.spot and offer.price_per_hour is None else offer.price_per_hour
        return math.inf if price is None else price * (1 + _LOST_H * self.an_hour(offer))

    def seen(self, offer: Offer) -> str:
        """Return what was seen on the market of an offer, in words; empty for no interruption."""
        lives = self._of_market(offer)
        taken = sum(life.preempted for life in lives)
        return f"{taken} of {len(lives)} machines preempted" if taken else ""

    def _of_market(self, offer: Offer) -> Sequence[SpotLife]:
        return self._by_market.get(_market(offer), ())

    @cached_property
    def _by_market(self) -> Mapping[tuple[str, ...], Sequence[SpotLife]]:
        found = defaultdict[tuple[str, ...], list[SpotLife]](list)
        for life in self.lives:
            found[_market(life.offer)].append(life)
        return found


NOTHING_SEEN = Interruptions()


def _market(offer: Offer) -> tuple[str, ...]:
    return offer.provider, offer.region, offer.spec.name


def _weight(hours_ago: float) -> float:
    return 0.5 ** (hours_ago / _HALF_LIFE_H)


def _faded_hours(life: SpotLife) -> float:
    """Return the hours of a life, each counted by how long ago it was."""
    return (_weight(life.ended_h) - _weight(life.began_h)) * _HALF_LIFE_H / math.log(2)
