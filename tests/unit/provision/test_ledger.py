"""The ledger survives, is shared, and knows what is open."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.provision.ledger import Ledger, LedgerEntry


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / "ledger.db", now=lambda: 1000.0)


def reserve(ledger: Ledger, *keys: str, pool_id: str = "pool") -> None:
    ledger.reserve(keys, pool_id=pool_id, provider="local", region="")


def test_a_reserved_key_is_open_before_any_id_is_known(ledger: Ledger) -> None:
    reserve(ledger, "a")

    assert ledger.open_entries() == (
        LedgerEntry(key="a", pool_id="pool", provider="local", region="", instance_id=None, created_at=1000.0),
    )


def test_an_id_is_added_to_its_entry(ledger: Ledger) -> None:
    reserve(ledger, "a", "b")
    ledger.record("b", "i-2")

    assert [(entry.key, entry.instance_id) for entry in ledger.open_entries()] == [("a", None), ("b", "i-2")]


def test_closed_entries_are_not_open_and_closing_twice_is_harmless(ledger: Ledger) -> None:
    reserve(ledger, "a", "b")
    ledger.close(["a"])
    ledger.close(["a"])

    assert [entry.key for entry in ledger.open_entries()] == ["b"]


def test_open_entries_can_be_those_of_one_pool(ledger: Ledger) -> None:
    reserve(ledger, "a", pool_id="one")
    reserve(ledger, "b", pool_id="two")

    assert [entry.key for entry in ledger.open_entries(pool_id="two")] == ["b"]


def test_a_later_process_reads_what_an_earlier_one_wrote(ledger: Ledger) -> None:
    reserve(ledger, "a")

    assert [entry.key for entry in Ledger(ledger.path).open_entries()] == ["a"]


def test_its_folder_is_private(ledger: Ledger) -> None:
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700


def test_processes_write_at_once_without_losing_an_entry(ledger: Ledger) -> None:
    program = (
        "import sys; from pathlib import Path; from skyward.provision.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for n in range(25): ledger.reserve([f'{sys.argv[2]}-{n}'], pool_id='pool', provider='local', region='')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(ledger.path), name]) for name in "abc"]

    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert len(ledger.open_entries()) == 75
