"""What machines cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from skyward.errors import ConfigurationError
from skyward.events import CostFinal, CostUpdate
from skyward.market.budget import Budget
from skyward.market.choose import Batch
from skyward.market.consent import Forecast
from skyward.market.cost import CostReport, Usage, charge
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec

SPOT = Usage(launched_at=0.0, spot=True, price_per_hour=1.0, on_demand_price_per_hour=3.0)
ON_DEMAND = Usage(launched_at=1800.0, ended_at=3600.0, price_per_hour=2.0, on_demand_price_per_hour=2.0)


def test_a_running_fleet_counts_and_rates_only_what_runs() -> None:
    report = CostReport(usages=(SPOT, ON_DEMAND), now=7200.0, provider="aws")

    assert report.update() == CostUpdate(
        7200.0, accumulated_cost=3.0, hourly_rate=1.0, spot_count=1, ondemand_count=0, cost_by_provider={"aws": 3.0}
    )


def test_the_final_numbers_are_of_all_machines() -> None:
    report = CostReport(usages=(SPOT, ON_DEMAND), now=7200.0, provider="aws")

    assert report.final() == CostFinal(
        3.0, 7200.0, 3.0, spot_count=1, ondemand_count=1, savings_vs_ondemand=4.0, cost_by_provider={"aws": 3.0}
    )


def test_the_shares_of_several_providers_are_the_total() -> None:
    offer = Offer(spec=InstanceSpec(name="a", cpu=1, memory_gib=1), price_per_hour=1.0, provider="verda")
    usages = (
        Usage.of(offer, 0.0),
        replace(SPOT, provider="aws (eu-central-1)"),
        replace(ON_DEMAND, provider="verda"),
        Usage.past(7.0, 100.0, provider="runpod"),
        Usage(launched_at=0.0, price_per_hour=0.0, provider="ssh"),
    )
    report = CostReport(usages=usages, now=7200.0, provider="several")

    shares = {"verda": 2.0 + 1.0, "aws (eu-central-1)": 2.0, "runpod": 7.0, "ssh": 0.0}
    assert (report.by_provider, sum(shares.values())) == (shares, report.total)
    assert report.update().cost_by_provider == report.final().cost_by_provider == shares


def test_the_meter_stops_when_the_last_machine_has_ended() -> None:
    assert CostReport(usages=(ON_DEMAND,), now=9999.0).elapsed_s == 1800.0


@pytest.mark.parametrize("usage", [Usage(launched_at=0.0), Usage(launched_at=0.0, spot=True, price_per_hour=0.0)])
def test_unknown_prices_cost_nothing_and_save_nothing(usage: Usage) -> None:
    final = CostReport(usages=(usage,), now=3600.0).final()

    assert (final.total_cost, final.savings_vs_ondemand) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "price", "least_s", "least_charge", "usd"),
    [
        pytest.param(74, 0.0357, 60, 0.01, 0.01, id="a droplet for a minute"),
        pytest.param(1800, 0.0357, 60, 0.01, 0.01785, id="a droplet for half an hour"),
        pytest.param(74, 36.0, 60, 0.01, 0.74, id="a droplet with GPUs"),
        pytest.param(5, 36.0, 60, 0.01, 0.6, id="a droplet with GPUs that lived for less than a minute"),
        pytest.param(5, 3.6, 600, 0.0, 0.6, id="Verda"),
        pytest.param(5, 3.6, 0, 0.0, 0.005, id="RunPod and VastAI"),
        pytest.param(5, 0.0, 60, 0.01, 0.0, id="free"),
        pytest.param(5, None, 60, 0.01, 0.0, id="of unknown price"),
        pytest.param(-3, 3.6, 0, 0.01, 0.01, id="a clock that was set back"),
        pytest.param(0.1 + 0.2 - 0.3 + 1, 3600.0, 0, 0.0, 1.0, id="rounding"),
    ],
)
def test_a_machine_is_charged_for_every_begun_second_and_at_least_the_vendors_least(
    seconds: float, price: float | None, least_s: float, least_charge: float, usd: float
) -> None:
    assert charge(seconds, price, minimum_billed_s=least_s, minimum_charge=least_charge) == pytest.approx(usd)

    spec = InstanceSpec(name="x", cpu=1, memory_gib=1)
    offer = Offer(spec=spec, price_per_hour=price, minimum_billed_s=least_s, minimum_charge=least_charge)
    assert Usage.of(offer, 0.0).cost(seconds) == pytest.approx(usd)
    assert Forecast(timeout_s=seconds).most(offer, 3) == (math.inf if price is None else pytest.approx(3 * usd))


def test_a_limit_below_the_least_charge_of_the_first_machines_is_refused() -> None:
    spec = InstanceSpec(name="s-2vcpu-4gb", cpu=2, memory_gib=4)
    offer = Offer(spec=spec, price_per_hour=0.0357, minimum_billed_s=60.0, minimum_charge=0.01)
    with pytest.raises(ConfigurationError, match=r"max_cost must be at least 0\.0300"):
        Budget(max_cost=0.029).afford([Batch(nodes=3, offers=(offer,))], (), 0.0, provider="digitalocean")
    assert Budget(max_cost=0.03).afford([Batch(nodes=3, offers=(offer,))], (), 0.0, provider="digitalocean")


def test_no_machines_cost_nothing() -> None:
    report = CostReport(usages=(), now=5.0)

    assert (report.total, report.elapsed_s) == (0.0, 0.0)
