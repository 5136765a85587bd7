"""The whole way on AWS, with EC2 on this machine: launch, SSH, environment, engine, calls, preemption, the end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

import skyward as sky
from skyward.events import (
    BootstrapProgress,
    CostFinal,
    CostUpdate,
    InstanceLaunching,
    InstancePreempted,
    InstanceProvisioned,
    LogLine,
    Metrics,
    Notice,
    Progress,
    SkywardEvent,
)
from skyward.fleet.kept import keep_for
from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.ledger import Ledger
from skyward.testing.aws import LocalEC2, Market, use_ec2
from skyward.testing.hosts import require_sshd

require_sshd()
pytestmark = pytest.mark.timeout(240)  # the first pool builds an environment

Start = Callable[[Path], LocalEC2]
T = TypeVar("T")
Kind = TypeVar("Kind", bound=SkywardEvent)

PAGE = Path(__file__).parents[3] / "docs/providers/aws.md"
MACHINE = "m7i.large"
NODES = 4
CALLS = 400
VICTIM = 2
NOTICE_S = 9.0  # the node looks every 5 s
USD_PER_SECOND = 0.001
BILLED_S = 60
TIMEOUT_S = 900
DEADLINE_S = 100.0


@pytest.fixture
def start(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts EC2 with that folder of environments on its machines, on which there is no uv."""
    market = Market(prices={MACHINE: 7200 * USD_PER_SECOND}, spot_prices={MACHINE: 3600 * USD_PER_SECOND})
    machines = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    folder = tmp_path_factory.mktemp("ec2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # other tests' prices

    with ExitStack() as stack:

        def started(cache: Path) -> LocalEC2:
            ec2 = LocalEC2(folder, machines=True, market=market, cache=cache, env=machines)
            stack.enter_context(ec2)
            use_ec2(ec2, monkeypatch, ec2.settings)
            return ec2

        yield started


class Seen:
    """A pool's events, and when they came."""

    def __init__(self) -> None:
        self.events: list[tuple[float, SkywardEvent]] = []

    def __call__(self, event: SkywardEvent) -> None:
        self.events.append((time.monotonic(), event))

    def of(self, kind: type[Kind]) -> list[tuple[float, Kind]]:
        return [(at, event) for at, event in self.events if isinstance(event, kind)]


def open_pool(ec2: LocalEC2, seen: Seen, nodes: int) -> sky.ComputePool:
    provider = sky.AWS(endpoint_url=ec2.endpoint_url)
    return sky.ComputePool(
        provider=provider, nodes=nodes, machine=MACHINE, timeout=TIMEOUT_S, display="quiet", on_event=seen
    )


def nothing_is_left(ec2: LocalEC2) -> None:
    started = {instance["InstanceId"] for instance in ec2.instances()}
    assert ec2.left() == {}
    assert ec2.failures() == []
    assert [entry for entry in Ledger.of_user().open_entries() if entry.purchase.provider == "aws"] == []
    assert processes_of(started) == []


def processes_of(instances: Iterable[str]) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKYWARD_INSTANCE") in instances and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def documented() -> list[str]:
    """The page's list of events."""
    section = PAGE.read_text(encoding="utf-8").partition("## Events of a pool\n")[2]
    found = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1].split("\n")[:-1]


def told(events: Iterable[SkywardEvent]) -> list[str]:
    """Events as the page lists them, without those that it leaves out."""
    lines: list[str] = []
    for event in events:
        line = type(event).__name__ + (f" {event.step}" if isinstance(event, BootstrapProgress) else "")
        again = isinstance(event, CostUpdate) and line in lines
        if not (again or isinstance(event, Metrics | LogLine | Progress)):
            lines.append(line)
    return lines


@sky.compute
def square(number: int) -> int:
    return number * number


@pytest.mark.full
def test_a_pool_tells_what_the_page_says_and_leaves_nothing(start: Start, tmp_path: Path, ssh_cache: Path) -> None:
    """On a machine that has nothing yet, but what was downloaded before."""
    (tmp_path / "new").mkdir(mode=0o700)
    (tmp_path / "new/cache").symlink_to(ssh_cache / "cache")
    ec2 = start(tmp_path / "new")
    seen = Seen()
    with open_pool(ec2, seen, 1) as pool:
        assert sky.gather(*[square(n) for n in range(20)]) >> pool == tuple(n * n for n in range(20))
    nothing_is_left(ec2)
    assert told(event for _, event in seen.events) == documented()
    ((_, provisioned),) = seen.of(InstanceProvisioned)
    assert (provisioned.spot, provisioned.instance_type, provisioned.provider) == (True, MACHINE, "aws")
    orders = ec2.user_data(provisioned.instance_id)
    assert "shutdown" in orders.commands[0]
    assert orders.shutdown_min == TIMEOUT_S / 60 + 2  # after the node had its time to end by itself


CLIENT = """
import json, os, signal, sys
import skyward as sky

for name, value in json.loads(sys.argv[2]).items():
    setattr(sky.AWS, name, value)
with sky.ComputePool(provider=sky.AWS(endpoint_url=sys.argv[1]), machine=sys.argv[3], lease=3, display="quiet"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


# In `make test`: the contract of TestAWS, unit/testing/test_aws.py and clouds/test_killed_clients.py.
@pytest.mark.full
def test_the_machine_of_a_killed_client_ends_its_bill_by_itself(start: Start, tmp_path: Path, ssh_cache: Path) -> None:
    ec2 = start(ssh_cache)
    killed = subprocess.run(
        [sys.executable, "-c", CLIENT, ec2.endpoint_url, json.dumps(dict(ec2.settings)), MACHINE],
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},  # the ledger's entry stays open
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    (machine,) = ec2.instances()
    eventually(lambda: not ec2.left().get("instances"))
    assert "TerminateInstances" not in ec2.actions
    assert "ClientInstanceInitiatedShutdown" in str(ec2.instances()).replace(".", "")
    assert processes_of([machine["InstanceId"]]) == []


KEPT = """
import json, os, signal, sys
import skyward as sky

@sky.compute(retries=0)
def note(path, number):
    with open(path, "a") as file:
        file.write(f"{number}\\n")
    return number

for name, value in json.loads(sys.argv[2]).items():
    setattr(sky.AWS, name, value)
provider, notes = sky.AWS(endpoint_url=sys.argv[1]), sys.argv[4]
with sky.ComputePool(provider=provider, machine=sys.argv[3], name="cloud", keep="10m", nodes=2) as pool:
    pool.spawn(sky.gather(*(note(notes, number) for number in range(200))), name="notes")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kept_fleet_is_taken_over_without_a_purchase_and_nothing_of_it_is_left_when_its_time_is_over(
    start: Start, tmp_path: Path, ssh_cache: Path
) -> None:
    ec2, notes = start(ssh_cache), tmp_path / "notes"
    command = [sys.executable, "-c", KEPT, ec2.endpoint_url, json.dumps(dict(ec2.settings)), MACHINE, str(notes)]
    killed = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    bought = sorted(instance["InstanceId"] for instance in ec2.instances())
    creates = Counter(ec2.actions)["RunInstances"], Counter(ec2.actions)["CreateFleet"]
    folder = FleetFolder("cloud")

    with sky.attach("cloud", display="quiet") as pool:
        found = sorted(instance for _, instance in where() @ pool)
        cost = pool.status.cost
        assert sky.job("notes", pool="cloud").result(timeout=DEADLINE_S) == tuple(range(200))
    assert (Counter(ec2.actions)["RunInstances"], Counter(ec2.actions)["CreateFleet"]) == creates
    asyncio.run(keep_for(folder, Ledger.of_user(), 2.0))
    eventually(lambda: not folder.written_at() and not folder.has_keeper())

    assert found == bought
    assert Counter(map(int, notes.read_text().split())) == Counter(range(200))
    assert cost >= 2 * BILLED_S * USD_PER_SECOND  # since their launch, by another process
    assert {entry.name for entry in folder.path.iterdir()} <= {"lock", "keeper", "jobs"}
    nothing_is_left(ec2)


@sky.compute(retries=1)
def work(number: int, notes: str, victim: str) -> int:
    """Takes a moment, but has no end on the victim, if it is one of the first."""
    instance = os.environ["SKYWARD_INSTANCE"]
    with open(notes, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    time.sleep(600 if instance == victim and number < 2 * NODES else 0.1)
    return number * number


@sky.compute
def where() -> tuple[int, str]:
    return sky.instance_info().node, os.environ["SKYWARD_INSTANCE"]


# In `make test`: unit/fleet/test_preempted.py, with one of four nodes taken under 400 calls.
@pytest.mark.full
def test_a_preempted_node_is_replaced_no_call_is_lost_and_the_bill_is_right(
    start: Start, tmp_path: Path, ssh_cache: Path
) -> None:
    ec2 = start(ssh_cache)
    seen = Seen()
    notes = tmp_path / "notes"
    with open_pool(ec2, seen, NODES) as pool:
        first = dict(where() @ pool)
        victim = first[VICTIM]
        futures = [pool.submit(work, number, str(notes), victim) for number in range(CALLS)]
        eventually(lambda: sum(future.done() for future in futures) >= CALLS // 10)
        ec2.preempt(victim, in_s=NOTICE_S)
        ec2.hint(first[0])
        results = [future.result(timeout=DEADLINE_S) for future in futures]
        replaced = eventually(lambda: dict(members) if len(members := where() @ pool) == NODES else None)
    nothing_is_left(ec2)

    assert results == [number * number for number in range(CALLS)]
    times = Counter(int(line) for line in notes.read_text(encoding="utf-8").split())
    assert sorted(times) == list(range(CALLS))
    again = [number for number, count in times.items() if count > 1]
    assert again, "nothing ran on the victim when it was taken back"
    assert set(again) <= set(range(2 * NODES))

    ((_, preempted),) = seen.of(InstancePreempted)
    assert (preempted.instance_id, preempted.node) == (victim, VICTIM)
    assert 0 < preempted.seconds_left <= NOTICE_S
    hinted, announced = [event for _, event in seen.of(Notice)]
    assert (hinted.instance_id, announced.instance_id) == (first[0], victim)
    assert "will probably take the machine of node 0 back" in hinted.message
    assert f"node {VICTIM} is preempted" in announced.message
    assert {node: instance for node, instance in replaced.items() if first[node] != instance}.keys() == {VICTIM}
    assert ec2.launched() == NODES + 1
    check_the_bill(seen)


@sky.compute(retries=1)
def train(notes: str, steps: int) -> tuple[int, str]:
    """Train from the last checkpoint; write one every 25 steps, and one when the machine is taken back."""
    folder = sky.checkpoint_folder()
    state = folder / "state"
    begin = int(state.read_text()) if state.exists() else 0
    saved = "regularly"
    for step in range(begin, steps):
        time.sleep(0.05)
        with open(notes, "a", encoding="utf-8") as file:
            file.write(f"{os.environ['SKYWARD_INSTANCE']} {step}\n")
        preempted = (end := sky.notice()) is not None and end.kind == "preemption"
        if (step + 1) % 25 == 0 or (preempted and saved == "regularly"):
            saved = "on notice" if preempted else "regularly"
            (folder / "next").write_text(str(step + 1))
            (folder / "next").rename(state)
            if preempted:
                time.sleep(600)  # nothing is done that would be lost
    return begin, os.environ["SKYWARD_INSTANCE"]


# In `make test`: e2e/calls/test_checkpoints.py, on nodes of this machine.
@pytest.mark.full
@pytest.mark.parametrize("notice_s", [NOTICE_S, 0.0], ids=["with notice", "without"])
def test_a_preempted_training_continues_from_its_checkpoint_on_another_machine(
    start: Start, tmp_path: Path, ssh_cache: Path, notice_s: float
) -> None:
    ec2, seen, notes = start(ssh_cache), Seen(), tmp_path / "notes"

    def ran() -> list[tuple[str, int]]:
        rows = [line.split() for line in notes.read_text(encoding="utf-8").splitlines()] if notes.exists() else []
        return [(machine, int(step)) for machine, step in rows]

    with open_pool(ec2, seen, 2) as pool:
        training = pool.submit(train, str(notes), 200)
        victim = eventually(lambda: next((machine for machine, step in ran() if step == 120), None))
        ec2.preempt(victim, in_s=notice_s)
        begin, machine = training.result(timeout=DEADLINE_S)
    nothing_is_left(ec2)

    first = [step for each, step in ran() if each == victim]
    assert machine != victim
    assert first == list(range(len(first)))
    assert [step for each, step in ran() if each == machine] == list(range(begin, 200))
    if notice_s:
        assert begin == len(first), "it has saved its work on the notice: no step is lost"
        assert [event.instance_id for _, event in seen.of(InstancePreempted)] == [victim]
    else:
        assert begin in range(50, len(first) + 1, 25), "no step is lost but those since the last checkpoint copied"
    assert [each for _, each in seen.of(Notice) if "train#0 continues from its checkpoint" in each.message]


def check_the_bill(seen: Seen) -> None:
    """Every second of every machine, from asking for it to its confirmed end, and no other."""
    (began, _), (again, _) = seen.of(InstanceLaunching)
    ((preempted, event),) = seen.of(InstancePreempted)
    ((ended, bill),) = seen.of(CostFinal)
    until_end = [ended - began] * (NODES - 1) + [ended - again]
    least = [*until_end, preempted + event.seconds_left - began]
    most = [*until_end, ended - began]
    seconds = bill.total_cost / USD_PER_SECOND
    assert seconds == pytest.approx(round(seconds), abs=1e-6)
    assert billed(least, slack=-1) <= round(seconds) <= billed(most, slack=1)
    assert bill.savings_vs_ondemand == pytest.approx(bill.total_cost)  # on demand it is twice that
    assert (bill.spot_count, bill.ondemand_count) == (NODES + 1, 0)


def billed(machines: Iterable[float], *, slack: float) -> int:
    return sum(max(BILLED_S, math.ceil(seconds + slack)) for seconds in machines)


def eventually(condition: Callable[[], T]) -> T:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    return found
