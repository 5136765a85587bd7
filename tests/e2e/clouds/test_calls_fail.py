"""Whichever call fails at a cloud, and however: nothing is left, and nothing is bought twice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import SkywardError
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.providers.base import REFUSALS
from skyward.request.request import parse_request
from support.clouds.fake_cloud import FakeCloud
from support.clouds.rest_service import FAULTS
from support.clouds.vendors import PROMPT, VENDORS, Vendor, opened

pytestmark = pytest.mark.timeout(600)

NODES = 2
SAMPLE, LARGE_SAMPLE = 29, 1 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 5
"""Every 29th combination of a call and a failure in `make test`, every fifth in `make test-full`, else each."""
IMPATIENT = {**PROMPT, "patience_s": 20.0}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one launch, from which machines run, to its end."""

    made: int
    error: SkywardError | None
    routes: Sequence[str]


class Launcher:
    """Launches two machines and ends them, each time as a client that has never done it before."""

    def __init__(self, vendor: Vendor, cloud: FakeCloud, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cloud = cloud
        self._vendor = vendor
        self._folder = folder
        self._patch = patch
        self._count = 0

    async def live(self, *, planned: tuple[str, int] | None = None) -> Outcome:
        """Launch, run and end; ``planned`` is a failure and the number of the call that meets it."""
        cloud, self._count = self.cloud, self._count + 1
        cloud.forget_user()
        self._patch.setenv("XDG_CACHE_HOME", str(self._folder / f"cache-{self._count}"))
        before, made = len(cloud.service.calls), len(cloud.machines)
        cloud.service.bill.peak = 0
        if planned is not None:
            cloud.service.fail(FAULTS[planned[0]], nth=planned[1])
        provider = self._vendor.provider(cloud)
        ledger = Ledger(self._folder / f"{self._count}.db")
        asked = parse_request(nodes=NODES, machine=self._vendor.machine)
        pool_id = f"pool-{self._count}"
        pool = Machines(provider, asked, pool_id=pool_id, publish=lambda event: None, ledger=ledger, clock=SYSTEM_CLOCK)
        error: SkywardError | None = None
        try:
            await pool.launch(range(NODES))
            for machine in pool.all:
                await pool.wait_running(machine)
        except SkywardError as failed:
            error = failed
        if error is None or isinstance(error, REFUSALS):
            known = [each for each in ledger.open_entries() if each.key not in pool._lost]
            assert bool(pool.unended()) == bool(known), error
        await pool.end([each for each in pool.all if not each.ended])
        routes = cloud.service.routes[before:]
        cloud.service.faults.clear()
        assert not cloud.alive
        if error is None or isinstance(error, REFUSALS):
            assert all(each.key in pool._lost for each in ledger.open_entries())
        await provider.tidy(pool_id)  # what was refused at the end is removed with the next pool
        await provider.close()
        assert cloud.left() == {}
        assert cloud.service.bill.peak <= NODES
        return Outcome(made=len(cloud.machines) - made, error=error, routes=routes)


@pytest.fixture(params=VENDORS, ids=[each.name for each in VENDORS])
def launcher(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    vendor: Vendor = request.param
    with opened(vendor, monkeypatch, tmp_path, provider=IMPATIENT) as cloud:
        cloud.service.paces.clear()
        yield Launcher(vendor, cloud, tmp_path, monkeypatch)


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(LARGE_SAMPLE, marks=pytest.mark.full)], ids=["some", "many"])
async def test_whichever_call_fails_and_however_nothing_is_left(launcher: Launcher, every: int) -> None:
    healthy = await launcher.live()
    assert (healthy.made, healthy.error) == (NODES, None)
    combinations = [(fault, nth) for fault in FAULTS for nth in range(1, len(healthy.routes) + 1)]
    for fault, nth in combinations[::every]:
        outcome = await launcher.live(planned=(fault, nth))
        route = outcome.routes[nth - 1] if nth <= len(outcome.routes) else ""
        where = f"{route}, call {nth}, {fault}"
        if fault != "refused":
            assert (outcome.made, outcome.error) == (NODES, None), where
        for secret in launcher.cloud.secrets:
            assert secret not in repr(outcome.error) + str(outcome.error), where
