"""The tables of docs/providers/index.md have the facts of the providers' classes and of their offers."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.providers import registry
from skyward.providers._common.rented_machines import RentedContainers, RentedMachines
from skyward.providers.aws.account import FAMILIES, MINIMUM_BILLED_S
from skyward.providers.base import Offer, Provider
from skyward.providers.registry import BUILT_IN, provider_type
from skyward.request.request import parse_request
from support.clouds.vendors import PROMPT, VENDORS, Vendor, opened

ROOT = Path(__file__).parents[4]
CODE = re.compile(r"`([^`]+)`")
KINDS: Mapping[str, type[Any]] = {provider_type(name).__name__: provider_type(name) for name in BUILT_IN}
ABILITIES = ("admit", "check", "look_interval_s", "public_offers", "secret", "tagged", "tidy", "trouble", "zones")
ASKED: Mapping[str, dict[str, Any]] = {
    "digitalocean": {"accelerator": "MI350X"},
    "verda": {"accelerator": "H100"},
    "runpod": {"accelerator": "RTX-4090"},
    "vastai": {"accelerator": "RTX-4090"},
}
"""Requests for accelerators that the fakes rent on both markets, if they have two."""

Table = Sequence[dict[str, str]]
Tables = dict[str, Table]


@pytest.fixture(scope="module")
def page(tables: Callable[[str], Tables]) -> Tables:
    return tables("providers/index.md")


@pytest.fixture(scope="module")
def rows(page: Tables) -> dict[str, dict[str, str]]:
    """All columns of each provider, by the class's name."""
    found: dict[str, dict[str, str]] = {name: {} for name in KINDS}
    for table in page.values():
        if "Provider" not in table[0]:
            continue
        assert [row["Provider"].strip("`") for row in table] == list(rows_in_order())
        for row in table:
            found[row["Provider"].strip("`")] |= row
    return found


def rows_in_order() -> Sequence[str]:
    """Your own machines first, then the clouds by name."""
    return sorted(KINDS, key=lambda name: (not KINDS[name].own_machines, name.lower()))


def test_rented_machines_and_containers_are_the_classes_that_are(rows: dict[str, dict[str, str]]) -> None:
    for name, kind in KINDS.items():
        assert rows[name]["Rented"] == ("yes" if not kind.own_machines else "no")
        assert ("container" in rows[name]["A node is"]) == issubclass(kind, RentedContainers)


def test_abilities_are_what_the_classes_override(page: Tables) -> None:
    (table,) = [rows for head, rows in page.items() if head.startswith("Ability |")]
    assert sorted(CODE.findall(row["Ability"])[0] for row in table) == sorted(ABILITIES)
    for row in table:
        ability = CODE.findall(row["Ability"])[0]
        has = {name: "yes" if kind.supports(ability) else "no" for name, kind in KINDS.items()}
        assert {name: row[f"`{name}`"] for name in KINDS} == has, ability


def test_every_ability_that_a_provider_may_add_is_on_the_page() -> None:
    free = {name for name in vars(Provider) if not name.startswith("_")} - Provider.__abstractmethods__
    elsewhere = {
        *("close", "ends_itself", "grant", "has_credentials", "listing_s", "member_of", "members", "own_machines"),
        *("supports", "this_machine", "unlisted_s", "wishes"),
    }

    assert free - elsewhere == set(ABILITIES)


def test_machines_that_end_their_own_bill_by_default(rows: dict[str, dict[str, str]]) -> None:
    for name, kind in KINDS.items():
        cell = rows[name]["Ends its own bill"]
        if issubclass(kind, RentedMachines):
            assert cell.startswith("yes") == kind().ends_itself, name
            for parameter in re.findall(r"`(\w+)=", cell):
                assert parameter in registry.provider_parameters(kind)
        else:
            assert cell == ("yes" if not kind.own_machines else "free")


def test_credentials_and_extras_are_those_of_the_code(rows: dict[str, dict[str, str]]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    providers = ROOT / "src/skyward/providers"
    for name, kind in KINDS.items():
        extra = rows[name]["Extra"].strip("`")
        assert extra in extras or extra == "none"
        source = "".join(path.read_text(encoding="utf-8") for path in providers.glob(f"{name.lower()}.py"))
        for word in CODE.findall(rows[name]["Credentials, the first that is there"]):
            if word.endswith("="):
                assert word[:-1] in registry.provider_parameters(kind)
            elif word.isupper() and not kind.own_machines and name != "AWS":  # boto3 reads AWS's
                assert word in source, (name, word)


def test_the_number_of_names_that_aws_rents(rows: dict[str, dict[str, str]]) -> None:
    assert rows["AWS"]["Kinds"].startswith(f"[{len(FAMILIES)} names]")


def offers(vendor: Vendor, patch: pytest.MonkeyPatch, folder: Path) -> Sequence[Offer]:
    with opened(vendor, patch, folder, provider=PROMPT) as cloud:
        settings = {"region": "ric1"} if vendor.name == "digitalocean" else {}
        request = parse_request(**ASKED[vendor.name], spot="if-available")
        return asyncio.run(vendor.provider(cloud, **settings).offers(request))


SAMPLED = [
    # DigitalOcean's description takes a second of processor time to load.
    pytest.param(each, marks=pytest.mark.full if each.name == "digitalocean" else (), id=each.name)
    for each in VENDORS
]


@pytest.mark.parametrize("vendor", SAMPLED)
def test_markets_islands_and_least_billed_are_those_of_offers(
    vendor: Vendor, rows: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = offers(vendor, monkeypatch, tmp_path)
    row = rows[vendor.kind.__name__]

    assert ("spot" in row["Markets"]) == any(each.spot for each in found)
    assert row["Nodes reach each other"].startswith("no") == all(each.island for each in found)
    least = max(each.minimum_billed_s for each in found)
    charge = max(each.minimum_charge for each in found)
    expected = ", ".join([f"{least:g} s"] * bool(least) + [f"${charge:.2f}"] * bool(charge))
    assert row["Least billed"] == (expected or "none")


def test_aws_bills_the_least_time_that_the_page_has(rows: dict[str, dict[str, str]]) -> None:
    assert rows["AWS"]["Least billed"] == f"{MINIMUM_BILLED_S:g} s"
