"""The ``skyward`` command: what each of its commands says, in both forms, and with which exit code."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from skyward.cli import main
from skyward.cli._base import Rows, write
from skyward.cli._setup import _requirement
from skyward.environment.installed import Distribution, Origin
from skyward.environment.local_wheels import local_wheel
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Moment, Owner
from skyward.machine.local import LocalAccess
from skyward.providers.base import Instance, LaunchOrder
from skyward.providers.local import Local
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, find_openssh, write_known_hosts

ALIVE = Owner.this_process()
DEAD = replace(ALIVE, started="long ago")
HOUR_S = 3600.0

needs_sshd = pytest.mark.skipif(find_openssh("sshd") is None, reason="there is no sshd: tools/sshd gets it")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / "skyward" / "ledger.db", now=lambda: time.time() - 2 * HOUR_S)


@pytest.fixture
def launch(ledger: Ledger) -> Iterator[Callable[..., list[Instance]]]:
    """Makes nodes of this machine on which nothing runs."""
    made: list[str] = []

    def launch(*keys: str, pool: str = "sky-1", owner: Owner = DEAD, price: float | None = 1.5) -> list[Instance]:
        purchase = Purchase(pool_id=pool, provider="local", machine="m", spot=True, price_per_hour=price)
        ledger.reserve({key: node for node, key in enumerate(keys)}, purchase, owner=owner)
        instances = asyncio.run(_launch(keys, pool))
        paid = replace(instances[0].offer, price_per_hour=price)
        ledger.record([replace(each, offer=paid) for each in instances])
        made.extend(each.id for each in instances)
        return instances

    yield launch
    asyncio.run(Local().terminate(made))


async def _launch(keys: Sequence[str], pool: str) -> list[Instance]:
    (offer,) = await Local().offers(parse_request())
    return list(await Local().launch([offer], LaunchOrder(pool_id=pool, keys=tuple(keys), timeout_s=60.0)))


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def answer(*arguments: str, exit_code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def folder_of(instance: Instance) -> Path:
    assert isinstance(instance.access, LocalAccess)
    return Path(instance.access.workdir)


# --- all of them --------------------------------------------------------------------------------------------------


def commands(group: click.Group) -> Iterator[tuple[list[str], click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from (([name, *rest], each) for rest, each in commands(command))
        else:
            yield [name], command


@pytest.mark.parametrize(("words", "command"), [*commands(main)], ids=str)
def test_every_command_explains_itself_and_speaks_json(words: list[str], command: click.Command) -> None:
    done = run(*words, "--help")

    assert done.exit_code == 0
    assert "--json" in done.output
    assert command.help


@pytest.mark.parametrize("command", [["ls"], ["sweep"], ["down", "sky-1"], ["logs", "sky-1"], ["clean"]])
def test_a_ledger_that_cannot_be_used_is_named_in_either_form(command: list[str], ledger: Ledger) -> None:
    ledger.path.write_bytes(b"no ledger" * 1000)

    plain = run(*command)
    assert plain.exit_code == 1
    assert f"Error: the ledger {ledger.path} cannot be used" in plain.stderr
    assert "move it away" in answer(*command, exit_code=1)["error"]


def test_it_is_installed_and_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skyward", "ls", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    nothing = {key: [] for key in ("fleets", "machines", "unknown", "unasked", "damaged")}
    assert json.loads(done.stdout) == nothing | {"cost": 0, "cost_by_provider": {}}
    assert done.stderr == ""


# --- its documentation ---------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    line.removeprefix("$ ").removeprefix("skyward ").partition("  #")[0].split()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith(("$ skyward ", "skyward "))
    and "--provider folders" not in line  # an example's, not installed here
]


def test_every_example_in_the_docs_is_understood(subtests: pytest.Subtests) -> None:
    for arguments in EXAMPLES:
        with subtests.test(arguments=arguments):
            name, *rest = arguments

            main.commands[name].make_context(name, rest)


def test_every_command_and_every_option_is_in_the_docs() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    options = [option for command in main.commands.values() for each in command.params for option in each.opts]

    assert [name for name in main.commands if f"`skyward {name}" not in page] == []
    assert [option for option in options if option.startswith("-") and option not in page] == []


# --- ls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ('settings = \'{"hosts": ["a\'', "the provider's settings are no JSON"),
        ("settings = ''", "the provider's settings are no JSON"),
        ("settings = '[1]'", "the provider's settings are list, not an object"),
        ("settings = cast(x'7bff' as text)", "the provider's settings are no JSON"),
        ("created_at = 9e999", "created_at is inf"),
        ("price_per_hour = -9e999", "price_per_hour is -inf"),
        ("minimum_billed_s = 9e999", "minimum_billed_s is inf"),
        ("minimum_charge = 9e99", "minimum_charge is 9e+99"),
    ],
)
def test_a_damaged_record_is_named_and_kept_and_hides_no_other(
    launch: Callable[..., list[Instance]], ledger: Ledger, damage: str, reason: str
) -> None:
    launch("a", "b")
    with closing(sqlite3.connect(ledger.path)) as database, database:
        database.execute(f"UPDATE entries SET {damage} WHERE key = 'a'")

    listed, said = answer("ls", exit_code=1), run("ls")
    swept, again = answer("sweep", exit_code=1), answer("sweep", exit_code=1)

    assert sorted(each["key"] for each in listed["machines"]) == ["a", "b"]
    (damaged,) = listed["damaged"]
    assert damaged["key"] == "a"
    assert reason in damaged["reason"]
    assert "delete the row whose key is 'a'" in said.output
    assert {each["key"] for each in swept["ended"] + swept["gone"]} == {"b"}
    for report in (swept, again):
        assert [(each["key"], reason in each["reason"]) for each in report["left"]] == [("a", True)]


@pytest.mark.parametrize(
    "change",
    ["provider = 'of a later version'", "provider = ''", "settings = '{\"later\": 1}'", "region = cast(x'ff' as text)"],
)
def test_an_entry_whose_provider_is_not_known_here_hides_no_other(
    launch: Callable[..., list[Instance]], ledger: Ledger, change: str
) -> None:
    launch("a", "b")
    with closing(sqlite3.connect(ledger.path)) as database, database:
        database.execute(f"UPDATE entries SET {change} WHERE key = 'a'")

    listed, swept = answer("ls"), answer("sweep", exit_code=0 if "region" in change else 1)

    assert sorted(each["key"] for each in listed["machines"]) == ["a", "b"]
    assert "b" in {each["key"] for each in swept["ended"] + swept["gone"]}
    assert [each["key"] for each in swept["left"]] == ([] if "region" in change else ["a"])


def test_ls_lists_open_machines_with_cost_and_owner(launch: Callable[..., list[Instance]]) -> None:
    first, second = launch("a", "b")
    launch("c", pool="sky-2", owner=ALIVE, price=None)

    listed = answer("ls")
    assert listed["cost_by_provider"] == {"local": listed["cost"]}

    assert [(each["pool"], each["node"], each["instance"]) for each in listed["machines"]][:2] == [
        ("sky-1", 0, first.id),
        ("sky-1", 1, second.id),
    ]
    assert [each["owner"]["alive"] for each in listed["machines"]] == [False, False, True]
    assert listed["cost"] == pytest.approx(2 * 2 * 1.5, rel=0.01)
    said = run("ls").output
    assert "dead: `skyward sweep` ends its machines" in said
    assert f"{ALIVE.pid}, alive" in said
    assert "3 machines, $6.00" in said


def test_a_kept_machine_is_no_leftover(launch: Callable[..., list[Instance]], ledger: Ledger) -> None:
    launch("a", "b")
    ledger.keep_pool("sky-1", Moment.after(600), keys=["a"])

    kept, left = [line for line in run("ls").output.splitlines() if "sky-1" in line]
    said = run("sweep").output

    assert "kept without one" in kept
    assert "dead" in left
    assert re.search(r"spared   sky-1: it is kept until \d\d:\d\d; `skyward down sky-1` ends it", said)
    assert "0 with a dead owner" in run("doctor").output


def test_ls_asks_the_provider_what_is_still_there(
    launch: Callable[..., list[Instance]], ledger: Ledger, tmp_path: Path
) -> None:
    _, gone = launch("a", "b")
    shutil.rmtree(folder_of(gone))
    lost = Purchase(pool_id="sky-3", provider="no-such-provider", price_per_hour=1.0)
    ledger.reserve({"c": 0}, lost, owner=DEAD)

    assert [each["state"] for each in answer("ls")["machines"]] == ["running", "gone", None]
    said = run("ls").output
    assert "state unknown: no-such-provider: " in said
    assert "3 machines, $8.00 (local $6.00, no-such-provider $2.00)" in said
    (row,) = [line.split() for line in said.splitlines() if "sky-3" in line]
    assert row[3:5] == ["?", "?"], "neither id nor state"
    assert f"{gone.id} " in said
    assert said.count("dead: `skyward sweep` removes it from this list") == 1
    assert [each["key"] for each in answer("ls", "--provider", "local")["machines"]] == ["a", "b"]


def test_ls_says_where_an_owner_is_that_cannot_be_judged_from_here(launch: Callable[..., list[Instance]]) -> None:
    launch("a", owner=replace(ALIVE, namespace="pid:[1]"))
    assert "in another container, may be alive" in run("ls").output
    assert "1 machine, $3.00" in run("ls").output
    launch("b", owner=replace(ALIVE, host="far"))
    assert "on far, may be alive" in run("ls").output


def test_ls_lists_what_has_ended_only_when_asked_to(launch: Callable[..., list[Instance]], ledger: Ledger) -> None:
    assert "No machines are open, and none ended" in run("ls", "--all").output

    launch("a")
    ledger.close(["a"])

    assert answer("ls")["machines"] == []
    assert "No machines are open; --all" in run("ls").output
    assert [each["ended"] is not None for each in answer("ls", "--all")["machines"]] == [True]
    assert "ended 2" in run("ls", "--all").output


# --- down and sweep -----------------------------------------------------------------------------------------------


def test_down_ends_pools_by_the_beginning_of_their_ids(launch: Callable[..., list[Instance]], ledger: Ledger) -> None:
    (first,) = launch("a", pool="sky-aaa", owner=ALIVE)
    (second,) = launch("b", pool="sky-bbb", owner=ALIVE)

    ended = answer("down", "sky-a")

    assert [each["instance"] for each in ended["ended"]] == [first.id]
    assert not (folder_of(first) / "instance.json").exists()
    assert [entry.instance_id for entry in ledger.open_entries()] == [second.id]
    assert "1 ended, 0 were gone already, 0 left" in run("down", "sky-bbb").output


@pytest.mark.parametrize(
    ("pool", "message"),
    [("nope", "no pool nope in this user's ledger. The latest are sky-1, sky-2"), ("sky", "sky is ambiguous: ")],
)
@pytest.mark.parametrize("command", ["down", "logs"])
def test_a_pool_that_is_not_there_or_not_the_only_one_is_a_usage_error(
    launch: Callable[..., list[Instance]], command: str, pool: str, message: str
) -> None:
    launch("a")
    launch("b", pool="sky-2")

    done = run(command, pool)

    assert done.exit_code == 2
    assert message in done.stderr


def test_sweep_ends_what_dead_owners_left_and_spares_the_living(launch: Callable[..., list[Instance]]) -> None:
    (dead,) = launch("a")
    (alive,) = launch("b", pool="sky-2", owner=ALIVE)

    swept = answer("sweep")

    assert [each["instance"] for each in swept["ended"]] == [dead.id]
    assert [each["pool"] for each in swept["spared"]] == ["sky-2"]
    assert (folder_of(alive) / "instance.json").exists()
    assert "spared   sky-2: its owner is alive\n0 ended, 0 were gone already, 0 left" in run("sweep").output


def test_sweep_says_of_an_owner_that_ended_meanwhile_to_sweep_again(
    launch: Callable[..., list[Instance]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch("a", owner=ALIVE)
    lives = Owner.lives
    asked: list[Owner] = []

    def ended_after_the_first_look(self: Owner, here: Owner | None = None) -> bool | None:
        asked.append(self)
        return lives(self, here) and len(asked) == 1

    monkeypatch.setattr(Owner, "lives", ended_after_the_first_look)

    assert "spared   sky-1: its owner has ended meanwhile; sweep again\n" in run("sweep").output


def test_sweep_lists_a_machine_without_an_entry_and_ends_it_with_unknown(ledger: Ledger) -> None:
    (stranger,) = asyncio.run(_launch(["stranger"], "sky-lost"))

    assert f"unknown  local {stranger.id} (stranger)" in run("sweep").output
    assert [each["ended"] for each in answer("sweep", "--unknown")["unknown"]] == [True]
    assert answer("sweep")["unknown"] == []


def test_sweep_says_what_it_could_not_end_and_exits_with_one(ledger: Ledger) -> None:
    lost = Purchase(pool_id="sky-1", provider="atlantis")
    ledger.reserve({"a": 0}, lost, owner=DEAD)

    left = answer("sweep", exit_code=1)["left"]

    assert [(each["key"], "has no provider 'atlantis'" in each["reason"]) for each in left] == [("a", True)]
    assert "LEFT     sky-1 node 0: atlantis without an id" in run("sweep").output


# --- logs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(launch: Callable[..., list[Instance]]) -> list[Instance]:
    nodes = launch("a", "b")
    for rank, node in enumerate(nodes):
        for name in ("supervisor", "worker-0", "worker-1"):
            lines = "".join(f"{name} of {rank}, line {n}\n" for n in range(3))
            (folder_of(node) / f"{name}.log").write_text(lines + "unfinished")
    return nodes


def test_logs_show_every_log_of_every_node(logged: list[Instance]) -> None:
    shown = run("logs", "sky-1", "--system").output.splitlines()

    assert shown[:3] == [f"node 0 supervisor | supervisor of 0, line {n}" for n in range(3)]
    assert len(shown) == 2 * 3 * 3, "an unfinished line may still grow"
    read = answer("logs", "sky-1", "--system")["logs"]
    assert [(log["node"], log["worker"], len(log["lines"])) for log in read] == [
        (node, worker, 3) for node in range(2) for worker in (None, 0, 1)
    ]


def test_logs_of_one_worker_can_be_cut_to_their_last_lines(logged: list[Instance]) -> None:
    shown = run("logs", "sky-1", "--system", "--node", "1", "--worker", "0", "-n", "1").output.splitlines()

    assert shown == ["node 1 worker-0 | worker-0 of 1, line 2"]


def test_logs_of_a_node_that_has_ended_are_still_there_on_this_machine(logged: list[Instance]) -> None:
    asyncio.run(Local().terminate([each.id for each in logged]))

    shown = run("logs", "sky-1", "--system", "--worker", "1", "-f").output.splitlines()

    assert len(shown) == 2 * 4, "nothing is unfinished any more, and there is nothing to follow"


HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x1b[Aat 10%\rat 99% \x9b5n\x00end"


def test_logs_are_shown_without_control_sequences_and_read_as_they_are(logged: list[Instance]) -> None:
    (folder_of(logged[0]) / "worker-0.log").write_text(f"{HOSTILE}\n", encoding="utf-8", newline="")

    shown = run("logs", "sky-1", "--system", "--node", "0", "--worker", "0").output
    (read,) = answer("logs", "sky-1", "--system", "--node", "0", "--worker", "0")["logs"]

    assert shown == "node 0 worker-0 | red at 99% \\x00end\n"
    assert read["lines"] == [HOSTILE]


def test_logs_keep_colours_on_a_terminal(logged: list[Instance], tmp_path: Path) -> None:
    (folder_of(logged[0]) / "worker-0.log").write_text("\x1b[31mred\x1b[0m \x1b[2Jtext\n")
    command = [sys.executable, "-m", "skyward", "logs", "sky-1", "--system", "--node", "0", "--worker", "0"]
    terminal, its_end = os.openpty()
    try:
        done = subprocess.run(command, stdout=its_end, check=False, timeout=60)
        shown = os.read(terminal, 4096)
    finally:
        os.close(terminal)
        os.close(its_end)

    assert done.returncode == 0
    assert shown == b"node 0 worker-0 | \x1b[31mred\x1b[0m text\x1b[0m\r\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node", "7"], "the pool had no node 7; it had 0, 1"),
        (["--worker", "7"], "there is no log of a worker 7"),
        (["--follow", "--json"], "leave one out"),
        (["--node", "x"], "Invalid value for '--node'"),
        (["--call", "train"], "leave one out"),
    ],
)
def test_logs_that_cannot_be_are_usage_errors(logged: list[Instance], options: list[str], message: str) -> None:
    done = run("logs", "sky-1", "--system", *options)

    assert done.exit_code == 2
    assert message in done.stderr


def test_output_that_is_not_kept_is_an_error_that_names_what_is_left(launch: Callable[..., list[Instance]]) -> None:
    launch("a")
    assert "the output of pool sky-1 is not kept any more" in run("logs", "sky-1").stderr


# --- clean --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "skyward" / "envs" / "abc"
    folder.mkdir(parents=True)
    (folder / "lib").write_bytes(bytes(1 << 20))
    return folder.parents[1]


def test_clean_removes_the_cache_and_says_how_much_that_freed(cached: Path, ledger: Ledger) -> None:
    assert answer("clean", "--dry-run")["freed_bytes"] >= 1 << 20
    assert cached.exists()
    assert "MiB freed" in run("clean").output
    assert not cached.exists()
    assert answer("clean")["freed_bytes"] == 0


def test_clean_removes_the_wheels_that_a_mirror_has_built(tmp_path: Path, ledger: Ledger) -> None:
    source = tmp_path / "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("own.py", "")
    wheel = local_wheel(Distribution(name="own", version="1.0", origin=Origin.ARCHIVE, place=str(source)), {})
    assert wheel.read_bytes() == source.read_bytes()

    answer("clean")

    assert not wheel.exists()
    assert source.exists()


def test_clean_keeps_what_nodes_may_run_from(cached: Path, launch: Callable[..., list[Instance]]) -> None:
    launch("a", owner=ALIVE)

    kept = answer("clean", exit_code=1)["cleaned"][0]

    assert "of sky-1; see `skyward ls`" in kept["kept_because"]
    assert cached.exists()


def test_clean_keeps_what_nodes_of_hosts_that_share_the_home_run_from(cached: Path, ledger: Ledger) -> None:
    node = cached / "nodes/ssh-0-0123456789ab"
    node.mkdir(parents=True)
    (node / "instance.json").write_text("{}")

    kept = answer("clean", exit_code=1)["cleaned"][0]

    assert "hosts that share it" in kept["kept_because"]
    assert node.exists()


def test_clean_keeps_a_host_whose_key_file_is_gone_and_goes_on(ledger: Ledger, tmp_path: Path) -> None:
    lost = Purchase(pool_id="sky-old", provider="ssh", settings={"hosts": ["gpu1"], "key_path": str(tmp_path / "gone")})
    ledger.reserve({"old": 0}, lost, owner=DEAD)
    ledger.close(["old"])

    (kept,) = answer("clean", "--hosts", exit_code=1)["cleaned"]

    assert (kept["where"], kept["freed_bytes"]) == ("gpu1", 0)
    assert f"there is no {tmp_path / 'gone'} (settings of pool sky-old)" in kept["kept_because"]


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_here_but_perhaps_keys() -> None:
    findings = {each["what"]: each for each in answer("doctor")["findings"]}

    assert {"python", "skyward", "dask", "distributed", "paramiko", "uv", "ssh", "ledger", "ssh keys"} <= set(findings)
    assert [each for each in findings.values() if each["state"] == "fail"] == []
    assert [each for each in findings.values() if each["state"] != "ok" and not each["fix"]] == []


def test_doctor_says_how_to_mend_a_ledger_and_a_folder_and_what_crashed(
    launch: Callable[..., list[Instance]], ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch("a")
    assert "-> `skyward sweep` ends those" in run("doctor").output

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = run("doctor")
    assert done.exit_code == 1
    assert "fail state folder" in done.output
    assert "set XDG_STATE_HOME to another folder" in done.output
    assert "fail ledger" in done.output


def test_doctor_warns_where_the_packages_of_dask_are_missing() -> None:
    [found] = _requirement('sky-no-such>=1; extra == "dask"')

    assert (found.state, found.found) == ("warn", "not installed")
    assert "pip install 'skyward-fleet[dask]'" in found.fix
    assert [each.state for each in _requirement("sky-no-such>=1")] == ["fail"]
    assert [*_requirement('sky-no-such>=1; extra == "otel"')] == []


# --- hosts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SshHost]:
    with SshHost(tmp_path / "host", address="127.0.0.2") as host:
        yield host


@needs_sshd
def test_doctor_says_which_hosts_reach_each_other(host: SshHost, tmp_path: Path) -> None:
    shut = SshHost(tmp_path / "shut", address="127.0.0.3", sshd_options=["PermitOpen 127.0.0.3:*"])
    with shut:
        places = [f"{each.address}:{each.port}" for each in (host, shut)]
        known = write_known_hosts(tmp_path / "known_hosts", host, shut)
        named = [word for place in (*places, "127.0.0.9:9") for word in ("--ssh", place)]
        login = ["--key", str(host.key_path), "--known-hosts", str(known)]
        found = answer("doctor", *named, *login, exit_code=1)["findings"][-1]

    assert (found["what"], found["state"]) == ("networks", "warn")
    assert found["found"] == f"{places[0]}, {places[1]} reach no other"
    assert "does not reach 127.0.0.2" in found["fix"]


@needs_sshd
def test_doctor_and_clean_reach_hosts(host: SshHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    place = f"{host.address}:{host.port}"
    known = write_known_hosts(tmp_path / "known_hosts", host)
    options = ["--key", str(host.key_path), "--known-hosts", str(known)]

    *others, good = answer("doctor", "--ssh", place, *options)["findings"]
    assert "ssh keys" not in {each["what"] for each in others if each["state"] == "warn"}, "one was accepted"
    assert (good["what"], good["state"]) == (f"host {place}", "ok")

    (tmp_path / "none").write_text("")
    bad = answer(
        "doctor", "--ssh", place, "--key", str(host.key_path), "--known-hosts", str(tmp_path / "none"), exit_code=1
    )
    assert (bad["findings"][-1]["state"], "ssh" in bad["findings"][-1]["fix"]) == ("fail", True)

    (home / ".ssh" / "known_hosts").write_text(known.read_text())
    (home / ".ssh" / "id_ed25519").write_text(host.key_path.read_text())
    (home / ".ssh" / "id_ed25519").chmod(0o600)
    cache = host.home / ".cache/skyward"
    (cache / "nodes/ssh-0-1").mkdir(parents=True)
    (cache / "big").write_bytes(bytes(1 << 20))
    (cache / "nodes/ssh-0-1/instance.json").write_text("{}")
    assert answer("clean", "--ssh", place, exit_code=1)["cleaned"][0]["kept_because"] == "nodes run from it"
    (cache / "nodes/ssh-0-1/instance.json").unlink()
    assert answer("clean", "--ssh", place)["freed_bytes"] >= 1 << 20
    assert not (cache / "big").exists()

    (cache / "big").write_bytes(bytes(1 << 20))
    purchase = Purchase(pool_id="sky-1", provider="ssh", settings={"hosts": [place]})
    Ledger.of_user().reserve({"a": 0}, purchase, owner=DEAD)
    (cleaned,) = answer("clean", "--hosts")["cleaned"]
    assert (cleaned["freed_bytes"] >= 1 << 20, (cache / "big").exists()) == (True, False)


def test_tables_cut_nothing_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", shown)
    rows = [("sky-0123456789", "i-0123456789abcdef0", "digitalocean", "2026-11-26 11:12:13", "123 on far, alive")]
    write(Rows(("pool", "instance", "provider", "since", "owner"), rows))
    assert all(cell in shown.getvalue() for cell in rows[0])
