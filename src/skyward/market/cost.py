"""Cost of machines: what they have cost and can cost, and the limits of pool, machine and user."""

from __future__ import annotations

import asyncio
import bisect
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO, TypeGuard

from skyward.base.waiting import wait_until
from skyward.errors import BudgetError, ConfigurationError
from skyward.events import CostFinal, CostUpdate
from skyward.market.choose import Batch, describe_offer
from skyward.providers.base import Instance, Offer
from skyward.request.request import PoolRequest


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
    """

    launched_at: float
    ended_at: float | None = None
    spot: bool = False
    price_per_hour: float | None = None
    on_demand_price_per_hour: float | None = None
    minimum_billed_s: float = 0.0
    minimum_charge: float = 0.0

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
        )

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
    """

    usages: tuple[Usage, ...]
    now: float

    @property
    def total(self) -> float:
        """USD so far."""
        return sum(usage.cost(self.now) for usage in self.usages)

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
        )


# --- the limit of a pool's cost -------------------------------------------------------------------------------------

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


# --- the most that machines can cost, and the consent to it ---------------------------------------------------------

CONFIRM_ABOVE = "SKYWARD_CONFIRM_ABOVE"
"""Environment variable: USD above which a pool is opened only after a confirmation."""
_YES = ("y", "yes")
_LINE_BYTES = 1024
_TURN_S = 0.1
# Standard input belongs to the process: two pools that open at the same time, on any loop, ask one after the other.
_asking = threading.Lock()

Ask = Callable[[str], Awaitable[bool | None]]
"""Asks a question; returns the answer, or None where nobody can answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Terms that bound the cost of machines. Pure.

    Attributes:
        timeout_s: seconds after its launch at which a machine ends.
        max_cost: USD that the pool may cost; infinite without a limit.
    """

    timeout_s: float
    max_cost: float = math.inf

    def most(self, offer: Offer, count: int = 1) -> float:
        """Return the most that so many machines of an offer can cost in USD; infinite for an unknown price."""
        if offer.price_per_hour is None:
            return self.max_cost
        return min(self.max_cost, count * Usage.of(offer, 0.0).cost(self.timeout_s))


def limit_of(environ: Mapping[str, str]) -> float:
    """Return the sum in USD above which a purchase is confirmed; infinite if the user has set none.

    Raises:
        ConfigurationError: the variable's value is no sum.
    """
    value = environ.get(CONFIRM_ABOVE, "").strip()
    if not value:
        return math.inf
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise ConfigurationError(f"{CONFIRM_ABOVE} must be a sum in USD such as 20, got {value!r}")
    return limit


@dataclass(slots=True)
class Consent:
    """The user's limit on the most that a pool can cost, and the consent to exceed it.

    Attributes:
        forecast: the bounds of the cost.
        limit: USD; infinite without a limit.
        ask: asks the user.
        nodes: the largest number of nodes bought so far.
        agreed: True once the user has agreed to a sum above the limit: so many nodes may be replaced at any price.
    """

    forecast: Forecast
    limit: float = field(default_factory=lambda: limit_of(os.environ))
    ask: Ask = field(default_factory=lambda: ask_on_terminal)
    nodes: int = 0
    agreed: bool = False

    async def given(self, batches: Sequence[Batch], beside: Sequence[Offer], *, provider: str) -> list[Batch]:
        """Return the batches with only the offers that the user has agreed to; ask first if the best exceed the limit.

        Args:
            batches: the machines to buy.
            beside: offers of the pool's present machines.
            provider: the provider's name.

        Raises:
            BudgetError: the user declines, or cannot be asked. A pool that is open already does not ask.
        """
        nodes = len(beside) + sum(batch.nodes for batch in batches)
        if math.isinf(self.limit) or (self.agreed and nodes <= self.nodes):
            return list(batches)
        best = [self.forecast.most(batch.offers[0], batch.nodes) for batch in batches]
        most = min(self.forecast.max_cost, sum(self.forecast.most(offer) for offer in beside) + sum(best))
        if most > self.limit:
            await self._confirm(most, batches, nodes, provider)
            self.limit, self.agreed = most, True
        self.nodes = max(self.nodes, nodes)
        if math.isinf(self.limit):
            return list(batches)
        spare = (self.limit - most) / len(batches)
        return [
            replace(
                batch,
                offers=tuple(each for each in batch.offers if self.forecast.most(each, batch.nodes) <= own + spare),
            )
            for batch, own in zip(batches, best, strict=True)
        ]

    async def _confirm(self, most: float, batches: Sequence[Batch], nodes: int, provider: str) -> None:
        wares = " and ".join(f"{batch.nodes} of {describe_offer(batch.offers[0])}" for batch in batches)
        total = "an unknown sum, since no price is known" if math.isinf(most) else f"up to ${most:.2f} until timeout"
        what = f"{wares} at {provider} can cost {total}"
        limit = f"{CONFIRM_ABOVE}={self.limit:g}"
        answer = None if self.nodes else await self.ask(f"{what}, more than {limit}. Buy? [y/N] ")
        if answer:
            return
        why = "it was not confirmed" if answer is False else "nobody can confirm it here"
        if self.nodes:
            why, what = "an open pool does not ask", f"{what}, together with the present machines of {nodes} nodes"
        raise BudgetError(
            f"{what}, more than {limit}, and {why}: nothing was bought. Raise {CONFIRM_ABOVE}, shorten timeout, set "
            "max_cost, or ask for less",
            max_cost=self.limit,
            cost=most,
        )


async def ask_on_terminal(question: str, *, stdin: TextIO | None = None, stderr: TextIO | None = None) -> bool | None:
    """Ask on the terminal; return True for yes, False for anything else, None without a terminal.

    A cancellation ends the wait, which a thread that reads would not allow.
    """
    stdin, stderr = stdin or sys.stdin, stderr or sys.stderr
    if not (_is_terminal(stdin) and _is_terminal(stderr)):
        return None
    loop, readable, terminal = asyncio.get_running_loop(), asyncio.Event(), stdin.fileno()
    await wait_until(_turn, deadline_s=math.inf, interval_s=_TURN_S, what="another pool's question to be answered")
    try:
        print(question, end="", file=stderr, flush=True)
        loop.add_reader(terminal, readable.set)
        await readable.wait()
        answer = os.read(terminal, _LINE_BYTES).decode(errors="replace")
    finally:
        loop.remove_reader(terminal)
        _asking.release()
    return answer.strip().lower() in _YES


async def _turn() -> bool | None:
    return _asking.acquire(blocking=False) or None


def _is_terminal(stream: TextIO | None) -> TypeGuard[TextIO]:
    try:
        return stream is not None and stream.isatty() and stream.fileno() >= 0
    except (ValueError, OSError):  # it is closed, or a window of an editor without a descriptor
        return False
