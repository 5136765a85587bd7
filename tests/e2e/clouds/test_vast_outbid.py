"""A node that is outbid in the middle of its calls: nothing is lost, no retry is charged, and the bill adds up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.events import CostFinal, Error, InstancePreempted, Notice, Progress, SkywardEvent
from skyward.ledger.ledger import Ledger
from skyward.testing.hosts import require_sshd
from support.clouds.vast_api import VastApi
from support.clouds.vendors import PROMPT, opened, vendor_named
from support.ssh_islands import require_namespaces

require_sshd()
pytestmark = pytest.mark.timeout(400)  # the first pool builds an environment

DEADLINE_S = 240.0
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


def assert_progress_is_true(events: list[SkywardEvent], early: int, count: int) -> None:
    """A node that is taken back leaves one call running; nothing fails, and each call counts once."""
    told = [each for each in events if isinstance(each, Progress) and each.label == "leave_a_mark"]
    preempted = next(at for at, each in enumerate(events) if isinstance(each, InstancePreempted))
    while_closed = [each for each in told if each.done == early and each.total == count]
    assert {(each.failed, each.cancelled) for each in told} == {(0, 0)}
    assert max(each.running for each in while_closed) == 2
    assert Progress("leave_a_mark", early, count, running=1) in events[preempted:]
    assert told[-1] == Progress("leave_a_mark", count, count)


# In `make test`: unit/fleet/test_preempted.py, and unit/providers/vastai for the words of an outbid machine.
@pytest.mark.full
@pytest.mark.parametrize("count", [400])
def test_an_outbid_node_loses_no_call_and_is_replaced_on_another_ask_as_no_failure(
    count: int, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_namespaces()
    vendor, events = vendor_named("vastai"), list[SkywardEvent]()
    early, times = count // 2, 2 if count > 40 else 1
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
            late = [f"begun-{number}-" for number in range(early, count)]
            # Both: an idle node would take the other's call, and the next outbid one is the replacement.
            _, (call, *_) = [
                eventually(lambda machine=machine: [each for each in late if (tmp_path / f"{each}{machine}").exists()])
                for machine in first
            ]
            eventually(lambda: Progress("leave_a_mark", early, count, running=2) in events)
            ran_on = [first[1]]
            for _ in range(times):  # with retries=1, the second of such losses would be an error if it were charged
                cloud.outbid(ran_on[-1])
                known = {tmp_path / f"{call}{machine}" for machine in ran_on}
                runs = eventually(lambda known=known: {*tmp_path.glob(f"{call}*")} - known)
                ran_on += [run.name.removeprefix(call) for run in runs]
            (tmp_path / "open").touch()
            assert [call.result(DEADLINE_S) for call in calls] == list(range(count))
            last = eventually(lambda: found if len(found := place() @ pool) == 2 and found[1] == ran_on[-1] else None)
        assert [each.node for each in events if isinstance(each, InstancePreempted)] == [1] * times
        assert (len([*tmp_path.glob(f"{call}*")]), last[0]) == (1 + times, first[0]), "the call under way ran again"
        assert_progress_is_true(events, early, count)
        told = [each.message for each in events if isinstance(each, Notice) and "outbid" in each.message]
        assert ["node 1 is preempted" in each for each in told] == [True] * times
        assert [each for each in events if isinstance(each, Error)] == [], "a preemption is no failed attempt"
        made = list(cloud.instances.values())
        assert sorted(each.id for each in made if each.price is not None) == sorted([first[0], *ran_on])
        assert len({each.ask["machine_id"] for each in made}) == len(made) == 2 + times
        assert (cloud.left(), cloud.failures(), Ledger.of_user().open_entries()) == ({}, [], ())
        (bill,) = [each for each in events if isinstance(each, CostFinal)]
    second, charged = made[0].price_per_hour / 3600, cloud.service.bill.usd()
    assert cloud.service.bill.open == []
    assert made[0].price_per_hour == pytest.approx(BID * 1.25 + 40 * 0.15 / 720, abs=1e-6)
    assert charged <= bill.total_cost + len(made) * second
    assert bill.total_cost <= charged + SLACK_S * len(made) * second
    assert (bill.spot_count, bill.ondemand_count) == (2 + times, 0)
