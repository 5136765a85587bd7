"""Which offers to take, in which order, for how many nodes: price, size and the spot strategy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from skyward.errors import CapacityError
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest
from skyward.request.spot import Spot, SpotNever, SpotStrategy

__all__ = ["Batch", "Choice", "choose", "notes_on_purchase"]

_INSISTENT = Spot.Always()
_ELSEWHERE = "try again later, or another accelerator, machine, region or provider"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some of the nodes, and what to launch for them.

    Attributes:
        nodes: how many.
        offers: best first, at least one; the next is for when the provider refuses the one before.
        retries: how often to ask again when all of them are refused.
        interval_s: seconds between two tries.
        advice: what to do when they are refused for good.
    """

    nodes: int
    offers: tuple[Offer, ...]
    retries: int = 0
    interval_s: float = 1.0
    advice: str = _ELSEWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How to launch a fleet.

    Attributes:
        batches: in rank order; on-demand nodes come first, since losing the head costs most.
        note: what the user should know about it; empty when there is nothing.
    """

    batches: tuple[Batch, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a strategy says of some nodes: how many go on spot, how insistently, and whether on demand will do."""

    nodes: int
    fall_back: bool = False
    retries: int = 0
    interval_s: float = 1.0
    advice: str = 'try again later, or allow others with spot="if-available"'


def choose(
    request: PoolRequest, offers: Iterable[Offer], *, nodes: int, provider: str, beside: Iterable[Offer] = ()
) -> Choice:
    """Rank what a provider offers for ``nodes`` nodes of ``request`` and apply its spot strategy.

    A share is one of the whole fleet, with the machines ``beside`` these. A provider that offers no spot machine at all
    has no spot market here: every strategy then means on-demand, and the note says so. Raises
    :class:`~skyward.errors.CapacityError` when nothing that the strategy allows is offered.
    """
    ranked = sorted(offers, key=_rank)
    spot = tuple(offer for offer in ranked if offer.spot)
    on_demand = tuple(offer for offer in ranked if not offer.spot)
    share = _share(request.spot, nodes, tuple(beside))
    on_spot = share.nodes if spot else 0
    note = ""
    # what costs nothing needs no excuse
    if share.nodes and not spot and any(offer.price_per_hour != 0 for offer in on_demand):
        note = f"{provider} has no spot market for this: the {_counted(share.nodes)} asked on spot are on-demand"
    batches = (
        _batch(Batch(nodes=nodes - on_spot, offers=on_demand), kind="on-demand", provider=provider),
        _batch(
            Batch(
                nodes=on_spot,
                offers=spot + on_demand if share.fall_back else spot,
                retries=share.retries,
                interval_s=share.interval_s,
                advice=share.advice,
            ),
            kind="spot",
            provider=provider,
        ),
    )
    return Choice(batches=tuple(batch for batch in batches if batch.nodes), note=note)


def _share(strategy: SpotStrategy, nodes: int, beside: Sequence[Offer]) -> _Share:
    match strategy:
        case Spot.Always(retries=retries, interval=interval_s):
            return _Share(nodes=nodes, retries=retries, interval_s=interval_s)
        case Spot.IfAvailable():
            return _Share(nodes=nodes, fall_back=True, advice=_ELSEWHERE)
        case Spot.Percent(share=share):
            # 0.1 * 30 is 3.0000000000000004: a share never asks for one more node than it says
            of_all = math.ceil(round(share * (nodes + len(beside)), 9))
            missing = of_all - sum(offer.spot for offer in beside)
            return _Share(
                nodes=min(max(missing, 0), nodes),
                retries=_INSISTENT.retries,
                interval_s=_INSISTENT.interval,
                advice=f"try again later, or lower the share: spot={share:g} asks for {of_all} of "
                f"{_counted(nodes + len(beside))}",
            )
        case SpotNever():
            return _Share(nodes=0)
        case _:
            assert_never(strategy)


def _batch(batch: Batch, *, kind: str, provider: str) -> Batch:
    if batch.nodes and not batch.offers:
        raise CapacityError(
            f"{provider} offers no {kind} machine for this request; "
            "try another accelerator, machine, region, spot strategy or provider"
        )
    return batch


def notes_on_purchase(asked: Offer, got: Sequence[Offer]) -> Sequence[str]:
    """What the user should know of machines that were launched, of which ``asked`` would have been the best."""
    notes: list[str] = []
    for offer in dict.fromkeys(got):
        if (offer.spec.name, offer.spot) != (asked.spec.name, asked.spot) or _is_dearer(offer, asked):
            notes.append(f"asked for {_described(asked)}, got {_described(offer)}")
            notes += [offer.note] if offer.note else []
        if offer.price_per_hour is None:
            notes.append(f"{_described(offer)} counts as nothing: what the pool really costs is not known")
    return notes


def _is_dearer(offer: Offer, asked: Offer) -> bool:
    price, expected = offer.price_per_hour, asked.price_per_hour
    return price is not None and expected is not None and price > expected


def _described(offer: Offer) -> str:
    price = "price not known" if offer.price_per_hour is None else f"${offer.price_per_hour:.4g} an hour"
    return f"{offer.spec.name} {'on the spot market' if offer.spot else 'on demand'} ({price})"


def _rank(offer: Offer) -> tuple[float, float]:
    """The cheapest first, those of unknown price last; of equally dear ones the smallest."""
    price = math.inf if offer.price_per_hour is None else offer.price_per_hour
    return price, offer.spec.memory_gib


def _counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
