"""This machine as a provider: what it refuses, what it makes, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.environment.image import Image
from skyward.errors import ConfigurationError
from skyward.machine.local import LocalAccess
from skyward.providers import local
from skyward.providers.base import Instance, InstanceState, LaunchOrder
from skyward.providers.local import INSTANCE_VARIABLE, Local
from skyward.request.accelerators import Accelerator, model_name
from skyward.request.request import parse_request
from support.users import as_other_user


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = launch("key-0")[0]
    yield made
    terminate(made)


def launch(*keys: str, pool_id: str = "pool") -> list[Instance]:
    async def scenario() -> list[Instance]:
        (offer,) = await Local().offers(parse_request())
        return list(await Local().launch([offer], LaunchOrder(pool_id=pool_id, keys=keys, timeout_s=60.0)))

    return asyncio.run(scenario())


def terminate(*instances: Instance) -> None:
    asyncio.run(Local().terminate([instance.id for instance in instances]))


def folder_of(instance: Instance) -> Path:
    assert isinstance(instance.access, LocalAccess)
    return Path(instance.access.workdir)


def run_in(instance: Instance, program: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {INSTANCE_VARIABLE: instance.id}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)


def test_the_offer_is_this_machine_for_nothing_and_on_demand() -> None:
    (offer,) = asyncio.run(Local().offers(parse_request(spot="always")))

    assert (offer.price_per_hour, offer.spot, offer.spec.cpu > 0) == (0.0, False, True)


def test_all_nodes_are_on_one_network(instance: Instance) -> None:
    other, again = launch("key-1", pool_id="another")[0], asyncio.run(Local().describe([instance.id]))[0]
    terminate(other)

    assert "" != instance.network == other.network == again.network


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"accelerator": "A100"}, r"does not fit on this machine \(.*\), which has no accelerator; "),
        ({"cpu": 100_000}, r"100000 cores does not fit on this machine \(.*\); "),
        ({"memory": "100000GB"}, "does not fit"),
        ({"machine": "p5.48xlarge"}, "machine='p5.48xlarge': Local"),
        ({"accelerator": Accelerator.NVIDIA.H100(mig="3g.40gb"), "nodes": 2}, "nodes=2: Local.* for one node"),
        ({"image": Image(apt=["no-such-package-here"])}, "apt install no-such-package-here"),
    ],
)
def test_what_this_machine_does_not_have_is_refused_by_name(
    asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_gpus", tuple)

    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(Local().offers(parse_request(**asked)))


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs a Debian")
def test_apt_packages_that_are_installed_need_nothing() -> None:
    assert asyncio.run(Local().offers(parse_request(image=Image(apt=["dpkg"]))))


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("Voodoo 2", "Voodoo 2"),
    ],
)
def test_what_the_driver_calls_a_gpu_is_read(reported: str, name: str) -> None:
    assert model_name(reported).startswith(name)


def test_an_accelerator_that_is_here_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: [("H100", 79.6)] * 2)

    assert asyncio.run(Local().offers(parse_request(accelerator="H100")))


def test_a_node_has_a_private_folder_tagged_with_pool_and_key(instance: Instance) -> None:
    tags = json.loads((folder_of(instance) / "instance.json").read_text())

    assert stat.S_IMODE(folder_of(instance).stat().st_mode) == 0o700
    assert (tags["pool_id"], tags["key"], tags["instance_id"]) == ("pool", "key-0", instance.id)


def test_nodes_are_at_an_address_that_an_interface_lists() -> None:
    made = launch("key-0", "key-1")
    addresses = {each.access.address for each in made if each.access}
    terminate(*made)

    assert addresses <= {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def test_another_process_sees_the_instance(instance: Instance) -> None:
    (seen,) = asyncio.run(Local().describe([instance.id]))

    assert (seen.state, seen.key, seen.access) == (InstanceState.RUNNING, "key-0", instance.access)


def test_terminating_kills_the_instances_processes_and_their_orphans_only(instance: Instance) -> None:
    other = launch("key-1")[0]
    double_fork = (
        "import subprocess, sys, time\n"
        "orphan = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(orphan.pid, flush=True); time.sleep(600)"
    )
    ours, spared = run_in(instance, double_fork), run_in(other, "import time; print(1, flush=True); time.sleep(600)")
    assert ours.stdout is not None
    assert spared.stdout is not None
    orphan = int(ours.stdout.readline())
    spared.stdout.readline()

    terminate(instance)

    assert ours.wait(timeout=10) == -9
    assert not Path(f"/proc/{orphan}/environ").exists() or Path(f"/proc/{orphan}/stat").read_text().split()[2] == "Z"
    assert spared.poll() is None
    terminate(other)
    assert spared.wait(timeout=10) == -9
    ours.stdout.close()
    spared.stdout.close()


def test_after_terminating_only_the_logs_are_left(instance: Instance) -> None:
    folder = folder_of(instance)
    (folder / "worker-0.log").write_text("what happened")
    (folder / "node.json").write_text("secret")
    (folder / "blobs").mkdir()
    (folder / "blobs" / "big").write_text("data")

    terminate(instance)

    assert [path.name for path in folder.iterdir()] == ["worker-0.log"]
    (seen,) = asyncio.run(Local().describe([instance.id]))
    assert seen.state is InstanceState.GONE


def test_logs_of_the_newest_pools_are_kept(instance: Instance) -> None:
    root = folder_of(instance).parents[1]
    for age in range(60):
        log = root / f"older-{age}" / "local-1" / "supervisor.log"
        log.parent.mkdir(parents=True)
        log.write_text("what happened")
        os.utime(log.parents[1], (0, time.time() - 60 - age))
    running = root / "older-59" / "local-1" / "instance.json"
    running.write_text("{}")

    terminate(instance)

    left = sorted(int(path.name.removeprefix("older-")) for path in root.glob("older-*"))
    assert left == [*range(49), 59], "the oldest one runs"


def test_a_node_without_logs_leaves_no_folder(instance: Instance) -> None:
    terminate(instance)

    assert not folder_of(instance).exists()


def test_folders_that_a_call_made_read_only_are_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "files"
    kept.mkdir()
    kept.chmod(0o555)
    with as_other_user(tmp_path):
        for name in ("a/b/c", "d"):
            Path("files", name).mkdir(parents=True)
        Path("files/a/b/x").touch(0o444)
        Path("files/a/link").symlink_to(kept)
        for name, mode in (("a/b/c", 0o000), ("a/b", 0o500), ("a", 0o100), ("d", 0o000), (".", 0o500)):
            Path("files", name).chmod(mode)

        local.remove_folder(Path("files"))

    assert not folder.exists()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o555
