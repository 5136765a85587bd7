"""Pools on rented containers: two that reach nothing of each other, and every way in which one may fail."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joblib import parallel_config

import skyward as sky
from skyward.errors import ConfigurationError
from skyward.events import CostFinal, InstanceLaunching, Notice, SkywardEvent
from skyward.fleet import machine_size
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest
from skyward.testing.hosts import require_sshd
from skyward_dask import SkywardCluster
from support.clouds.container_room import Container, ContainerFault, ContainerRoom
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import PROMPT, VENDORS, Vendor, opened
from support.ssh_islands import require_namespaces

require_sshd()
pytestmark = pytest.mark.timeout(400)  # the first pool builds an environment

CONTAINERS = [each for each in VENDORS if each.containers]
IMAGE = sky.Image(pip=[f"numpy=={np.__version__}", f"scikit-learn=={version('scikit-learn')}"])
DEADLINE_S = 120.0
READY_WITHIN_S = 20.0
CALLS = 200
EARLY = 120
"""Number of calls that do not wait for the restart of a container."""


@pytest.fixture
def vendor(request: pytest.FixtureRequest) -> Vendor:
    require_namespaces()
    found: Vendor = request.param
    return found


@pytest.fixture
def cloud(vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    with opened(vendor, monkeypatch, tmp_path, machines=True, image=IMAGE, cache=ssh_cache, provider=PROMPT) as cloud:
        yield cloud
        assert (cloud.left(), cloud.failures()) == ({}, [])


@sky.compute
def place() -> tuple[int, int, str]:
    return sky.instance_info().node, os.getpid(), os.environ["SKYWARD_INSTANCE"]


@sky.compute
def total(values: np.ndarray) -> float:
    return float(values.sum())


def leave_a_mark(number: int, folder: str) -> int:
    """Has an effect that fails if it was there already; a late call waits for the gate first."""
    import time
    from pathlib import Path

    Path(folder, f"begun-{number}-{os.environ['SKYWARD_INSTANCE']}").touch()
    while number >= EARLY and not Path(folder, "open").exists():
        time.sleep(0.02)
    Path(folder, f"done-{number}").touch(exist_ok=False)
    return number


def load(folder: str) -> str:
    """Returns the machine, but not on the first one: that is to die."""
    import time
    from pathlib import Path

    own = os.environ["SKYWARD_INSTANCE"]
    try:
        with Path(folder, "loaded").open("x", encoding="utf-8") as file:
            file.write(own)
    except FileExistsError:
        return own
    while True:
        time.sleep(0.05)


def sampled(*often: str) -> pytest.MarkDecorator:
    """Vendors of containers; in `make test` only these."""
    params = [
        pytest.param(each, marks=() if each.name in often else pytest.mark.full, id=each.name) for each in CONTAINERS
    ]
    return pytest.mark.parametrize("vendor", params, indirect=True)


def eventually(condition: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    return found


def room_of(cloud: FakeCloud) -> ContainerRoom:
    assert isinstance(cloud.room, ContainerRoom)
    return cloud.room


def deadline(of: Container) -> str:
    """The deadline that the container's loop holds, as it lies on its disk."""
    text = (of.own_root / "var/lib/skyward/boot.sh").read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith("ends_at="))


@sampled("runpod")
def test_two_containers_that_reach_nothing_of_each_other_do_all_but_train_together(
    vendor: Vendor, cloud: FakeCloud, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Their own keys are refused, which is reported; ports move, keys vanish, and one main process is restarted."""
    cloud.containers_may_end = False
    events: list[SkywardEvent] = []
    assert sky.distributed.__all__, "a program that trains has imported it before its pool opens"
    pool = sky.ComputePool(
        provider=vendor.provider(cloud),
        nodes=2,
        machine=vendor.machine,
        image=IMAGE,
        display="quiet",
        on_event=events.append,
    )
    with pool:
        with subtests.test("a gang is announced to be refused, before the machines are bought"):
            told = [each for each in events if isinstance(each, InstanceLaunching) or "reach each other" in str(each)]
            assert [type(each) for each in told[:2]] == [Notice, InstanceLaunching]
        with subtests.test("a container whose key is refused cannot end its own bill"):
            check_notices(vendor, events)
        with subtests.test("calls on both, a grid search, a large argument"):
            check_calls(pool)
        with subtests.test("a gang and a cluster are refused before anything is bought"):
            check_refusals(pool, vendor, cloud)
        with subtests.test("the vendor's keys vanish and the link is dialled again, at another port"):
            check_link(pool, cloud)
        with subtests.test("a restarted container in the middle of calls with effects"):
            check_restart(pool, cloud, tmp_path)


def check_notices(vendor: Vendor, events: Sequence[SkywardEvent]) -> None:
    notes = [
        event.message for event in events if isinstance(event, Notice) and "cannot end its own bill" in event.message
    ]
    assert len(notes) == 2
    assert all("status 40" in note for note in notes)
    assert len(Ledger.of_user().billed_entries(vendor.name)) == 2


def check_calls(pool: sky.ComputePool) -> None:
    from sklearn.datasets import load_iris
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    assert [node for node, _, _ in place() @ pool] == [0, 1]
    search = GridSearchCV(SVC(), {"C": [1, 10]}, cv=3)
    with parallel_config(backend="skyward", pool=pool):
        assert search.fit(*load_iris(return_X_y=True)).best_params_["C"] in (1, 10)
    assert total(np.ones(12_500_000)) @ pool == (12_500_000.0,) * 2


def check_refusals(pool: sky.ComputePool, vendor: Vendor, cloud: FakeCloud) -> None:
    @sky.compute
    @sky.distributed.torch()
    def train() -> None:
        raise AssertionError("it must not run")

    bought = cloud.service.count(vendor.creating)
    with pytest.raises(ConfigurationError, match="network"):
        train() @ pool
    with pytest.raises(ConfigurationError, match="network"):
        SkywardCluster(pool)
    with pytest.raises(ConfigurationError, match="reach each other"):
        SkywardCluster(provider=vendor.provider(cloud), machine=vendor.machine, nodes=2, image=IMAGE, display="quiet")
    assert cloud.service.count(vendor.creating) == bought == 2


def check_link(pool: sky.ComputePool, cloud: FakeCloud) -> None:
    before = place() @ pool
    moved = room_of(cloud).machine(before[1][2])
    moved.empty_keys()
    moved.move_port()
    assert place() @ pool == before


def check_restart(pool: sky.ComputePool, cloud: FakeCloud, folder: Path) -> None:
    machines = {node: machine for node, _, machine in place() @ pool}
    doomed = room_of(cloud).machine(machines[1])
    before, port = deadline(doomed), doomed.port
    calls = [pool.submit(leave_a_mark, number, str(folder)) for number in range(CALLS)]
    for call in calls[:EARLY]:
        call.result(DEADLINE_S)
    late = [f"begun-{number}-{machines[1]}" for number in range(EARLY, CALLS)]
    eventually(lambda: any((folder / each).exists() for each in late))
    doomed.restart()
    assert doomed.port != port
    (folder / "open").touch()
    assert [call.result(DEADLINE_S) for call in calls] == list(range(CALLS))
    assert len(list(folder.glob("done-*"))) == CALLS
    assert len(list(folder.glob("begun-*"))) > CALLS, "no call was under way on the container"
    assert deadline(doomed) == before


def give_up_early(provider: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the provider's machines be given up after a short time."""
    kind: type[Any] = type(provider)
    offers = kind.offers

    async def impatient(self: Any, request: PoolRequest) -> Sequence[Offer]:
        return [dataclasses.replace(offer, ready_within_s=READY_WITHIN_S) for offer in await offers(self, request)]

    monkeypatch.setattr(kind, "offers", impatient)


# In `make test`: test_cloud_limits.py for the host key, unit/fleet/test_unfit_machines.py for the others.
@sampled()
def test_hosts_that_fail_are_replaced_elsewhere_and_their_cost_is_in_the_summary(
    vendor: Vendor, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One never answers, one has another host key, one is smaller than sold, one dies at its first load."""
    (sold,) = sky.offers(vendor.provider(cloud), machine=vendor.machine)
    monkeypatch.setattr(machine_size, "CORES_SHARE", 2 / sold.cpu)
    room_of(cloud).faults += [ContainerFault.SILENT, ContainerFault.IMPOSTOR, ContainerFault.SMALL]
    events: list[SkywardEvent] = []
    provider: Any = vendor.provider(cloud)
    give_up_early(provider, monkeypatch)
    with sky.ComputePool(
        provider=provider, nodes=2, machine=vendor.machine, image=IMAGE, display="quiet", on_event=events.append
    ) as pool:
        loaded, call = tmp_path / "loaded", pool.submit(load, str(tmp_path))
        first = eventually(lambda: loaded.read_text(encoding="utf-8") if loaded.exists() else "")
        cloud.lose(first)
        assert call.result(DEADLINE_S) != first
        running = {machine for _, _, machine in place() @ pool}

    made = list(cloud.machines.values())
    assert len(made) == 6
    assert first not in running
    assert len({each.host for each in made}) == 6
    notes = " ".join(event.message for event in events if isinstance(event, Notice))
    assert "host key" in notes
    assert "smaller than bought: it has 1 of" in notes
    (final,) = [event for event in events if isinstance(event, CostFinal)]
    assert final.spot_count + final.ondemand_count == 6
    assert 0 < cloud.service.bill.usd() <= final.total_cost
