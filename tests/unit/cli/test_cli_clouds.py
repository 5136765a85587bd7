"""The ``skyward`` command against every cloud that has a fake: offers, doctor, ls, down, sweep."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward.cli import main
from skyward.ledger.fleet_record import new_pool_id
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Owner
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Provider
from skyward.providers.registry import provider_settings
from skyward.request.request import parse_request
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import EACH_KIND, PROMPT, Vendor, opened

ALIVE = Owner.this_process()
DEAD = replace(ALIVE, started="long ago")


@dataclass(frozen=True, kw_only=True)
class Shop:
    """A vendor with an account, and a user with a ledger."""

    vendor: Vendor
    cloud: FakeCloud
    ledger: Ledger

    @property
    def place(self) -> Sequence[str]:
        """Options that choose the fake."""
        settings = {**self.vendor.settings, "endpoint_url": self.cloud.endpoint_url}
        options = [f"--set={name}={value}" for name, value in settings.items()]
        return "--provider", self.vendor.name, *options

    def launch(self, *keys: str, pool: str = "sky-1", owner: Owner = DEAD, known: bool = True) -> Sequence[Instance]:
        """Make machines, written down or not."""
        provider = self.vendor.provider(self.cloud)
        if known:
            self.ledger.reserve(
                {key: node for node, key in enumerate(keys)}, self.purchase(provider, pool), owner=owner
            )
        instances = asyncio.run(_launch(provider, self.vendor.machine, keys, pool))
        if known:
            self.ledger.record(instances)
        return instances

    def purchase(self, provider: Provider, pool: str) -> Purchase:
        """Return what the ledger holds of a launch before its answer."""
        name, settings = self.vendor.name, provider_settings(provider)
        return Purchase(pool_id=pool, provider=name, settings=settings, machine=self.vendor.machine, spot=False)


async def _launch(provider: Provider, machine: str, keys: Sequence[str], pool: str) -> Sequence[Instance]:
    try:
        offers = await provider.offers(parse_request(machine=machine, spot="never"))
        made = await provider.launch(offers, LaunchOrder(pool_id=pool, keys=tuple(keys), timeout_s=3600.0))
        while any(each.state is InstanceState.PENDING for each in await provider.describe([each.id for each in made])):
            pass  # the fakes answer with the next state
        return made
    finally:
        await provider.close()


@pytest.fixture(params=EACH_KIND)
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    vendor: Vendor = request.param
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with opened(vendor, monkeypatch, tmp_path, provider=PROMPT) as cloud:
        cloud.service.paces.clear()
        path = tmp_path / "state" / "skyward" / "ledger.db"
        yield Shop(vendor=vendor, cloud=cloud, ledger=Ledger(path, now=lambda: time.time() - 3600.0))


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def answer(*arguments: str, exit_code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def test_offers_have_prices_and_places_and_the_cheapest_comes_first(shop: Shop) -> None:
    listed = answer("offers", "--cpu", "2", *shop.place)["offers"]
    table = run("offers", "--cpu", "2", *shop.place).stdout

    prices = [min(each["spot_per_hour"] or 1e9, each["on_demand_per_hour"] or 1e9) for each in listed]
    assert {each["provider"] for each in listed} == {shop.vendor.name}
    assert prices == sorted(prices)
    (named,) = [each for each in listed if each["type"] == shop.vendor.machine]
    assert named["on_demand_per_hour"] == shop.vendor.usd_per_hour
    assert named["region"]
    assert all(each["type"] in table for each in listed)
    assert shop.cloud.alive == []


def test_without_a_request_machines_with_gpus_are_listed_too(shop: Shop) -> None:
    listed = answer("offers", *shop.place)["offers"]
    kinds = {each["accelerator"] for each in listed}

    assert None in kinds
    assert len(kinds) > 1
    assert {spec.accelerator for spec in sky.offers(shop.vendor.provider(shop.cloud))} == kinds


def test_an_unknown_region_is_an_error_that_names_it(shop: Shop) -> None:
    name = shop.vendor.regions
    place = ("--region", "nowhere-9") if name == "region" else ("--set", f"{name}=nowhere-9")
    errors = answer("offers", "--cpu", "2", *shop.place, *place, exit_code=1)["errors"]

    error = errors[shop.vendor.name]
    assert "nowhere-9" in error or "has no parameter 'region'" in error


def test_python_gets_the_same_types_and_prices(shop: Shop) -> None:
    listed = answer("offers", "--cpu", "2", "--memory", "4GB", *shop.place)["offers"]
    found = sky.offers(shop.vendor.provider(shop.cloud), cpu=2, memory="4GB")

    assert [(spec.name, spec.price_spot, spec.price_on_demand) for spec in found] == [
        (each["type"], each["spot_per_hour"], each["on_demand_per_hour"]) for each in listed
    ]
    assert all(each["cores"] >= 2 and each["memory_gib"] >= 4 for each in listed)
    assert sky.select_instance(found, cpu=2) in found


def test_doctor_finds_the_account_in_order_and_creates_nothing(shop: Shop) -> None:
    found = answer("doctor", *shop.place)["findings"][len(answer("doctor")["findings"]) :]

    assert found
    assert {each["state"] for each in found} <= {"ok", "warn"}
    assert shop.cloud.left() == {}


def test_doctor_explains_missing_credentials(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shop.cloud.environment:
        monkeypatch.delenv(name)

    found = [each for each in answer("doctor", *shop.place, exit_code=1)["findings"] if each["state"] == "fail"]

    assert any(name in f"{each['found']} {each['fix']}" for each in found for name in shop.cloud.environment)


def test_a_request_without_offers_is_explained(shop: Shop) -> None:
    done = run("offers", "--machine", shop.vendor.machine, "--spot", *shop.place)

    assert (done.exit_code, done.output.strip()) != (1, "")


def test_a_sweep_that_cannot_list_a_named_cloud_fails(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shop.cloud.environment:
        monkeypatch.delenv(name)

    (reason,) = answer("sweep", *shop.place, exit_code=1)["unasked"]

    assert all(name in reason for name in shop.cloud.environment)


def test_ls_lists_a_named_clouds_machines_at_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    (stranger,) = shop.launch("sky-9-0", pool="sky-9", known=False)
    monkeypatch.setattr(shop.vendor.kind, "listing_s", 3600.0)

    listed = answer("ls", *shop.place)

    assert ([each["instance"] for each in listed["unknown"]], listed["unasked"]) == ([stranger.id], [])


def test_ls_of_a_named_cloud_without_credentials_names_them_and_fails(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in shop.cloud.environment:
        monkeypatch.delenv(name)
    monkeypatch.setattr(shop.vendor.kind, "listing_s", 3600.0)

    (reason,) = answer("ls", *shop.place, exit_code=1)["unasked"]

    assert all(name in reason for name in shop.cloud.environment)
    assert re.findall(rf"{shop.vendor.name}[\w ]*: ", reason, re.IGNORECASE)[1:] == []


def test_offers_name_the_cloud_that_refuses_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shop.cloud.environment:
        monkeypatch.delenv(name)

    shown = run("offers", *shop.place).stderr

    assert re.findall(rf"{shop.vendor.name}[\w ]*: ", shown, re.IGNORECASE)[1:] == []


def test_no_command_shows_a_secret(shop: Shop) -> None:
    shop.launch("sky-1-0")

    shown = [run(*command, *shop.place).output for command in (("offers",), ("doctor",), ("sweep",))]
    shown += [run("ls", "--all", "--json").output]

    assert [secret for secret in shop.cloud.secrets if secret in "".join(shown)] == []


def test_ls_and_down_name_the_machines_of_a_pool(shop: Shop) -> None:
    gone = shop.launch("sky-1-0", "sky-1-1", owner=ALIVE)
    (other,) = shop.launch("sky-2-0", pool="sky-2", owner=ALIVE)

    listed = {each["instance"]: each["provider"] for each in answer("ls")["machines"]}
    ended = answer("down", "sky-1")["ended"]

    assert listed == dict.fromkeys([*(each.id for each in gone), other.id], shop.vendor.name)
    assert {each["instance"] for each in ended} == {each.id for each in gone}
    assert shop.cloud.alive == [other.id]
    answer("down", "sky-2")
    assert shop.cloud.left() == {}


def test_sweep_ends_machines_of_dead_owners_and_spares_those_of_living_ones(shop: Shop) -> None:
    (dead,) = shop.launch("sky-1-0")
    (alive,) = shop.launch("sky-2-0", pool="sky-2", owner=ALIVE)

    swept = answer("sweep")

    assert [each["instance"] for each in swept["ended"]] == [dead.id]
    assert [each["pool"] for each in swept["spared"]] == ["sky-2"]
    assert shop.cloud.alive == [alive.id]
    answer("down", "sky-2")
    assert shop.cloud.left() == {}


def test_sweep_finds_a_machine_whose_create_call_was_never_answered(shop: Shop) -> None:
    (lost,) = shop.launch("sky-1-0", known=False)
    provider = shop.vendor.provider(shop.cloud)
    shop.ledger.reserve({"sky-1-0": 0}, shop.purchase(provider, "sky-1"), owner=DEAD)

    swept = answer("sweep")

    assert [each["instance"] for each in swept["ended"]] == [lost.id]
    assert shop.cloud.left() == {}


def test_sweep_lists_unknown_machines_and_ends_them_on_request(shop: Shop) -> None:
    (stranger,) = shop.launch("sky-9-0", pool="sky-9", known=False)

    assert answer("sweep")["unknown"] == [], "a cloud that was never used is not asked"
    (seen,) = answer("sweep", *shop.place)["unknown"]
    assert (seen["instance"], seen["ended"]) == (stranger.id, False)
    assert shop.cloud.alive == [stranger.id]

    (ended,) = answer("sweep", "--unknown", *shop.place)["unknown"]
    assert (ended["instance"], ended["ended"]) == (stranger.id, True)
    assert shop.cloud.alive == []


def test_down_from_another_computer_ends_a_fleet_by_its_name_and_no_other_machine(shop: Shop) -> None:
    pool_id, other_id = new_pool_id("llm"), new_pool_id("llm-2")
    fleet = shop.launch(f"{pool_id}-0-aaaaaaaa", f"{pool_id}-1-bbbbbbbb", pool=pool_id, known=False)
    (other,) = shop.launch(f"{other_id}-0-cccccccc", pool=other_id, known=False)

    assert "no pool llm in this user's ledger" in run("down", "llm").output
    said = answer("down", "llm", *shop.place)

    assert {(each["instance"], each["ended"]) for each in said["unknown"]} == {(each.id, True) for each in fleet}
    assert shop.cloud.alive == [other.id]
    assert "1 ended, 0 were gone already, 0 left" in run("down", "llm-2", *shop.place).output
    assert shop.cloud.left() == {}
    assert answer("down", "llm", *shop.place)["unknown"] == []


def test_down_ends_a_fleet_by_its_name_whose_folder_was_deleted(shop: Shop) -> None:
    pool_id = new_pool_id("llm")
    (machine,) = shop.launch(f"{pool_id}-0-aaaaaaaa", pool=pool_id)

    assert [each["instance"] for each in answer("down", "llm")["ended"]] == [machine.id]
    assert shop.cloud.left() == {}
