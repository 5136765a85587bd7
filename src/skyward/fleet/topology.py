"""Reach between a fleet's nodes: whether all of them reach each other."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

from skyward.errors import ConfigurationError
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest

_SEVERAL = 2
_GANGS = "skyward.distributed"

HEAD = 0
"""Rank of the head node, whose address all nodes that reach it are told."""


def separation(networks: Mapping[int, str]) -> str:
    """Return which nodes reach each other, in plain English; empty if all of them do.

    Args:
        networks: network of each node by rank; empty for an island.
    """
    if len(networks) < _SEVERAL or ("" not in networks.values() and len(set(networks.values())) == 1):
        return ""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for rank, network in sorted(networks.items()):
        members[network].append(rank)
    alone = members.pop("", [])
    groups: list[str] = []
    for ranks in members.values():
        if len(ranks) < _SEVERAL:
            alone += ranks
        else:
            groups.append(f"nodes {_listed(ranks)} reach each other")
    if alone:
        groups.append(f"nodes {_listed(alone)} reach no other" if alone[1:] else f"node {alone[0]} reaches no other")
    return ", ".join(groups)


def connected(offers: Sequence[Offer], request: PoolRequest, *, nodes: int) -> Sequence[Offer]:
    """Return the offers whose machines suit a fleet of so many nodes, in their order.

    Raises:
        ConfigurationError: the nodes have to reach each other, and those of no offer do.
    """
    if not request.one_network or nodes < _SEVERAL:
        return offers
    found = [offer for offer in offers if not offer.island]
    if offers and not found:
        apart = f"none of the machines on offer reaches another, and {nodes} nodes are needed"
        raise service_out_of_reach(request.service_name, apart)
    return found


def note_on_gangs(
    offers: Sequence[Offer],
    nodes: int,
    provider: str,
    *,
    spread: bool = False,
    modules: Container[str] = sys.modules,
) -> str:
    """Return the remark on machines for a pool in which a gang could not run; empty if one can, or none is made.

    Args:
        offers: the machines to buy.
        nodes: number of nodes that the pool will have.
        provider: the provider's name.
        spread: True if the nodes may be of several providers.
        modules: imported modules: a program without :mod:`skyward.distributed` has no gangs.
    """
    if nodes < _SEVERAL or _GANGS not in modules:
        return ""
    if spread and len({offer.site for offer in offers}) > 1:
        return (
            "spread=True lets the nodes come from several places, and calls with skyward.distributed are refused on "
            "nodes that do not reach each other"
        )
    if not all(offer.island for offer in offers):
        return ""
    return (
        f"nodes of {provider} cannot reach each other: calls with skyward.distributed are refused on this pool of "
        f"{nodes} nodes. They need nodes=1, or a provider whose machines share a network"
    )


def service_out_of_reach(service: str, apart: str) -> ConfigurationError:
    """Return the error of a use of a service, such as ``dask``, on nodes that are ``apart`` so."""
    name = service.capitalize()
    return ConfigurationError(
        f"{name}'s workers have to reach each other, but {apart}. Ask for nodes=1, or use a provider whose machines "
        f"share a network; >>, @, executors and joblib need none: ComputePool without {name} works there"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
