"""Pools on machines reached over SSH: real sshd, real environments, links that break."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.events import InstanceProvisioned, NodeReachable, NodeUnreachable, SkywardEvent
from skyward.testing.hosts import require_sshd, write_known_hosts
from support.chaos import ChaosProxy
from support.ssh_hosts import cached_host

require_sshd()
pytestmark = pytest.mark.timeout(300)  # the first pool builds an environment

CUT_S = float(os.environ.get("SKYWARD_TEST_CUT_S", "20"))
"""How long links stay cut; longer than a half-open one takes to be noticed."""

CALLS = 200


class Linked:
    """Two hosts, each behind a proxy that can misbehave, and what it takes to log in through it."""

    def __init__(self, stack: ExitStack, folder: Path, cache: Path) -> None:
        self.hosts = [stack.enter_context(cached_host(folder / f"host-{n}", f"127.0.0.{n}", cache)) for n in (2, 3)]
        self.proxies = [
            stack.enter_context(ChaosProxy(f"127.0.1.{n}", (host.address, host.port)))
            for n, host in enumerate(self.hosts, start=2)
        ]
        behind = {(proxy.address, proxy.port): host for proxy, host in zip(self.proxies, self.hosts, strict=True)}
        self.known_hosts = write_known_hosts(folder / "known_hosts", *self.hosts, through=behind)

    def provider(self, *, direct: bool = False) -> sky.SSH:
        """Through the proxies, or past them."""
        return sky.SSH(
            hosts=[f"{place.address}:{place.port}" for place in (self.hosts if direct else self.proxies)],
            key_path=str(self.hosts[0].key_path),
            known_hosts=str(self.known_hosts),
        )


@pytest.fixture
def linked(tmp_path: Path, ssh_cache: Path) -> Iterator[Linked]:
    with ExitStack() as stack:
        yield Linked(stack, tmp_path, ssh_cache)


def processes_of(pool_id: str) -> list[psutil.Process]:
    """What runs for a pool, wherever."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if pool_id in process.environ().get("SKYWARD_WORKER", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


@sky.compute
def where() -> tuple[int, int, int, str]:
    info = sky.instance_info()
    return info.node, info.worker, os.getpid(), os.environ["HOME"]


@sky.compute
def note(path: str, number: int, seconds: float) -> int:
    """A side effect that shows how often it happened."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return number * number


def test_a_pool_runs_on_hosts_and_leaves_only_the_environment(linked: Linked) -> None:
    events: list[SkywardEvent] = []
    provider = linked.provider(direct=True)
    with sky.ComputePool(provider=provider, nodes=2, concurrency=2, display="quiet", on_event=events.append) as pool:
        everyone = where() @ pool
        squares = sky.gather(*[note(os.devnull, n, 0) for n in range(100)]) >> pool
        connections = [
            each
            for each in psutil.Process().net_connections("tcp")
            if each.status == psutil.CONN_ESTABLISHED and each.raddr in [(h.address, h.port) for h in linked.hosts]
        ]
        pids = {pid for _, _, pid, _ in everyone}

    assert [(node, worker) for node, worker, _, _ in everyone] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [home for *_, home in everyone] == [str(host.home) for host in linked.hosts for _ in range(2)]
    assert squares == tuple(n * n for n in range(100))
    assert len(connections) == 2  # one for each node, however many workers
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    instances = [event.instance_id for event in events if isinstance(event, InstanceProvisioned)]
    assert len(instances) == 2
    for host in linked.hosts:
        assert not [name for name in instances if (host.home / ".cache/skyward/nodes" / name).exists()]
        assert [path.name for path in host.home.iterdir() if path.name != ".cache"] == []


@pytest.mark.full
def test_a_large_argument_goes_up_once_and_changes_stay_with_the_call(linked: Linked) -> None:
    import numpy as np

    @sky.compute
    def total(values: object) -> float:
        values[0] = 7.0  # type: ignore[index]
        return float(values.sum())  # type: ignore[attr-defined]

    array = np.ones(2_000_000)
    before = sum(proxy.bytes_up for proxy in linked.proxies)
    image = sky.Image(pip=[f"numpy=={np.__version__}"])
    with sky.ComputePool(provider=linked.provider(), nodes=2, concurrency=2, image=image, display="quiet") as pool:
        started = sum(proxy.bytes_up for proxy in linked.proxies)
        totals = total(array) @ pool
        sent = sum(proxy.bytes_up for proxy in linked.proxies) - started

    assert started > before
    assert totals == (2_000_006.0,) * 4
    assert sent < 1.05 * array.nbytes


@pytest.mark.full
def test_calls_go_on_while_the_links_are_cut_and_each_happens_once(linked: Linked, tmp_path: Path) -> None:
    """One link closed, the other half-open, at the same time."""
    events: list[SkywardEvent] = []
    path = str(tmp_path / "noted")
    per_call_s = CUT_S * 2 / (CALLS / 4)  # work enough for twice the cut, on four workers
    pool = sky.ComputePool(provider=linked.provider(), nodes=2, concurrency=2, display="quiet", on_event=events.append)
    with pool:
        futures = [pool.submit(note.local, path, number, per_call_s) for number in range(CALLS)]
        while sum(future.done() for future in futures) < 10:
            time.sleep(0.05)
        linked.proxies[0].cut()
        linked.proxies[1].freeze()
        healing = threading.Timer(CUT_S, lambda: [proxy.heal() for proxy in linked.proxies])
        healing.start()
        results = [future.result(timeout=600) for future in futures]
        healing.join()

    assert results == [number * number for number in range(CALLS)]
    with open(path, encoding="utf-8") as file:
        assert Counter(map(int, file)) == Counter(range(CALLS))
    for kind in (NodeUnreachable, NodeReachable):
        assert sorted(event.node for event in events if isinstance(event, kind)) == [0, 1]


def holders(secret: str, *places: Path) -> dict[Path, int]:
    """Files that contain the secret, and their modes."""
    found: dict[Path, int] = {}
    for place in places:
        for folder, folders, names in os.walk(place):
            folders[:] = [name for name in folders if name != "envs"]
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):
                    if path.is_file() and secret.encode() in path.read_bytes():
                        found[path] = stat.S_IMODE(path.stat().st_mode)
    return found


# In `make test`: test_ssh_transport.py for lists of processes, clouds/test_cloud_life.py for the rest.
@pytest.mark.full
def test_no_secret_is_in_a_process_list_an_event_a_log_or_a_file_of_others(linked: Linked, own_home: Path) -> None:
    secret = f"hush-{os.urandom(8).hex()}"
    events: list[SkywardEvent] = []
    listed: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    line = path.read_bytes().decode(errors="replace")
                    if secret in line or "PRIVATE KEY" in line:
                        listed.append(line)

    watcher = threading.Thread(target=watch)
    watcher.start()
    places = [own_home, *(host.home for host in linked.hosts), *Path("/dev/shm").glob("skyward-*")]
    try:
        with sky.ComputePool(
            provider=linked.provider(direct=True),
            nodes=2,
            env={"TOKEN": secret},
            display="quiet",
            on_event=events.append,
        ) as pool:
            told = sky.gather(*[read_variable("TOKEN") for _ in range(4)]) >> pool
            while_open = holders(secret, *places) | holders("PRIVATE KEY", *places)
        after = holders(secret, *places)
    finally:
        over.set()
        watcher.join()

    assert told == (secret,) * 4
    assert listed == []
    assert [event for event in events if secret in repr(event)] == []
    packages = own_home / ".cache/uv"  # which other tests fill; some have keys of their own tests
    open_to_others = {path: oct(mode) for path, mode in while_open.items() if mode & 0o077}
    assert {path: mode for path, mode in open_to_others.items() if not path.is_relative_to(packages)} == {}
    assert after == {}


@sky.compute
def read_variable(name: str) -> str:
    return os.environ[name]


@sky.compute
def keep(name: str, nbytes: int) -> list[str]:
    before = sorted(path.name for path in Path().iterdir())
    Path(name).write_bytes(os.urandom(nbytes))
    return before


@pytest.mark.full
def test_pools_on_one_host_have_folders_of_their_own_and_files_come_back(
    linked: Linked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = sky.Image(outputs=["*.bin"])
    with sky.ComputePool(provider=linked.provider(direct=True), image=image, display="quiet") as first:
        assert keep("first.bin", 20_000_000) >> first == []
        with sky.ComputePool(provider=linked.provider(direct=True), display="quiet") as second:
            assert keep("second.bin", 10) >> second == []
            assert [path.name for path in second.fetch("*", to="second")] == ["second.bin"]
        (large,) = first.fetch("*", to="first")
        assert large.stat().st_size == 20_000_000
    (output,) = (tmp_path / "outputs").glob("*/0/first.bin")
    assert output.read_bytes() == large.read_bytes()

    with sky.ComputePool(provider=linked.provider(direct=True), display="quiet") as third:
        assert keep("third.bin", 10) >> third == []
