"""Fleets that outlive their program: taken over as they are, changed in place, held by one client, ended in time."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli import main
from skyward.events import SkywardEvent
from skyward.fleet.node import Node
from skyward.fleet.node_setup import NodeSetup
from skyward.ledger.fleet_record import FleetFolder, FleetRecord
from skyward.ledger.keeper import Keeper
from skyward.ledger.ledger import Ledger
from support.eventually import eventually
from support.kept import KEEPER_S, end_kept_fleet, keeper_process

NAME = "llm"
BOUGHT_OR_SET_UP = (
    sky.events.InstanceLaunching,
    sky.events.BootstrapStarting,
    sky.events.BootstrapProgress,
    sky.events.BootstrapCompleted,
)

CLIENT = """
import os, sys
import skyward as sky
with sky.ComputePool(provider=sky.Local(), nodes=2, name="llm", keep="10m", display="quiet"):
    print("open", flush=True)
    sys.stdin.readline()
"""
OPENING = """
import asyncio
import skyward as sky
from skyward.fleet.node_setup import NodeSetup

async def equip(self, node):
    print("opening", flush=True)
    await asyncio.Event().wait()

NodeSetup.equip = equip
sky.ComputePool(provider=sky.Local(), name="llm", keep="10m", display="quiet").open()
"""
ATTACHED = """
import skyward as sky
with sky.attach("llm", display="quiet") as pool:
    print(*[node.instance_id for node in pool.status.nodes], sky.job("run-7").result()[0])
"""
SEVERAL = """
import skyward as sky
image = sky.Image(mirror=False)
given = {"provider": [sky.Local(), sky.VastAI()], "image": image, "name": "llm", "keep": "10m", "display": "quiet"}
for kept in (sky.ComputePool(**given), sky.ComputePool(**given, prefer="order"), None):
    with kept or sky.attach("llm", display="quiet") as pool:
        print(pool.status.nodes[0].instance_id, repr(pool))
"""
AN_HOUR_LATER = """
import time
now = time.time
time.time = lambda: now() + 3600
"""


@sky.compute
def look() -> tuple[int, str]:
    return os.getpid(), os.environ.get("COLOUR", "")


@sky.compute
def sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def kept_pool(**options: Any) -> sky.ComputePool:
    given: dict[str, Any] = {"nodes": 2, "name": NAME, "keep": "10m", "display": "quiet"} | options
    return sky.ComputePool(provider=sky.Local(), **given)


def record() -> FleetRecord:
    found = FleetFolder(NAME).read()
    assert found is not None
    return found


def machines() -> list[str]:
    return [node.instance.id for node in record().nodes]


@pytest.fixture(autouse=True)
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # tests beside this one have machines, too
    yield
    end_kept_fleet(NAME)
    assert Ledger.of_user().open_entries() == ()


def client() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_a_plan_has_the_nodes_that_would_be_taken_over() -> None:
    with kept_pool() as pool:
        busy = kept_pool().plan()
        assert "this process has the kept fleet" in busy.problems[0]
        assert pool.plan().problems == busy.problems

    same, larger, changed = (kept_pool(**options).plan() for options in ({}, {"nodes": 3}, {"env": {"COLOUR": "red"}}))

    assert [(plan.present, plan.nodes, len(plan.offers)) for plan in (same, larger, changed)] == [
        (2, 0, 0),
        (2, 1, 1),
        (2, 0, 0),
    ]
    assert repr(same).startswith("Opening this pool would take over 2 nodes.")
    assert changed.notes == ("the nodes of the kept fleet 'llm' are set up again, for: env",)
    assert sky.attach(NAME).plan().present == 2
    assert "other machines" in kept_pool(cpu=1).plan().problems[0]


def test_next_pool_has_the_machines_with_fresh_workers_and_what_leaving_says_is_true() -> None:
    events: list[SkywardEvent] = []
    with kept_pool(on_event=events.append) as pool:
        first = look() @ pool
        instances = [node.instance_id for node in pool.status.nodes]
    (left,) = [event for event in events if isinstance(event, sky.events.Notice) and "is kept until" in event.message]

    with kept_pool() as pool:
        second = look() @ pool
        assert [node.instance_id for node in pool.status.nodes] == instances == machines()
    events.clear()
    with sky.attach(NAME, display="quiet", on_event=events.append) as pool:
        assert len(look() @ pool) == 2

    assert not [event for event in events if isinstance(event, BOUGHT_OR_SET_UP)]
    assert "2 nodes, free" in left.message
    assert f"`skyward down {NAME}`" in left.message
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}
    assert {entry.owner and entry.owner.pid for entry in Ledger.of_user().open_entries()} == {os.getpid()}


def test_fleet_of_several_providers_is_found_watched_and_ended_by_the_one_it_is_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # no key there either
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, check=True)

    (instance,) = machines()
    assert done.stdout == f"{instance} <ComputePool of 1 node of local, vastai: open>\n" * 3
    assert {entry.purchase.provider for entry in Ledger.of_user().open_entries()} == {"local"}
    assert asyncio.run(Keeper(FleetFolder(NAME), Ledger.of_user())._lives(record()))
    assert (FleetFolder(NAME).path / "keeper.log").read_text() == ""


def test_what_can_be_changed_is_changed_on_the_machines_and_the_rest_is_refused_with_the_differences() -> None:
    with kept_pool(env={"COLOUR": "red"}) as pool:
        assert [colour for _, colour in look() @ pool] == ["red", "red"]
    before = machines()

    with pytest.raises(sky.ConfigurationError, match=r"other machines .*cpu: None there, 1 here.*timeout: 3600 .* 60"):
        kept_pool(cpu=1, timeout=60).open()
    with kept_pool(env={"COLOUR": "blue"}, concurrency=2, keep="5m") as pool:
        assert [colour for _, colour in look() @ pool] == ["blue"] * 4
    with pytest.raises(sky.BootstrapError), kept_pool(pip=["no-such-package-anywhere==99"]):
        pytest.fail("it opened")
    with sky.attach(NAME, display="quiet") as pool:  # what was there before is restored
        assert [colour for _, colour in look() @ pool] == ["blue"] * 4

    assert machines() == before
    assert {node.config.keep_s for node in record().nodes} == {300.0}


def test_fleet_grows_and_shrinks_to_what_its_next_client_asks_for() -> None:
    with kept_pool(nodes=1):
        pass
    (head,) = machines()
    with kept_pool(nodes=3) as pool:
        assert len(look() @ pool) == 3
    assert machines()[0] == head
    with kept_pool(nodes=1):
        pass
    assert machines() == [head]


def test_client_that_is_killed_leaves_its_fleet_and_a_call_that_ran_there_ends() -> None:
    with client() as holder:
        before = machines()
        holder.kill()
    with kept_pool() as pool:
        assert len(look() @ pool) == 2
        running = pool.submit(sleep, 600)
    with kept_pool() as pool:
        assert len(look() @ pool) == 2

    assert isinstance(running.exception(), sky.PoolStateError)
    assert machines() == before


def test_second_client_is_told_who_has_the_fleet_and_may_take_it_over() -> None:
    with client() as holder:
        with pytest.raises(sky.PoolStateError, match=rf"process {holder.pid} on .* takeover=True"):
            kept_pool().open()
        before = machines()
        with kept_pool(takeover=True) as pool:
            assert len(look() @ pool) == 2
            with pytest.raises(sky.PoolStateError, match="this process has the kept fleet"):
                kept_pool(takeover=True).open()
        holder.communicate("\n")

    assert holder.returncode == 0
    assert machines() == before


def test_client_that_fails_to_take_a_node_over_leaves_the_fleet_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_setup: NodeSetup, node: Node) -> None:
        raise sky.UnreachableError(f"no way to node {node.rank}")

    with kept_pool():
        pass
    before = machines()
    with monkeypatch.context() as patch:
        patch.setattr(NodeSetup, "open", refuse)
        with pytest.raises(sky.UnreachableError, match="no way to node"):
            kept_pool().open()
    with kept_pool() as pool:
        assert len(look() @ pool) == 2

    assert machines() == before


def test_client_that_is_still_opening_leaves_when_it_is_asked_to() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPENING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "opening\n"
        with kept_pool(takeover=True) as pool:
            assert len(look() @ pool) == 2
        _, said = holder.communicate()

    assert holder.returncode == 1  # -9 is that of one that was killed
    assert "another process has taken over the kept fleet 'llm'" in said


def test_clock_that_is_set_ends_nothing_too_early_and_nothing_too_late(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text(AN_HOUR_LATER)

    def an_hour_later(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "later")}
        return subprocess.run([sys.executable, *arguments], env=env, check=True, capture_output=True, text=True).stdout

    with kept_pool(nodes=1) as pool:
        job = pool.spawn(look(), name="run-7")
    before = machines()
    keeper_process(NAME).kill()
    listed = an_hour_later("-m", "skyward", "ls")  # which starts another keeper, with the clock as it is now
    pid, _ = job.result(timeout=60)
    taken = an_hour_later("-c", ATTACHED)

    assert "until " in listed
    assert taken.split() == [*before, str(pid)]
    with kept_pool(nodes=1, keep="1s"):
        pass
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert Ledger.of_user().open_entries() == ()
            assert FleetFolder(NAME).read() is None


def test_node_that_has_died_meanwhile_is_replaced_and_a_fleet_without_any_cannot_be_attached_to() -> None:
    with kept_pool():
        pass
    before = record().nodes
    os.kill(before[1].ready.pid, 9)
    with kept_pool() as pool:
        assert len(look() @ pool) == 2
    after = record().nodes
    for node in after:
        os.kill(node.ready.pid, 9)
    with pytest.raises(sky.PoolStateError, match=r"no node of the kept fleet|no kept fleet"):
        sky.attach(NAME, display="quiet").open()

    assert after[0].instance.id == before[0].instance.id
    assert after[1].instance.id != before[1].instance.id


def test_when_its_time_is_over_nothing_of_it_is_left() -> None:
    with kept_pool(keep="1s", nodes=1):
        pass
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert Ledger.of_user().open_entries() == ()
            assert FleetFolder(NAME).read() is None
    with pytest.raises(sky.PoolStateError, match="no kept fleet"):
        sky.attach(NAME)


def skyward(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_commands_list_it_in_80_columns_and_keep_it_longer_with_a_client_and_without() -> None:
    with kept_pool(nodes=1):
        in_use = skyward("ls")
        assert skyward("keep", NAME, "30m") == f"{NAME}: in use, then for 30m\n"
    left = skyward("ls")
    told = skyward("keep", NAME, "1h")

    rows = [text.strip().split(maxsplit=4) for text in (in_use.splitlines()[3], left.splitlines()[3])]
    assert rows[0] == [NAME, "1", "$0.00", "0", "in use, then for 10m"]
    assert rows[1][-1].startswith("until ")
    assert max(map(len, left.splitlines()[:4])) <= 80
    assert told.startswith(f"{NAME}: until ")
    assert (record().keep_s, record().nodes[0].config.keep_s) == (3600.0, 3600.0)
    with kept_pool(nodes=1, keep="10m") as pool:
        assert len(look() @ pool) == 1
    assert record().nodes[0].config.keep_s == 600.0


def test_down_ends_it_by_its_name_from_another_process() -> None:
    with kept_pool(nodes=1):
        pass
    refused = CliRunner().invoke(main, ["down", "nope"])
    skyward("down", NAME)

    assert f"no pool nope in this user's ledger. The kept fleets are {NAME}." in refused.output
    assert FleetFolder(NAME).read() is None
    assert Ledger.of_user().open_entries() == ()
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert not FleetFolder(NAME).path.exists()


def test_fleet_whose_folder_was_deleted_is_not_bought_a_second_time_and_can_be_ended() -> None:
    with kept_pool(nodes=1):
        pass
    shutil.rmtree(FleetFolder(NAME).path)

    with pytest.raises(sky.PoolStateError, match=r"whose folder .* was deleted.*`skyward down llm`"):
        kept_pool(nodes=1).open()
    assert len(Ledger.of_user().entries()) == 1
    skyward("down", NAME)
    with kept_pool(nodes=1) as pool:
        assert len(look() @ pool) == 1
