"""Kept fleets on machines reached over SSH: a client dies behind a cut link, and another one goes on with its nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.ledger.fleet_record import FleetFolder, FleetRecord
from skyward.testing.hosts import require_sshd, write_known_hosts
from support.chaos import ChaosProxy
from support.kept import end_kept_fleet
from support.ssh_hosts import cached_host

require_sshd()
pytestmark = pytest.mark.timeout(300)  # the first pool builds an environment

NAME = "lab"
LEASE_S = 2.0
"""That of the client, which a kept fleet does not need."""

CLIENT = """
import json, sys
import skyward as sky

settings, path = json.loads(sys.argv[1])

@sky.compute
def note(number):
    import time
    with open(path, "a") as file:
        file.write(f"{number}\\n")
    time.sleep(0.1)
    return number

pool = sky.ComputePool(provider=sky.SSH(**settings), nodes=2, name="lab", keep="10m", lease=2, display="quiet").open()
pool.submit(note, -1).result()
job = pool.spawn(sky.gather(*(note(number) for number in range(200))), name="notes")
while job.progress.done < 20:
    pass
print("under way", flush=True)
sys.stdin.readline()
print(json.dumps([*job.result()]), flush=True)
pool.close()
"""


@sky.compute
def where() -> int:
    return sky.instance_info().node


@pytest.fixture
def hosts(tmp_path: Path, ssh_cache: Path) -> Iterator[tuple[dict[str, object], list[ChaosProxy]]]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(cached_host(tmp_path / f"host-{n}", f"127.0.0.{n}", ssh_cache)) for n in (2, 3)]
        proxies = [
            stack.enter_context(ChaosProxy(f"127.0.1.{n}", (host.address, host.port)))
            for n, host in enumerate(hosts, start=2)
        ]
        behind = {(proxy.address, proxy.port): host for proxy, host in zip(proxies, hosts, strict=True)}
        known_hosts = write_known_hosts(tmp_path / "known_hosts", *hosts, through=behind)
        settings: dict[str, object] = {
            "hosts": [f"{proxy.address}:{proxy.port}" for proxy in proxies],
            "key_path": str(hosts[0].key_path),
            "known_hosts": str(known_hosts),
        }
        yield settings, proxies
        end_kept_fleet(NAME)


def record() -> FleetRecord:
    found = FleetFolder(NAME).read()
    assert found is not None
    return found


@contextmanager
def client(settings: dict[str, object], notes: Path) -> Generator[subprocess.Popen[str]]:
    """Run a client, whose job is under way."""
    order = json.dumps([settings, str(notes)])
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        yield process


@contextmanager
def cut_links(proxies: list[ChaosProxy]) -> Generator[None]:
    """Cut the links before the block; heal them once the client's lease has run out after it."""
    for proxy in proxies:
        proxy.cut()
    yield
    time.sleep(LEASE_S + 2)
    for proxy in proxies:
        proxy.heal()


def test_nodes_and_their_jobs_outlive_a_client_that_dies_behind_a_cut_link_and_no_call_runs_twice(
    hosts: tuple[dict[str, object], list[ChaosProxy]], tmp_path: Path
) -> None:
    settings, proxies = hosts
    notes = tmp_path / "notes"
    with client(settings, notes) as process:
        before = record()
        with cut_links(proxies):
            process.kill()
    with sky.attach(NAME, display="quiet") as pool:
        values = sky.job("notes", pool=NAME).result(timeout=60)
        assert where() @ pool == (0, 1)
    after = record()

    assert [node.ready.pid for node in after.nodes] == [node.ready.pid for node in before.nodes]
    assert values == tuple(range(200))
    assert Counter(map(int, notes.read_text().split())) == Counter(range(-1, 200))
    end_kept_fleet(NAME)
    assert not [node for node in after.nodes if psutil.pid_exists(node.ready.pid)]


def test_client_whose_machine_sleeps_for_longer_than_its_lease_goes_on_with_the_same_nodes_and_job(
    hosts: tuple[dict[str, object], list[ChaosProxy]], tmp_path: Path
) -> None:
    settings, proxies = hosts
    notes = tmp_path / "notes"
    with client(settings, notes) as process:
        before = record()
        with cut_links(proxies):
            process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate("\n", timeout=60)
    after = record()

    assert process.returncode == 0
    assert json.loads(told) == [*range(200)]
    assert [node.ready.pid for node in after.nodes] == [node.ready.pid for node in before.nodes]
    assert Counter(map(int, notes.read_text().split())) == Counter(range(-1, 200))
