"""A pool with ``max_cost`` never costs more: what is too dear is not bought, and it ends before the sum is reached."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import BudgetError, ConfigurationError, PoolStateError
from skyward.events import CostFinal, CostUpdate, Error, PoolStopped, SkywardEvent
from skyward.ledger.ledger import Ledger
from skyward.market.budget import ENDING_S, Budget
from skyward.market.choose import Batch
from skyward.market.cost import CostReport, Usage
from skyward.market.spending import Spending
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider
from support.clock import FakeClock
from support.fleets import FleetStage

SPEC = InstanceSpec(name="big", cpu=2, memory_gib=4)
SPOT = Offer(spec=SPEC, spot=True, price_per_hour=3.6, minimum_billed_s=60.0)
ON_DEMAND = Offer(spec=SPEC, price_per_hour=36.0, minimum_billed_s=60.0)
UNKNOWN = Offer(spec=SPEC, spot=True)


def usage(launched_at: float, price: float | None = 3.6, **fields: Any) -> Usage:
    return Usage(launched_at=launched_at, price_per_hour=price, **fields)


# --- how long a pool may go on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usages", "now", "left_s"),
    [
        pytest.param([usage(0.0)], 0.0, 1000 - ENDING_S, id="one-machine"),
        pytest.param([usage(0.0)], 400.0, 600 - ENDING_S, id="one-that-has-run"),
        pytest.param([usage(0.0), usage(0.0)], 0.0, 500 - ENDING_S, id="two"),
        pytest.param([usage(0.0), usage(500.0)], 500.0, 250 - ENDING_S, id="one-more-later"),
        pytest.param([usage(0.0, ended_at=600.0), usage(600.0)], 600.0, 400 - ENDING_S, id="a-replacement"),
        pytest.param([usage(0.0, ended_at=10.0, minimum_billed_s=60), usage(10.0)], 10.0, 940 - ENDING_S, id="least"),
        pytest.param([usage(0.0)], 1000.0, -ENDING_S, id="just-reached"),
        pytest.param([usage(0.0, ended_at=50.0)], 50.0, math.inf, id="nothing-runs"),
        pytest.param([usage(0.0, 0.0)], 50.0, math.inf, id="free"),
        pytest.param([], 50.0, math.inf, id="nothing-yet"),
    ],
)
def test_a_pool_may_go_on_until_ending_it_takes_what_is_left(usages: list[Usage], now: float, left_s: float) -> None:
    budget = Budget(max_cost=1.0)
    left = budget.seconds_left(usages, now)

    assert left == left_s
    if math.isfinite(left):
        assert CostReport(usages=tuple(usages), now=now + left + ENDING_S).total <= 1.0 + 1e-9
        assert CostReport(usages=tuple(usages), now=now + left + ENDING_S + 1).total > 1.0


def test_without_a_limit_it_goes_on_for_ever() -> None:
    assert Budget().seconds_left([usage(0.0)], 1e6) == math.inf


def test_nodes_that_are_left_alone_end_later_than_their_pool_and_before_the_sum() -> None:
    budget, usages = Budget(max_cost=1.0), [usage(0.0)]

    assert budget.seconds_left(usages, 0.0) < budget.cap_s(usages, 0.0) < 1000
    assert budget.cap_s(usages, 2000.0) == 1.0


# --- what it may buy --------------------------------------------------------------------------------------------------


def afford(max_cost: float, *offers: Offer, nodes: int = 1, usages: Sequence[Usage] = (), now: float = 0.0) -> Any:
    batch = Batch(nodes=nodes, offers=offers)
    (afforded,) = Budget(max_cost=max_cost).afford([batch], usages, now, provider="cloud")
    return afforded.offers


def test_only_offers_that_fit_are_taken() -> None:
    assert afford(0.59, SPOT, ON_DEMAND) == (SPOT,)
    assert afford(0.60, SPOT, ON_DEMAND) == (SPOT, ON_DEMAND)
    assert afford(0.60, SPOT, ON_DEMAND, nodes=2) == (SPOT,)
    assert afford(9.0, UNKNOWN, SPOT) == (SPOT,)


def test_less_than_the_least_sum_is_refused_by_that() -> None:
    with pytest.raises(ConfigurationError, match=r"max_cost must be at least 0\.2400, got 0\.1: 4 of big"):
        afford(0.1, SPOT, nodes=4)


def test_a_price_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cloud gives none for big; leave max_cost out"):
        afford(100.0, UNKNOWN)


def test_what_is_known_of_an_unknown_price_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"gives none for big \(you may not ask\); leave max_cost out"):
        afford(100.0, replace(UNKNOWN, note="you may not ask"))


def test_further_machines_that_do_not_fit_are_another_error() -> None:
    with pytest.raises(BudgetError, match=r"leaves \$0\.0400") as refused:
        afford(1.0, SPOT, usages=[usage(0.0)], now=900.0)

    assert (refused.value.max_cost, refused.value.cost) == (1.0, pytest.approx(0.96))


def test_all_batches_have_to_fit_together() -> None:
    budget, batches = Budget(max_cost=0.65), [Batch(nodes=1, offers=(ON_DEMAND,)), Batch(nodes=1, offers=(SPOT,))]
    with pytest.raises(ConfigurationError, match=r"at least 0\.6600"):
        budget.afford(batches, [], 0.0, provider="cloud")


# --- the fleet --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: FakeProvider = field(default_factory=lambda: Noting([SPOT, ON_DEMAND]))


class Noting(FakeProvider):
    """Notes what it is asked to launch."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        super().__init__(offers)
        self.orders: list[LaunchOrder] = []

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        self.orders.append(order)
        return await super().launch(offers, order)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


async def test_machines_and_nodes_end_by_themselves_before_the_sum_is_reached(stage: Stage) -> None:
    await stage.open_and_close(max_cost=1.0)

    assert isinstance(stage.provider, Noting)
    assert [order.timeout_s for order in stage.provider.orders] == [470]
    assert [node.config.timeout_s for node in stage.nodes.opened if node.config] == [470, 470]


async def test_the_timeout_counts_where_it_is_less(stage: Stage) -> None:
    await stage.open_and_close(max_cost=1.0, timeout=100)

    assert [node.config.timeout_s for node in stage.nodes.opened if node.config] == [100, 100]


async def test_what_cannot_be_afforded_is_refused_before_it_is_asked_for(stage: Stage) -> None:
    with pytest.raises(ConfigurationError, match="max_cost must be at least"):
        await stage.fleet(max_cost=0.01).start()

    assert "launch" not in stage.provider.calls
    assert stage.ledger.entries() == ()


async def test_one_more_machine_that_cannot_be_afforded_leaves_the_others_alone(stage: Stage) -> None:
    fleet = stage.fleet(max_cost=0.13)
    await fleet.start()
    with pytest.raises(BudgetError):
        await fleet.scale(3, ())
    assert len(stage.provider.alive) == 2
    await fleet.stop()


# --- the watch --------------------------------------------------------------------------------------------------------


async def test_the_pool_is_ended_once_and_in_time_although_its_rate_changes() -> None:
    clock, ended = FakeClock(), list[BudgetError]()

    def cost(now: float) -> CostReport:  # a second machine after 300 s
        return CostReport(usages=(usage(0.0), *([usage(300.0)] if now >= 300 else [])), now=now)

    watching = Spending(cost, max_cost=1.0, publish=lambda event: None, on_spent=ended.append, clock=clock)
    watching.watch()
    async with asyncio.timeout(10):
        while not ended:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0)
    watching.close()

    now = clock.monotonic()
    assert len(ended) == 1
    assert ended[0].cost == pytest.approx(cost(now).total)
    assert 0.85 < cost(now + ENDING_S).total <= 1.0


async def test_the_pool_is_ended_at_the_next_look_after_its_client_has_slept_too_long() -> None:
    clock, ended, events = FakeClock(), list[BudgetError](), list[SkywardEvent]()

    def cost(now: float) -> CostReport:
        return CostReport(usages=(usage(0.0),), now=now)

    watching = Spending(cost, max_cost=1.0, publish=events.append, on_spent=ended.append, clock=clock)
    watching.watch()
    await asyncio.sleep(0)
    clock.suspend(8 * 3600.0)
    async with asyncio.timeout(10):
        while not ended:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0)
    watching.close()
    watching.publish_final()

    assert clock.monotonic() <= 10
    assert ended[0].cost >= 8 * 3.6
    assert isinstance(events[-1], CostFinal)
    assert events[-1].total_seconds >= 8 * 3600


async def test_a_fleet_whose_client_has_slept_buys_and_caps_by_what_it_has_really_cost(tmp_path: Path) -> None:
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([SPOT]))
    fleet = stage.fleet(nodes=1, max_cost=36.0, timeout=100 * 3600.0)
    await fleet.start()
    capped_s = fleet._machines.timeout_s()
    stage.clock.suspend(8 * 3600.0)
    left_s = fleet._machines.timeout_s()
    cost = fleet.cost(stage.clock.elapsed()).total
    stage.clock.suspend(3 * 3600.0)
    with pytest.raises(BudgetError):
        await fleet.scale(2, ())
    await fleet.stop()

    assert cost == pytest.approx(8 * 3.6)
    assert left_s == pytest.approx(capped_s - 8 * 3600)


async def test_a_pool_tells_what_it_costs_every_half_minute() -> None:
    clock, events = FakeClock(), list[SkywardEvent]()
    telling = Spending(
        lambda now: CostReport(usages=(usage(0.0),), now=now),
        max_cost=None,
        publish=events.append,
        on_spent=lambda error: None,
        clock=clock,
    )
    telling.watch()
    telling.report()
    async with asyncio.timeout(10):
        while len(events) < 3:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0)
    telling.close()
    telling.publish_final()

    assert [event.elapsed_seconds for event in events[:3] if isinstance(event, CostUpdate)] == [0, 30, 60]
    assert isinstance(events[-1], CostFinal)


# --- a pool -----------------------------------------------------------------------------------------------------------


class Paid(sky.Local):
    """This machine, at a price."""

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        return [replace(offer, price_per_hour=1.0) for offer in await super().offers(request)]


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set it to have the sum reached."""
    reached = threading.Event()
    monkeypatch.setattr("skyward.market.spending._LOOK_S", 0.01)
    monkeypatch.setattr(Budget, "seconds_left", lambda *_: -1.0 if reached.is_set() else math.inf)
    return reached


def test_an_open_pool_fails_what_is_unfinished_and_ends_its_machines(spent: threading.Event) -> None:
    events: list[SkywardEvent] = []
    stopped = threading.Event()

    def hear(event: SkywardEvent) -> None:
        events.append(event)
        if isinstance(event, PoolStopped):
            stopped.set()

    with sky.ComputePool(provider=Paid(), max_cost=5.0, display="quiet", on_event=hear) as pool, pool.executor() as ex:
        future = ex.submit(wait_for_ever)
        spent.set()
        with pytest.raises(BudgetError, match=r"max_cost=\$5\.00; raise max_cost") as error:
            future.result(60)
        assert error.value.max_cost == 5.0
        assert stopped.wait(60), "its machines end although the block goes on"
        assert pool.instance_count == 0
        with pytest.raises(PoolStateError, match="max_cost"):
            ex.submit(print)

    assert [str(error.value)] == [event.message for event in events if isinstance(event, Error)]
    assert sum(isinstance(event, CostFinal) for event in events) == 1


def test_an_opening_that_costs_too_much_fails_and_leaves_nothing(spent: threading.Event) -> None:
    spent.set()
    with pytest.raises(BudgetError), sky.ComputePool(provider=Paid(), max_cost=5.0, display="quiet"):
        raise AssertionError("it is not open")
