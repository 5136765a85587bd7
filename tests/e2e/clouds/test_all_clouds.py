"""One pool over five clouds and the user's host: its bill, the loss of a cloud, and the end of a killed client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from joblib import parallel_config
from sklearn.base import BaseEstimator
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV

import skyward as sky
from skyward.cli import main
from skyward.events import CostFinal, InstancePreempted, Notice, Progress, SkywardEvent
from skyward.ledger.ledger import Ledger
from skyward.providers.registry import provider_settings
from skyward.providers.vastai import VastAI
from skyward.testing.hosts import require_sshd
from support.clouds.all_clouds import CLOUDS, NAMES, AllClouds, all_clouds
from support.clouds.container_room import ContainerFault, ContainerRoom
from support.clouds.vendors import PROMPT
from support.eventually import eventually
from support.ssh_islands import require_namespaces

require_sshd()
pytestmark = pytest.mark.timeout(400)  # the first pool builds an environment

IMAGE = sky.Image(pip=[f"numpy=={np.__version__}", f"scikit-learn=={version('scikit-learn')}"])
SMALL: dict[str, Any] = {"cpu": 2, "memory": "2GB", "spread": True, "display": "quiet"}
DEADLINE_S = 120.0
HOUR_S = 3600.0
SOME_HOURS = 10
CENT = 0.01

FITS, FOLDS = 60, 3

CLIENT = """
import json, sys
import skyward as sky
from skyward.fleet import machine_size
from skyward.providers.registry import make_provider, provider_type

machine_size.CORES_SHARE = machine_size.MEMORY_SHARE = 0.0
providers, variables = json.loads(sys.argv[1])
for name, values in variables.items():
    for variable, value in values.items():
        setattr(provider_type(name), variable, tuple(value) if isinstance(value, list) else value)
terms = {"cpu": 2, "memory": "2GB", "spot": "if-available", "timeout": 900, "lease": 3, "display": "quiet"}
made = [make_provider(name, settings) for name, settings in providers]
with sky.ComputePool(provider=made, nodes=len(made), spread=True, **terms):
    sys.stdin.read()
"""


class Slow(BaseEstimator):
    """A model that takes a tenth of a second, and scores better the deeper it is."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def fit(self, rows: Any, targets: Any) -> Slow:
        time.sleep(0.1)
        return self

    def score(self, rows: Any, targets: Any) -> float:
        return float(self.depth)


@sky.compute
def place() -> int:
    return sky.instance_info().node


def answer(*arguments: str) -> Any:
    """Run the command; return its JSON."""
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def machines(tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllClouds]:
    """The clouds, with a real host per machine."""
    require_namespaces()
    with all_clouds(monkeypatch, tmp_path, cache=ssh_cache, machines=True, image=IMAGE) as clouds:
        yield clouds
        assert (clouds.left(), Ledger.of_user().open_entries()) == ({}, ())


def test_the_bill_of_every_cloud_is_in_the_final_cost_to_the_cent(machines: AllClouds) -> None:
    """A machine of each, one more expensive than listed, one that fails, two taken back and replaced, in 20 hours."""
    clouds, events = machines, list[SkywardEvent]()
    clouds.limit(1, *CLOUDS)
    clouds.limit(2, "runpod")
    clouds.fakes["runpod"].surcharge = 1.5
    room = clouds.fakes["runpod"].room
    assert isinstance(room, ContainerRoom)
    room.faults.append(ContainerFault.IMPOSTOR)
    timeout = 5 * SOME_HOURS * HOUR_S

    with sky.ComputePool(
        provider=clouds.providers(),
        nodes=len(NAMES),
        image=IMAGE,
        spot="if-available",
        timeout=timeout,
        on_event=events.append,
        **SMALL,
    ) as pool:
        assert [*(place() @ pool)] == [*range(len(NAMES))]
        assert {*clouds.alive()} == {*CLOUDS}
        clouds.pass_time(SOME_HOURS * HOUR_S)
        taken = {name: clouds.alive()[name][0] for name in ("aws", "verda")}
        for name, machine in taken.items():
            clouds.take_back(name, machine)
        for attempt in eventually(DEADLINE_S):
            with attempt:
                assert all(clouds.alive().get(name, [old]) != [old] for name, old in taken.items())
                assert len([*(place() @ pool)]) == len(NAMES)
        clouds.pass_time(SOME_HOURS * HOUR_S)
        assert pool.status.cost_by_provider == pytest.approx({**clouds.bills(), "ssh": 0.0}, abs=CENT)
        listed = answer("ls")
        assert {*listed["cost_by_provider"]} == {*NAMES}

    (final,) = [event for event in events if isinstance(event, CostFinal)]
    assert final.cost_by_provider == pytest.approx({**clouds.bills(), "ssh": 0.0}, abs=CENT)
    assert final.total_cost == pytest.approx(sum(clouds.bills().values()), abs=CENT)
    assert final.total_cost > 20 * sum((0.01, 0.0168, 0.03571, 0.0383, 0.09))
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any(each.startswith("runpod charges $0.09 an hour") for each in told), told
    assert any("is not the one that was ordered" in each for each in told), told
    assert any(isinstance(event, InstancePreempted) for event in events)


def test_a_search_outlives_one_of_its_clouds_and_gets_a_machine_of_the_other(machines: AllClouds) -> None:
    clouds, progress = machines, list[Progress]()
    clouds.limit(1, "verda", "digitalocean")

    def down() -> None:
        clouds.restock("digitalocean")
        clouds.sell_out("verda")
        clouds.take_back("verda", *clouds.alive()["verda"])

    def listen(event: SkywardEvent) -> None:
        if isinstance(event, Progress):
            if not progress and event.done >= FITS // 4:
                down()
            progress.extend([event] if event.done >= FITS // 4 else [])

    with sky.ComputePool(
        provider=clouds.providers("verda", "digitalocean"),
        nodes=2,
        image=IMAGE,
        spot="never",
        on_event=listen,
        **SMALL,
    ) as pool:
        assert {name: len(ids) for name, ids in clouds.alive().items()} == {"verda": 1, "digitalocean": 1}
        search = GridSearchCV(Slow(), {"depth": [*range(1, 1 + FITS // FOLDS)]}, cv=FOLDS, refit=False)
        with parallel_config(backend="skyward", pool=pool):
            found = search.fit(*load_iris(return_X_y=True))
        for attempt in eventually(DEADLINE_S):
            with attempt:
                assert [*(place() @ pool)] == [0, 1]
        alive = {name: len(ids) for name, ids in clouds.alive().items()}

    assert found.best_params_ == {"depth": FITS // FOLDS}
    assert progress, "the cloud went down before the search had ended"
    assert alive == {"digitalocean": 2}


# --- a killed client --------------------------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllClouds]:
    """The clouds, whose machines never answer."""
    with all_clouds(monkeypatch, tmp_path, cache=ssh_cache) as clouds:
        clouds.limit(1, *CLOUDS)
        yield clouds


def killed(clouds: AllClouds) -> None:
    """Run a client until it has a machine of each cloud and a node on the host, and kill it."""
    providers = [[each.name, provider_settings(each)] for each in clouds.providers()]
    variables = {name: {**PROMPT, **cloud.room.settings} for name, cloud in clouds.fakes.items()}
    variables["vastai"]["pace"] = dict(VastAI.pace)  # quick, as the double's
    variables["aws"] = {**clouds.ec2.settings, "listing_s": 0.0}
    client = subprocess.Popen([sys.executable, "-c", CLIENT, json.dumps([providers, variables])], stdin=subprocess.PIPE)
    try:
        for attempt in eventually(DEADLINE_S):
            with attempt:
                assert client.poll() is not None or {*clouds.alive()} == {*CLOUDS}
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == -signal.SIGKILL


@pytest.mark.parametrize("command", ["down", pytest.param("sweep", marks=pytest.mark.full)])
def test_commands_end_the_machines_of_a_killed_client_at_all_of_its_clouds(records: AllClouds, command: str) -> None:
    killed(records)
    listed = answer("ls")
    machines: Sequence[Any] = listed["machines"]
    assert {each["provider"] for each in machines} >= {*CLOUDS}
    assert {each["owner"]["alive"] for each in machines} == {False}
    assert listed["unasked"] == []
    pools = {each["pool"] for each in machines}
    ended = answer(command, *(pools if command == "down" else ()))

    assert ended["left"] == []
    assert (records.alive(), Ledger.of_user().open_entries()) == ({}, ())
    for attempt in eventually(DEADLINE_S):
        with attempt:
            assert records.left() == {}
