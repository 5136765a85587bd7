"""Machine types of vendors of two kinds: sizes with their regions, and types of one whole offer."""

from __future__ import annotations

from typing import Any

import pytest

from skyward import Accelerator
from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    closest,
    fewest_accelerators,
    refuse_unlikely,
    sold_accelerators,
    sold_as,
)
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request


def machine(name: str, cpu: int, memory_gib: float, accelerator: str | None = None, count: int = 0) -> MachineType:
    sold = sold_as(accelerator, reported_gib=0.0) if accelerator else None
    spec = InstanceSpec(
        name=name,
        cpu=cpu,
        memory_gib=memory_gib,
        accelerator=sold.name if sold else None,
        accelerator_count=count,
        accelerator_memory_gib=sold.memory_gib if sold else None,
    )
    return MachineType(spec=spec)


TINY, SMALL, LARGE = machine("s-1", 1, 1), machine("s-2", 2, 4), machine("s-8", 8, 16)
ONE, EIGHT = machine("h100x1", 20, 240, "H100", 1), machine("h100x8", 160, 1920, "H100", 8)
L40S, RTX = machine("l40s", 8, 64, "L40S", 1), machine("rtx4000", 8, 32, "RTX-4000-Ada", 1)
SOLD = {
    TINY: ["nyc", "ams"],
    SMALL: ["nyc", "ams"],
    LARGE: ["nyc"],
    ONE: ["nyc", "tor"],
    EIGHT: ["nyc", "tor", "ams"],
    L40S: ["tor"],
    RTX: [],
}


def at(place: str) -> Catalogue:
    return Catalogue(
        vendor="Cloud",
        types=[each for each, places in SOLD.items() if place in places],
        place=place,
        accelerators=sold_accelerators(SOLD),
        places={each.name: places for each, places in SOLD.items()},
        remedy="try Cloud(region={place!r})",
    )


WHOLE = Catalogue(vendor="Cloud", types=list(SOLD), accelerators={"H100": "h100x1", "L40S": "l40s"}, kind="location")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, ["s-2", "s-8"]),
        ({"cpu": 4}, ["s-8"]),
        ({"accelerator": "H100"}, ["h100x1", "h100x8"]),
        ({"accelerator": Accelerator.NVIDIA.H100(count=4)}, ["h100x8"]),
        ({"machine": "s-1"}, ["s-1"]),
    ],
)
def test_a_wish_gets_the_types_that_have_it_the_smallest_first(asked: dict[str, Any], names: list[str]) -> None:
    assert [each.name for each in at("nyc").candidates(parse_request(**asked))] == names


@pytest.mark.parametrize(
    ("place", "asked", "message"),
    [
        (
            "nyc",
            {"accelerator": "L40S"},
            r"L40S \(l40s in tor\) in other regions, but not in nyc: try Cloud\(region='tor'\)$",
        ),
        (
            "nyc",
            {"machine": "l40s"},
            r"machine='l40s': Cloud has it in tor, but not in nyc: try Cloud\(region='tor'\)$",
        ),
        ("nyc", {"machine": "l40"}, r"machine='l40': Cloud has no such machine type in nyc; it has h100x1, "),
        ("nyc", {"machine": "rtx4000"}, r"no such machine type in nyc"),
        ("ams", {"cpu": 8}, r"no machine type with 8 cores in ams; nearest: s-2"),
        ("tor", {"cpu": 2}, r"no machine type with 2 cores in tor$"),
        ("nyc", {"accelerator": Accelerator.NVIDIA.H100(count=16)}, r"at most 8 H100.* in nyc \(h100x8\), not 16"),
        ("nyc", {"accelerator": "H100", "cpu": 500}, r"Cloud's machines with .* in nyc have less than .*h100x8"),
        ("nyc", {"accelerator": "B200"}, r"B200: Cloud has none of these .* in any region; nearest: H100"),
        ("", {"accelerator": "B200"}, r"in any location; nearest: "),
        ("", {"accelerator": "H100-PCIe"}, r"no H100-PCIe with 80 GiB, but H100.* \(h100x1\).*: request that$"),
        ("", {"cpu": 99}, r"no machine type with 99 cores; nearest: "),
        ("", {"machine": "x"}, r"no such machine type; it has h100x1, .*\. `skyward offers --provider NAME` lists"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is_and_where(place: str, asked: dict[str, Any], message: str) -> None:
    catalogue = at(place) if place else WHOLE
    with pytest.raises(ConfigurationError, match=message):
        catalogue.candidates(parse_request(**asked))


@pytest.mark.parametrize(
    ("name", "names", "end"),
    [
        ("EU-RO-9", ["EU-RO-1", "US-TX-3"], "; closest: EU-RO-1, US-TX-3"),
        ("mars", ["FIN-03", "ICE-01"], "; it has FIN-03, ICE-01"),
        ("qqq", [f"x{number}" for number in range(50)], ""),
        ("qqq", [], ""),
    ],
)
def test_an_unknown_name_is_followed_by_similar_ones_or_by_all_that_there_are_if_they_are_few(
    name: str, names: list[str], end: str
) -> None:
    assert closest(name, names) == end


def test_a_vendors_accelerators_are_named_with_the_smallest_machine_and_its_places() -> None:
    assert set(sold_accelerators(SOLD).values()) == {"h100x1 in nyc, tor", "l40s in tor"}


@pytest.mark.parametrize(
    ("names", "reported_gib", "name", "memory_gib"),
    [
        (["A100"], 80.0, "A100-80GB", 80),
        (["A100"], 39.6, "A100-40GB", 40),
        (["H100 SXM"], 80.0, "H100-SXM", 80),
        (["L40S"], 44.7, "L40S", 48),
        (["L40S"], 0.0, "L40S", 48),
        (["H100"], 0.0, "H100-80GB", 80),
        (["nonsense", "L4"], 22.4, "L4", 24),
        (["Phi-9000"], 12.0, "Phi-9000", 12),
    ],
)
def test_an_accelerator_gets_the_name_and_the_memory_it_is_sold_with(
    names: list[str], reported_gib: float, name: str, memory_gib: float
) -> None:
    sold = sold_as(*names, reported_gib=reported_gib)
    assert (sold.name, sold.memory_gib) == (name, memory_gib)


def test_one_who_can_have_one_does_not_pay_for_eight() -> None:
    assert fewest_accelerators([EIGHT, ONE]) == (ONE,)
    assert fewest_accelerators([]) == ()


def test_names_like_a_misspelt_one_are_found() -> None:
    assert closest("h100x2", ["h100x1", "s-1"]) == "; closest: h100x1"


@pytest.mark.parametrize("machine", [None, "CPU", "2x RTX 4090", "1x A100 PCIE", "8x H100 SXM"])
def test_machines_with_catalogued_accelerators_are_not_refused(machine: str | None) -> None:
    refuse_unlikely(machine, "vendor")


def test_a_machine_with_an_accelerator_that_nobody_makes_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"machine='2x RTX 4091': vendor has no .*closest: .*RTX 4090"):
        refuse_unlikely("2x RTX 4091", "vendor")
