"""What we asked providers for, written down before we asked: how ``skyward sweep`` finds what a crash left behind."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

__all__ = ["Ledger", "LedgerEntry"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY,
    pool_id TEXT NOT NULL,
    provider TEXT NOT NULL,
    region TEXT NOT NULL,
    instance_id TEXT,
    created_at REAL NOT NULL,
    closed_at REAL
) STRICT
"""
_OPEN_ENTRIES = """
SELECT key, pool_id, provider, region, instance_id, created_at FROM entries
WHERE closed_at IS NULL AND pool_id = ifnull(?, pool_id)
ORDER BY created_at, key
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One machine that may exist and cost money.

    Attributes:
        key: the machine's tag at its provider, unique.
        pool_id: the pool it was asked for.
        provider: the provider's name.
        region: where; empty where it has no meaning.
        instance_id: the provider's id; None while the create call has not answered.
        created_at: Unix time of the entry, just before the create call.
    """

    key: str
    pool_id: str
    provider: str
    region: str
    instance_id: str | None
    created_at: float


class Ledger:
    """A small SQLite file that any number of processes of this user write to at once.

    Methods block on the disk, for up to ten seconds while another process writes: call them off the event loop.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._now = now
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._transaction() as database:
            database.execute(_SCHEMA)

    @classmethod
    def of_user(cls) -> Ledger:
        """The ledger in this user's state folder."""
        return cls(platformdirs.user_state_path("skyward") / "ledger.db")

    def reserve(self, keys: Iterable[str], *, pool_id: str, provider: str, region: str) -> None:
        """Write one open entry per key: the last thing to do before the create call."""
        row = (pool_id, provider, region, self._now())
        with self._transaction() as database:
            database.executemany(
                "INSERT INTO entries (key, pool_id, provider, region, created_at) VALUES (?, ?, ?, ?, ?)",
                [(key, *row) for key in keys],
            )

    def record(self, key: str, instance_id: str) -> None:
        """Note the id that the provider gave to the machine of ``key``."""
        with self._transaction() as database:
            database.execute("UPDATE entries SET instance_id = ? WHERE key = ?", (instance_id, key))

    def close(self, keys: Iterable[str]) -> None:
        """Note that the machines of ``keys`` are confirmed gone, or were never made. Idempotent."""
        with self._transaction() as database:
            database.executemany(
                "UPDATE entries SET closed_at = ? WHERE key = ? AND closed_at IS NULL",
                [(self._now(), key) for key in keys],
            )

    def open_entries(self, *, pool_id: str | None = None) -> Sequence[LedgerEntry]:
        """Entries not confirmed gone, oldest first; only those of ``pool_id`` where one is given."""
        with self._transaction() as database:
            rows = database.execute(_OPEN_ENTRIES, (pool_id,)).fetchall()
        return tuple(LedgerEntry(**dict(row)) for row in rows)

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        with closing(sqlite3.connect(self.path, timeout=10.0)) as database, database:
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA journal_mode = WAL")
            yield database
