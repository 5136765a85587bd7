"""Pools on hosts that do not reach each other: real islands, and a mix of two networks."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from joblib import parallel_config

import skyward as sky
from skyward.errors import ConfigurationError
from skyward.events import Error, InstanceProvisioned, Notice, SkywardEvent
from skyward.testing.hosts import SshHost, require_sshd, share_cache, write_known_hosts
from skyward_dask import SkywardCluster
from support.chaos import ChaosProxy
from support.clouds.environments import build_environment
from support.ssh_islands import IslandHost, require_namespaces

require_sshd()
pytestmark = pytest.mark.timeout(300)  # the first pool builds an environment

IMAGE = sky.Image(pip=[f"numpy=={np.__version__}", f"scikit-learn=={version('scikit-learn')}"])
PROMPT_S = 2.0
"""How long a refusal may take, with what is asked of the hosts for it."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Path:
    """A cache with the environment of the image: islands reach no package index."""
    build_environment(IMAGE, ssh_cache, tmp_path_factory.mktemp("builder") / "host")
    return ssh_cache


class Sea:
    """Hosts, each behind a proxy that counts bytes, and what it takes to log in through it."""

    def __init__(self, stack: ExitStack, folder: Path, cache: Path) -> None:
        self.hosts: list[SshHost] = []
        self.proxies: list[ChaosProxy] = []
        self._stack = stack
        self._folder = folder
        self._cache = cache

    def add(self, **island: Any) -> SshHost:
        number = len(self.hosts) + 2
        folder = self._folder / f"host-{number}"
        host = (IslandHost if island else SshHost)(folder, address=f"127.0.2.{number}", **island)
        share_cache(host.home, self._cache)
        self.hosts.append(self._stack.enter_context(host))
        proxy = ChaosProxy(f"127.0.3.{number}", (host.address, host.port))
        self.proxies.append(self._stack.enter_context(proxy))
        return host

    @property
    def names(self) -> list[str]:
        return [f"{proxy.address}:{proxy.port}" for proxy in self.proxies]

    def bytes_up(self) -> int:
        return sum(proxy.bytes_up for proxy in self.proxies)

    def provider(self, **options: Any) -> sky.SSH:
        behind = dict(zip([proxy.place for proxy in self.proxies], self.hosts, strict=True))
        known = write_known_hosts(self._folder / "known_hosts", through=behind)
        return sky.SSH(hosts=self.names, key_path=str(self.hosts[0].key_path), known_hosts=str(known), **options)


@sky.compute
def place(number: int = 0) -> tuple[int, int, int]:
    return number, sky.instance_info().node, os.getpid()


@sky.compute
def total(values: np.ndarray) -> float:
    return float(values.sum())


@sky.compute(retries=1)
def die_once(path: str) -> int:
    """Kills its worker the first time."""
    if not os.path.exists(path):
        open(path, "w", encoding="utf-8").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return sky.instance_info().node


def square(number: int) -> int:
    return number * number


def supervisor_of(pid: int) -> psutil.Process:
    return next(each for each in psutil.Process(pid).parents() if "skyward.node.supervisor" in each.cmdline())


@pytest.mark.full
def test_a_large_argument_leaves_the_client_once_for_each_network(tmp_path: Path, cache: Path) -> None:
    """Two networks of two hosts, of which each is in the middle of the other one's names."""
    require_namespaces()
    with ExitStack() as stack:
        sea = Sea(stack, tmp_path, cache)
        sea.add()
        first = sea.add(island="127.0.0.2")
        sea.add()
        sea.add(island="127.0.0.3", neighbour=first)
        with sky.ComputePool(provider=sea.provider(), nodes=4, image=IMAGE, display="quiet") as pool:
            array = np.ones(12_500_000)
            before = sea.bytes_up()
            totals = total(array) @ pool
            sent = sea.bytes_up() - before
            nodes = [node for _, node, _ in place() @ pool]

    assert nodes == [0, 1, 2, 3]
    assert totals == (12_500_000.0,) * 4
    assert 2 * array.nbytes <= sent < 2.1 * array.nbytes


@pytest.mark.full
def test_hosts_that_reach_each_other_are_islands_on_request(tmp_path: Path, cache: Path) -> None:
    with ExitStack() as stack:
        sea = Sea(stack, tmp_path, cache)
        for _ in range(2):
            sea.add()
        with sky.ComputePool(provider=sea.provider(network="none"), nodes=2, image=IMAGE, display="quiet") as pool:
            check_calls(pool)
            with pytest.raises(ConfigurationError, match="network"):
                SkywardCluster(pool)


# In `make test`: fleet/test_networks.py, and clouds/test_containers.py for real networks.
@pytest.mark.full
def test_a_pool_on_two_islands_does_all_but_train_together(
    tmp_path: Path, cache: Path, subtests: pytest.Subtests
) -> None:
    """One pool, with a third island in reserve."""
    require_namespaces()
    events: list[SkywardEvent] = []
    with ExitStack() as stack:
        sea = Sea(stack, tmp_path, cache)
        for _ in range(3):
            sea.add(island="127.0.0.1")
        with sky.ComputePool(
            provider=sea.provider(), nodes=2, image=IMAGE, display="quiet", on_event=events.append
        ) as pool:
            with subtests.test("calls"):
                check_calls(pool)
                (note,) = [
                    event.message for event in events if isinstance(event, Notice) and "all hosts" in event.message
                ]
                assert note == f"not all hosts reach each other: {', '.join(sea.names)} reach no other"
            with subtests.test("a grid search and an executor"):
                check_front_ends(pool)
            with subtests.test("a large argument"):
                check_large_argument(pool, sea)
            with subtests.test("a worker is killed"):
                assert die_once(str(tmp_path / "died")) >> pool in (0, 1)
                assert [node for _, node, _ in place() @ pool] == [0, 1]
            with subtests.test("a node is replaced"):
                check_replacement(pool, events)
            with subtests.test("a gang and a cluster are refused"):
                check_refusals(pool, sea)


def check_calls(pool: sky.ComputePool) -> None:
    answers = sky.gather(*[place(number) for number in range(200)]) >> pool

    assert [number for number, _, _ in answers] == list(range(200))
    assert {node for _, node, _ in answers} == {0, 1}
    assert [node for _, node, _ in place() @ pool] == [0, 1]


def check_front_ends(pool: sky.ComputePool) -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    images, labels = (values[:300] for values in load_digits(return_X_y=True))
    search = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [0.001, 0.01]}, cv=3)
    expected = search.fit(images, labels).best_score_

    with parallel_config("skyward", pool=pool):
        assert search.fit(images, labels).best_score_ == expected
    with pool.executor() as executor:
        assert list(executor.map(square, range(50))) == [number * number for number in range(50)]


def check_large_argument(pool: sky.ComputePool, sea: Sea) -> None:
    array = np.ones(12_500_000)
    before = sea.bytes_up()

    assert total(array) @ pool == (12_500_000.0,) * 2
    assert 2 * array.nbytes <= sea.bytes_up() - before < 2.1 * array.nbytes


def check_replacement(pool: sky.ComputePool, events: list[SkywardEvent]) -> None:
    """The lost node is the head, whose island has the scheduler that Dask's users would get."""
    before = {node: pid for _, node, pid in place() @ pool}
    doomed = supervisor_of(before[0])
    for process in [doomed, *doomed.children(recursive=True)]:
        process.kill()

    after = {node: pid for _, node, pid in place() @ pool}

    assert set(after) == {0, 1}
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert len({event.instance_id for event in events if isinstance(event, InstanceProvisioned)}) == 3
    assert [event for event in events if isinstance(event, Error) and "node 0 is lost" in event.message]


def check_refusals(pool: sky.ComputePool, sea: Sea) -> None:
    @sky.compute
    @sky.distributed.torch()
    def train() -> None:
        raise AssertionError("it must not run")

    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="network"):
        train() @ pool
    with pytest.raises(ConfigurationError, match="network"):
        SkywardCluster(pool)
    with pytest.raises(ConfigurationError, match="nodes=2 must reach each other, and no 2 of the hosts do"):
        SkywardCluster(provider=sea.provider(), nodes=2, image=IMAGE, display="quiet")
    assert time.monotonic() - began < PROMPT_S
