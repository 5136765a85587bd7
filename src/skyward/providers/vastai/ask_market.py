"""Asks that one search found, kept for a minute and handed out one by one."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from skyward.providers.base import LaunchOrder, Offer
from skyward.providers.vastai.ask_classes import Ask, in_order, make_offers, parse_asks
from skyward.providers.vastai.ask_terms import AskTerms
from skyward.providers.vastai.vast_account import VastAccount
from skyward.request.request import PoolRequest

__all__ = ["AskMarket"]

_KEPT_S: Final = 60.0
"""Longest age of asks. Searches have a quota by the minute and another by the day."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Asks of one search that were not tried since, and the time of the search."""

    asks: list[Ask]
    at: float


class AskMarket:
    """Asks of VastAI's hosts that meet the terms.

    Args:
        account: the account that searches.
        terms: the terms.
        now: the time in seconds.
    """

    def __init__(self, account: VastAccount, terms: AskTerms, now: Callable[[], float] = time.monotonic) -> None:
        self._account = account
        self._terms = terms
        self._now = now
        self._found: dict[str, _Found] = {}
        self._requests: dict[tuple[str, str], PoolRequest] = {}
        self._used: dict[str, Counter[str]] = defaultdict(Counter)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the classes of asks that satisfy a request."""
        found = await self._search(request)
        offers = make_offers(found.asks, request, self._terms, age_s=self._now() - found.at)
        self._requests |= {(each.spec.name, each.region): request for each in offers}
        return offers

    async def take(self, offer: Offer, order: LaunchOrder) -> Ask | None:
        """Return the next ask of an offer's class, which nobody gets again; None if there is none.

        Hosts without a machine of the pool come first, those to be avoided never.
        """
        found = await self._search(self._requests[offer.spec.name, offer.region])
        asks = [each for each in found.asks if each.serves(offer) and each.host not in order.avoid]
        if not asks:
            return None
        first = in_order(asks, self._terms, spot=offer.spot, used=self._used[order.pool_id])[0]
        found.asks.remove(first)
        self._used[order.pool_id][first.host] += 1
        return first

    async def _search(self, request: PoolRequest) -> _Found:
        body = self._terms.search_body(request)
        name = json.dumps(body, sort_keys=True)
        found = self._found.get(name)
        if found is None or self._now() - found.at > _KEPT_S:
            found = _Found(asks=parse_asks(await self._account.search(body)), at=self._now())
            self._found[name] = found
        return found
