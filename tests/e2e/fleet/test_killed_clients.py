"""Clients that are killed, anywhere between launch and teardown: their nodes end by themselves; a sweep finds it so."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from skyward.cli import main
from skyward.testing.hosts import SshHost, require_sshd, share_cache, write_known_hosts
from support.eventually import eventually

LEASE_S = 5.0
GRACE_S = 10.0
MARK = "SKYWARD_TEST_KILLED_CLIENT"
"""Every process of a pool of this file carries it, with the client's name."""

CLIENT = """
import json, os, signal, sys, threading
import skyward as sky
from skyward.ledger.ledger import Ledger
from skyward.providers.registry import make_provider

phase, delay_s, name, settings, nodes, lease_s = json.loads(sys.argv[1])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def reached(here):
    if here == phase:
        if not delay_s:
            die()
        timer = threading.Timer(delay_s, die)
        timer.daemon = True
        timer.start()

@sky.compute
def work(number):
    import time
    time.sleep(0.05)
    return number

def before(kind, verb, here):
    original = getattr(kind, verb)
    def instead(*args, **kwargs):
        reached(here)
        return original(*args, **kwargs)
    setattr(kind, verb, instead)

provider = make_provider(name, settings)
before(Ledger, "reserve", "before the ledger")
before(type(provider), "launch", "before the create call")
before(Ledger, "record", "before its answer is written down")
before(type(provider), "terminate", "before terminating")
before(Ledger, "close", "before the ledger is closed")
pool = sky.ComputePool(provider=provider, nodes=nodes, lease=lease_s, timeout=300, display="quiet")
for event in (sky.InfraCreating, sky.InstanceProvisioned, sky.BootstrapProgress, sky.BootstrapCompleted,
              sky.PoolStarted, sky.PoolStopping):
    pool.on(event, lambda event: reached(type(event).__name__))
with pool:
    for _ in range(5):
        sky.gather(*[work(n) for n in range(4)]) >> pool
        reached("in the block")
"""

PHASES = [
    "InfraCreating",
    "before the ledger",
    "before the create call",
    "before its answer is written down",
    "InstanceProvisioned",
    "BootstrapProgress",
    "BootstrapCompleted",
    "PoolStarted",
    "in the block",
    "PoolStopping",
    "before terminating",
    "before the ledger is closed",
]
POINTS = 20
AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a client dies: so many seconds after a phase has begun."""

    phase: str
    delay_s: float

    @property
    def name(self) -> str:
        return f"{self.phase} + {self.delay_s:.2f} s"


def points() -> Sequence[Point]:
    """Every phase at once, then as many again at seeded moments within one; the longest phases get most of these."""
    chance = random.Random(20)
    long = ["InfraCreating", "BootstrapProgress", "BootstrapCompleted", "in the block", "PoolStopping"]
    late = [Point(phase=chance.choice(long), delay_s=chance.uniform(0.02, 0.8)) for _ in range(POINTS - len(PHASES))]
    return [*(Point(phase=phase, delay_s=0.0) for phase in PHASES), *late]


class Client:
    """A program with a pool, and a state folder of its own."""

    def __init__(self, number: int, point: Point, provider: tuple[str, dict[str, object]], folder: Path) -> None:
        self.point = point
        self.ended_at = 0.0
        self.status: int | None = None
        self.said = ""
        self.state = folder / f"client-{number}"
        self.env = os.environ | {"XDG_STATE_HOME": str(self.state), MARK: self.state.name}
        name, settings = provider
        order = [point.phase, point.delay_s, name, settings, 1 + number % 2, LEASE_S]
        self._command = [sys.executable, "-c", CLIENT, json.dumps(order)]

    def live(self) -> None:
        """From start to end."""
        done = subprocess.run(self._command, env=self.env, capture_output=True, text=True, timeout=110, check=False)
        self.ended_at = time.monotonic()
        self.status, self.said = done.returncode, done.stderr

    def sweep(self) -> dict[str, list[object]]:
        done = CliRunner().invoke(main, ["sweep", "--json"], env={"XDG_STATE_HOME": str(self.state)})
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


def carriers(mark: str | None = None) -> list[str]:
    """What runs for the nodes of a client, or of all of them."""
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            carried = process.environ()
            mine = carried.get(MARK) if mark is None else carried.get(MARK) == mark
            if mine and "SKYWARD_INSTANCE" in carried and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Iterator[tuple[str, dict[str, object]]]:
    require_sshd()
    folder = tmp_path_factory.mktemp("killed")
    with ExitStack() as stack:
        both = [
            stack.enter_context(SshHost(folder / f"host-{n}", address=f"127.0.0.{n}", env={MARK: "on a host"}))
            for n in (2, 3)
        ]
        for host in both:
            share_cache(host.home, ssh_cache)
        known = write_known_hosts(folder / "known_hosts", *both)
        settings: dict[str, object] = {
            "hosts": [f"{host.address}:{host.port}" for host in both],
            "key_path": str(both[0].key_path),
            "known_hosts": str(known),
        }
        yield "ssh", settings


@pytest.fixture(params=["local", "ssh"])
def provider(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    return ("local", {}) if request.param == "local" else request.getfixturevalue("hosts")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_nodes_of_a_killed_client_end_within_their_lease_and_a_sweep_finds_nothing(
    provider: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    some = points()[:: 3 if provider[0] == "local" else 1]  # what differs is on the hosts
    clients = [Client(number, point, provider, tmp_path) for number, point in enumerate(some)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(Client.live, clients))

    at_once = [client for client in clients if not client.point.delay_s]
    assert {c.point.name: c.said for c in at_once if c.status != -signal.SIGKILL} == {}, "these were to be killed"
    assert {c.point.name: c.said for c in clients if c.status not in (0, -signal.SIGKILL)} == {}

    within = {
        client.point.name: (lambda mark=client.state.name: carriers(mark), client.ended_at + LEASE_S + GRACE_S)
        for client in clients
        if provider[0] == "local"
    }
    within["on the hosts"] = (carriers, max(client.ended_at for client in clients) + LEASE_S + GRACE_S)
    for name, (left, deadline) in within.items():
        assert none_by(deadline, left) == [], name

    first = {client.point.name: client.sweep() for client in clients}
    assert {name: report["left"] for name, report in first.items() if report["left"]} == {}
    again = {client.point.name: client.sweep() for client in clients}
    assert {name: report for name, report in again.items() if any(report.values())} == {}


def none_by(deadline: float, left: Callable[[], list[str]]) -> list[str]:
    """What is left at ``deadline``, a reading of the monotonic clock; looks at least once."""
    for attempt in eventually(max(0.01, deadline - time.monotonic())):
        with suppress(AssertionError), attempt:
            assert left() == []
    return left()
