from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skyward.node import plan as plans
from skyward.node.gpu.driver import Device
from skyward.node.plan import (
    NodePlan,
    claim_ports,
    cpu_count,
    free_ports,
    make_folders,
    make_plan,
    memory_bytes,
    share_of,
)
from skyward.node.processes import exit_reason, kill_all, kill_session
from skyward.providers import local
from skyward.wire.control import Start
from skyward.wire.node_config import NodeConfig, WorkerPlace

ADDRESS = "127.83.1.10"


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(
        pool_id="pool",
        instance_id=f"unit-{os.getpid()}",
        node=1,
        total_nodes=2,
        workers=3,
        head=True,
        address=ADDRESS,
        workdir=str(tmp_path),
        env={"COLOUR": "blue"},
        tls_ca="ca",
        tls_cert="cert",
        tls_key="key",
        accelerators=("A100",),
    )


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which anybody may create names."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(plans, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def plan(config: NodeConfig) -> Iterator[NodePlan]:
    plan = make_plan(
        config, control_port=4711, blob_port=4712, ports=range(4713, 4813), devices=(Device(name="A100", shown_as="0"),)
    )
    yield plan
    for folder in {plan.ready.blob_dir, plan.ready.blob_dir_disk}:
        Path(folder).rmdir()


def test_every_port_of_a_plan_is_another_one(plan: NodePlan) -> None:
    addresses = [plan.ready.control, plan.ready.blobs, plan.ready.service, *plan.ready.guests]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    ports += [int(lane.rpartition(":")[2]) for lane in plan.ready.lanes] + [*plan.ready.call_ports]

    assert len(set(ports)) == len(ports) == 3 + 3 + 3 + 32


def test_the_client_dials_where_ports_are_bound_and_other_nodes_dial_the_address(config: NodeConfig) -> None:
    behind_nat = replace(config, bind="10.1.2.3", head=False)
    plan = make_plan(behind_nat, control_port=4711, blob_port=4712, ports=range(4713, 4813))
    Path(plan.ready.blob_dir).rmdir()
    ready = plan.ready

    assert {each.rpartition(":")[0] for each in (ready.control, *ready.lanes)} == {"10.1.2.3"}
    assert {each.rpartition(":")[0] for each in (ready.service, *ready.guests, ready.blobs)} == {ADDRESS}
    assert plan.here(ready.service) == ready.service.replace(ADDRESS, "10.1.2.3")


def test_free_ports_can_be_bound() -> None:
    for port in free_ports(ADDRESS, 3):
        socket.create_server((ADDRESS, port)).close()


def test_claimed_ports_can_be_bound_and_are_nobody_elses_while_the_claim_holds() -> None:
    with claim_ports(ADDRESS, 40) as first, claim_ports(ADDRESS, 100) as second:
        assert len({*first, *second}) == 140
        for port in (*first, *second):
            socket.create_server((ADDRESS, port)).close()


def test_no_outgoing_connection_takes_a_claimed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ephemeral_ports", lambda: (20_000, 60_000))

    with claim_ports(ADDRESS, 5000) as ports:
        assert not [port for port in ports if 20_000 <= port <= 60_000]


def test_where_all_ports_are_ephemeral_the_claim_takes_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ephemeral_ports", lambda: (1024, 65_535))

    with claim_ports(ADDRESS, 40) as ports:
        assert len(set(ports)) == 40


@pytest.mark.parametrize(
    ("sharers", "least", "share"),
    [(1, 0, 8), (2, 0, 4), (3, 0, 2), (2, 6, 6), (2, 2, 4), (2, 20, 8), (20, 0, 1)],
)
def test_nodes_on_one_machine_divide_what_it_has(sharers: int, least: int, share: int) -> None:
    assert share_of(8, sharers=sharers, least=least) == share


def test_a_node_that_shares_its_machine_claims_its_part_only(config: NodeConfig) -> None:
    values = json.loads(config.to_json()) | {"sharers": 2, "instance_id": f"{config.instance_id}-shared"}
    half = make_plan(NodeConfig.from_json(json.dumps(values)), control_port=1, blob_port=2, ports=range(3, 103))
    Path(half.ready.blob_dir).rmdir()

    assert half.ready.memory_bytes == memory_bytes() // 2
    assert half.memory_limit_bytes == memory_bytes() // 2 // 3
    cores = max(1, cpu_count() // 2)
    assert half.process_env()["OMP_NUM_THREADS"] == str(max(1, cores // 3))
    assert half.process_env()["LOKY_MAX_CPU_COUNT"] == str(cores)


def test_a_rented_node_has_no_more_than_was_bought(config: NodeConfig) -> None:
    values = json.loads(config.to_json()) | {"instance_id": f"{config.instance_id}-bought", "workers": 1}
    values |= {"bought_cpu": 1, "bought_memory_bytes": 64 << 20}
    plan = make_plan(NodeConfig.from_json(json.dumps(values)), control_port=1, blob_port=2, ports=range(3, 103))
    Path(plan.ready.blob_dir).rmdir()

    assert (plan.ready.cpu_count, plan.ready.memory_bytes, plan.memory_limit_bytes) == (1, 64 << 20, 64 << 20)
    assert plan.process_env()["OMP_NUM_THREADS"] == plan.process_env()["LOKY_MAX_CPU_COUNT"] == "1"


def test_blob_folders_are_private_and_anew_in_memory(config: NodeConfig, shared_memory: Path) -> None:
    first, second = make_folders(config), make_folders(config)

    for folder in (*first, *second):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert first[0] != second[0]
    assert {path.name for path in shared_memory.iterdir()} == {first[0].name, second[0].name}


def test_nobody_can_put_a_link_in_the_place_of_the_folder_in_memory(
    config: NodeConfig, shared_memory: Path, tmp_path: Path
) -> None:
    """The name that it once had: of the user and the instance, both of which others can see."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (shared_memory / f"skyward-{os.getuid()}-{config.instance_id}").symlink_to(victim)

    memory, _ = make_folders(config)

    assert not memory.is_symlink()
    assert memory.resolve() != victim


@pytest.mark.parametrize("kind", ["link", "file", "open folder"])
def test_a_folder_on_disk_that_is_not_ones_own_is_refused(config: NodeConfig, tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "blobs", tmp_path / "other"
    match kind:
        case "link":
            other.mkdir(mode=0o700)
            place.symlink_to(other)
        case "file":
            place.touch()
        case _:
            place.mkdir()
            place.chmod(0o777)

    with pytest.raises(OSError, match=r"of this user alone|File exists"):
        make_folders(config)


def test_what_an_ended_node_left_in_memory_is_removed(config: NodeConfig, shared_memory: Path) -> None:
    memory, _ = make_folders(config)
    (memory / "blob").write_bytes(b"large")
    kept = shared_memory / f"skyward-{os.getuid()}-another-instance-0"
    kept.mkdir()

    local.remove_blobs(config.instance_id, shared_memory)

    assert list(shared_memory.iterdir()) == [kept]


def test_worker_knows_its_place(plan: NodePlan) -> None:
    env = plan.worker_env(2, Start(head_addr="127.0.0.9", total_nodes=4))

    assert WorkerPlace.from_json(env["SKYWARD_WORKER"]) == WorkerPlace(
        pool_id="pool",
        instance_id=plan.config.instance_id,
        node=1,
        total_nodes=4,
        worker=2,
        workers_per_node=3,
        head_addr="127.0.0.9",
        address=plan.config.address,
        accelerators=("A100",),
        memory_limit_bytes=plan.ready.memory_bytes // 3,
        node_accelerators=len(plan.devices),
    )
    assert env["SKYWARD_BLOB_DIRS"].split(":") == [plan.ready.blob_dir, plan.ready.blob_dir_disk]


def test_thread_caps_give_way_to_the_users_environment(config: NodeConfig, plan: NodePlan) -> None:
    values = json.loads(config.to_json()) | {"env": {"OMP_NUM_THREADS": "64", "SKYWARD_INSTANCE": "mine"}}
    own = NodePlan(config=NodeConfig.from_json(json.dumps(values)), ready=plan.ready)

    assert plan.process_env()["OMP_NUM_THREADS"] == str(max(1, plan.ready.cpu_count // 3))
    assert own.process_env()["OMP_NUM_THREADS"] == "64"
    assert own.process_env()["MKL_NUM_THREADS"] == plan.process_env()["MKL_NUM_THREADS"]
    assert own.process_env()["SKYWARD_INSTANCE"] == config.instance_id


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-15, "killed by signal 15 (SIGTERM)"),
        (-77, "killed by signal 77"),
    ],
)
def test_exit_code_in_plain_english(exit_code: int, reason: str) -> None:
    assert exit_reason(exit_code) == reason


PARENT_OF_A_DAEMON = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session={daemon})
print(child.pid, flush=True)
"""


def spawn_parent(*, daemon: bool, instance_id: str = "") -> tuple[subprocess.Popen[str], psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT_OF_A_DAEMON.format(daemon=daemon)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"SKYWARD_INSTANCE": instance_id},
    )
    with process:
        assert process.stdout is not None
        return process, psutil.Process(int(process.stdout.readline()))


def test_killing_a_session_ends_what_its_leader_left_behind() -> None:
    leader, orphan = spawn_parent(daemon=False)

    kill_session(leader.pid)

    psutil.wait_procs([orphan], timeout=5)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_killing_all_finds_a_daemon_by_the_instance_in_its_environment() -> None:
    name = f"unit-daemon-{os.getpid()}"
    others = [child.pid for child in psutil.Process().children()]  # of earlier tests
    _, daemon = spawn_parent(daemon=True, instance_id=name)

    assert kill_all("somebody-else", keep=[os.getpid()]) == 0
    assert kill_all(name, keep=others) == 1

    psutil.wait_procs([daemon], timeout=5)
    assert kill_all(name, keep=others) == 0
