"""A client is killed at any moment: its machines end as documented, and the next pool's opening removes the rest."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.ledger.ledger import Ledger
from skyward.ledger.sweep import OpeningSweep
from skyward.testing.hosts import require_sshd
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import BOOTED, EACH_KIND, PROMPT, VENDORS, Vendor, opened_with_hosts

require_sshd()
pytestmark = pytest.mark.timeout(600)

SEED = 16
POINTS = 20
SHARED = os.environ.get("HYPOTHESIS_PROFILE") != "long"
"""Whether the vendors share the points, as in `make test-full`; else each of them has them all."""
CALLS = 30
"""Calls of a healthy client, about: points later than its last one kill it at its end."""
DEADLINE_S = 120.0
LEASE_S = 3

CLIENT = """
import json, sys
import skyward as sky
from skyward.providers.registry import provider_type
from skyward.fleet import machine_size

machine_size.CORES_SHARE = machine_size.MEMORY_SHARE = 0.0
name, settings, variables, machine, lease_s = json.loads(sys.argv[1])
kind = provider_type(name)
for variable, value in variables.items():
    setattr(kind, variable, value)
terms = {"nodes": 2, "machine": machine, "timeout": 900, "lease": lease_s, "display": "quiet"}
with sky.ComputePool(provider=kind(**settings), **terms):
    print("up", flush=True)
    sys.stdin.read()
"""

Moment = tuple[int, str]


def moments(vendor: Vendor) -> list[Moment]:
    """Return a vendor's seeded points: the number of a call, and whether it has taken effect."""
    every = [(number, moment) for number in range(1, CALLS + 1) for moment in ("before", "after")]
    points = random.Random(SEED).sample(every, POINTS)
    return points[VENDORS.index(vendor) :: len(VENDORS)] if SHARED else points


@pytest.fixture(params=VENDORS, ids=[each.name for each in VENDORS])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    found: Vendor = request.param
    return found


@pytest.fixture
def cloud(vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    with opened_with_hosts(vendor, monkeypatch, tmp_path, ssh_cache) as cloud:
        cloud.service.paces.clear()
        yield cloud
        assert cloud.failures() == []


class Client:
    """A client in a process of its own, which is killed once."""

    def __init__(self, vendor: Vendor, cloud: FakeCloud, **settings: Any) -> None:
        settings = {"endpoint_url": cloud.endpoint_url, **vendor.settings, **settings}
        variables = {**PROMPT, **cloud.room.settings}
        argument = json.dumps([vendor.name, settings, variables, vendor.machine, LEASE_S])
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def up(self) -> str:
        """Wait for its pool; return what it says, nothing if it was killed before."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> str:
        """Wait for its death and return what it complained about."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == -signal.SIGKILL, errors
        return errors


def killed_at(vendor: Vendor, cloud: FakeCloud, point: Moment | None) -> None:
    """Run a client until that call, or until it is up if there are fewer; None is when a machine was just created."""
    first = len(cloud.service.calls)
    started: list[Client] = []

    def strike(number: int, moment: str) -> None:
        just_created = (cloud.service.calls[number - 1].route, moment) == (vendor.creating, "after")
        if started and (just_created if point is None else (number - first, moment) == point):
            started[0].kill()

    cloud.service.around = strike
    started.append(Client(vendor, cloud))
    started[0].up()
    cloud.service.around = lambda number, moment: None
    started[0].kill()
    started[0].end()


async def swept(vendor: Vendor, cloud: FakeCloud) -> list[str]:
    """What the opening of the next pool does about machines of dead clients; its notes."""
    notes: list[str] = []
    provider = vendor.provider(cloud)
    sweep = OpeningSweep(provider, Ledger.of_user(), publish=lambda event: notes.append(str(event)))
    sweep.begin()
    await sweep.settle()
    await provider.close()
    return notes


def eventually(condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)


def ended_by(cloud: FakeCloud) -> set[str]:
    """The keys with which machines were ended."""
    return {call.token for call in cloud.service.calls if call.method == "DELETE" and 0 < call.status < 300}


def own_keys(cloud: FakeCloud) -> set[str]:
    machines: list[Any] = [*cloud.machines.values()]
    return {machine.key for machine in machines}


def all_off(cloud: FakeCloud) -> bool:
    """Let the timers pass, those of a machine whose create call arrived after its client's death as well."""
    cloud.room.elapse()
    return all(cloud.room.machine(each).off for each in cloud.alive)


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.full)], ids=["one", "many"])
@pytest.mark.parametrize("vendor", EACH_KIND, indirect=True)
def test_whenever_the_client_is_killed_its_machines_power_off_and_the_next_pool_removes_them(
    vendor: Vendor, cloud: FakeCloud, many: bool
) -> None:
    points: Sequence[Moment | None] = moments(vendor) if many else [None]
    for point in points:
        killed_at(vendor, cloud, point)
        eventually(lambda: all_off(cloud))
        assert not vendor.containers or ended_by(cloud) == own_keys(cloud)
        hosts = [cloud.room.machine(each).host for each in cloud.alive]
        assert [host.processes() for host in hosts if host is not None] == [[]] * len(hosts)
        assert [*cloud.service.bill.open] == [*cloud.alive], "powering off must not be taken for the end of the bill"
        notes = asyncio.run(swept(vendor, cloud))
        open_entries = [each for each in Ledger.of_user().open_entries() if not each.purchase.ends_itself]
        # The next pool sweeps no machine that was seen able to end itself: `skyward sweep` closes its entry.
        assert (cloud.left(), open_entries) == ({}, []), (point, notes)


@pytest.mark.parametrize("vendor", BOOTED, indirect=True)
def test_machines_with_a_secret_of_their_own_remove_themselves(vendor: Vendor, cloud: FakeCloud) -> None:
    """Without anybody's help: the client is dead, and no other pool is opened."""
    assert vendor.ends_itself is not None
    client = Client(vendor, cloud, **vendor.ends_itself(cloud))
    assert client.up() == "up\n"
    client.kill()
    killed = cloud.service.clock()
    client.end()
    eventually(lambda: not cloud.alive)
    assert cloud.service.bill.open == []
    if vendor.containers:
        assert ended_by(cloud) == own_keys(cloud)
        assert cloud.service.calls[-1].at - killed < LEASE_S + 30
