"""Whichever call of a launch fails, and however: in the end nothing is left, and nothing is bought twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import skyward as sky
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import SkywardError
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.request.request import parse_request
from skyward.testing.aws import AwsFault, LocalEC2, Looks, Market, use_ec2

NODES = 2
THROTTLED = AwsFault(code="RequestLimitExceeded", status=503)
FORBIDDEN = AwsFault(code="UnauthorizedOperation", status=403)
UNANSWERED = AwsFault(dropped="after")
UNSENT = AwsFault(dropped="before")

DISPENSABLE = {"DescribeSpotPriceHistory", "GetProducts", "GetServiceQuota", "DeleteLaunchTemplate"}
"""What may be forbidden, and machines are launched all the same."""

CREATING = {
    "AuthorizeSecurityGroupIngress",
    "CreateFleet",
    "CreateLaunchTemplate",
    "CreateSecurityGroup",
    "DeleteLaunchTemplate",
    "RunInstances",
}


class Launcher:
    """Launches two machines on spot, of several types, each time as a client that has never done it before."""

    def __init__(self, ec2: LocalEC2, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.ec2 = ec2
        self._folder = folder
        self._patch = patch
        self._open: list[tuple[Machines, sky.AWS, Ledger]] = []

    async def launch(self) -> tuple[int, list[str], SkywardError | None]:
        """Returns how many machines were made, the calls until they ran, and the error if there was one."""
        before, made = len(self.ec2.actions), self.ec2.launched()
        pool_id = f"pool-{len(self._open)}"
        self._patch.setenv("XDG_CACHE_HOME", str(self._folder / pool_id))
        ledger = Ledger(self._folder / f"{pool_id}.db")
        provider = sky.AWS(endpoint_url=self.ec2.endpoint_url)
        asked = parse_request(nodes=NODES, cpu=2, memory="4GB", spot=sky.Spot.Always(retries=0))
        pool = Machines(provider, asked, pool_id=pool_id, publish=lambda event: None, ledger=ledger, clock=SYSTEM_CLOCK)
        self._open.append((pool, provider, ledger))
        error: SkywardError | None = None
        try:
            await pool.launch(range(NODES))
            for machine in pool.all:
                await pool.wait_running(machine)
        except SkywardError as failed:
            error = failed
        calls = list(self.ec2.actions[before:])
        self.ec2.heal()
        return self.ec2.launched() - made, calls, error

    async def close(self) -> None:
        """End what was launched: nothing is left of anything."""
        for pool, _, ledger in self._open:  # what has no machine now was ended when its launch failed
            assert bool(pool.unended()) == bool(ledger.open_entries())
        await asyncio.gather(*(pool.end(pool.all) for pool, *_ in self._open))
        await asyncio.gather(*(provider.close() for _, provider, _ in self._open))
        assert self.ec2.left() == {}
        assert [ledger.open_entries() for *_, ledger in self._open] == [()] * len(self._open)


@asynccontextmanager
async def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks) -> AsyncGenerator[Launcher]:
    market = Market(prices={"m7i.large": 0.1, "c7i.large": 0.09})
    with LocalEC2(market=market, looks=looks) as ec2:
        use_ec2(ec2, monkeypatch, {**ec2.settings, "listing_s": 0.0})
        launcher = Launcher(ec2, tmp_path, monkeypatch)
        yield launcher
        await launcher.close()


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    async with launching(tmp_path, monkeypatch, Looks(pending=0, ending=0)) as launcher:
        yield launcher


@pytest.fixture
async def healthy(launcher: Launcher) -> list[str]:
    """The calls of a launch at which nothing fails."""
    made, calls, error = await launcher.launch()
    assert (made, error) == (NODES, None)
    assert set(calls) >= CREATING
    return calls


def fail_each_call_once(launcher: Launcher, fault: AwsFault, actions: Sequence[str]) -> None:
    """Let every second call of each action fail, so that each call that succeeds has failed before."""
    for action, count in Counter(actions).items():
        for nth in range(1, 2 * count, 2):
            launcher.ec2.fail(fault, action=action, nth=nth)


async def test_whichever_calls_are_refused_for_a_moment_the_machines_run(
    launcher: Launcher, healthy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.aws.api._FIRST_PAUSE_S", 0.01)
    fail_each_call_once(launcher, THROTTLED, healthy)
    made, calls, error = await launcher.launch()
    assert (made, error) == (NODES, None)
    assert Counter(calls) == Counter(2 * healthy)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
async def test_whichever_call_is_forbidden_nothing_is_left(launcher: Launcher, healthy: list[str], every: int) -> None:
    """Fail every tenth call in `make test`, each of them in `make test-full`: a launch takes much processor time."""
    for nth, action in list(enumerate(healthy, start=1))[::every]:
        launcher.ec2.fail(FORBIDDEN, nth=nth)
        made, _, error = await launcher.launch()
        if action in DISPENSABLE:
            assert (made, error) == (NODES, None), f"{action}, call {nth}"
        else:
            assert error is not None, f"{action}, call {nth}"
            assert action in str(error), f"{action}, call {nth}"


@pytest.mark.parametrize("fault", [UNSENT, UNANSWERED], ids=["unsent", "unanswered"])
async def test_whichever_calls_are_interrupted_have_their_effect_once(
    launcher: Launcher, healthy: list[str], fault: AwsFault
) -> None:
    fail_each_call_once(launcher, fault, [action for action in healthy if action in CREATING])
    made, _, error = await launcher.launch()
    assert (made, error) == (NODES, None)


async def test_machines_that_are_not_listed_at_first_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launching(tmp_path, monkeypatch, Looks(unseen=2, pending=1, ending=1)) as launcher:
        made, _, error = await launcher.launch()
    assert (made, error) == (NODES, None)


@pytest.mark.parametrize("action", ["CreateFleet", "RunInstances"])
async def test_a_machine_that_nobody_knows_of_is_found_and_ended_once_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """It was made, its id never came, asking again is refused, and it is not in lists yet."""
    async with launching(tmp_path, monkeypatch, Looks(unseen=2)) as launcher:
        monkeypatch.setattr(sky.AWS, "listing_s", 5.0)
        launcher.ec2.fail(UNANSWERED, action=action)
        launcher.ec2.fail(FORBIDDEN, action=action, nth=2)
        made, _, error = await launcher.launch()
        assert made == NODES - (action == "CreateFleet")
        assert error is not None
        assert action in str(error)
