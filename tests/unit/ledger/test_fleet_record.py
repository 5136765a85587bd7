from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from skyward.api.pool import attach
from skyward.base.waiting import wait_until
from skyward.environment.bootstrap import Environment
from skyward.environment.image import Image
from skyward.errors import ConfigurationError, PoolStateError
from skyward.ledger import fleet_record, ownership
from skyward.ledger.fleet_record import (
    FleetFolder,
    FleetRecord,
    KeptNode,
    belongs_to,
    changes_to,
    differences,
    new_pool_id,
    parts_for_machines,
    parts_for_nodes,
    refuse_second,
)
from skyward.ledger.keeper import Keeper, look_after
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Moment, Owner
from skyward.ledger.sweep import Sweep
from skyward.providers.aws.provider import AWS
from skyward.providers.local import Local
from skyward.providers.several import parse_provider
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from skyward.wire.frames import TlsIdentity
from support.clock import FakeClock
from support.nodes import node_config, node_instance, node_ready

TLS = TlsIdentity(ca="the ca", cert="the cert", key="the key")


def request(**options: Any) -> PoolRequest:
    return parse_request(**({"name": "llm", "keep": "20m"} | options))


def kept_node(rank: int = 0, *, pid: int = 1, **config: Any) -> KeptNode:
    return KeptNode(
        rank=rank,
        instance=node_instance(),
        launched=Moment.after(-60),
        started=Moment.after(-50),
        environment=Environment(python=sys.executable, env={"A": "b"}, isolated=False),
        config=node_config(TLS, node=rank, env={"SECRET": "s3cret"}, keep_s=1200.0, **config),
        ready=node_ready(pid=pid),
    )


def kept_record(*nodes: KeptNode, **fields: Any) -> FleetRecord:
    asked = request()
    usual: dict[str, Any] = {
        "pool_id": "pool",
        "name": "llm",
        "keep_s": 1200.0,
        "provider": "local",
        "settings": {},
        "machines": parts_for_machines(asked, Local()),
        "applied": parts_for_nodes(asked),
        "request": asked,
        "project": "/project",
        "tls": TLS,
        "nodes": nodes,
    }
    return FleetRecord(**usual | fields)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetFolder]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = FleetFolder("llm")
    asyncio.run(folder.hold())
    yield folder
    folder.release()


# --- the record -----------------------------------------------------------------------------------------------------


def test_record_is_read_as_it_was_written_and_is_its_users_only(folder: FleetFolder) -> None:
    record = kept_record(kept_node(0), kept_node(1), left=Moment.after(), spent={"aws": 1.5, "verda": 0.5})
    folder.write(record)

    assert folder.read() == record
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "fleet.json").stat().st_mode & 0o777 == 0o600
    assert "the key" not in repr(record)
    assert "s3cret" not in repr(record)


def test_ended_fleet_leaves_its_jobs_and_no_keys(folder: FleetFolder) -> None:
    folder.write(kept_record(kept_node()))
    (folder.jobs / "run-7").mkdir(parents=True)
    folder.request("keep", 60)
    folder.forget()
    folder.forget()

    assert folder.read() is None
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["jobs", "lock"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skyward": "0.0.1"}, r"is of Skyward 0\.0\.1 and Python .*`skyward down llm`"),
        ({"python": "3.1.4"}, r"Python 3\.1, and this is Skyward"),
        ({"nodes": [{}]}, "is damaged .*`skyward sweep --all`"),
        ({"tls": 3}, "is damaged"),
    ],
)
def test_record_of_another_version_or_a_damaged_one_says_what_to_do(
    folder: FleetFolder, change: dict[str, Any], message: str
) -> None:
    folder.write(kept_record(kept_node()))
    values = json.loads((folder.path / "fleet.json").read_text())
    (folder.path / "fleet.json").write_text(json.dumps(values | change))

    with pytest.raises(PoolStateError, match=message):
        folder.read()
    assert folder.pool_id() == "pool"  # by which it can be ended


def test_record_of_another_patch_version_of_python_can_be_read(folder: FleetFolder) -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    folder.write(kept_record(kept_node(), python=f"{here}.99"))

    assert folder.read() is not None


def test_fleets_of_another_user_are_not_used(folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(kept_record(kept_node()))
    monkeypatch.setattr(fleet_record, "user_id", lambda: os.getuid() + 1)

    with pytest.raises(PoolStateError, match="is of another user"):
        folder.read()


def test_pools_of_a_fleet_are_recognized_by_its_name() -> None:
    first, second = new_pool_id("llm"), new_pool_id("llm")

    assert first != second
    assert belongs_to("llm", first)
    assert belongs_to("llm", second)
    assert not belongs_to("llm-2", first)
    assert not belongs_to("llm", new_pool_id())
    assert not belongs_to("llm", f"{first}-0-12345678")


def test_fleet_whose_folder_was_deleted_is_not_opened_a_second_time_while_its_machines_are_kept(
    tmp_path: Path,
) -> None:
    ledger, pool_id = Ledger(tmp_path / "ledger.db"), new_pool_id("llm")
    ledger.reserve({"a": 0}, Purchase(pool_id=pool_id, provider="local"))
    refuse_second("llm", ledger)  # it is being opened, or its client was killed then
    ledger.keep_pool(pool_id, Moment.after(60), keys=["a"])

    with pytest.raises(PoolStateError, match=rf"pool {pool_id}\) whose folder .*llm was deleted.*`skyward down llm`"):
        refuse_second("llm", ledger)
    refuse_second("another", ledger)
    ledger.keep_pool(pool_id, Moment.after(-1), keys=["a"])
    refuse_second("llm", ledger)


# --- what a request changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, ""),
        ({"keep": "1h", "nodes": 4, "lease": 5, "max_price_per_hour": 3}, ""),
        ({"env": {"A": "1"}}, "env"),
        ({"pip": ["numpy"]}, "image"),
        ({"image": Image(apt=["git"]), "concurrency": 2}, "image, concurrency"),
        ({"collect_metrics": False}, "collect_metrics"),
    ],
)
def test_what_the_machines_can_be_given_is_a_change(options: dict[str, Any], changed: str) -> None:
    assert changes_to(kept_record(kept_node()), request(**options), Local()) == changed


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"machine": "big"}, "machine: None there, 'big' here"),
        ({"cpu": 2}, "cpu: None there, 2 here"),
        ({"memory": "4GB"}, "memory: None there, 4.0 here"),
        ({"accelerator": "A100"}, "accelerator: None there, 1x A100-80GB of 80 GiB here"),
        ({"spot": "never"}, "spot: .*Always.* there, Spot.Never here"),
        ({"timeout": 60, "max_cost": 2}, "max_cost: None there, 2.0 here; timeout: 3600 there, 60 here"),
    ],
)
def test_what_needs_other_machines_is_refused_with_each_difference(options: dict[str, Any], difference: str) -> None:
    with pytest.raises(ConfigurationError, match=f"other machines than this pool asks for .*{difference}"):
        changes_to(kept_record(kept_node()), request(**options), Local())


@pytest.mark.parametrize(
    ("providers", "difference"),
    [
        ([FakeProvider(name="west"), Local(), FakeProvider(name="east")], ""),
        ([FakeProvider(name="east"), Local()], "(provider: [east, local, west] there, [east, local] here)"),
        (Local(), "(provider: [east, local, west] there, local here)"),
    ],
)
def test_order_of_a_list_of_providers_is_no_difference_and_its_members_are_named(
    providers: Any, difference: str
) -> None:
    first = parse_provider([Local(), FakeProvider(name="east"), FakeProvider(name="west")])
    record = kept_record(kept_node(), machines=parts_for_machines(request(), first))
    try:
        said = changes_to(record, request(), parse_provider(providers))
    except ConfigurationError as error:
        said = str(error)

    assert (difference in said) if difference else not said


def test_settings_of_each_provider_of_a_list_are_a_difference() -> None:
    kept, asked = (
        parts_for_machines(request(), parse_provider([Local(), AWS(region=it)])) for it in ("eu-west-1", "eu-west-2")
    )

    assert differences(kept, asked) == ["provider.aws.region: 'eu-west-1' there, 'eu-west-2' here"]


def test_edited_files_of_an_image_are_a_change(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("1")
    asked = request(image=Image(includes=[str(tmp_path / "data.txt")]))
    record = kept_record(kept_node(), applied=parts_for_nodes(asked))
    before = changes_to(record, asked, Local())
    (tmp_path / "data.txt").write_text("22")

    assert (before, changes_to(record, asked, Local())) == ("", "includes")


# --- times that outlive a process -----------------------------------------------------------------------------------


def test_setting_the_clock_moves_no_moment_until_the_machine_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, now = Moment.after(600), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    here = moment.left_s
    monkeypatch.setattr(ownership, "boot_id", lambda: "the next boot")

    assert 590 < here <= 600
    assert -3010 < moment.left_s <= -3000


@pytest.mark.parametrize(("left_s", "swept"), [(60.0, False), (-1.0, True)])
def test_sweep_spares_the_machines_of_a_dead_owner_while_they_are_kept(
    tmp_path: Path, left_s: float, swept: bool
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    dead = replace(Owner.this_process(), started="before")
    ledger.reserve({"a": 0}, Purchase(pool_id="pool", provider="local"), owner=dead)
    ledger.keep_pool("pool", Moment.after(left_s), keys=["a"])
    report = asyncio.run(Sweep(ledger).run())

    assert bool(report.forgotten) is swept
    assert bool(report.spared) is not swept
    (entry,) = ledger.entries()
    ledger.keep_pool("pool", Moment.after(left_s), keys=["a"], owner=Owner.this_process())
    assert entry.owner == dead


def test_machines_that_are_no_nodes_are_not_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.reserve({"node": 0, "lost": 1, "bought": 2}, Purchase(pool_id="pool", provider="local"))
    ledger.keep_pool("pool", Moment.after(60), keys=["node", "lost"])
    ledger.keep_pool("pool", Moment.after(60), keys=["node"])

    assert [entry.key for entry in ledger.open_entries() if entry.kept_until is not None] == ["node"]


def test_sweep_leaves_a_fleet_to_its_keeper_although_its_time_is_over(folder: FleetFolder) -> None:
    ledger, dead = Ledger.of_user(), replace(Owner.this_process(), started="before")
    ledger.reserve({"key": 0, "stray": 1}, Purchase(pool_id="pool", provider="local"), owner=dead)
    record = kept_record(kept_node(), left=Moment.after(-9000))
    folder.write(record)
    ledger.keep_pool("pool", Moment.after(-60), keys=record.keys)  # this machine slept, and a job goes on

    assert [entry.key for entry in asyncio.run(Sweep(ledger).run(others=True)).spared] == ["key"]
    folder.forget()
    assert [entry.key for entry in asyncio.run(Sweep(ledger).run()).forgotten] == ["key"]


def test_fleet_is_kept_no_longer_than_its_nodes_may_live() -> None:
    record = kept_record(kept_node(timeout_s=500.0), left=Moment.after(), keep_s=1200.0)

    assert record.kept_until is not None
    assert 400 < record.kept_until.left_s <= 450  # 50 s after its start


def test_cost_of_a_fleet_counts_from_the_launch_over_all_of_its_clients() -> None:
    offer = replace(node_instance().offer, price_per_hour=3600.0)
    node = replace(kept_node(), instance=replace(node_instance(), offer=offer))
    record = kept_record(node, spent={"aws": 4.0, "verda": 3.0})

    assert round(record.cost()) in (67, 68)  # launched a minute ago, at a dollar a second
    assert round(record.cost(10)) in (77, 78)


# --- one client at a time -------------------------------------------------------------------------------------------


def test_requests_to_a_client_are_taken_once_and_do_not_outlive_it(folder: FleetFolder) -> None:
    folder.request("keep", 60)
    folder.request("keep", 90)

    assert folder.take_requests() == {"keep": 90}
    assert folder.take_requests() == {}
    folder.request("leave")
    folder.release()
    asyncio.run(folder.hold())
    assert folder.take_requests() == {}


def test_folder_without_a_fleet_goes_with_its_last_process_unless_it_has_jobs(folder: FleetFolder) -> None:
    folder.write(kept_record(kept_node()))
    folder.release()
    assert folder.written_at()
    asyncio.run(folder.hold())
    folder.forget()
    (folder.jobs / "run-7").mkdir(parents=True)
    folder.release()
    assert (folder.jobs / "run-7").exists()
    asyncio.run(folder.hold())
    (folder.jobs / "run-7").rmdir()
    folder.release()

    assert not folder.path.exists()
    assert not folder.is_held()


async def test_process_that_has_waited_for_a_folder_that_was_deleted_holds_another_one(folder: FleetFolder) -> None:
    others = [FleetFolder("llm") for _ in range(3)]
    waiting = [asyncio.ensure_future(other.hold()) for other in others]
    await asyncio.sleep(0)  # each has tried once
    folder.release()
    done, _ = await asyncio.wait(waiting)
    (holder,) = [other for other, task in zip(others, waiting, strict=True) if task in done and not task.exception()]

    assert holder.is_held()
    holder.write(kept_record(kept_node()))
    assert FleetFolder("llm").read() is not None
    holder.release()


@pytest.mark.parametrize(("function", "error"), [("open", FileNotFoundError), ("mkdir", FileExistsError)])
def test_folder_that_its_last_process_deletes_meanwhile_is_held_at_the_next_look(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch, function: str, error: type[OSError]
) -> None:
    folder.release()

    def fail(path: object, *_: object) -> int:
        raise error(2, "as the folder was there, and is gone", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        assert not folder.try_hold()
    assert folder.try_hold()


def test_holder_that_leaves_and_deletes_the_folder_is_taken_over_from(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FleetFolder("llm")
    says = json.loads((folder.path / "lock").read_text())
    says["owner"]["pid"] += 1
    (folder.path / "lock").write_text(json.dumps(says))

    def write_late(self: Path, *_: object, **__: object) -> int:
        folder.release()
        raise FileNotFoundError(2, "the folder was deleted", str(self))

    monkeypatch.setattr(fleet_record, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(Path, "write_text", write_late)
    asyncio.run(other.hold(takeover=True))

    assert other.is_held()
    other.release()


def test_holder_that_does_not_answer_and_may_be_another_process_is_not_killed(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((folder.path / "lock").read_text())
    values["owner"] |= asdict(replace(Owner.this_process(), started="before"))
    (folder.path / "lock").write_text(json.dumps(values))
    killed: list[int] = []
    monkeypatch.setattr(fleet_record, "kill_process", killed.append)
    monkeypatch.setattr(fleet_record, "_ANSWER_S", 0.01)
    monkeypatch.setattr(fleet_record, "_PATIENCE_S", 0.01)

    with pytest.raises(PoolStateError, match="does not answer, and cannot be ended from here"):
        asyncio.run(FleetFolder("llm").hold(takeover=True))
    assert killed == []


async def test_holder_that_has_answered_may_take_its_time_to_leave(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((folder.path / "lock").read_text())
    values["owner"]["pid"] = 1
    (folder.path / "lock").write_text(json.dumps(values))
    killed: list[int] = []
    monkeypatch.setattr(fleet_record, "kill_process", killed.append)
    monkeypatch.setattr(Owner, "lives", lambda _owner: True)
    monkeypatch.setattr(fleet_record, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(fleet_record, "_ANSWER_S", 0.5)
    other = FleetFolder("llm")
    taking = asyncio.ensure_future(other.hold(takeover=True))

    async def asked() -> bool | None:
        return "leave" in folder.take_requests() or None

    await wait_until(asked, deadline_s=30, interval_s=0.01, what="the request")
    await asyncio.sleep(0.7)
    folder.release()
    await taking
    other.release()

    assert killed == []


def test_attaching_to_a_fleet_that_has_ended_meanwhile_buys_nothing(folder: FleetFolder) -> None:
    folder.write(kept_record(kept_node()))
    folder.release()
    pool = attach("llm", display="quiet")
    folder.forget()

    with pytest.raises(PoolStateError, match="no kept fleet 'llm'"):
        pool.open()
    assert Ledger.of_user().entries() == ()


# --- the keeper -----------------------------------------------------------------------------------------------------


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {"SKYWARD_INSTANCE": node_instance().id}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as process:
        yield process
        process.kill()


def keeper(folder: FleetFolder) -> Keeper:
    return Keeper(folder, Ledger.of_user(), clock=FakeClock())


@pytest.mark.skipif(sys.platform != "linux", reason="the check reads /proc")
def test_keeper_waits_for_the_client_and_for_the_nodes_and_then_deletes_the_keys(
    folder: FleetFolder, supervisor: subprocess.Popen[bytes]
) -> None:
    record = kept_record(kept_node(pid=supervisor.pid))
    folder.write(record)
    ledger = Ledger.of_user()
    ledger.reserve({"key": 0}, Purchase(pool_id="pool", provider="local"))
    ledger.record([node_instance()])
    dead = replace(Owner.this_process(), started="before")
    ledger.reserve({"bought-and-not-joined": 1}, Purchase(pool_id="pool", provider="local"), owner=dead)
    asyncio.run(keeper(folder)._look())
    assert folder.read() == record
    folder.release()
    asyncio.run(keeper(folder)._look())
    noted = folder.read()
    assert noted is not None
    assert noted.left is not None  # its client was killed
    pause_s = asyncio.run(keeper(folder)._look())
    (entry,) = ledger.open_entries()
    assert entry.kept_until is not None
    assert (pause_s, round(entry.kept_until.left_s, -2)) == (60.0, 1500)
    supervisor.kill()
    supervisor.wait()
    asyncio.run(keeper(folder).run())

    assert folder.read() is None
    assert ledger.open_entries() == ()


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param((), id="killed-while-it-opened"),
        pytest.param((replace(kept_node(pid=os.getpid()), started=Moment.after(-9000)),), id="beyond-its-timeout"),
        pytest.param((kept_node(pid=2**22 + 1),), id="supervisor-gone"),
    ],
)
def test_keeper_ends_a_fleet_that_is_over_at_once(folder: FleetFolder, nodes: tuple[KeptNode, ...]) -> None:
    folder.write(kept_record(*nodes, left=Moment.after()))
    folder.release()
    asyncio.run(keeper(folder).run())

    assert folder.read() is None


async def test_keeper_stays_for_the_next_fleet_that_a_client_is_opening(folder: FleetFolder) -> None:
    other = FleetFolder("llm")
    staying = asyncio.ensure_future(look_after(other, Ledger.of_user(), clock=FakeClock()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not staying.done()
    folder.write(kept_record(left=Moment.after()))  # killed while it opened
    folder.release()
    await staying
    other.release()

    assert not folder.path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the check reads /proc")
def test_cost_of_machines_that_the_keeper_ends_is_added_once(
    folder: FleetFolder, supervisor: subprocess.Popen[bytes]
) -> None:
    record = kept_record(kept_node(pid=supervisor.pid), left=Moment.after(), spent={"local": 1.0})
    folder.write(record)
    folder.release()
    ledger, dead = Ledger.of_user(), replace(Owner.this_process(), started="before")
    offer = replace(node_instance().offer, price_per_hour=0.01, minimum_charge=5.0)
    ledger.reserve({"stray": 1, "never made": 2}, Purchase(pool_id="pool", provider="local"), owner=dead)
    ledger.record([replace(node_instance(), id="lo-4", key="stray", offer=offer)])
    for _ in range(2):
        asyncio.run(keeper(folder)._look())

    kept = folder.read()
    assert kept is not None
    assert kept.spent == {"local": 6.0}
    assert replace(kept, spent=record.spent) == record


@pytest.mark.parametrize(("left_s", "stays"), [(-60.0, True), (-1300.0, False)])
def test_keeper_leaves_machines_whose_restart_was_not_finished_for_as_long_as_they_are_kept(
    folder: FleetFolder, left_s: float, stays: bool
) -> None:
    folder.write(kept_record(kept_node(pid=2**22 + 1), left=Moment.after(left_s), restarting=True))
    folder.release()
    asyncio.run(keeper(folder)._look())

    assert bool(folder.written_at()) is stays


@pytest.mark.skipif(sys.platform != "linux", reason="the check reads /proc")
def test_keeper_of_another_version_ends_no_living_fleet(
    folder: FleetFolder, supervisor: subprocess.Popen[bytes]
) -> None:
    folder.write(kept_record(kept_node(pid=supervisor.pid), skyward="0.0.1", python="3.1.4"))
    folder.release()
    asyncio.run(keeper(folder)._look())
    asyncio.run(keeper(folder)._look())

    noted = folder.read(any_version=True)
    assert noted is not None
    assert noted.left is not None


@pytest.mark.parametrize(("left_s", "stays"), [(60.0, True), (-1.0, False)])
def test_keeper_that_cannot_read_a_record_waits_for_the_time_in_the_ledger(
    folder: FleetFolder, left_s: float, stays: bool
) -> None:
    record = kept_record(kept_node())
    folder.write(record)
    values = json.loads((folder.path / "fleet.json").read_text())
    (folder.path / "fleet.json").write_text(json.dumps(values | {"nodes": [{}]}))
    ledger, dead = Ledger.of_user(), replace(Owner.this_process(), started="before")
    ledger.reserve({"key": 0}, Purchase(pool_id="pool", provider="local"), owner=dead)
    ledger.keep_pool("pool", Moment.after(left_s), keys=record.keys)
    folder.release()
    asyncio.run(keeper(folder)._look())

    assert bool(folder.written_at()) is stays
