"""Asks of hosts, and the classes of equal asks that are offered (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from skyward.errors import CapacityError
from skyward.providers._common.machine_catalogue import sold_as
from skyward.providers._common.offer_list import cheapest_offers
from skyward.providers.base import Offer
from skyward.providers.vastai.ask_terms import CPU_ONLY, AskTerms
from skyward.request.accelerators import model_name
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest

__all__ = ["Ask", "in_order", "make_offers", "parse_asks", "region_of", "spec_of"]

_LEAST: Final = InstanceWish(cpu=2, memory_gib=4.0)
"""Smallest machine for a request that gives no size."""
_LEAST_BID: Final = 0.001
_SPARE: Final = 12
"""Asks of a class beyond one per node: the size of the class is the least of all of them."""


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
        least_bid: lowest bid that runs now.
        usd_per_gb_in: price of incoming traffic.
        usd_per_gb_out: price of outgoing traffic.
    """

    id: int
    host: str
    region: str
    spec: InstanceSpec
    price: float
    disk: float
    least_bid: float
    usd_per_gb_in: float
    usd_per_gb_out: float

    def bid(self, factor: float) -> float:
        """Return the bid: the lowest one times a factor, at most the price on demand."""
        return round(max(_LEAST_BID, min(self.least_bid * factor, self.price - self.disk)), 6)

    def charged(self, terms: AskTerms, *, spot: bool) -> float:
        """Return the USD an hour, disk included."""
        return self.bid(terms.bid_factor) + self.disk if spot else self.price

    def serves(self, offer: Offer) -> bool:
        """Return whether it belongs to the class that an offer stands for."""
        name, cpu, memory_gib = offer.spec.name, offer.spec.cpu, offer.spec.memory_gib
        return (
            (self.spec.name, self.region) == (name, offer.region)
            and self.spec.cpu >= cpu
            and self.spec.memory_gib >= memory_gib
        )


def parse_asks(rows: Iterable[Mapping[str, Any]]) -> list[Ask]:
    """Parse the answer to a search; malformed rows are left out."""
    return [each for row in rows if (each := _parse(row)) is not None]


def spec_of(row: Mapping[str, Any]) -> InstanceSpec:
    """Return the share of a machine that an ask or an instance has.

    Raises:
        ArithmeticError, KeyError, TypeError, ValueError: something is missing in the row.
    """
    count, cores = int(row["num_gpus"] or 0), float(row["cpu_cores_effective"])
    memory_gib = float(row["cpu_ram"]) / 1024 * min(1.0, cores / float(row["cpu_cores"]))
    spec = InstanceSpec(name=CPU_ONLY, cpu=max(1, int(cores)), memory_gib=round(memory_gib, 1))
    if not count:
        return spec
    gpu = str(row["gpu_name"]).replace("_", " ")
    sold = sold_as(gpu, model_name(gpu), reported_gib=float(row["gpu_ram"]) / 1024)
    return replace(
        spec,
        name=f"{count}x {gpu}",
        accelerator=sold.name,
        accelerator_count=count,
        accelerator_memory_gib=sold.memory_gib,
    )


def region_of(row: Mapping[str, Any]) -> str:
    """Return the country of an ask or an instance: the end of ``"Quebec, CA"``."""
    return str(row.get("geolocation") or "").rpartition(",")[2].strip()


def in_order(asks: Iterable[Ask], terms: AskTerms, *, spot: bool, used: Mapping[str, int]) -> list[Ask]:
    """Return asks in the order in which they are tried: on other hosts than before first, then the cheapest.

    Args:
        asks: the asks.
        terms: terms of their rental.
        spot: True for bids.
        used: number of machines on each host so far.
    """
    seen, ranked = Counter(used), list[tuple[int, float, int, Ask]]()
    for each in sorted(asks, key=lambda ask: (ask.charged(terms, spot=spot), ask.id)):
        ranked.append((seen[each.host], each.charged(terms, spot=spot), each.id, each))
        seen[each.host] += 1
    return [each for *_, each in sorted(ranked, key=lambda entry: entry[:3])]


def make_offers(asks: Sequence[Ask], request: PoolRequest, terms: AskTerms, *, age_s: float) -> Sequence[Offer]:
    """Return the classes of asks that satisfy a request, of each market, the cheapest first.

    A class costs as much as the dearest of the asks that the request's nodes take.

    Raises:
        CapacityError: no ask does.
    """
    fitting = [each for each in asks if not _shortfall(each, request)]
    if not fitting:
        what = request.machine or str(request.wish)
        raise CapacityError(
            f"VastAI has no machine with {what} now ({terms}{_free(request, terms)}). Try again later, or relax the "
            "parameters of VastAI: regions, min_reliability, min_inet_mbps, verified, disk_gb, billed_traffic"
        )
    fewest = min(each.spec.accelerator_count for each in fitting)
    classes: dict[tuple[str, str], list[Ask]] = defaultdict(list)
    for each in fitting:
        if each.spec.accelerator_count == fewest:
            classes[each.spec.name, each.region].append(each)
    offers = [_offer(same, request, terms, spot=False, age_s=age_s) for same in classes.values()]
    cheaper = [[each for each in same if each.charged(terms, spot=True) < each.price] for same in classes.values()]
    offers += [_offer(same, request, terms, spot=True, age_s=age_s) for same in cheaper if same]
    return cheapest_offers(offers, request, vendor="VastAI")


def _offer(asks: Sequence[Ask], request: PoolRequest, terms: AskTerms, *, spot: bool, age_s: float) -> Offer:
    ordered = in_order(asks, terms, spot=spot, used={})[: request.nodes + _SPARE]
    first = ordered[: request.nodes]
    spec = replace(
        first[0].spec,
        cpu=min(each.spec.cpu for each in ordered),
        memory_gib=min(each.spec.memory_gib for each in ordered),
    )
    return Offer(
        spec=spec,
        region=first[0].region,
        spot=spot,
        price_per_hour=max(each.charged(terms, spot=spot) for each in first),
        on_demand_price_per_hour=max(each.price for each in first),
        price_age_s=age_s,
        note=_note(ordered, request),
        island=True,
    )


def _note(asks: Sequence[Ask], request: PoolRequest) -> str:
    dearest = max(each.usd_per_gb_in for each in asks), max(each.usd_per_gb_out for each in asks)
    if not any(dearest):
        return ""
    note = f"traffic is billed in addition, up to ${dearest[0]:.3g} a GB in and ${dearest[1]:.3g} a GB out"
    return note if request.max_cost is None else f"{note}: max_cost does not hold for it"


def _shortfall(ask: Ask, request: PoolRequest) -> int:
    short = 0 if request.machine is not None else request.wish.shortfall(ask.spec)
    return short or (_LEAST.shortfall(ask.spec) if request.accelerator is None and request.machine is None else 0)


def _free(request: PoolRequest, terms: AskTerms) -> str:
    return ", free traffic, since max_cost is set" if terms.pays_no_traffic(request) else ""


def _parse(row: Mapping[str, Any]) -> Ask | None:
    try:
        price = float(row["dph_total"])
        return Ask(
            id=int(row["id"]),
            host=str(row["machine_id"]),
            region=region_of(row),
            spec=spec_of(row),
            price=price,
            disk=max(0.0, price - float(row["dph_base"])),
            least_bid=float(row["min_bid"]),
            usd_per_gb_in=float(row.get("inet_down_cost") or 0.0),
            usd_per_gb_out=float(row.get("inet_up_cost") or 0.0),
        )
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None
