"""The ledger survives, is shared, and knows what is open."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import LedgerError, PoolStateError
from skyward.ledger import ledger as ledger_module
from skyward.ledger.ledger import Ledger, LedgerEntry, Purchase
from skyward.ledger.ownership import Owner
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec

PURCHASE = Purchase(
    pool_id="pool",
    provider="ssh",
    settings={"hosts": ["a", "b"], "user": None},
    region="here",
    machine="m1",
    spot=True,
    price_per_hour=1.5,
)
DAY_S = 24 * 3600.0

VERSION_1 = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, pool_id TEXT NOT NULL, provider TEXT NOT NULL, region TEXT NOT NULL,
    instance_id TEXT, created_at REAL NOT NULL, closed_at REAL
) STRICT;
INSERT INTO entries VALUES ('a', 'pool', 'local', '', 'i-1', 1000.0, NULL);
"""

WRITER = """
import sys
from pathlib import Path
from skyward.ledger.ledger import Ledger, Purchase
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
offer = Offer(spec=InstanceSpec(name="m", cpu=1, memory_gib=1))
ledger, name, purchase = Ledger(Path(sys.argv[1])), sys.argv[2], Purchase(pool_id="pool", provider="local")
for n in range(int(sys.argv[3])):
    ledger.reserve({f"{name}-{n}": n}, purchase)
    ledger.record([Instance(id=f"i-{name}-{n}", key=f"{name}-{n}", state=InstanceState.RUNNING, offer=offer)])
    ledger.close([f"{name}-{n}"] if n % 2 else [])
    print(n, flush=True)
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / "ledger.db", now=lambda: 1000.0)


def reserve(ledger: Ledger, *keys: str, pool_id: str = "pool") -> None:
    ledger.reserve(dict.fromkeys(keys, 0), replace(PURCHASE, pool_id=pool_id))


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_reserved_key_is_open_before_any_id_is_known(ledger: Ledger) -> None:
    ledger.reserve({"a": 3}, PURCHASE)

    assert ledger.open_entries() == (
        LedgerEntry(
            key="a", node=3, purchase=PURCHASE, owner=Owner.this_process(), instance_id=None, created_at=1000.0
        ),
    )


def test_ids_are_added_to_their_entries_and_what_was_got_instead_of_what_was_asked_for(ledger: Ledger) -> None:
    reserve(ledger, "a", "b")
    got = Offer(spec=InstanceSpec(name="smaller", cpu=1, memory_gib=1), region="elsewhere", price_per_hour=0.5)
    ledger.record([Instance(id="i-2", key="b", state=InstanceState.PENDING, offer=got)])

    first, second = ledger.open_entries()
    assert (first.instance_id, first.purchase) == (None, PURCHASE)
    assert (second.instance_id, second.purchase.machine, second.purchase.region) == ("i-2", "smaller", "elsewhere")
    assert (second.purchase.spot, second.purchase.price_per_hour) == (False, 0.5)


def test_closed_entries_are_not_open_but_remembered_and_closing_twice_is_harmless(ledger: Ledger) -> None:
    reserve(ledger, "a", "b")
    ledger.close(["a"])
    ledger.close(["a"])

    assert [entry.key for entry in ledger.open_entries()] == ["b"]
    assert [(entry.key, entry.closed_at) for entry in ledger.entries()] == [("a", 1000.0), ("b", None)]


def test_what_ended_is_forgotten_after_a_month_and_what_did_not_never_is(tmp_path: Path) -> None:
    now = 1000.0
    ledger = Ledger(tmp_path / "ledger.db", now=lambda: now)
    reserve(ledger, "ended", "open")
    ledger.close(["ended"])
    now += 31 * DAY_S
    reserve(ledger, "new")

    assert [entry.key for entry in ledger.entries()] == ["open", "new"]


def test_open_entries_can_be_those_of_one_pool(ledger: Ledger) -> None:
    reserve(ledger, "a", pool_id="one")
    reserve(ledger, "b", pool_id="two")

    assert [entry.key for entry in ledger.open_entries(pool_id="two")] == ["b"]


def test_a_pool_that_was_ended_from_outside_gets_no_more_machines(ledger: Ledger) -> None:
    reserve(ledger, "a")
    ledger.end_pool("pool")
    ledger.end_pool("pool")

    with pytest.raises(PoolStateError, match="pool pool was ended with `skyward down`"):
        reserve(ledger, "b")
    reserve(ledger, "c", pool_id="another")
    assert [entry.key for entry in ledger.open_entries()] == ["a", "c"]


def test_cost_runs_until_the_entry_is_closed(ledger: Ledger) -> None:
    reserve(ledger, "a")
    (entry,) = ledger.open_entries()

    assert entry.cost(1000.0 + 7200) == pytest.approx(3.0)
    assert replace(entry, closed_at=1000.0 + 3600).cost(1e9) == pytest.approx(1.5)
    least = replace(entry.purchase, minimum_billed_s=7200.0, minimum_charge=4.0)
    assert replace(entry, purchase=least, closed_at=1000.0 + 3600).cost(1e9) == pytest.approx(4.0)
    assert replace(entry, purchase=Purchase(pool_id="pool", provider="local")).cost(1e9) == 0


def test_a_later_process_reads_what_an_earlier_one_wrote(ledger: Ledger) -> None:
    reserve(ledger, "a")

    assert [entry.key for entry in Ledger(ledger.path).open_entries()] == ["a"]


def test_its_folder_and_file_are_private(ledger: Ledger) -> None:
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600


# --- other versions -----------------------------------------------------------------------------------------------


def test_entries_of_the_first_version_are_kept_without_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as database:
        database.executescript("PRAGMA journal_mode = WAL;" + VERSION_1)
    database.close()

    ledger = Ledger(path)
    reserve(ledger, "b")

    first, second = ledger.open_entries()
    assert (first.key, first.instance_id, first.purchase) == ("a", "i-1", Purchase(pool_id="pool", provider="local"))
    assert first.owner is None
    assert second.owner == Owner.this_process()


def test_entries_of_the_third_version_are_of_machines_that_end_themselves(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as database:
        for statement in [each for version in ledger_module._VERSIONS[:3] for each in version]:
            database.execute(statement)
        database.execute(
            "INSERT INTO entries (key, pool_id, provider, region, created_at) VALUES ('a', 'p', 'aws', '', 1)"
        )
        database.execute("PRAGMA user_version = 3")
    database.close()

    ledger = Ledger(path)
    ledger.reserve({"b": 0}, Purchase(pool_id="p", provider="aws", ends_itself=False))

    assert [entry.key for entry in ledger.open_entries()] == ["a", "b"]
    assert [entry.key for entry in ledger.billed_entries("aws")] == ["b"]
    assert ledger.billed_entries("local") == ()


def test_a_file_of_a_later_version_is_refused(ledger: Ledger) -> None:
    with sqlite3.connect(ledger.path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()

    with pytest.raises(LedgerError, match=r"ledger\.db is of a later version of Skyward"):
        Ledger(ledger.path)


# --- many processes, and sudden ends ------------------------------------------------------------------------------


def test_processes_make_it_and_write_at_once_without_losing_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ledger.db"
    writers = [writer(path, name, 25) for name in "abcd"]

    for each in writers:
        each.communicate(timeout=60)
        assert each.returncode == 0
    ledger = Ledger(path)
    assert len(ledger.entries()) == 100
    assert len(ledger.open_entries()) == 4 * 13
    assert all(entry.instance_id == f"i-{entry.key}" for entry in ledger.entries())


def test_a_process_killed_while_it_writes_leaves_a_ledger_that_the_next_one_uses(tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "ledger.db"
    for round_ in range(5):
        with writer(path, f"r{round_}", 100_000) as killed:
            assert killed.stdout is not None
            said = [killed.stdout.readline() for _ in range(chance.randint(1, 30))]
            killed.kill()
            last = int([*said, *killed.stdout][-1])

        ledger = Ledger(path)
        mine = [entry for entry in ledger.entries() if entry.key.startswith(f"r{round_}-")]
        assert len(mine) - 1 - last in (0, 1), "what was said to be written is, and at most one more"
        assert [entry for entry in mine[: last + 1] if entry.instance_id is None] == []
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_an_owner_lives_as_long_as_its_process_and_no_longer() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = Owner.this_process()
    try:
        owner = replace(me, pid=child.pid, started=started_of(child.pid))
        assert owner.lives()
        assert not replace(owner, started="1").lives(), "the number belongs to another process"
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not owner.lives(), "a zombie works no more"
    finally:
        child.kill()
        child.communicate()
    assert not owner.lives()
    assert me.lives()


def started_of(pid: int) -> str:
    code = "import os, sys; from skyward.ledger.ownership import _started; print(_started(int(sys.argv[1])))"
    return subprocess.run(
        [sys.executable, "-c", code, str(pid)], capture_output=True, text=True, check=True
    ).stdout.strip()


# --- what cannot be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a ledger, but a letter" * 99, "it is no ledger; move it away"),
        (b"damaged", "it is damaged; move it away"),
    ],
)
def test_a_file_that_is_none_or_damaged_is_named_with_what_to_do(ledger: Ledger, content: bytes, message: str) -> None:
    if content == b"damaged":
        reserve(ledger, *map(str, range(200)))
        whole = ledger.path.read_bytes()
        content = whole[:4096] + b"\xff" * (len(whole) - 4096)
    ledger.path.write_bytes(content)

    with pytest.raises(LedgerError, match=rf"ledger {ledger.path} cannot be used .*: {message}"):
        Ledger(ledger.path).open_entries()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")

    with pytest.raises(LedgerError, match=r"state/ledger.db cannot be opened .* or set XDG_STATE_HOME"):
        Ledger(tmp_path / "state" / "ledger.db")


def test_a_ledger_held_by_another_process_is_waited_for_and_then_named(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_WAIT_S", 0.1)
    holder = sqlite3.connect(ledger.path, isolation_level=None)
    try:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another process has held it"):
            reserve(ledger, "a")
    finally:
        holder.close()
    reserve(ledger, "a")


def test_a_disk_without_room_is_an_error_before_anything_is_reserved(tmp_path: Path) -> None:
    program = """
        import resource, signal, sys
        from pathlib import Path
        from skyward.ledger.ledger import Ledger, Purchase
        from skyward.errors import LedgerError
        ledger = Ledger(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size,) * 2)
        try:
            ledger.reserve({f"{n}" * 99: n for n in range(500)}, Purchase(pool_id="pool", provider="local"))
        except LedgerError as error:
            print(error)
    """
    path = tmp_path / "ledger.db"

    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], capture_output=True, text=True, check=True
    ).stdout

    assert f"the ledger {path} cannot be used" in said
    assert Ledger(path).open_entries() == ()


def test_a_machine_ends_when_it_was_first_seen_to_be_gone_and_its_entry_stays_open(tmp_path: Path) -> None:
    now = 0.0
    ledger = Ledger(tmp_path / "ledger.db", now=lambda: now)
    ledger.reserve({"a": 0, "b": 1}, PURCHASE)
    for gone_at in (5000.0, 3600.0, 4000.0):
        ledger.note_presence({"a": gone_at, "b": gone_at})
    ledger.note_presence({"b": None})  # it is there after all
    assert [entry.gone_at for entry in ledger.open_entries()] == [3600.0, None]
    assert [entry.cost(7200.0) for entry in ledger.open_entries()] == [1.5, 3.0]
    now = 7200.0
    ledger.close(["a", "b"])
    ledger.note_presence({"a": 1.0})
    assert [entry.closed_at for entry in ledger.entries()] == [3600.0, 7200.0]
    assert [entry.cost(9000.0) for entry in ledger.entries()] == [1.5, 3.0]
