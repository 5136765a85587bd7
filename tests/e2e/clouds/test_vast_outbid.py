"""A node that is outbid in the middle of its calls: nothing is lost, no attempt is counted, and the bill adds up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.events import CostFinal, Error, InstancePreempted, Notice, SkywardEvent
from skyward.provision.buying.ledger import Ledger
from skyward.testing.hosts import require_namespaces, require_sshd
from support.clouds.vast_api import VastApi
from support.clouds.vendors import PROMPT, opened, vendor_named

require_sshd()
pytestmark = pytest.mark.timeout(400)  # the first pool builds an environment

DEADLINE_S = 120.0
SLACK_S = 30.0
BID = 0.01


@sky.compute(retries=1)
def leave_a_mark(number: int, early: int, folder: str) -> int:
    """Return the number, once the gate is open for a late call."""
    import os
    import time
    from pathlib import Path

    Path(folder, f"begun-{number}-{os.environ['SKYWARD_INSTANCE']}").touch()
    while number >= early and not Path(folder, "open").exists():
        time.sleep(0.02)
    return number


@sky.compute
def place() -> str:
    import os

    return os.environ["SKYWARD_INSTANCE"]


def eventually(condition: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.full)])
def test_an_outbid_node_loses_no_call_and_is_replaced_on_another_ask_as_no_failure(
    count: int, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_namespaces()
    vendor, events = vendor_named("vastai"), list[SkywardEvent]()
    early = count // 2
    with opened(vendor, monkeypatch, tmp_path, machines=True, cache=ssh_cache, provider=PROMPT) as cloud:
        assert isinstance(cloud, VastApi)
        for row in cloud.asks.values():
            row["min_bid"] = BID
        provider = vendor.provider(cloud)
        terms: dict[str, Any] = {"nodes": 2, "machine": vendor.machine, "display": "quiet", "on_event": events.append}
        with sky.ComputePool(provider=provider, **terms) as pool:
            first = place() @ pool
            calls = [pool.submit(leave_a_mark, number, early, str(tmp_path)) for number in range(count)]
            for call in calls[:early]:
                call.result(DEADLINE_S)
            late = [f"begun-{number}-{first[1]}" for number in range(early, count)]
            (begun,) = eventually(lambda: [each for each in late if (tmp_path / each).exists()][:1])
            cloud.outbid(first[1])
            eventually(lambda: [each for each in events if isinstance(each, InstancePreempted)])
            (tmp_path / "open").touch()
            assert [call.result(DEADLINE_S) for call in calls] == list(range(count))
            last = eventually(lambda: found if len(found := place() @ pool) == 2 and found[1] != first[1] else None)
        assert len(list(tmp_path.glob(begun.rpartition("-")[0] + "-*"))) == 2, "the call under way ran again"
        assert last[0] == first[0]
        (told,) = [each.message for each in events if isinstance(each, Notice) and "outbid" in each.message]
        assert "node 1 is preempted" in told
        assert [each for each in events if isinstance(each, Error)] == [], "a preemption is no failed attempt"
        made = list(cloud.instances.values())
        assert sorted(each.id for each in made if each.price is not None) == sorted([*first, last[1]])
        assert len({each.ask["machine_id"] for each in made}) == len(made) == 3
        assert (cloud.left(), cloud.failures(), Ledger.of_user().open_entries()) == ({}, [], ())
        (bill,) = [each for each in events if isinstance(each, CostFinal)]
    second, charged = made[0].price_per_hour / 3600, cloud.service.bill.usd()
    assert cloud.service.bill.open == []
    assert made[0].price_per_hour == pytest.approx(BID * 1.25 + 40 * 0.15 / 720, abs=1e-6)
    assert charged <= bill.total_cost + len(made) * second
    assert bill.total_cost <= charged + SLACK_S * len(made) * second
    assert (bill.spot_count, bill.ondemand_count) == (3, 0)
