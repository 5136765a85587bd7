"""What machines cost."""

from __future__ import annotations

import pytest

from skyward.events import CostFinal, CostUpdate
from skyward.provision.buying.cost import CostReport, Usage

SPOT = Usage(launched_at=0.0, spot=True, price_per_hour=1.0, on_demand_price_per_hour=3.0)
ON_DEMAND = Usage(launched_at=1800.0, ended_at=3600.0, price_per_hour=2.0, on_demand_price_per_hour=2.0)


def test_a_running_fleet_counts_and_rates_only_what_runs() -> None:
    report = CostReport(usages=(SPOT, ON_DEMAND), now=7200.0)

    assert report.update() == CostUpdate(7200.0, accumulated_cost=3.0, hourly_rate=1.0, spot_count=1, ondemand_count=0)


def test_the_final_numbers_are_of_all_machines() -> None:
    report = CostReport(usages=(SPOT, ON_DEMAND), now=7200.0)

    assert report.final() == CostFinal(3.0, 7200.0, 3.0, spot_count=1, ondemand_count=1, savings_vs_ondemand=4.0)


def test_the_meter_stops_when_the_last_machine_has_ended() -> None:
    assert CostReport(usages=(ON_DEMAND,), now=9999.0).elapsed_s == 1800.0


@pytest.mark.parametrize("usage", [Usage(launched_at=0.0), Usage(launched_at=0.0, spot=True, price_per_hour=0.0)])
def test_unknown_prices_cost_nothing_and_save_nothing(usage: Usage) -> None:
    final = CostReport(usages=(usage,), now=3600.0).final()

    assert (final.total_cost, final.savings_vs_ondemand) == (0.0, 0.0)


def test_no_machines_cost_nothing() -> None:
    report = CostReport(usages=(), now=5.0)

    assert (report.total, report.elapsed_s) == (0.0, 0.0)
