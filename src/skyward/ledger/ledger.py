"""Record of requested machines, written before each request; ``skyward sweep`` ends the leftovers of a crash by it."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, cast

import platformdirs

from skyward.errors import LedgerError, PoolStateError
from skyward.ledger.ownership import Moment, Owner
from skyward.market.budget import charged_price
from skyward.market.cost import charge
from skyward.providers.base import Instance

_WAIT_S = 10.0
_LARGEST: Final = 1e11
"""Times and prices beyond are none; the years of such times have five digits."""
_NUMBERS: Final[Mapping[str, float | None]] = {
    "created_at": 0.0,
    "closed_at": None,
    "gone_at": None,
    "price_per_hour": None,
    "minimum_billed_s": 0.0,
    "minimum_charge": 0.0,
}
"""Columns with times, prices and charges, and what is read instead of a damaged one."""
_KEPT_S = 30 * 24 * 3600.0
"""Seconds for which closed entries are kept: 30 days."""

_FIRST = """
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
_SECOND = (
    "ALTER TABLE entries ADD COLUMN settings TEXT NOT NULL DEFAULT '{}'",
    "ALTER TABLE entries ADD COLUMN node INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN machine TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE entries ADD COLUMN spot INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN price_per_hour REAL",
    "ALTER TABLE entries ADD COLUMN owner_pid INTEGER",
    "ALTER TABLE entries ADD COLUMN owner_started TEXT",
    "ALTER TABLE entries ADD COLUMN owner_host TEXT",
    "CREATE TABLE ended_pools (pool_id TEXT PRIMARY KEY, at REAL NOT NULL) STRICT",
)
_THIRD = (
    "ALTER TABLE entries ADD COLUMN owner_machine TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE entries ADD COLUMN owner_boot TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE entries ADD COLUMN owner_namespace TEXT NOT NULL DEFAULT ''",
)
# Older entries are of providers whose machines end themselves.
_FOURTH = ("ALTER TABLE entries ADD COLUMN ends_itself INTEGER NOT NULL DEFAULT 1",)
_FIFTH = ("ALTER TABLE entries ADD COLUMN gone_at REAL",)
_SIXTH = (
    "ALTER TABLE entries ADD COLUMN minimum_billed_s REAL NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN minimum_charge REAL NOT NULL DEFAULT 0",
)
_SEVENTH = ("ALTER TABLE entries ADD COLUMN kept_until TEXT NOT NULL DEFAULT ''",)
_VERSIONS = ((_FIRST,), _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH, _SEVENTH)
"""Statements that migrate the file from each version to the next."""
_RECORD = """
UPDATE entries SET instance_id = ?, region = ?, machine = ?, spot = ?, price_per_hour = ?, ends_itself = ?,
                   minimum_billed_s = ?, minimum_charge = ?
WHERE key = ?
"""
_CLOSE = """
UPDATE entries SET closed_at = max(created_at, coalesce(gone_at, ?)) WHERE key = ? AND closed_at IS NULL
"""
# min() of SQLite with an argument that is NULL is NULL: a machine that is there again has no end.
_NOTE_PRESENCE = """
UPDATE entries SET gone_at = min(ifnull(gone_at, ?), ?) WHERE key = ? AND closed_at IS NULL
"""
_SELECT = """
SELECT * FROM entries WHERE (closed_at IS NULL OR :closed) AND pool_id = ifnull(:pool_id, pool_id)
ORDER BY created_at, key
"""
_SELECT_BILLED = """
SELECT * FROM entries WHERE closed_at IS NULL AND (:entrusted OR NOT ends_itself) AND provider = :provider
ORDER BY created_at, key
"""
_ADVICE = {
    sqlite3.SQLITE_BUSY: f"another process has held it for {_WAIT_S:g} s; find it with `fuser`, and try again",
    sqlite3.SQLITE_READONLY: "it cannot be written to; make the file and its folder writable for this user",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; make the file and its folder writable for this user",
    sqlite3.SQLITE_FULL: "the disk is full; make room",
    sqlite3.SQLITE_IOERR: "reading or writing failed; check the disk and its quota",
    sqlite3.SQLITE_CORRUPT: "it is damaged; move it away, and look for leftovers with `skyward sweep --unknown`",
    sqlite3.SQLITE_NOTADB: "it is no ledger; move it away, and look for leftovers with `skyward sweep --unknown`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Common properties of the machines of one create call.

    Attributes:
        pool_id: their pool.
        provider: the provider's name.
        settings: the provider's parameters, JSON values only; never a secret.
        region: region of the machines; empty where it has no meaning.
        machine: the provider's name of the machine type.
        spot: True if the provider may take them back.
        price_per_hour: USD for one; None is unknown.
        ends_itself: True if they can stop their own bill, or cost nothing; False while that is unknown.
        minimum_billed_s: see :class:`~skyward.providers.base.Offer`.
        minimum_charge: see there.
    """

    pool_id: str
    provider: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    region: str = ""
    machine: str = ""
    spot: bool = False
    price_per_hour: float | None = None
    ends_itself: bool = True
    minimum_billed_s: float = 0.0
    minimum_charge: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One machine that may exist and cost money.

    Attributes:
        key: the machine's tag at its provider, unique.
        node: rank of its node.
        purchase: properties shared by its create call.
        owner: the process that requested it; None in entries of Skyward's first version.
        instance_id: the provider's id; None while the create call has not answered.
        created_at: Unix time of the entry, just before the create call.
        closed_at: Unix time of its end once it was confirmed gone, or not to exist; None while it may.
        gone_at: Unix time of its end by its provider's record, else at which it was first not listed any more; None
            before. The entry stays open until the end is confirmed.
        kept_until: time until which it is kept without its owner; None for one that ends with it.
        damage: why its provider cannot be asked about it, and how to close it; empty for a record as it was written.
    """

    key: str
    node: int
    purchase: Purchase
    owner: Owner | None
    instance_id: str | None
    created_at: float
    closed_at: float | None = None
    gone_at: float | None = None
    kept_until: Moment | None = None
    damage: str = ""

    def owner_lives(self) -> bool | None:
        """Return whether its owner lives, as :meth:`Owner.lives` does; a machine that is kept needs none."""
        if self.kept_until is not None and self.kept_until.left_s > 0:
            return True
        return None if self.owner is None else self.owner.lives()

    def cost(self, now: float) -> float:
        """Return the cost until ``now``, a Unix time, in USD; 0 if the price is unknown."""
        ends = [each for each in (self.closed_at, self.gone_at) if each is not None]
        until = min(ends, default=now)
        return charge(
            until - self.created_at,
            self.purchase.price_per_hour,
            minimum_billed_s=self.purchase.minimum_billed_s,
            minimum_charge=self.purchase.minimum_charge,
        )


class Ledger:
    """A small SQLite file that any number of processes of this user write to at once.

    Every method is one transaction: a process that is killed has done all of it or nothing. Methods block on the disk,
    for up to ten seconds while another process writes: call them off the event loop.

    Raises:
        LedgerError: the file cannot be used; the message names it and the remedy. Any method may raise it.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._now = now
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise LedgerError(
                f"the ledger {path} cannot be opened ({error.strerror}), and no machine is requested without it; "
                "make the file and its folder writable for this user, or set XDG_STATE_HOME to another folder"
            ) from error
        with self._transaction() as database:
            self._migrate(database)

    @classmethod
    def of_user(cls) -> Ledger:
        """Open the ledger in this user's state folder."""
        return cls(platformdirs.user_state_path("skyward") / "ledger.db")

    def reserve(self, nodes: Mapping[str, int], purchase: Purchase, *, owner: Owner | None = None) -> None:
        """Write one open entry per key of ``nodes``, whose values are ranks: the last thing before the create call.

        Args:
            nodes: the rank of each key's machine.
            purchase: common properties of the machines.
            owner: their process; None is this one.

        Raises:
            PoolStateError: the pool was ended from outside, with ``skyward down``.
        """
        now = self._now()
        asked_by = {f"owner_{name}": value for name, value in asdict(owner or Owner.this_process()).items()}
        bought = asdict(purchase) | {"settings": json.dumps(purchase.settings, sort_keys=True)}
        rows = [{"key": key, "node": node, "created_at": now, **bought, **asked_by} for key, node in nodes.items()]
        with self._transaction() as database:
            ended = database.execute("SELECT 1 FROM ended_pools WHERE pool_id = ?", (purchase.pool_id,)).fetchone()
            if ended:
                raise PoolStateError(f"pool {purchase.pool_id} was ended with `skyward down`: it gets no more machines")
            database.execute("DELETE FROM entries WHERE closed_at < ?", (now - _KEPT_S,))
            database.execute("DELETE FROM ended_pools WHERE at < ?", (now - _KEPT_S,))
            for row in rows:
                columns = ", ".join(row)
                database.execute(f"INSERT INTO entries ({columns}) VALUES (:{', :'.join(row)})", row)  # noqa: S608 - names of fields

    def record(self, instances: Iterable[Instance]) -> None:
        """Record the machines' ids at the provider, the offers that they were launched as, and their prices."""
        with self._transaction() as database:
            database.executemany(_RECORD, [_bought_as(each) for each in instances])

    def close(self, keys: Iterable[str]) -> None:
        """Record that the machines of ``keys`` are confirmed gone. Idempotent.

        Their end is the earlier one that :meth:`note_presence` has recorded, else now.
        """
        with self._transaction() as database:
            database.executemany(_CLOSE, [(self._now(), key) for key in keys])

    def delete_never_made(self, keys: Iterable[str]) -> None:
        """Delete the open entries of create calls that made no machine: they cost nothing. Idempotent."""
        with self._transaction() as database:
            database.executemany(
                "DELETE FROM entries WHERE key = ? AND instance_id IS NULL AND closed_at IS NULL",
                [(key,) for key in keys],
            )

    def note_presence(self, gone_at: Mapping[str, float | None]) -> None:
        """Record the Unix times at which machines ended, as their providers see them; None for those still there.

        The earliest time counts. Entries stay open.
        """
        with self._transaction() as database:
            database.executemany(_NOTE_PRESENCE, [(at, at, key) for key, at in gone_at.items()])

    def end_pool(self, pool_id: str) -> None:
        """Record that the pool gets no more machines from any process. Idempotent."""
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO ended_pools VALUES (?, ?)", (pool_id, self._now()))

    def keep_pool(self, pool_id: str, until: Moment, *, keys: Iterable[str], owner: Owner | None = None) -> None:
        """Record that these machines of a pool are kept until then, whoever lives, and that its others are not.

        With ``owner``, who has them from now on. Closed entries stay as they are.
        """
        columns = {f"owner_{name}": value for name, value in asdict(owner).items()} if owner is not None else {}
        columns["kept_until"] = json.dumps(asdict(until))
        changes = ", ".join(f"{column} = :{column}" for column in columns)
        with self._transaction() as database:
            database.execute("UPDATE entries SET kept_until = '' WHERE pool_id = ? AND closed_at IS NULL", (pool_id,))
            database.executemany(
                f"UPDATE entries SET {changes} WHERE key = :key AND closed_at IS NULL",  # noqa: S608 - names of fields
                [columns | {"key": key} for key in keys],
            )

    def open_entries(self, *, pool_id: str | None = None) -> Sequence[LedgerEntry]:
        """Return entries not confirmed gone, oldest first; only those of ``pool_id`` where one is given."""
        return self._select(_SELECT, closed=False, pool_id=pool_id)

    def billed_entries(self, provider: str, *, entrusted: bool = False) -> Sequence[LedgerEntry]:
        """Return open entries of a provider's machines that cannot stop their own bill, oldest first.

        With ``entrusted`` also of those that can do so by a secret, which a machine may never have received.
        """
        return self._select(_SELECT_BILLED, entrusted=entrusted, provider=provider)

    def entries(self, *, pool_id: str | None = None) -> Sequence[LedgerEntry]:
        """Return open entries and those that were closed within 30 days, as :meth:`open_entries` does."""
        return self._select(_SELECT, closed=True, pool_id=pool_id)

    def _select(self, statement: str, **values: object) -> Sequence[LedgerEntry]:
        with self._transaction() as database:
            rows = database.execute(statement, values).fetchall()
        return tuple(_entry(row, self.path) for row in rows)

    def _migrate(self, database: sqlite3.Connection) -> None:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > len(_VERSIONS):
            raise LedgerError(
                f"the ledger {self.path} is of a later version of Skyward; update Skyward, or move the file away"
            )
        for number, statements in enumerate(_VERSIONS, start=1):
            if number > version:
                # The first version had no number: its statement changes nothing where the table exists.
                for statement in statements:
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {number}")

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)) as database:
                database.row_factory = sqlite3.Row
                database.text_factory = _text  # one damaged text must not hide all other entries
                database.execute("BEGIN IMMEDIATE")
                with database:
                    yield database
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            advice = _ADVICE.get(code, "move it away if this happens again")
            raise LedgerError(f"the ledger {self.path} cannot be used ({error}): {advice}") from error


def _bought_as(instance: Instance) -> tuple[Any, ...]:
    offer, price = instance.offer, charged_price(instance)
    # A claim that is still to be checked does not count: the client may die before.
    ends_itself = price == 0 or (instance.ends_itself and not instance.end_check)
    bought = (offer.region, offer.spec.name, offer.spot, price, ends_itself)
    return (instance.id, *bought, offer.minimum_billed_s, offer.minimum_charge, instance.key)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _settings(text: str) -> tuple[dict[str, Any], str]:
    """Return a provider's settings, and what is wrong with their text."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"the provider's settings are no JSON: {error}"
    if not isinstance(settings, dict):
        return {}, f"the provider's settings are {type(settings).__name__}, not an object"
    return cast("dict[str, Any]", settings), ""


def _moment(text: str) -> Moment | None:
    try:
        return Moment(**json.loads(text)) if text else None
    except (ValueError, TypeError):  # damaged: its owner decides
        return None


def _entry(row: sqlite3.Row, ledger: Path) -> LedgerEntry:
    """Return the record as far as it can be read."""
    settings, damage = _settings(row["settings"])
    numbers = {name: row[name] for name in _NUMBERS}
    for name, number in numbers.items():
        if number is not None and not abs(number) < _LARGEST:
            damage, numbers[name] = f"{name} is {number}", _NUMBERS[name]
    if numbers["created_at"] != row["created_at"]:
        numbers["price_per_hour"] = None  # the cost is not known
    owner = {each.name: row[f"owner_{each.name}"] for each in fields(Owner)}
    purchase = {each.name: numbers.get(each.name, row[each.name]) for each in fields(Purchase)}
    purchase |= {"settings": settings, "spot": bool(row["spot"]), "ends_itself": bool(row["ends_itself"])}
    advice = (
        f"its record in {ledger} is damaged ({damage}): look for the machine in the provider's console, then delete "
        f"the row whose key is {row['key']!r}"
    )
    return LedgerEntry(
        key=row["key"],
        node=row["node"],
        purchase=Purchase(**purchase),
        owner=None if owner["pid"] is None else Owner(**owner),
        instance_id=row["instance_id"],
        created_at=numbers["created_at"],
        closed_at=numbers["closed_at"],
        gone_at=numbers["gone_at"],
        kept_until=_moment(row["kept_until"]),
        damage=advice if damage else "",
    )
