"""Spot strategies against a market that has, and has not: what is launched, and what is told."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import AuthenticationError, CapacityError
from skyward.events import InstanceLaunching, Notice, SkywardEvent
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.request.request import parse_request
from skyward.testing.aws import AwsFault, Capacity, LocalEC2, Looks, Market, use_ec2
from support.clock import FakeClock

PRICES = {"m7i.large": 0.096, "c7i.large": 0.085, "m7i.xlarge": 0.192}


class OnSleep(FakeClock):
    """Has something happen at the end of the ``nth`` pause."""

    def __init__(self, nth: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._left = nth
        self._then = then

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self._left -= 1
        if not self._left:
            self._then()


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

    def asked_for(self) -> list[tuple[int, str]]:
        return [(each.count, each.instance_type) for each in self.events if isinstance(each, InstanceLaunching)]


def key_of(instance: dict[str, Any]) -> str:
    return next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "skyward:key")


def spot(instance: dict[str, Any]) -> bool:
    return instance.get("InstanceLifecycle") == "spot"


def no_spot(*types: str) -> list[Capacity]:
    return [Capacity(type=each, spot=True) for each in types]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no prices of another test
    with LocalEC2(market=Market(prices=dict(PRICES)), looks=Looks(pending=0, ending=0)) as ec2:
        use_ec2(ec2, monkeypatch, {**ec2.settings, "listing_s": 0.0})
        yield Stage(ec2, tmp_path)


@pytest.mark.parametrize(
    "strategy",
    ["always", *(pytest.param(each, marks=pytest.mark.full) for each in ("if-available", sky.Spot.IfAvailable(), 1.0))],
)
def test_what_is_to_be_had_on_spot_is_launched_on_spot(stage: Stage, strategy: Any) -> None:
    assert stage.launch(spot=strategy) == [("m7i.large", "us-east-1a", True)] * 4
    assert stage.asked_for() == [(4, "m7i.large")]
    assert stage.told() == []


def test_always_asks_again_until_there_is_some(stage: Stage) -> None:
    stage.ec2.market.limits += no_spot("m7i.large")
    stage.clock = OnSleep(2, stage.ec2.market.limits.clear)

    assert stage.launch(spot=sky.Spot.Always(retries=3, interval=20)) == [("m7i.large", "us-east-1a", True)] * 4
    assert stage.clock.slept_s == [20, 20]
    assert stage.told() == []


def test_always_fails_when_its_retries_are_over_and_buys_nothing_dearer(stage: Stage) -> None:
    stage.ec2.market.limits += no_spot("m7i.large")

    with pytest.raises(CapacityError, match=r"for [0-9]+ s, .*m7i\.large \(spot, us-east-1a, us-east-1b"):
        stage.launch(spot=sky.Spot.Always(retries=2, interval=5))
    assert stage.clock.slept_s == [5, 5]
    assert stage.ec2.instances() == []


def test_if_available_takes_what_is_on_demand_and_says_what_it_costs(stage: Stage) -> None:
    stage.ec2.market.limits += no_spot("m7i.large")

    assert stage.launch(spot="if-available") == [("m7i.large", "us-east-1a", False)] * 4
    (told,) = stage.told()
    assert "asked for m7i.large on the spot market" in told
    assert "got m7i.large on demand ($0.096 an hour)" in told
    assert stage.clock.slept_s == []


def test_a_fleet_of_too_few_spot_machines_is_given_back_and_is_on_demand_as_a_whole(stage: Stage) -> None:
    stage.ec2.market.limits.append(Capacity(type="m7i.large", spot=True, count=3))

    assert stage.launch(spot="if-available") == [("m7i.large", "us-east-1a", False)] * 4
    kept = [each for each in stage.ec2.instances() if each["State"]["Name"] != "terminated"]
    assert kept == []
    assert any(spot(each) for each in stage.ec2.instances())  # they were had


def test_another_zone_has_what_the_cheapest_lacks_and_the_whole_fleet_goes_there(stage: Stage) -> None:
    zones = {f"us-east-1{letter}": price for letter, price in zip("abcdef", (3, 2, 1, 4, 5, 6), strict=True)}
    stage.ec2.market.spot_prices["m7i.large"] = {zone: price / 100 for zone, price in zones.items()}
    stage.ec2.market.limits.append(Capacity(type="m7i.large", zone="us-east-1c", spot=True, count=2))

    assert stage.launch(spot="always") == [("m7i.large", "us-east-1b", True)] * 4


def test_never_is_on_demand_although_spot_is_cheaper(stage: Stage) -> None:
    assert stage.launch(spot="never") == [("m7i.large", "us-east-1a", False)] * 4
    assert not any(spot(each) for each in stage.ec2.instances())
    assert stage.told() == []


@pytest.mark.parametrize(
    ("share", "on_spot"),
    [
        (0.5, 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((sky.Spot.Percent(0.3), 2), (0.0, 0), (0.75, 3))),
    ],
)
def test_a_share_is_on_spot_and_the_head_is_not(stage: Stage, share: Any, on_spot: int) -> None:
    kinds = [on_demand for *_, on_demand in stage.launch(spot=share)]

    assert kinds == [False] * (4 - on_spot) + [True] * on_spot
    assert stage.asked_for() == [(count, "m7i.large") for count in (4 - on_spot, on_spot) if count]


def test_a_share_that_spot_does_not_have_fails_and_leaves_nothing_on_demand(stage: Stage) -> None:
    stage.ec2.market.limits += no_spot("m7i.large")

    with pytest.raises(CapacityError, match="lower the share"):
        stage.launch(spot=0.5)


@pytest.mark.parametrize("strategy", ["always", "if-available"])
def test_of_several_types_the_one_that_is_to_be_had_is_taken_on_spot(stage: Stage, strategy: str) -> None:
    stage.ec2.market.limits += no_spot("c7i.large")

    assert stage.launch(spot=strategy, machine=None, cpu=2, memory="4GB") == [("m7i.large", "us-east-1a", True)] * 4
    assert "CreateFleet" in stage.ec2.actions


def test_what_may_not_be_done_on_spot_is_no_reason_to_buy_on_demand(stage: Stage) -> None:
    stage.ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="RunInstances", times=100)

    with pytest.raises(AuthenticationError, match="ec2:RunInstances"):
        stage.launch(spot="if-available")
    assert stage.ec2.instances() == []
    assert stage.ec2.actions.count("RunInstances") == 1


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
