"""A pool over five clouds and a host of one's own opens as planned, also where some of them have nothing to sell."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from support.clouds.all_clouds import AllClouds, all_clouds
from support.openings import Opening, OpeningEndedError, watch_openings

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

IMAGE = sky.Image(mirror=False)


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Iterator[AllClouds]:
    folder = tmp_path_factory.mktemp("clouds")
    with pytest.MonkeyPatch.context() as patch, all_clouds(patch, folder, cache=ssh_cache) as clouds:
        yield clouds


def opened_with(clouds: AllClouds, *names: str, **parameters: Any) -> Opening:
    pool = sky.ComputePool(
        provider=clouds.providers(*names), image=IMAGE, cpu=2, memory="2GB", display="quiet", **parameters
    )
    with pytest.MonkeyPatch.context() as patch:
        openings = watch_openings(patch)
        with pytest.raises(OpeningEndedError), pool:
            pass
    (opening,) = openings
    opening.check()
    return opening


def places(opening: Opening) -> list[str]:
    """Return the providers of the planned offers, in order, each run of them once."""
    return [name for name, _ in itertools.groupby(each.provider for each in opening.plan.offers)]


@pytest.mark.parametrize(
    "parameters",
    [
        {"spot": "never", "nodes": 2},
        {"spot": "if-available", "max_cost": 2.0},
        {"spot": "never", "prefer": "order", "max_price_per_hour": 0.05},
        {"spot": "never", "nodes": 2, "spread": True},
    ],
    ids=str,
)
def test_the_plan_is_what_is_tried(parameters: dict[str, Any], clouds: AllClouds) -> None:
    opening = opened_with(clouds, "verda", "aws", "digitalocean", "runpod", "vastai", **parameters)

    assert len({*places(opening)}) > 2
    assert {*opening.tried} == {places(opening)[0]}
    assert clouds.alive() == {}


def test_where_the_first_are_sold_out_the_next_of_the_plan_serves(clouds: AllClouds) -> None:
    cheapest = places(opened_with(clouds, "verda", "digitalocean", "aws", spot="never"))
    clouds.sell_out(*cheapest[:2])
    try:
        opening = opened_with(clouds, "verda", "digitalocean", "aws", spot="never")
    finally:
        clouds.restock(*cheapest[:2])

    passed = opening.tried.index(cheapest[2])
    assert [name for name, _ in itertools.groupby(opening.tried[: passed + 1])] == places(opening)[: passed + 1]


def test_a_host_of_ones_own_is_first_and_free(clouds: AllClouds) -> None:
    opening = opened_with(clouds, "aws", "ssh", spot="never")

    assert opening.plan.offers[0].provider == "ssh"
    assert (opening.plan.offers[0].at_most, opening.plan.offers[0].ends_itself) == (0.0, True)
    assert opening.tried == ["ssh"]
