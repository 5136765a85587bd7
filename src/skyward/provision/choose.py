"""Which offers to take, in which order, for how many nodes: price, size and the spot strategy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from skyward.errors import CapacityError
from skyward.providers.base import Offer
from skyward.spec.request import PoolRequest
from skyward.spec.spot import Spot, SpotNever, SpotStrategy

__all__ = ["Batch", "Choice", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some of the nodes, and what to launch for them.

    Attributes:
        nodes: how many.
        offers: best first, at least one; the next is for when the provider refuses the one before.
    """

    nodes: int
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How to launch a fleet.

    Attributes:
        batches: in rank order; on-demand nodes come first, since losing the head costs most.
        note: what the user should know about it; empty when there is nothing.
    """

    batches: tuple[Batch, ...]
    note: str = ""


def choose(request: PoolRequest, offers: Iterable[Offer], *, nodes: int, provider: str) -> Choice:
    """Rank what a provider offers for ``nodes`` nodes of ``request`` and apply its spot strategy.

    A provider that offers no spot machine at all has no spot market here: every strategy then means on-demand, and the
    note says so. Raises :class:`~skyward.errors.CapacityError` when nothing that the strategy allows is offered.
    """
    ranked = sorted(offers, key=_rank)
    spot = tuple(offer for offer in ranked if offer.spot)
    on_demand = tuple(offer for offer in ranked if not offer.spot)
    nodes_on_spot, fall_back = _share(request.spot, nodes)
    note = ""
    if nodes_on_spot and not spot:
        if any(offer.price_per_hour != 0 for offer in on_demand):  # what costs nothing needs no excuse
            note = f"{provider} has no spot market for this: the {_counted(nodes_on_spot)} asked on spot are on-demand"
        nodes_on_spot = 0
    batches = (
        _batch(nodes - nodes_on_spot, on_demand, kind="on-demand", provider=provider),
        _batch(nodes_on_spot, spot + on_demand if fall_back else spot, kind="spot", provider=provider),
    )
    return Choice(batches=tuple(batch for batch in batches if batch.nodes), note=note)


def _share(strategy: SpotStrategy, nodes: int) -> tuple[int, bool]:
    """How many nodes go on spot, and whether they may be on-demand after all."""
    match strategy:
        case Spot.Always():
            return nodes, False
        case Spot.IfAvailable():
            return nodes, True
        case Spot.Percent(share=share):
            # 0.1 * 30 is 3.0000000000000004: a share never asks for one more node than it says
            return math.ceil(round(share * nodes, 9)), False
        case SpotNever():
            return 0, False
        case _:
            assert_never(strategy)


def _batch(nodes: int, offers: Sequence[Offer], *, kind: str, provider: str) -> Batch:
    if nodes and not offers:
        raise CapacityError(
            f"{provider} offers no {kind} machine for this request; "
            "try another accelerator, machine, region, spot strategy or provider"
        )
    return Batch(nodes=nodes, offers=tuple(offers))


def _rank(offer: Offer) -> tuple[float, float]:
    """The cheapest first, those of unknown price last; of equally dear ones the smallest."""
    price = math.inf if offer.price_per_hour is None else offer.price_per_hour
    return price, offer.spec.memory_gib


def _counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
