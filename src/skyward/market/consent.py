"""The most that machines can cost, and the question to the user above a limit."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO, TypeGuard

from skyward.base.waiting import wait_until
from skyward.errors import BudgetError, ConfigurationError
from skyward.market.choose import Batch, describe_offer
from skyward.market.cost import Usage
from skyward.providers.base import Offer

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

    @property
    def covers_elastic(self) -> bool:
        """True if no pool whose nodes come and go can exceed the limit: ``max_cost`` alone bounds its cost."""
        return self.forecast.max_cost <= self.limit

    async def given_to_elastic(self, batches: Sequence[Batch], *, provider: str) -> None:
        """Ask before an elastic pool opens that may exceed the limit: it buys later, and does not ask then.

        Args:
            batches: its machines, if it has as many as it may.
            provider: the provider's name.

        Raises:
            BudgetError: the user declines, or cannot be asked.
        """
        nodes, most = sum(batch.nodes for batch in batches), self.forecast.max_cost
        if any(batch.offers[0].price_per_hour != 0 for batch in batches):
            unknown = "an unknown sum, since they come and go, and max_cost is not set"
            await self._confirm(most, batches, nodes, provider, unknown if math.isinf(most) else f"up to ${most:.2f}")
            self.limit, self.agreed = most, True
        self.nodes = nodes

    async def _confirm(self, most: float, batches: Sequence[Batch], nodes: int, provider: str, total: str = "") -> None:
        wares = " and ".join(f"{batch.nodes} of {describe_offer(batch.offers[0])}" for batch in batches)
        if not total:
            unknown = "an unknown sum, since no price is known"
            total = unknown if math.isinf(most) else f"up to ${most:.2f} until timeout"
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
