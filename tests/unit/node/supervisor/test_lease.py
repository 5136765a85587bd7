from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.node.supervisor.lease import Lease
from skyward.node.supervisor.supervisor import Supervisor
from skyward.scheduling.certificates import issue
from skyward.wire.control import EndComing
from skyward.wire.node_config import NodeConfig
from support.clock import FakeClock


def make_config(folder: Path, **fields: Any) -> NodeConfig:
    identity = issue()
    return NodeConfig(
        pool_id="pool",
        instance_id="unit-lease",
        node=0,
        total_nodes=1,
        workers=1,
        head=True,
        address="127.83.1.11",
        workdir=str(folder),
        env={},
        tls_ca=identity.ca,
        tls_cert=identity.cert,
        tls_key=identity.key,
        **fields,
    )


def make_lease(*, timeout_s: float = 1000, lease_s: float = 10, away_s: float = 100, keep_s: float = 0) -> Lease:
    return Lease(timeout_s=timeout_s, lease_s=lease_s, away_s=away_s, keep_s=keep_s, now=0)


@pytest.mark.parametrize(
    ("events", "asked_at", "reason"),
    [
        pytest.param([], 9.9, None, id="before-the-first-client-for-less-than-a-lease"),
        pytest.param([], 10, "lease", id="no-client-ever-came"),
        pytest.param([("joined", 5)], 104.9, None, id="silent-for-less-than-away"),
        pytest.param([("joined", 5)], 105, "away", id="silent-from-the-start"),
        pytest.param([("joined", 5), ("heard", 90)], 189.9, None, id="a-ping-renews"),
        pytest.param([("joined", 5), ("heard", 90)], 190, "away", id="silent-after-a-ping"),
        pytest.param([("joined", 5), ("left", 20)], 29.9, None, id="gone-for-less-than-a-lease"),
        pytest.param([("joined", 5), ("left", 20)], 30, "lease", id="gone"),
        pytest.param([("joined", 5), ("left", 20), ("joined", 29)], 120, None, id="came-back-in-time"),
        pytest.param([("joined", 5), ("joined", 8), ("left", 9)], 60, None, id="redialled-before-the-old-one-was-lost"),
        pytest.param([("joined", 5), ("joined", 8), ("left", 9), ("left", 10)], 20, "lease", id="both-gone"),
        pytest.param(
            [("joined", 5), ("heard", 20), ("left", 60)], 119.9, None, id="its-carrier-gave-up-on-a-silent-one"
        ),
        pytest.param([("joined", 5), ("heard", 20), ("left", 60)], 120, "away", id="silent-since-before-that"),
        pytest.param([("joined", 5), ("left", 60), ("joined", 70), ("left", 71)], 81, "lease", id="came-back-and-died"),
        pytest.param([("joined", 5), ("heard", 999.9)], 1000, "timeout", id="timeout-though-the-client-is-there"),
        pytest.param([("joined", 5), ("left", 6)], 2000, "timeout", id="timeout-comes-before-the-lease"),
    ],
)
def test_node_ends_when_its_lease_is_over(events: list[tuple[str, float]], asked_at: float, reason: str | None) -> None:
    lease = make_lease()
    for name, at in events:
        getattr(lease, name)(at)

    said = lease.end_reason(asked_at, age_s=asked_at)

    assert (reason in said) if reason and said else (said == reason)


@pytest.mark.parametrize(
    ("events", "asked_at", "reason"),
    [
        pytest.param([], 49.9, None, id="no-client-yet"),
        pytest.param([], 50, "keep", id="no-client-ever-came"),
        pytest.param([("joined", 5), ("left", 20)], 69.9, None, id="gone-for-longer-than-a-lease"),
        pytest.param([("joined", 5), ("left", 20)], 70, "keep", id="gone"),
        pytest.param([("joined", 5), ("heard", 90)], 139.9, None, id="silent-for-less-than-keep"),
        pytest.param([("joined", 5), ("heard", 90)], 140, "keep", id="silent-counts-as-gone"),
        pytest.param([("joined", 5), ("heard", 20), ("left", 60)], 70, "keep", id="silent-before-its-link-was-closed"),
        pytest.param([("joined", 5), ("left", 20), ("worked", 300)], 349.9, None, id="a-job-is-waited-for"),
        pytest.param([("joined", 5), ("left", 20), ("worked", 300)], 350, "keep", id="after-its-last-job"),
        pytest.param([("worked", 10), ("joined", 11), ("left", 90)], 140, "keep", id="after-its-client"),
        pytest.param([("joined", 5), ("left", 20), ("worked", 999)], 1000, "timeout", id="timeout-ends-jobs-too"),
    ],
)
def test_kept_node_waits_for_the_next_client_and_for_its_jobs(
    events: list[tuple[str, float]], asked_at: float, reason: str | None
) -> None:
    lease = make_lease(keep_s=50)
    for name, at in events:
        getattr(lease, name)(at)

    said = lease.end_reason(asked_at, age_s=asked_at)

    assert (reason in said) if reason and said else (said == reason)


def test_order_to_keep_a_node_longer_counts_at_once() -> None:
    lease = make_lease(keep_s=50)
    lease.keep_s = 200

    assert lease.end_reason(199, age_s=199) is None
    assert lease.end_reason(200, age_s=200) == "no client has come for 200 s (keep)"


def test_warning_is_due_once_when_a_tenth_of_the_timeout_is_left() -> None:
    lease = make_lease(timeout_s=1000)

    due = [lease.due_warning_s(now) for now in (0, 899, 901, 950)]

    assert due == [None, None, 99, None]


def test_warning_that_comes_late_never_says_less_than_nothing() -> None:
    assert make_lease(timeout_s=1000).due_warning_s(1001) == 0


def test_time_asleep_counts_towards_the_timeout_and_not_as_a_clients_silence() -> None:
    lease = make_lease(timeout_s=1000, lease_s=10, away_s=100)
    lease.joined(5)

    assert lease.end_reason(20, age_s=900) is None  # asleep for 880 s, and the client is heard of in a moment
    assert lease.due_warning_s(age_s=900) == 100
    reason = lease.end_reason(20, age_s=1000)

    assert reason == "its timeout of 1000 s is over"
    assert lease.timed_out(age_s=1000)


@pytest.mark.parametrize(("cap", "kind"), [("timeout", "pool_timeout"), ("max_cost", "max_cost")])
async def test_calls_are_told_when_a_tenth_of_the_timeout_is_left(tmp_path: Path, cap: str, kind: str) -> None:
    clock, orders = FakeClock(), list[Any]()
    supervisor = Supervisor(make_config(tmp_path, timeout_s=3600.0, cap=cap), clock=clock)
    slot: Any = SimpleNamespace(follow=orders.append)
    supervisor._slots = [slot]
    clock.suspend(3300.0)
    watching = asyncio.ensure_future(supervisor._watch())
    await asyncio.sleep(0)
    supervisor.end("the test is over")
    await watching

    (end,) = orders
    assert isinstance(end, EndComing)
    assert end.kind == kind
    assert 290 < end.at - time.monotonic() <= 300


async def test_a_node_that_has_slept_past_its_timeout_ends_when_it_wakes(tmp_path: Path) -> None:
    clock, config = FakeClock(), make_config(tmp_path, timeout_s=3600.0)
    supervisor = Supervisor(config, clock=clock)
    supervisor.joined()
    watching = asyncio.ensure_future(supervisor._watch())
    await asyncio.sleep(0)
    assert not supervisor._ending.done()
    clock.suspend(8 * 3600.0)
    async with asyncio.timeout(30):
        await watching

    assert supervisor._ending.result() == "its timeout of 3600 s is over"


async def test_a_kept_node_ends_in_time_although_its_jobs_cannot_be_counted(tmp_path: Path) -> None:
    clock = FakeClock()
    supervisor = Supervisor(make_config(tmp_path, keep_s=60.0), clock=clock)
    (tmp_path / "jobs").write_text("a file in place of the folder")
    watching = asyncio.ensure_future(supervisor._watch())
    await asyncio.sleep(0)
    clock.advance(60.0)
    async with asyncio.timeout(30):
        await watching

    assert supervisor._ending.result() == "no client has come for 60 s (keep)"
