"""Limits on every cloud with a fake: of money, of trust, of the vendor's patience, and of its words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import BudgetError, SkywardError, WorkerLostError
from skyward.events import CostFinal
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.market.cost import CostReport
from skyward.providers.base import InstanceState, Offer
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.aws import Looks
from support.clock import FakeClock
from support.clouds.fake_cloud import FakeCloud
from support.clouds.rest_service import SPECS
from support.clouds.vendors import BOOTED, EACH_KIND, PROMPT, VENDORS, Vendor, opened, opened_with_hosts

pytestmark = pytest.mark.timeout(300)

SURCHARGE = 1.25
FEW_CALLS = 100
TOO_MANY = 429
LASTS_S = 75.0
"""How long the money lasts at the price that is charged. A minute of it is reserved for the end."""
LEAST_BILLED_S = 60.0
READY_WITHIN_S = 900.0
"""By the vendor and its provider, in the test of that: so little money buys nothing where ten minutes are billed."""

Open = Callable[..., FakeCloud]


@pytest.fixture(params=VENDORS, ids=[each.name for each in VENDORS])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    found: Vendor = request.param
    return found


@pytest.fixture
def records(vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """An account whose machines are records only."""
    with opened(vendor, monkeypatch, tmp_path, provider=PROMPT, looks=Looks(pending=2, ending=1)) as cloud:
        yield cloud


@pytest.fixture
def machines(vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """An account whose machines are there."""
    with opened_with_hosts(vendor, monkeypatch, tmp_path, ssh_cache) as cloud:
        yield cloud


def buyer(vendor: Vendor, cloud: FakeCloud, folder: Path, nodes: int, clock: Clock = SYSTEM_CLOCK) -> Machines:
    asked = parse_request(nodes=nodes, machine=vendor.machine)
    ledger = Ledger(folder / "own.db")
    provider = vendor.provider(cloud)
    return Machines(provider, asked, pool_id="own", publish=lambda event: None, ledger=ledger, clock=clock)


async def run(pool: Machines, nodes: int) -> None:
    await pool.launch(range(nodes))
    for machine in pool.all:
        await pool.wait_running(machine)


async def test_the_cost_is_the_vendors_to_the_second_at_the_price_it_charges(
    vendor: Vendor, records: FakeCloud, tmp_path: Path
) -> None:
    """Client and vendor have one clock, which stands while a call is under way."""
    clock = FakeClock()
    records.service.clock = records.service.bill.clock = clock.monotonic
    records.service.paces.clear()
    records.surcharge = SURCHARGE
    pool = buyer(vendor, records, tmp_path, 4, clock)
    await run(pool, 4)
    for seconds, machine in zip((12.3, 700.4, 911.7, 2000.2), pool.all, strict=True):
        clock.advance(seconds)
        await pool.end([machine])
    final = CostReport(usages=tuple(each.usage for each in pool.all), now=clock.elapsed()).final()
    assert final.total_cost == pytest.approx(records.service.bill.usd(), abs=1e-6)
    assert final.hourly_rate == pytest.approx(4 * vendor.usd_per_hour * SURCHARGE, rel=1e-4)


@pytest.mark.parametrize("vendor", BOOTED, indirect=True)
def test_a_pool_stays_below_max_cost_although_its_record_is_dearer_than_the_offer(
    vendor: Vendor, machines: FakeCloud
) -> None:
    """At the offered price the money would last twice as long."""
    machines.surcharge, machines.least_billed_s = 2.0, LEAST_BILLED_S
    provider: Any = offering(vendor.provider(machines), minimum_billed_s=LEAST_BILLED_S, minimum_charge=0.0)
    limit = LASTS_S * vendor.usd_per_hour * machines.surcharge / 3600
    seen: list[Any] = []
    with (
        pytest.raises((BudgetError, WorkerLostError), match=r"max_cost|supervisor is gone"),  # a node has a timer
        sky.ComputePool(
            provider=provider, machine=vendor.machine, max_cost=limit, display="quiet", on_event=seen.append
        ) as pool,
    ):
        pool.submit(forever).result()
    assert machines.alive == []
    (final,) = [event for event in seen if isinstance(event, CostFinal)]
    assert 0 < machines.service.bill.usd() <= limit
    assert final.total_cost <= limit


def forever() -> None:
    import time

    time.sleep(3600)


def offering(provider: Any, **fields: Any) -> Any:
    """Return a copy of a provider whose offers differ in the fields given."""

    class Offering(type(provider)):
        async def offers(self, request: PoolRequest) -> Sequence[Offer]:
            return [dataclasses.replace(offer, **fields) for offer in await super().offers(request)]

    settings = {field.name: getattr(provider, field.name) for field in dataclasses.fields(provider) if field.init}
    return Offering(**settings)


@pytest.mark.parametrize("vendor", BOOTED, indirect=True)
def test_a_machine_with_another_host_key_gets_no_byte(
    vendor: Vendor, machines: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced long before its offer's time is over."""
    monkeypatch.setattr(vendor.kind, "other_key_s", 1.0)
    machines.room.impostors = True
    began = time.monotonic()
    with (
        pytest.raises(SkywardError, match=r"is not the one that was ordered .* host key"),
        sky.ComputePool(provider=vendor.provider(machines), machine=vendor.machine, display="quiet"),
    ):
        pass
    assert time.monotonic() - began < READY_WITHIN_S / 10
    assert machines.left() == {}
    logs = [machines.room.machine(each).log for each in machines.machines]
    assert all("Connection from" in each for each in logs)
    assert len(logs) == 3
    assert [each for each in logs if "Accepted" in each or "Starting session" in each] == []


@pytest.mark.parametrize("vendor", BOOTED, indirect=True)
async def test_eight_machines_come_up_within_the_vendors_patience(
    vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the intervals that are in force, and the limits that the vendor has."""
    with opened(vendor, monkeypatch, tmp_path, looks=Looks(pending=2, ending=1)) as cloud:
        pool = buyer(vendor, cloud, tmp_path, 8)
        await run(pool, 8)
        calls = list(cloud.service.calls)
        assert [call.route for call in calls if call.status == TOO_MANY] == []
        assert len(calls) <= FEW_CALLS
        assert cloud.service.bill.peak == 8
        await pool.end(pool.all)
        assert cloud.left() == {}


@pytest.mark.skipif(not SPECS.exists(), reason="the vendors' descriptions are not in the project")
def test_every_state_word_of_the_description_has_a_meaning(vendor: Vendor) -> None:
    assert set(vendor.described()) == set(vendor.states)


@pytest.mark.parametrize("vendor", EACH_KIND, indirect=True)
async def test_state_words_are_understood_and_an_unknown_one_is_waited_out(
    vendor: Vendor, records: FakeCloud, tmp_path: Path
) -> None:
    pool = buyer(vendor, records, tmp_path, 1)
    await run(pool, 1)
    (machine,) = pool.all
    provider = vendor.provider(records)
    found: dict[str, InstanceState] = {}
    for word in [*vendor.states, "out-to-lunch"]:
        records.machines[machine.instance.id].status = word
        records.machines[machine.instance.id].pending = 1000
        (seen,) = await provider.describe([machine.instance.id])
        found[word] = seen.state
    records.machines[machine.instance.id].status = next(word for word in vendor.states if word != "new")
    assert found == {**vendor.states, "out-to-lunch": InstanceState.PENDING}
    await provider.close()
    await pool.end(pool.all)
    records.service.violations.clear()  # of the unknown word
