"""The whole way on each cloud that has a fake: launch, first boot, SSH, environment, calls, a loss, the end."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import psutil
import pytest
from joblib import parallel_config

import skyward as sky
from skyward.events import (
    BootstrapProgress,
    CostFinal,
    CostUpdate,
    InstanceLaunching,
    LogLine,
    Metrics,
    Notice,
    Progress,
    SkywardEvent,
)
from skyward.ledger.ledger import Ledger
from skyward.providers._common.logins import user_key
from skyward.testing.hosts import require_sshd
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import BOOTED, Vendor, opened_with_hosts

require_sshd()
pytestmark = pytest.mark.timeout(300)  # the first pool builds an environment

T = TypeVar("T")
Kind = TypeVar("Kind", bound=SkywardEvent)

PAGES = Path(__file__).parents[3] / "docs/providers"
IMAGE = sky.Image(pip=[f"numpy=={np.__version__}", f"scikit-learn=={version('scikit-learn')}"])
NODES = 2
VICTIM = 1
TIMEOUT_S = 900
DEADLINE_S = 120.0
SLACK_S = 30.0
ORDERS = ("user_data", "script", "env")
"""Fields of calls with first-boot orders."""


@dataclass(eq=False)
class Life:
    """Everything that was seen of a pool, from its launch to its end.

    Attributes:
        told: the pool's events.
        before_loss: number of them when a machine was taken back.
        argvs: command lines of the processes of this machine while the pool was up.
        logs: messages of every logger.
        ledger: the ledger's files.
    """

    vendor: Vendor
    cloud: FakeCloud
    told: list[SkywardEvent] = field(default_factory=list[SkywardEvent])
    before_loss: int = 0
    squares: Sequence[int] = ()
    nodes: Sequence[int] = ()
    best: dict[str, float] = field(default_factory=dict[str, float])
    first: dict[int, str] = field(default_factory=dict[int, str])
    replaced: dict[int, str] = field(default_factory=dict[int, str])
    argvs: list[str] = field(default_factory=list[str])
    left: Any = None
    open_entries: Sequence[Any] = ()
    processes: Sequence[str] = ()
    failures: Sequence[str] = ()
    ledger: bytes = b""
    logs: list[str] = field(default_factory=list[str])
    host_keys: Sequence[str] = ()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.told if isinstance(event, kind)]


@sky.compute
def square(number: int) -> int:
    return number * number


@sky.compute
def where() -> tuple[int, str]:
    return sky.instance_info().node, os.environ["SKYWARD_INSTANCE"]


@pytest.fixture(scope="module", params=BOOTED)
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Life:
    vendor: Vendor = request.param
    folder = tmp_path_factory.mktemp(vendor.name)
    with (
        pytest.MonkeyPatch.context() as patch,
        opened_with_hosts(vendor, patch, folder, ssh_cache, image=IMAGE) as cloud,
        Listening() as logs,
    ):
        seen = Life(vendor, cloud, logs=logs.messages)
        live(seen)
        seen.host_keys = [private_part(cloud.room.machine(each).orders) for each in cloud.machines]
        seen.left, seen.failures = cloud.left(), cloud.failures()
        seen.open_entries = Ledger.of_user().open_entries()
        seen.processes = processes_of(cloud.machines)
        seen.ledger = b"".join(each.read_bytes() for each in (folder / "state").rglob("*") if each.is_file())
    return seen


def after_loss(pool: sky.ComputePool, first: dict[int, str]) -> dict[int, str] | None:
    """The machines, once another one has the victim's place."""
    found = dict(where() @ pool)
    return found if len(found) == NODES and found[VICTIM] != first[VICTIM] else None


class Listening(logging.Handler):
    """Collects what every logger logs. A context manager."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        self._level = logging.getLogger("skyward").level
        logging.getLogger("skyward").setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("skyward").setLevel(self._level)


def private_part(orders: str) -> str:
    """A line of the host's private key, which has nothing of the public one."""
    (key,) = re.findall("BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", orders, re.DOTALL)
    return str(re.split(r"\\n|\n", key)[4])


def live(seen: Life) -> None:
    """Open a pool, use it, take a machine from it, wait for another one."""
    from sklearn.datasets import load_iris
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    provider = seen.vendor.provider(seen.cloud)
    with sky.ComputePool(
        provider=provider,
        nodes=NODES,
        machine=seen.vendor.machine,
        image=IMAGE,
        timeout=TIMEOUT_S,
        display="quiet",
        on_event=seen.told.append,
    ) as pool:
        seen.squares = sky.gather(*[square(n) for n in range(20)]) >> pool
        seen.first = dict(where() @ pool)
        search = GridSearchCV(SVC(), {"C": [1, 10]}, cv=3)
        with parallel_config(backend="skyward", pool=pool):
            seen.best = search.fit(*load_iris(return_X_y=True)).best_params_
        seen.argvs = [" ".join(each) for each in command_lines()]
        seen.before_loss = len(seen.told)
        seen.cloud.destroy(seen.first[VICTIM])
        seen.replaced = eventually(lambda: after_loss(pool, seen.first))


def command_lines() -> Iterator[list[str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield process.cmdline()


def processes_of(instances: Iterable[str]) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKYWARD_INSTANCE") in instances and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def documented(vendor: Vendor) -> list[str]:
    """The page's list of events."""
    section = (PAGES / f"{vendor.name}.md").read_text(encoding="utf-8").partition("## Events of a pool\n")[2]
    found = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1].split("\n")[:-1]


def told(events: Iterable[SkywardEvent]) -> list[str]:
    """Events as the page lists them, each the first time, without remarks and those that it leaves out."""
    lines: dict[str, None] = {}
    for event in events:
        line = type(event).__name__ + (f" {event.step}" if isinstance(event, BootstrapProgress) else "")
        if not isinstance(event, CostUpdate | Metrics | LogLine | Notice | Progress):
            lines[line] = None
    return list(lines)


def eventually(condition: Callable[[], T | None]) -> T:
    began = time.monotonic()
    while (found := condition()) is None:
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    return found


def test_calls_broadcasts_and_a_search_run_on_the_machines(life: Life) -> None:
    assert life.squares == tuple(n * n for n in range(20))
    assert sorted(life.first) == list(range(NODES))
    assert life.best["C"] in (1, 10)


def test_a_machine_that_was_taken_back_is_replaced(life: Life) -> None:
    assert sorted(life.replaced) == list(range(NODES))
    changed = {node for node, machine in life.replaced.items() if life.first[node] != machine}
    assert changed == {VICTIM}
    assert [event.count for event in life.of(InstanceLaunching)] == [NODES, 1]


def test_nothing_is_left_at_the_vendor_in_the_ledger_or_running(life: Life) -> None:
    assert life.failures == []
    assert (life.left, life.open_entries, life.processes) == ({}, (), [])
    assert len(life.cloud.machines) == NODES + 1
    assert life.cloud.service.bill.peak == NODES


def test_the_events_are_those_of_the_page(life: Life) -> None:
    (stopping,) = [index for index, event in enumerate(life.told) if type(event).__name__ == "PoolStopping"]
    found = [*told(life.told[: life.before_loss]), *told(life.told[stopping:])]
    steps = {line for line in documented(life.vendor) if line.startswith("BootstrapProgress ")} - {*found}  # kept ones
    left_out = {"CostUpdate", "Notice", *steps}
    assert found == [line for line in documented(life.vendor) if line not in left_out]


def test_the_bill_is_the_vendors(life: Life) -> None:
    """The client counts from before its call until it knows of the end: no less, and not much more."""
    (bill,) = life.of(CostFinal)
    second, charged = life.vendor.usd_per_hour / 3600, life.cloud.service.bill.usd()
    assert charged <= bill.total_cost + second
    assert bill.total_cost <= charged + SLACK_S * len(life.cloud.machines) * second
    assert (bill.spot_count, bill.ondemand_count) == (0, NODES + 1)


def test_no_secret_is_in_any_argv_name_log_event_or_ledger(life: Life) -> None:
    """The host's private key is in the first-boot orders, and nowhere else."""
    calls = [call for call in life.cloud.service.calls if not call.route.endswith("/token")]
    places = {
        "argv": life.argvs,
        "call": [f"{call.path} {call.query} {without_orders(call.body)}" for call in calls],
        "event": [repr(event) for event in life.told],
        "log": life.logs,
        "ledger": [life.ledger.decode(errors="replace")],
        "repr": [repr(life.vendor.provider(life.cloud))],
    }
    secrets = [*life.cloud.secrets, *life.host_keys, private_part(user_key()[1].private)]
    assert all(len(each) > 10 for each in secrets)
    assert len(set(life.host_keys)) == NODES + 1
    assert life.logs
    found = {place: secret for place, texts in places.items() for secret in secrets for text in texts if secret in text}
    assert found == {}


def without_orders(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in ORDERS} if isinstance(body, dict) else body
