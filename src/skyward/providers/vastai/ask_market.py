"""Asks of hosts: the classes that are offered, and the asks of each, handed out one by one."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from skyward.errors import CapacityError, ConfigurationError
from skyward.providers._common.machine_catalogue import refuse_unlikely, sold_as
from skyward.providers._common.offer_list import cheapest_offers, spread
from skyward.providers._common.shared_answers import SharedAnswer, SharedAnswers
from skyward.providers.base import LaunchOrder, Offer
from skyward.providers.vastai.ask_terms import CPU_ONLY, AskTerms
from skyward.request.accelerators import Accelerator, Vendor, model_name
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest

__all__ = ["MALFORMED", "Ask", "AskMarket", "AskOffer", "region_of", "spec_of"]

MALFORMED: Final = (ArithmeticError, KeyError, TypeError, ValueError)
"""Errors of rows in which something is missing."""
_KEPT_S: Final = 60.0
"""Longest age of asks. Searches have a quota by the minute and another by the day."""
_LEAST: Final = InstanceWish(cpu=2, memory_gib=4.0)
"""Smallest machine for a request that gives no size."""
_VENDORS: Final = (Vendor.NVIDIA, Vendor.AMD, Vendor.UNKNOWN)
"""Vendors of the GPUs that hosts have; a name that Skyward's catalogue lacks may be one of them."""
_LEAST_BID, _BID_STEP, _DEARER = 0.001, 1e-6, 1.01
"""Least bid; least distance of a bid from the price on demand; highest price of an ask as a share of its offer's."""
_SPARE: Final = 12
"""Asks of a class beyond one per node: the size of the class is the least of all of them."""

_Rows = Sequence[Mapping[str, Any]]
Search = Callable[[Mapping[str, Any]], Awaitable[_Rows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOffer(Offer):
    """A class of asks, as it was offered for a request.

    Attributes:
        request: the request; it says which asks suit the pool.
        traffic: USD a GB of incoming and of outgoing traffic, as the note states them.
    """

    request: PoolRequest = field(compare=False, repr=False)
    traffic: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A machine, or a share of one, that a host rents out. Gone within seconds, at times.

    Attributes:
        id: the ask's id.
        host: id of the physical machine.
        region: code of its country.
        spec: its share of the machine; the name is that of its class.
        price: USD an hour on demand, disk included.
        disk: USD an hour of the disk.
        bid: the bid that is made for it, without the disk; infinite if none would run and be below the price on demand.
        traffic: USD a GB of incoming and of outgoing traffic.
    """

    id: int
    host: str
    region: str
    spec: InstanceSpec
    price: float
    disk: float
    bid: float
    traffic: tuple[float, float]

    def charged(self, *, spot: bool) -> float:
        """Return the USD an hour, disk included; infinity if it is not on that market."""
        return self.bid + self.disk if spot else self.price

    def serves(self, offer: AskOffer) -> bool:
        """Return whether it belongs to the class that an offer stands for, and costs no more than was offered."""
        fits = not InstanceWish(cpu=offer.spec.cpu, memory_gib=offer.spec.memory_gib).shortfall(self.spec)
        fits &= self.charged(spot=offer.spot) <= _DEARER * (offer.price_per_hour or 0.0)
        fits &= self.traffic[0] <= offer.traffic[0] and self.traffic[1] <= offer.traffic[1]
        return fits and (self.spec.name, self.region) == (offer.spec.name, offer.region)


class AskMarket:
    """Asks that meet the terms; those that one search found are kept for a minute. Serves several event loops.

    Args:
        search: performs a search.
        terms: the terms.
        now: the time in seconds.
    """

    def __init__(self, search: Search, terms: AskTerms, now: Callable[[], float] = time.monotonic) -> None:
        self._search = search
        self._terms = terms
        self._now = now
        self._found = SharedAnswers[_Rows](_KEPT_S, now)
        self._lock = threading.Lock()
        self._taken: dict[int, float] = {}
        self._used: dict[str, Counter[str]] = defaultdict(Counter)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the classes of asks that satisfy a request, of each market, the cheapest first.

        A class costs as much as the dearest of the asks that the request's nodes take.

        Raises:
            CapacityError: no ask does.
        """
        found = await self._asks(request)
        fitting = [each for each in self._left(found) if _fits(each, request)]
        if not fitting:
            refuse_unlikely(request.machine, "VastAI")
            _refuse_unknown_vendor(request.accelerator)
            free = ", free traffic because of max_cost" if self._terms.pays_no_traffic(request) else ""
            raise CapacityError(
                f"VastAI has no machine with {request.machine or request.wish} now ({self._terms}{free}). Try again "
                "later, or relax regions, min_reliability, min_inet_mbps, verified, disk_gb, billed_traffic of VastAI"
            )
        fewest = min(each.spec.accelerator_count for each in fitting)
        groups: dict[tuple[str, str, bool], list[Ask]] = defaultdict(list)
        for each in fitting:
            for spot in (True, False):
                if each.spec.accelerator_count == fewest and each.charged(spot=spot) < math.inf:
                    groups[each.spec.name, each.region, spot].append(each)
        offers = [_offer(same, request, spot=spot, age_s=self._now() - found.at) for (*_, spot), same in groups.items()]
        return cheapest_offers(offers, request, vendor="VastAI")

    async def take(self, offer: AskOffer, order: LaunchOrder) -> Ask | None:
        """Return the next ask of an offer's class, at about its price at most; None if there is none.

        Hosts without a machine of the pool come first, those to be avoided never. Nobody gets the ask again before it
        is released.
        """
        found = await self._asks(offer.request)
        with self._lock:
            left = [each for each in self._left(found) if each.serves(offer) and each.host not in order.avoid]
            first = next(iter(_in_order(left, spot=offer.spot, used=self._used[order.pool_id])), None)
            if first is not None:
                self._taken[first.id] = math.inf
                self._used[order.pool_id][first.host] += 1
        return first

    def release(self, ask: int) -> None:
        """Let an ask, whose machine is destroyed, be taken again once a later search finds it."""
        self._taken[ask] = self._now()

    def _left(self, found: SharedAnswer[_Rows]) -> Sequence[Ask]:
        """Return the asks of a search that nobody took: the vendor may list a rented one for a while."""
        asks = (_parse(row, self._terms.bid_factor) for row in found.value)
        return [each for each in asks if each is not None and self._taken.get(each.id, -math.inf) < found.at]

    async def _asks(self, request: PoolRequest) -> SharedAnswer[_Rows]:
        """Return the rows that one search has found for a request's terms."""
        body = self._terms.search_body(request)
        return await self._found.of(json.dumps(body, sort_keys=True), lambda: self._search(body))


def _refuse_unknown_vendor(wanted: Accelerator | None) -> None:
    """Refuse an accelerator of which no host will ever have one.

    Raises:
        ConfigurationError: it is none of the kinds that the vendor lists.
    """
    if wanted is not None and wanted.vendor not in _VENDORS:
        raise ConfigurationError(
            f"accelerator {wanted.label}: VastAI has none of these ({wanted.vendor.value}), but GPUs of NVIDIA and "
            "AMD: use another provider"
        )


def spec_of(row: Mapping[str, Any]) -> InstanceSpec:
    """Return the share of a machine that an ask or an instance has; raises one of :data:`MALFORMED`."""
    count, cores = int(row["num_gpus"] or 0), float(row["cpu_cores_effective"])
    memory_gib = float(row["cpu_ram"]) / 1024 * min(1.0, cores / float(row["cpu_cores"]))
    spec = InstanceSpec(name=CPU_ONLY, cpu=max(1, int(cores)), memory_gib=round(memory_gib, 1))
    if not count:
        return spec
    gpu = str(row["gpu_name"]).replace("_", " ")
    sold = sold_as(gpu, model_name(gpu), reported_gib=float(row["gpu_ram"]) / 1024)
    held = {"accelerator": sold.name, "accelerator_memory_gib": sold.memory_gib}
    return replace(spec, name=f"{count}x {gpu}", accelerator_count=count, **held)


def region_of(row: Mapping[str, Any]) -> str:
    """Return the country of an ask or an instance: the end of ``"Quebec, CA"``."""
    return str(row.get("geolocation") or "").rpartition(",")[2].strip()


def _in_order(asks: Iterable[Ask], *, spot: bool, used: Mapping[str, int]) -> list[Ask]:
    """Return asks in the order in which they are tried: the hosts used least first, then the cheapest."""
    return spread(sorted(asks, key=lambda ask: (ask.charged(spot=spot), ask.id)), lambda ask: ask.host, used)


def _offer(asks: Sequence[Ask], request: PoolRequest, *, spot: bool, age_s: float) -> AskOffer:
    ordered = _in_order(asks, spot=spot, used={})[: request.nodes + _SPARE]
    first = ordered[: request.nodes]
    cpu, memory_gib = min(each.spec.cpu for each in ordered), min(each.spec.memory_gib for each in ordered)
    inward, outward = (max(each.traffic[index] for each in ordered) for index in (0, 1))
    note = f"traffic is billed in addition, up to ${inward:.3g} a GB in and ${outward:.3g} a GB out"
    note += "" if request.max_cost is None else ": max_cost does not hold for it"
    return AskOffer(
        request=request,
        traffic=(inward, outward),
        spec=replace(first[0].spec, cpu=cpu, memory_gib=memory_gib),
        region=first[0].region,
        spot=spot,
        price_per_hour=max(each.charged(spot=spot) for each in first),
        on_demand_price_per_hour=max(each.price for each in first),
        price_age_s=age_s,
        note=note if inward or outward else "",
        island=True,
    )


def _fits(ask: Ask, request: PoolRequest) -> bool:
    wish = _LEAST if request.accelerator is None else InstanceWish()
    return request.machine is not None or not (request.wish.shortfall(ask.spec) or wish.shortfall(ask.spec))


def _parse(row: Mapping[str, Any], bid_factor: float) -> Ask | None:
    """Parse an ask; None for a malformed one."""
    try:
        price, base, least = float(row["dph_total"]), float(row["dph_base"]), float(row["min_bid"])
        bid = max(_LEAST_BID, round(least * bid_factor, 6), least)  # one below the least leaves a stopped contract
        return Ask(
            id=int(row["id"]),
            host=str(row["machine_id"]),
            region=region_of(row),
            spec=spec_of(row),
            price=price,
            disk=price - base,
            bid=bid if bid < base - _BID_STEP else math.inf,
            traffic=(float(row.get("inet_down_cost") or 0), float(row.get("inet_up_cost") or 0)),
        )
    except MALFORMED:
        return None
