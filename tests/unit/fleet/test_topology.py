"""Who is apart, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyward.errors import ConfigurationError
from skyward.fleet.topology import connected, note_on_gangs, separation
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request

NEAR = Offer(spec=InstanceSpec(name="near", cpu=2, memory_gib=4))
ISLAND = replace(NEAR, island=True)


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        ({}, ""),
        ({3: ""}, ""),
        ({0: "a", 1: "a"}, ""),
        ({0: "a", 1: "b"}, "nodes 0, 1 reach no other"),
        ({0: "a", 1: "", 2: "a"}, "nodes 0, 2 reach each other, node 1 reaches no other"),
        ({1: "", 0: ""}, "nodes 0, 1 reach no other"),
    ],
)
def test_nodes_that_do_not_reach_each_other_are_named_with_their_networks(networks: dict[int, str], said: str) -> None:
    assert separation(networks) == said


@pytest.mark.parametrize(
    ("one_network", "nodes", "left"), [(True, 2, [NEAR]), (True, 1, [ISLAND, NEAR]), (False, 2, [ISLAND, NEAR])]
)
def test_islands_are_no_offer_for_several_nodes_that_have_to_reach_each_other(
    one_network: bool, nodes: int, left: list[Offer]
) -> None:
    request = replace(parse_request(), one_network=one_network)

    assert list(connected([ISLAND, NEAR], request, nodes=nodes)) == left


def test_where_only_islands_are_on_offer_the_error_names_what_works() -> None:
    with pytest.raises(ConfigurationError, match=r"2 nodes are needed.*nodes=1.*ComputePool without Dask"):
        connected([ISLAND], replace(parse_request(), one_network=True, service_name="dask"), nodes=2)


@pytest.mark.parametrize(
    ("nodes", "islands", "modules", "noted"),
    [
        (2, (True, True), {"skyward.distributed"}, True),
        (1, (True, True), {"skyward.distributed"}, False),
        (2, (True, False), {"skyward.distributed"}, False),
        (2, (True, True), {"skyward"}, False),
    ],
)
def test_a_program_with_gangs_is_told_of_islands_before_they_are_bought(
    nodes: int, islands: tuple[bool, ...], modules: set[str], noted: bool
) -> None:
    spec = InstanceSpec(name="m", cpu=2, memory_gib=4)
    note = note_on_gangs([Offer(spec=spec, island=each) for each in islands], nodes, "cloud", modules=modules)

    assert ("nodes of cloud cannot reach each other" in note) == noted
    assert ("nodes=1" in note) == noted


@pytest.mark.parametrize(("spread", "is_noted"), [(True, True), (False, False)])
def test_a_program_with_gangs_is_told_that_spread_nodes_may_be_apart(spread: bool, is_noted: bool) -> None:
    offers = [replace(NEAR, provider=provider) for provider in ("a", "b")]
    note = note_on_gangs(offers, 2, "a, b", spread=spread, modules={"skyward.distributed"})

    assert note.startswith("spread=True lets the nodes come from several places") is is_noted
