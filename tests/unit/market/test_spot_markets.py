"""The simulation of spot markets: small ones whose outcome is known, and the bound below every strategy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.spot_markets import Market, Strategy, Task, least_cost, read_trace, simulate, synthetic_trace

from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec

SPEC = InstanceSpec(name="v100", cpu=8, memory_gib=61)
ON_DEMAND = Offer(spec=SPEC, price_per_hour=12.0, on_demand_price_per_hour=12.0)
ONE_NODE = Task(nodes=1, work_h=2.0, call_h=0.5, boot_ticks=1)


def market(price: float, machines: Sequence[int], region: str = "north") -> Market:
    offer = Offer(spec=SPEC, region=region, spot=True, price_per_hour=price, on_demand_price_per_hour=12.0)
    return Market(offer=offer, machines=machines)


@pytest.mark.parametrize(
    ("machines", "spot", "cost", "hours", "interruptions"),
    [
        pytest.param([1], "never", 25.0, 25 / 12, 0, id="on demand: a boot, and two hours"),
        pytest.param([1], "if-available", 12.5, 25 / 12, 0, id="the same on spot"),
        pytest.param([0], "if-available", 25.0, 25 / 12, 0, id="spot is sold out"),
        pytest.param([0] * 6 + [1] * 60, "always", 12.5, 31 / 12, 0, id="it waits for spot"),
        pytest.param([1] * 9 + [0] * 60, "if-available", 4.5 + 19.0, 28 / 12, 1, id="a call and a boot are lost"),
    ],
)
def test_one_node_costs_what_its_machines_cost(
    machines: list[int], spot: str, cost: float, hours: float, interruptions: int
) -> None:
    outcome = simulate(ONE_NODE, Strategy(spot=spot, markets=1), [market(6.0, machines)], ON_DEMAND, start=0)

    assert (outcome.cost, outcome.hours) == (pytest.approx(cost), pytest.approx(hours))
    assert outcome.interruptions == interruptions


def test_who_knows_the_future_avoids_a_market_that_ends_before_a_call_pays() -> None:
    assert least_cost(ONE_NODE, [market(6.0, [1])], ON_DEMAND, start=0) == pytest.approx(12.5)
    assert least_cost(ONE_NODE, [market(6.0, [0])], ON_DEMAND, start=0) == pytest.approx(25.0)
    assert least_cost(ONE_NODE, [market(6.0, [1, 0])], ON_DEMAND, start=0) == pytest.approx(25.0)


@pytest.mark.parametrize("spot", ["never", "if-available"])
@pytest.mark.parametrize("world", range(3))
def test_no_strategy_costs_less_than_that(spot: str, world: int) -> None:
    task = Task(nodes=4, work_h=32.0)
    markets = [market(5.0 + each, synthetic_trace(f"{world} {each}", days=4), f"region-{each}") for each in range(3)]
    outcome = simulate(task, Strategy(spot=spot, markets=3), markets, ON_DEMAND, start=world * 100)

    assert outcome.cost > least_cost(task, markets, ON_DEMAND, start=world * 100)


def test_a_published_trace_is_read_in_ticks_of_five_minutes(tmp_path: Path) -> None:
    path = tmp_path / "us-east-1a_v100_1.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 100}, "data": [0, 0, 0, 4, 0, 0, 2, 2, 2, 1]}))

    assert read_trace(path) == [0, 4, 2]


def test_a_synthetic_market_is_the_same_each_time() -> None:
    trace = synthetic_trace("7", days=28)

    assert trace == synthetic_trace("7", days=28)
    assert trace != synthetic_trace("8", days=28)
    assert 0.2 < sum(map(bool, trace)) / len(trace) < 0.9
