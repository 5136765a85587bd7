"""Which machine type each example of the specification gets, of those that EC2 really has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward import NVIDIA, Accelerator
from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import MachineType, fewest_accelerators
from skyward.providers.aws.account import FAMILIES, candidates, parse_types
from skyward.providers.aws.offering import PriceTable, make_offers
from skyward.request.accelerators import find_variant
from skyward.request.request import parse_request

CHOSEN: list[tuple[dict[str, Any], str]] = [
    # strings
    ({"accelerator": "T4"}, "g4dn.xlarge"),
    ({"accelerator": "L4"}, "g6.xlarge"),
    ({"accelerator": "L40S"}, "g6e.xlarge"),
    ({"accelerator": "A10G"}, "g5.xlarge"),
    ({"accelerator": "A100"}, "p4de.24xlarge"),
    ({"accelerator": "A100-40GB"}, "p4d.24xlarge"),
    ({"accelerator": "A100-80GB"}, "p4de.24xlarge"),
    ({"accelerator": "H100"}, "p5.4xlarge"),
    ({"accelerator": "H100-80GB"}, "p5.4xlarge"),
    ({"accelerator": "H100-SXM"}, "p5.4xlarge"),
    ({"accelerator": "H200"}, "p5e.48xlarge"),
    ({"accelerator": "B200"}, "p6-b200.48xlarge"),
    ({"accelerator": "B300"}, "p6-b300.48xlarge"),
    ({"accelerator": "RTX-PRO-6000"}, "g7e.2xlarge"),
    ({"accelerator": "T4g"}, "g5g.xlarge"),
    ({"accelerator": "Trainium2"}, "trn2.3xlarge"),
    # factories
    ({"accelerator": NVIDIA.A100}, "p4de.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.T4()}, "g4dn.xlarge"),
    ({"accelerator": Accelerator.NVIDIA.H100()}, "p5.4xlarge"),
    ({"accelerator": Accelerator.NVIDIA.H100(count=4)}, "p5.48xlarge"),
    ({"accelerator": Accelerator.NVIDIA.H100(count=8)}, "p5.48xlarge"),
    ({"accelerator": Accelerator.NVIDIA.A100(count=4)}, "p4de.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.A100(count=8)}, "p4de.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.A100(memory="40GB")}, "p4d.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.V100(memory="32GB")}, "p3dn.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.H100(form_factor="SXM")}, "p5.4xlarge"),
    ({"accelerator": Accelerator.NVIDIA.T4(count=4)}, "g4dn.12xlarge"),
    # MIG
    ({"accelerator": Accelerator.NVIDIA.H100(mig="3g.40gb")}, "p5.4xlarge"),
    ({"accelerator": Accelerator.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"])}, "p4de.24xlarge"),
    ({"accelerator": Accelerator.NVIDIA.A100(memory="40GB", mig="1g.5gb")}, "p4d.24xlarge"),
    # AWS's own
    ({"accelerator": Accelerator.AWS.Trainium(version=1)}, "trn1.2xlarge"),
    ({"accelerator": Accelerator.AWS.Trainium(version=1, count=16)}, "trn1.32xlarge"),
    ({"accelerator": Accelerator.AWS.Trainium(version=2)}, "trn2.3xlarge"),
    ({"accelerator": Accelerator.AWS.Trainium(version=2, count=16)}, "trn2.48xlarge"),
    ({"accelerator": Accelerator.AWS.Inferentia(version=1)}, "inf1.xlarge"),
    ({"accelerator": Accelerator.AWS.Inferentia(version=2)}, "inf2.xlarge"),
    ({"accelerator": Accelerator.AWS.Inferentia(version=2, count=12)}, "inf2.48xlarge"),
    # a machine by name, whatever else is asked for
    ({"machine": "p5.48xlarge"}, "p5.48xlarge"),
    ({"machine": "g6f.large", "accelerator": "H100"}, "g6f.large"),
    ({"machine": "g4dn.metal"}, "g4dn.metal"),
    ({"machine": "c7g.large"}, "c7g.large"),
    # besides the accelerator
    ({"accelerator": "T4", "cpu": 16}, "g4dn.4xlarge"),
    ({"accelerator": "L4", "memory": "100GB"}, "gr6.4xlarge"),
    ({"accelerator": "T4", "cpu": 4, "concurrency": 4}, "g4dn.4xlarge"),
    # without one
    ({"cpu": 4, "memory": "32GB"}, "r5a.xlarge"),
    ({"memory": "2TB"}, "x2iedn.16xlarge"),
]
"""What is asked for, and the smallest machine type that has it; every pool of the reference and accelerators.md."""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"accelerator": Accelerator.Google.TPU(version="v5p")}, r"TPU-v5p: EC2 has none of these .*nearest: "),
    ({"accelerator": Accelerator.Google.TPUSlice("v5p-8")}, r"TPU-v5p: EC2 has none of these"),
    ({"accelerator": Accelerator.AMD.MI("300X")}, r"MI300X: EC2 has none of these \(AMD, 192 GiB\).*nearest: B200"),
    ({"accelerator": Accelerator.AMD.MI("250X")}, r"MI250X: EC2 has none of these"),
    ({"accelerator": Accelerator.AMD.RadeonPro("V710")}, r"V710: EC2 has none of these.*nearest: Radeon-Pro-V520"),
    (
        {"accelerator": Accelerator.NVIDIA.H100(form_factor="PCIe")},
        r"no H100-PCIe with 80 GiB in any region; us-east-1 has H100-SXM \(p5[^:]*: request that$",
    ),
    ({"accelerator": Accelerator.NVIDIA.H100(form_factor="NVL")}, r"no H100-NVL with 94 GiB in any region;.*H100-SXM"),
    ({"accelerator": NVIDIA.H100_PCIe}, r"no H100-PCIe"),
    ({"accelerator": "V100"}, r"no V100 with 16 GiB in any region; us-east-1 has V100-32GB \(p3dn.24xlarge\)"),
    ({"accelerator": "A10"}, r"A10: EC2 has none of these.*nearest: A10G \(g5\)"),
    ({"accelerator": "L40"}, r"L40: EC2 has none of these.*nearest: L40S \(g6e\)"),
    ({"accelerator": "GH200"}, r"GH200: EC2 has none of these"),
    ({"accelerator": "B100"}, r"B100: EC2 has none of these"),
    ({"accelerator": "RTX-4090"}, r"RTX-4090: EC2 has none of these"),
    ({"accelerator": "GB200"}, r"no GB200 with 384 GiB in any region, but GB200-192GB \(p6e-gb200\)"),
    ({"accelerator": Accelerator.NVIDIA.A100(count=16)}, r"at most 8 A100-80GB on a machine .*request more nodes"),
    ({"accelerator": Accelerator.AMD.RadeonPro("V520")}, r"has Radeon-Pro-V520 \(g4ad\) in other regions, but not in"),
    ({"accelerator": "T4", "cpu": 500}, r"with 1x T4 in us-east-1 have less than .*the largest is g4dn.12xlarge"),
    ({"machine": "p5.48xlrge"}, r"no such machine type in us-east-1; closest: p5.48xlarge"),
    ({"cpu": 10_000}, r"no machine type with 10000 cores in us-east-1; nearest: "),
]


def smallest(types: tuple[MachineType, ...], asked: dict[str, Any]) -> MachineType:
    return fewest_accelerators(candidates(types, parse_request(**asked), region="us-east-1"))[0]


def test_the_docs_name_the_accelerators_that_can_be_rented() -> None:
    page = (Path(__file__).parents[4] / "docs/accelerators.md").read_text(encoding="utf-8")
    listed = page.partition("`AWS()` rents ")[2].partition(", each in some regions")[0]

    assert sorted(re.split(r",\s|\sand\s", listed)) == sorted(FAMILIES)


def test_the_smallest_type_that_has_it_is_chosen(subtests: pytest.Subtests, types: tuple[MachineType, ...]) -> None:
    for asked, name in CHOSEN:
        with subtests.test(asked=asked, name=name):
            assert smallest(types, asked).name == name


def test_what_cannot_be_had_is_refused_with_what_can(subtests: pytest.Subtests, types: tuple[MachineType, ...]) -> None:
    for asked, message in REFUSED:
        with subtests.test(asked=asked, message=message), pytest.raises(ConfigurationError, match=message):
            smallest(types, asked)


def test_every_type_can_be_read(types: tuple[MachineType, ...], type_rows: Mapping[str, Any]) -> None:
    assert {each.name for each in types} == set(type_rows)


def test_what_cannot_be_read_is_left_out(type_rows: Mapping[str, Any]) -> None:
    row = type_rows["g4dn.xlarge"]
    broken = [{}, {**row, "VCpuInfo": {}}, {**row, "GpuInfo": {"Gpus": [{}]}}, {**row, "MemoryInfo": None}]

    assert [each.name for each in parse_types([*broken, row])] == ["g4dn.xlarge"]


def test_every_family_in_the_table_has_what_the_table_says(types: tuple[MachineType, ...]) -> None:
    real = {each.family: each.spec.accelerator for each in types if each.spec.accelerator}
    for name, families in FAMILIES.items():
        assert find_variant(name) is not None
        for family in families.split(", "):
            assert real.get(family, name) == name  # some are in no region that moto knows


def test_accelerators_that_are_listed_twice_count_once(types: tuple[MachineType, ...]) -> None:
    found = {each.name: each.spec for each in types}
    assert (found["inf2.48xlarge"].accelerator, found["inf2.48xlarge"].accelerator_count) == ("Inferentia2", 12)


def test_memory_is_what_the_accelerator_is_sold_as(types: tuple[MachineType, ...]) -> None:
    found = {each.name: each.spec.accelerator_memory_gib for each in types}
    assert (found["g6.xlarge"], found["g6e.xlarge"], found["p6-b200.48xlarge"]) == (24, 48, 192)
    assert found["trn2.48xlarge"] == 96


def test_fractions_bare_metal_and_bursting_machines_are_chosen_only_by_name(types: tuple[MachineType, ...]) -> None:
    unasked = {each.name for each in types if each.whole}
    assert not unasked & {"g6f.large", "g4dn.metal", "t3.large"}


def test_a_small_general_machine_is_chosen_where_nothing_is_asked_for(types: tuple[MachineType, ...]) -> None:
    found = candidates(types, parse_request(), region="us-east-1")
    assert {(each.spec.cpu, each.architecture, each.spec.accelerator) for each in found[:10]} == {(2, "x86_64", None)}
    assert all(each.spec.memory_gib >= 4 for each in found[:10])


def test_eight_where_one_was_asked_for_is_said_with_the_price(types: tuple[MachineType, ...]) -> None:
    request = parse_request(accelerator="A100")
    chosen = [smallest(types, {"accelerator": "A100"})]

    offers = make_offers(chosen, chosen, PriceTable(on_demand={"p4de.24xlarge": 40.966}), request, region="us-east-1")

    unknown = "the account may not query them (ec2:DescribeSpotPriceHistory), or AWS lists none"
    assert [offer.note for offer in offers] == [
        f"no single A100 on EC2: p4de.24xlarge has 8, price unknown; prices on spot are unknown: {unknown}",
        "no single A100 on EC2: p4de.24xlarge has 8, $40.97/h",
    ]


def test_offers_say_the_price_of_the_cheapest_zone_and_the_shortest_bill(types: tuple[MachineType, ...]) -> None:
    chosen = [smallest(types, {"accelerator": "T4"})]
    spot = {"g4dn.xlarge": {"us-east-1a": 0.3, "us-east-1b": 0.2}}
    prices = PriceTable(on_demand={"g4dn.xlarge": 0.526}, spot=spot)

    on_spot, on_demand = make_offers(chosen, chosen, prices, parse_request(accelerator="T4"), region="us-east-1")

    assert (on_spot.spot, on_spot.price_per_hour, on_spot.on_demand_price_per_hour) == (True, 0.2, 0.526)
    assert (on_demand.spot, on_demand.price_per_hour, on_demand.note) == (False, 0.526, "")
    assert on_spot.minimum_billed_s == on_demand.minimum_billed_s == 60


def test_a_type_of_another_region_is_not_in_this_one(types: tuple[MachineType, ...]) -> None:
    here = tuple(each for each in types if each.spec.accelerator != "H100-SXM")
    with pytest.raises(ConfigurationError, match=r"EC2 has H100-SXM \(p5\) in other regions, but not in eu-west-3"):
        candidates(here, parse_request(accelerator="H100"), region="eu-west-3")


def test_a_size_of_another_region_is_named_as_such(types: tuple[MachineType, ...]) -> None:
    here = tuple(each for each in types if each.spec.accelerator != "A100-80GB")
    with pytest.raises(ConfigurationError, match=r"no A100 with 80 GiB in eu-west-3, but A100-40GB .*another region"):
        candidates(here, parse_request(accelerator="A100"), region="eu-west-3")


def test_arm_is_chosen_only_where_there_is_nothing_else(types: tuple[MachineType, ...]) -> None:
    t4g = smallest(types, {"accelerator": "T4g"})
    assert t4g.architecture == "arm64"
    twin = replace(t4g, spec=replace(t4g.spec, name="g5x.xlarge"), architecture="x86_64")
    assert smallest((*types, twin), {"accelerator": "T4g"}).name == "g5x.xlarge"
