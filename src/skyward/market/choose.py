"""Choice of offers by price, size and spot strategy; machines that turned out unfit. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from skyward.errors import AuthenticationError, CapacityError, HostKeyError, UnreachableError
from skyward.market.interruptions import NOTHING_SEEN, Interruptions
from skyward.providers.base import Instance, Offer
from skyward.request.request import PoolRequest, Spot, SpotNever, SpotStrategy

_INSISTENT = Spot.Always()
_ALLOW_OTHERS = 'try again later, as wait_for_capacity="2h" does, or allow others with spot="if-available"'
_WORTH_MOVING = 0.9
_TRY_ELSEWHERE = 'try again later, as wait_for_capacity="2h" does, or another accelerator, machine, region or provider'


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some of the nodes, and the offers to launch for them.

    Attributes:
        nodes: number of nodes.
        offers: best first, at least one; each is tried after the provider refused the one before.
        retries: number of retries when all of them are refused.
        interval_s: seconds between two attempts.
        advice: the user's next step when the last attempt is refused.
    """

    nodes: int
    offers: tuple[Offer, ...]
    retries: int = 0
    interval_s: float = 1.0
    advice: str = _TRY_ELSEWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Order of launches for a fleet.

    Attributes:
        batches: in rank order; on-demand nodes come first, since losing the head costs most.
        note: remark for the user; empty if there is none.
    """

    batches: tuple[Batch, ...]
    note: str = ""


def choose(
    request: PoolRequest,
    offers: Iterable[Offer],
    *,
    nodes: int,
    provider: str,
    beside: Iterable[Offer] = (),
    near: Iterable[Offer] | None = None,
    failed: Iterable[Offer] = (),
    seen: Interruptions = NOTHING_SEEN,
    instead_of: Offer | None = None,
) -> Choice:
    """Rank the offers of a provider, or of several, for ``nodes`` nodes of ``request``; apply its spot strategy.

    All nodes are bought alike, so that the price of one ranks the whole order. It is that of an hour of work, which
    interruptions ``seen`` on a market raise. In a list of providers, an offer whose machine has ``failed`` to come up
    ranks behind the others, and after a second failure so does its provider. Unless the request spreads its nodes, they
    go where the machines ``near`` them can be reached: those ``beside`` them, unless it is given.

    A share counts the whole fleet, including the machines ``beside`` these. A provider without any spot offer has no
    spot market: there every strategy means on-demand, and where no provider has one, the note reports it. Raises
    :class:`~skyward.errors.CapacityError` without an offer that the strategy allows.

    ``instead_of`` that offer of a node on demand, only spot machines are chosen whose hour of work costs a tenth less.
    """
    beside = tuple(beside)
    reached = _within_reach(request, tuple(offers), beside if near is None else tuple(near))
    if instead_of is not None:
        less = _WORTH_MOVING * seen.price_of_work(instead_of)
        places = {instead_of.provider} if request.prefer == "order" else {offer.provider for offer in reached}
        reached = [
            each for each in reached if each.spot and each.provider in places and seen.price_of_work(each) <= less
        ]
    ranked = _ranked(request, reached, tuple(failed), seen)
    markets = {offer.provider for offer in ranked if offer.spot}
    spot = tuple(offer for offer in ranked if markets and (offer.spot or offer.provider not in markets))
    on_demand = tuple(offer for offer in ranked if not offer.spot)
    on_spot = _spot_batch(request.spot, nodes, beside, spot, ranked)
    note = ""
    # Only where spot was asked for: "always" is the default, and the line of the launch names the market. Machines that
    # cost nothing, the user's own, need no such remark either.
    asked = request.spot not in (Spot.Always(), Spot.IfAvailable())
    if asked and on_spot.nodes and not spot and any(offer.price_per_hour != 0 for offer in on_demand):
        note = f"{provider} has no spot market for this: the {_counted(on_spot.nodes)} asked on spot are on-demand"
    if not spot:
        on_spot = replace(on_spot, nodes=0)
    batches = {"on-demand": Batch(nodes=nodes - on_spot.nodes, offers=on_demand), "spot": on_spot}
    for kind, batch in batches.items():
        if batch.nodes and not batch.offers:
            raise CapacityError(
                f"{provider} offers no {kind} machine for this request; "
                "try another accelerator, machine, region, spot strategy or provider"
            )
    chosen = tuple(_insistent_alone(batch) for batch in batches.values() if batch.nodes)
    passed_over = [] if request.prefer == "order" else [_note_on_passed_over(batch.offers, seen) for batch in chosen]
    return Choice(batches=chosen, note="; ".join(filter(None, (note, *passed_over))))


def _within_reach(request: PoolRequest, offers: Sequence[Offer], beside: Sequence[Offer]) -> Sequence[Offer]:
    """Return the offers at the sites of a pool's present machines, if they share networks; else all."""
    if request.spread or not any(offer.provider for offer in beside) or any(offer.island for offer in beside):
        return offers
    sites = {offer.site for offer in beside}
    found = [offer for offer in offers if offer.site in sites]
    if offers and not found:
        places = " and ".join(" ".join(filter(None, site)) for site in sorted(sites))
        raise CapacityError(
            f"{places} offers no machine for this request now, and the nodes stay together where the others are; "
            "spread=True lets them come from anywhere"
        )
    return found


def _ranked(
    request: PoolRequest, offers: Sequence[Offer], failed: Sequence[Offer], seen: Interruptions
) -> tuple[Offer, ...]:
    in_list = [offer for offer in failed if offer.provider]
    faults, faults_there = Counter(map(_type_and_place, in_list)), Counter(offer.provider for offer in in_list)
    turns = {each: turn for turn, each in enumerate(dict.fromkeys(offer.provider for offer in offers))}

    def key(offer: Offer) -> tuple[float, ...]:
        turn = turns[offer.provider] if request.prefer == "order" else 0
        price = seen.price_of_work(offer)
        return (
            faults_there[offer.provider] > 1,
            faults[_type_and_place(offer)],
            turn,
            price,
            not offer.spot,
            offer.spec.memory_gib,
        )

    return tuple(sorted(offers, key=key))


def _type_and_place(offer: Offer) -> tuple[tuple[str, str], str, bool]:
    return offer.site, offer.spec.name, offer.spot


def _insistent_alone(batch: Batch) -> Batch:
    """Return a batch without retries if a refusal leads to another provider; ``wait_for_capacity`` waits there."""
    return replace(batch, retries=0) if len({offer.provider for offer in batch.offers}) > 1 else batch


def _note_on_passed_over(ranked: Sequence[Offer], seen: Interruptions) -> str:
    """Return a remark on the cheapest of ranked offers, if interruptions on its market put another before it."""
    cheapest = min(ranked, key=NOTHING_SEEN.price_of_work)
    why = seen.seen(cheapest)
    if not why or cheapest.price_per_hour is None or seen.price_of_work(cheapest) <= seen.price_of_work(ranked[0]):
        return ""
    return (
        f"{describe_place(cheapest)} comes after {describe_place(ranked[0])}: with {why}, an hour of work there "
        f"costs ${seen.price_of_work(cheapest):.3g}"
    )


def describe_place(offer: Offer) -> str:
    """Return what :func:`describe_offer` does, with the region if there is one."""
    return describe_offer(offer) + (f" in {offer.region}" if offer.region else "")


def _spot_batch(
    strategy: SpotStrategy, nodes: int, beside: Sequence[Offer], spot: tuple[Offer, ...], ranked: tuple[Offer, ...]
) -> Batch:
    """Return the nodes that a strategy has on spot, with their offers and what follows a refusal."""
    match strategy:
        case Spot.Always(retries=retries, interval=interval_s):
            return Batch(nodes=nodes, offers=spot, retries=retries, interval_s=interval_s, advice=_ALLOW_OTHERS)
        case Spot.IfAvailable():
            return Batch(nodes=nodes, offers=ranked)
        case Spot.Percent(share=share):
            # 0.1 * 30 is 3.0000000000000004: without rounding, this share would ask for 4 nodes instead of 3
            of_all = math.ceil(round(share * (nodes + len(beside)), 9))
            missing = of_all - sum(offer.spot for offer in beside)
            return Batch(
                nodes=min(max(missing, 0), nodes),
                offers=spot,
                retries=_INSISTENT.retries,
                interval_s=_INSISTENT.interval,
                advice=f"try again later, or lower the share: spot={share:g} asks for {of_all} of "
                f"{_counted(nodes + len(beside))}",
            )
        case SpotNever():
            return Batch(nodes=0, offers=())
        case _:
            assert_never(strategy)


def notes_on_purchase(asked: Offer, got: Sequence[Offer]) -> Sequence[str]:
    """Return remarks on launched machines that differ from the best offer ``asked``, or have no known price.

    One order may be filled by several offers: each has remarks of its own, with the number of its machines.
    """
    notes: list[str] = []
    rented = [offer for offer in got if offer.price_per_hour != 0]  # hosts of the user differ, and need no remark
    for offer, count in Counter(rented).items():
        share = f" for {count} of {_counted(len(got))}" if count < len(got) else ""
        if (offer.spec.name, offer.spot) != (asked.spec.name, asked.spot) or _is_dearer(offer, asked):
            notes.append(f"asked for {describe_offer(asked)}, got {describe_offer(offer)}{share}")
            notes += [offer.note] if offer.note else []
        if offer.price_per_hour is None:
            notes.append(f"{describe_offer(offer)} counts as nothing: the pool's real cost is not known")
    return notes


def _is_dearer(offer: Offer, asked: Offer) -> bool:
    price, expected = offer.price_per_hour, asked.price_per_hour
    return price is not None and expected is not None and price > expected


def describe_offer(offer: Offer) -> str:
    """Return machine type, provider among several, market and price of an offer, for messages."""
    provider = f" of {offer.provider}" if offer.provider else ""
    price = "price not known" if offer.price_per_hour is None else f"${offer.price_per_hour:.4g} an hour"
    return f"{offer.spec.name}{provider} {'on the spot market' if offer.spot else 'on demand'} ({price})"


def _counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


# --- unfit machines -------------------------------------------------------------------------------------------------

_CENT = 0.01
_MACHINES = 3
_WITH_PREEMPTED = 10
"""Most machines of one rank, those included that were taken back while they started, which do not count as unfit."""


class UnfitMachineError(CapacityError):
    """A machine cannot become a node, for a fault of its own. The fleet ends it and buys another.

    Args:
        reason: the fault, in words that follow the machine's name: ``"did not run within 900 s"``.
        preempted: True if the provider took it back: that is no fault, and does not count.
    """

    def __init__(self, reason: str, *, preempted: bool = False) -> None:
        super().__init__(f"the machine {reason}")
        self.reason = reason
        self.preempted = preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A machine that was bought in vain.

    Attributes:
        instance: the provider's record of it.
        reason: see :class:`UnfitMachineError`.
        cost: USD from its launch to the order to terminate it; None if its price is unknown.
        preempted: True if the provider took it back.
    """

    instance: Instance
    reason: str
    cost: float | None
    preempted: bool = False

    def __str__(self) -> str:
        offer = self.instance.offer
        host = f"host {self.instance.host}" if self.instance.host else ""
        place = ", ".join(filter(None, (offer.spec.name, offer.provider, offer.region, host)))
        return f"machine {self.instance.id} ({place}) {self.reason}{_cost_words(self.cost)}"


class UnfitMachines:
    """Record of the machines that a pool bought in vain.

    Attributes:
        hosts: hosts of unfit machines, to be avoided for the rest of the pool's life.
    """

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self._attempts: dict[int, list[Attempt]] = defaultdict(list)

    def add(self, rank: int, attempt: Attempt) -> None:
        """Record a machine that was launched for ``rank``."""
        self._attempts[rank].append(attempt)
        if not attempt.preempted:
            self.avoid_host(attempt.instance)

    def avoid_host(self, instance: Instance) -> None:
        """Avoid the host of an unfit machine, if it is known."""
        if instance.host:
            self.hosts.add(instance.host)

    def offers(self, ranks: Iterable[int]) -> tuple[Offer, ...]:
        """Return what was bought in vain for these ranks; without what was taken back, which is no fault."""
        attempts = (attempt for rank in ranks for attempt in self.attempts(rank))
        return tuple(attempt.instance.offer for attempt in attempts if not attempt.preempted)

    def forget(self, rank: int) -> None:
        """Drop the attempts for a rank that has a sound machine, or gets none."""
        self._attempts.pop(rank, None)

    def attempts(self, rank: int) -> tuple[Attempt, ...]:
        """Return the machines bought in vain for ``rank``, in order."""
        return tuple(self._attempts.get(rank, ()))

    def outcome(self, rank: int) -> str:
        """Return the next step for ``rank``, in words; empty if no further machine is to be bought."""
        attempts = self.attempts(rank)
        unfit = sum(not attempt.preempted for attempt in attempts)
        if unfit >= _MACHINES or len(attempts) >= _WITH_PREEMPTED:
            return ""
        return "another is bought" + (f" ({unfit + 1} of {_MACHINES})" if unfit else "")

    def exhausted(self, rank: int) -> CapacityError:
        """Return the error of a rank without a sound machine, with all of its attempts."""
        attempts = tuple(map(str, self.attempts(rank)))
        listed = "; ".join(f"({number}) {attempt}" for number, attempt in enumerate(attempts, 1))
        return CapacityError(
            f"node {rank} has no sound machine, and no further one is bought after {len(attempts)}: {listed}. "
            "Try another machine type, region or provider",
            attempts=attempts,
        )


def blamed(error: Exception, *, fresh: bool) -> UnfitMachineError | None:
    """Return the error of a machine whose first contact failed with ``error``, or None if that is not its fault.

    Args:
        error: the error of the contact.
        fresh: True for a machine that was made for the pool and got its keys at its launch: then a refused login is the
            fault of its first boot. On other machines the credentials are wrong.
    """
    match error:
        case UnreachableError():
            return UnfitMachineError(f"did not answer ({error})")
        case HostKeyError() if fresh:
            return UnfitMachineError(f"is not the one that was ordered ({error})")
        case AuthenticationError() if fresh:
            return UnfitMachineError(f"admitted no login ({error})")
        case _:
            return None


def _cost_words(cost: float | None) -> str:
    if cost is None:
        return "; its cost is not known"
    if not cost:
        return ""
    return f"; it cost about ${cost:.2f}" if cost >= _CENT else "; it cost less than $0.01"
