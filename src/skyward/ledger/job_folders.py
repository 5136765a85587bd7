"""Folders of this user's jobs: what a client keeps of each, before its calls have run and after the fleet has ended.

``<state folder>/fleets/<fleet>/jobs/<job>/`` has ``job.json``, and for each call a folder ``0``, ``1``, … with ``call``
until it is over, then ``outcome`` and ``output``, as they were on the node.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import platformdirs

from skyward.base.platform import sync_folder
from skyward.errors import ConfigurationError
from skyward.wire.node_config import JsonRecord

_RECORD: Final = "job.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NO_PART: Final = re.compile(r"[^A-Za-z0-9_-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(JsonRecord):
    """A job, as it was spawned.

    Attributes:
        job: its id, unique in its fleet.
        pool_id: id of the pool that it was spawned on: a later fleet may have the same name.
        label: name of its function.
        calls: number of its calls.
        single: True for one call, False for a gather.
        return_exceptions: whether a gather returns exceptions in place of results.
        spawned_at: time in seconds since the epoch.
        places: instance id of the node that has each call.
        runs: number of each call's runs that began on nodes that are lost.
        results: location in a bucket where nodes keep copies of outcomes, ``s3://bucket/folder/``; empty for none.
    """

    job: str
    pool_id: str
    label: str
    calls: int
    single: bool
    spawned_at: float
    return_exceptions: bool = False
    places: tuple[str, ...] = ()
    runs: tuple[int, ...] = ()
    results: str = ""


@dataclass(slots=True, eq=False)
class JobFolder:
    """One job's folder.

    Attributes:
        path: the folder.
        fleet: name of the job's fleet.
        record: the job.
    """

    path: Path
    fleet: str
    record: JobRecord = field(repr=False)

    def refresh(self) -> None:
        """Read the record again, which the client that is attached changes when a call moves."""
        if (present := _folder_at(self.path, self.fleet)) is not None:
            self.record = present.record

    def call(self, index: int) -> Path:
        """Return the file of a call that is not over."""
        return self.path / str(index) / "call"

    def outcome(self, index: int) -> Path:
        """Return the file of a call's outcome, once it was fetched."""
        return self.path / str(index) / "outcome"

    def output(self, index: int) -> Path:
        """Return the file of a call's output, once it was fetched."""
        return self.path / str(index) / "output"

    def checkpoint(self, index: int) -> Path:
        """Return the folder of the copy of a call's checkpoints; it has no meaning once the call is over."""
        return self.path / str(index) / "checkpoint"

    def unfetched(self) -> list[int]:
        """Return the calls whose outcome is not here."""
        return [index for index in range(self.record.calls) if not self.outcome(index).exists()]

    def move(self, moves: Mapping[int, tuple[str, int]]) -> None:
        """Note the instances that have calls from now on, and how many runs of each are used up by then."""
        places, used = list(self.record.places), list(self.record.runs)
        for index, (instance_id, runs) in moves.items():
            places[index], used[index] = instance_id, runs
        self.write(replace(self.record, places=tuple(places), runs=tuple(used)))

    def write(self, record: JobRecord) -> None:
        """Replace the record."""
        self.record = record
        write_private(self.path / _RECORD, [record.to_json().encode()])


def make_folder(fleet: str, record: JobRecord, calls: Iterable[bytes | bytearray]) -> JobFolder:
    """Make a job's folder with its calls.

    A job of that id of an earlier fleet keeps its folder, under an id that names its pool.

    Raises:
        ConfigurationError: the fleet has a job of that id, or it is no name.
    """
    home = _home(fleet)
    path = home / record.job
    if (known := _folder_at(path, fleet)) is not None:
        if known.record.pool_id == record.pool_id:
            raise _taken(record.job, fleet)
        earlier = f"{record.job}.{known.record.pool_id}"
        os.rename(path, home / earlier)
        JobFolder(home / earlier, fleet, known.record).write(replace(known.record, job=earlier))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = home / f".{secrets.token_hex(8)}"
    folder = JobFolder(making, fleet, record)
    making.mkdir(mode=0o700)
    try:
        for index, content in enumerate(calls):
            write_private(folder.call(index), [content])
        folder.write(record)
        os.rename(making, path)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if path.exists():  # another process was faster
            raise _taken(record.job, fleet) from None
        raise
    folder.path = path
    return folder


def _taken(job: str, fleet: str) -> ConfigurationError:
    return ConfigurationError(
        f"name: the fleet {fleet!r} has a job {job!r} already; choose another name, or read its result with "
        f"sky.job({job!r}).result()"
    )


def write_private(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file for this user only, whole or not at all, on disk when this returns, with the folders around it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with open(making, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(making, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            making.unlink()
        raise


def job_folders(fleet: str | None = None) -> Sequence[JobFolder]:
    """Return the jobs of one fleet, or of all, in the order in which they were spawned."""
    homes = [_home(fleet)] if fleet is not None else [*_fleets().glob("*/jobs")]
    folders = (folder for home in homes for folder in _folders_in(home))
    return sorted(folders, key=lambda folder: folder.record.spawned_at)


def _folders_in(home: Path) -> Iterator[JobFolder]:
    for path in home.glob("[!.]*"):  # others are being made
        if (folder := _folder_at(path, home.parent.name)) is not None:
            yield folder


def find_job(job: str, fleet: str | None = None) -> JobFolder:
    """Return the job of this id.

    Raises:
        ConfigurationError: there is none, or several fleets have one.
    """
    known = job_folders(fleet)
    matching = [folder for folder in known if folder.record.job == job]
    if len(matching) == 1:
        return matching[0]
    if matching:
        fleets = ", ".join(repr(folder.fleet) for folder in matching)
        raise ConfigurationError(f"the fleets {fleets} have a job {job!r} each; name one of them: pool={fleets[:40]}")
    of = "" if fleet is None else f" of the fleet {fleet!r}"
    latest = ", ".join(folder.record.job for folder in known[-5:])
    others = f"the latest are {latest}" if latest else "there are none"
    raise ConfigurationError(f"there is no job {job!r}{of}; {others}")


def checked_job_name(name: object) -> str:
    """Return a job's name if it can be one.

    Raises:
        ConfigurationError: it is no text of letters, digits, ``.``, ``_`` and ``-``, or longer than 64 characters.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"name must be up to 64 letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    return name


def job_name_of(label: str) -> str:
    """Return a job's name that begins with its function's."""
    stem = _NO_PART.sub("-", label.rpartition(".")[2]).strip("-_")[:40] or "job"
    return f"{stem}-{secrets.token_hex(3)}"


def _folder_at(path: Path, fleet: str) -> JobFolder | None:
    try:
        return JobFolder(path, fleet, JobRecord.from_json((path / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # being made, removed, or of another version
        return None


def _fleets() -> Path:
    return platformdirs.user_state_path("skyward") / "fleets"


def _home(fleet: str) -> Path:
    return _fleets() / fleet / "jobs"


def loads(folders: Iterable[JobFolder], instance_ids: Iterable[str]) -> Mapping[str, int]:
    """Return the number of calls without an outcome here, by the instance that has them."""
    counts = dict.fromkeys(instance_ids, 0)
    for folder in folders:
        for index in folder.unfetched():
            place = folder.record.places[index] if folder.record.places else ""
            if place in counts:
                counts[place] += 1
    return counts
