"""The tables of docs/accelerators.md have the facts of the catalogue."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from skyward import Accelerator
from skyward.providers.aws.account import FAMILIES, parse_types
from skyward.request.accelerators import MigProfile, Model, Vendor, models, parse_accelerator

Table = Sequence[dict[str, str]]
Tables = dict[str, Table]
CODE = re.compile(r"`([^`]+)`")


@pytest.fixture(scope="module")
def page(tables: Callable[[str], Tables]) -> Tables:
    return tables("accelerators.md")


@pytest.fixture(scope="module")
def catalogue(page: Tables) -> list[dict[str, str]]:
    """The rows of the three tables, each with the accelerator's name as ``name``."""
    return [
        row | {"name": CODE.findall(next(iter(row.values())))[0]}
        for rows in page.values()
        for row in rows
        if next(iter(row)) in {"GPU", "Accelerator"}
    ]


def test_every_model_of_the_catalogue_has_one_row_with_its_memory(catalogue: list[dict[str, str]]) -> None:
    held = {model.name: ", ".join(f"{size:g}" for size in model.memory_gib) for model in models()}

    assert sorted(row["name"] for row in catalogue) == sorted(held)
    assert {row["name"]: row["Memory"] for row in catalogue} == held


def test_gpus_that_can_be_cut_are_marked(catalogue: list[dict[str, str]]) -> None:
    cut = {model.name for model in models() if model.mig}
    column = "Parts (MIG)"

    assert {row["name"] for row in catalogue if row.get(column) == "yes"} == cut
    assert cut <= {row["name"] for row in catalogue if column in row}


def test_the_families_are_those_that_ec2_rents(catalogue: list[dict[str, str]]) -> None:
    def rented(name: str) -> set[str]:
        labels = [label for label in FAMILIES if parse_accelerator(label).name == name]
        return {family for label in labels for family in FAMILIES[label].split(", ")}

    for row in catalogue:
        listed = row.get("EC2 families") or "".join(re.findall(r"AWS \((.*?)\)", row.get("Rented by", "")))
        assert set(re.findall(r"[\w-]+", listed)) == rented(row["name"]), row


def test_other_makers_factories_request_what_their_row_names(catalogue: list[dict[str, str]]) -> None:
    for row in catalogue:
        if "Ask for it as" in row:
            made = eval(row["Ask for it as"].strip("`"), {"Accelerator": Accelerator})
            assert made == Accelerator(name=row["name"]), row


def _columns(head: str) -> dict[str, list[Model]]:
    """The models that each column of the table of profiles is for."""
    named = {column: re.findall(r"[A-Z]\d+", column) for column in head.split(" | ")[3:]}
    return {column: [model for model in models() if model.name in names] for column, names in named.items()}


def test_profiles_shares_and_workers_are_the_catalogues(page: Tables) -> None:
    ((head, rows),) = [(head, rows) for head, rows in page.items() if head.startswith("Workers | Compute")]
    shown: set[tuple[str, float, str]] = set()
    for column, found in _columns(head).items():
        size = float(re.findall(r"(\d+) GB", column)[0])
        for row in rows:
            profile = MigProfile.of(row[column].strip("`"), size)
            shares = [Fraction(profile.compute_slices, 7), Fraction(profile.memory_slices, 8)]
            written = [
                Fraction(1) if row[share] == "whole" else Fraction(row[share]) for share in ("Compute", "Memory")
            ]
            assert (int(row["Workers"]), written) == (profile.most, shares), (column, row)
            shown |= {(model.name, size, profile.name) for model in found}

    assert shown == {(m.name, size, profile) for m in models() for size, names in m.mig.items() for profile in names}


def test_models_fit_on_the_accelerators_of_their_row(page: Tables) -> None:
    rule: dict[str, float] = {row[""]: float(row["bytes"]) for row in page["bytes | made of"]}
    room = {"Inference, 16 bits": 1.2, "LoRA, 16 bits": 1.2, "Full training": 1.0}
    bytes_of = {
        "Inference, 16 bits": rule["inference in 16 bits"],
        "LoRA, 16 bits": rule["adapters on 16-bit weights (LoRA)"],
        "Full training": rule["full training with Adam in mixed precision"],
    }
    for row in page["Parameters | Inference, 16 bits | LoRA, 16 bits | Full training"]:
        billions = float(row["Parameters"].split()[0])
        for column, share in room.items():
            needed = float(row[column].split()[0])
            assert needed == pytest.approx(billions * bytes_of[column] * share), (row, column)
            for name in CODE.findall(row[column]):
                asked = parse_accelerator(name)
                assert asked.memory_gib * asked.count > needed, (row, column, name)


def test_accelerators_to_begin_with_exist(page: Tables) -> None:
    for row in page["Workload | Begin with | Because"]:
        for name in CODE.findall(row["Begin with"]):
            if not name.endswith(("=", "()")):
                assert parse_accelerator(name).vendor is Vendor.NVIDIA


@pytest.mark.full  # the list of EC2's types takes 3 s to load
def test_instances_with_neuron_chips_are_ec2s(page: Tables) -> None:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    rows = page["Instance | Chips | Memory of chips | Cores | Use"]
    recorded: dict[str, Any] = {each.name: each.spec for each in parse_types(INSTANCE_TYPES.values())}
    for row in rows:
        spec = recorded[row["Instance"].strip("`")]
        assert row["Chips"] == f"{spec.accelerator_count} x {spec.accelerator}"
        assert row["Memory of chips"] == f"{spec.accelerator_count * spec.accelerator_memory_gib:g} GB"
        assert int(row["Cores"]) == spec.cpu
