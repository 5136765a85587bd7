"""Spot strategies against a market that has, and has not: what is launched, and what is told."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import CapacityError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.request.request import parse_request
from skyward.testing.aws import Capacity, LocalEC2, Looks, Market, use_ec2
from support.clock import FakeClock

PRICES = {"m7i.large": 0.096, "c7i.large": 0.085, "m7i.xlarge": 0.192}


class Stage:
    """Machines of a pool on the test EC2."""

    def __init__(self, ec2: LocalEC2, folder: Path) -> None:
        self.ec2 = ec2
        self.events: list[SkywardEvent] = []
        self.clock = FakeClock()
        self.ledger = Ledger(folder / "ledger.db")

    def launch(self, ranks: int = 4, **request: Any) -> list[tuple[str, str, bool]]:
        """Launching, and say what was got: type, zone, whether spot. Everything is ended afterwards."""
        asked = parse_request(**{"machine": "m7i.large"} | request, nodes=ranks)
        got: list[tuple[str, str, bool]] = []

        async def scenario() -> None:
            provider = sky.AWS(endpoint_url=self.ec2.endpoint_url)
            pool = Machines(
                provider,
                asked,
                pool_id="pool",
                publish=self.events.append,
                ledger=self.ledger,
                clock=self.clock,
            )
            try:
                await pool.launch(range(ranks))
                got.extend(self.got())
                offers = [machine.instance.offer for machine in pool.all if not machine.ended]  # others were given back
                assert [(offer.spec.name, offer.zone, offer.spot) for offer in offers] == got
            finally:
                await pool.end(pool.all)
                await provider.close()

        try:
            asyncio.run(scenario())
        finally:
            assert self.ec2.left() == {}
            assert self.ledger.open_entries() == ()
        return got

    def got(self) -> Sequence[tuple[str, str, bool]]:
        """What runs, as EC2 says it, in the order of the ranks."""
        found = [
            (key_of(each), each["InstanceType"], each["Placement"]["AvailabilityZone"], spot(each))
            for each in self.ec2.instances()
            if each["State"]["Name"] in ("pending", "running")
        ]
        return [(name, zone, on_spot) for _, name, zone, on_spot in sorted(found)]

    def told(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]


def key_of(instance: dict[str, Any]) -> str:
    return next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "skyward:key")


def spot(instance: dict[str, Any]) -> bool:
    return instance.get("InstanceLifecycle") == "spot"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no prices of another test
    with LocalEC2(market=Market(prices=dict(PRICES)), looks=Looks(pending=0, ending=0)) as ec2:
        use_ec2(ec2, monkeypatch, {**ec2.settings, "listing_s": 0.0})
        yield Stage(ec2, tmp_path)


def test_a_fleet_of_too_few_spot_machines_is_given_back_and_is_on_demand_as_a_whole(stage: Stage) -> None:
    stage.ec2.market.limits.append(Capacity(type="m7i.large", spot=True, count=3))

    assert stage.launch(spot="if-available") == [("m7i.large", "us-east-1a", False)] * 4
    kept = [each for each in stage.ec2.instances() if each["State"]["Name"] != "terminated"]
    assert kept == []
    assert any(spot(each) for each in stage.ec2.instances())  # they were had


def test_a_price_that_is_too_low_is_a_lack_of_machines(stage: Stage) -> None:
    stage.ec2.market.limits.append(Capacity(type="m7i.large", spot=True, code="SpotMaxPriceTooLow"))

    assert stage.launch(1, spot="if-available") == [("m7i.large", "us-east-1a", False)]


# --- prices of zones, and max_cost --------------------------------------------------------------------------------


def zone_prices(stage: Stage, **prices: float) -> None:
    """Prices by the zone's letter; no other zone has one. What is in the first zone is not to be had."""
    stage.ec2.market.spot_prices["m7i.large"] = {f"us-east-1{zone}": price for zone, price in prices.items()}
    stage.ec2.market.limits.append(Capacity(type="m7i.large", zone="us-east-1a", spot=True))


def test_a_dearer_zone_is_told(stage: Stage) -> None:
    zone_prices(stage, a=0.03, b=0.3, c=0.5)

    assert stage.launch(1, spot="always") == [("m7i.large", "us-east-1b", True)]
    (told,) = stage.told()
    assert "asked for m7i.large on the spot market ($0.03 an hour), got m7i.large on the spot market ($0.3" in told


def test_a_zone_that_is_too_dear_is_not_bought(stage: Stage) -> None:
    zone_prices(stage, a=0.03, b=3.0)

    with pytest.raises(CapacityError, match=r"m7i\.large \(spot, us-east-1b, "):
        stage.launch(1, spot=sky.Spot.Always(retries=0), max_cost=0.04)
    assert stage.ec2.instances() == []


def test_a_zone_without_a_price_counts_as_the_dearest(stage: Stage) -> None:
    zone_prices(stage, a=0.03, b=0.05)
    stage.ec2.market.limits.append(Capacity(type="m7i.large", zone="us-east-1b", spot=True))

    assert stage.launch(1, spot="always") == [("m7i.large", "us-east-1c", True)]
    (told,) = stage.told()
    assert "got m7i.large on the spot market ($0.05 an hour)" in told


def test_a_zone_without_a_price_is_not_used_with_max_cost(stage: Stage) -> None:
    zone_prices(stage, a=0.03)

    with pytest.raises(CapacityError, match="us-east-1f"):
        stage.launch(1, spot=sky.Spot.Always(retries=0), max_cost=1.0)
    assert stage.ec2.instances() == []


@pytest.mark.parametrize(("machine", "kind"), [("m7i.large", "RunInstances"), (None, "CreateLaunchTemplate")])
def test_max_cost_holds_for_what_is_bought_instead(stage: Stage, machine: str | None, kind: str) -> None:
    stage.ec2.market.spot_prices |= {"m7i.large": 0.0096, "c7i.large": 0.0096, "m7i.xlarge": 0.0096}
    stage.ec2.market.limits.append(Capacity(spot=True))
    asked = {"machine": machine} if machine else {"machine": None, "cpu": 2, "memory": "4GB"}

    ((name, _, on_spot),) = stage.launch(1, spot="if-available", max_cost=0.0192, timeout=36000, **asked)

    assert not on_spot
    lives_s = [time_to_live_s(call) for call in stage.ec2.calls if call.action == kind]
    assert lives_s[-1] / 3600 * PRICES[name] <= 0.0192
    assert 0.0175 <= lives_s[0] / 3600 * 0.0096 <= 0.0192


GRACE_S = 120
"""For the node to end by itself first."""


def time_to_live_s(call: Any) -> int:
    parameters = dict(call.parameters)
    (told,) = [value for name, value in parameters.items() if name.endswith("UserData")]
    found = re.search(r"life=(\d+)", base64.b64decode(told).decode())
    assert found is not None
    return int(found[1]) - GRACE_S
