"""Store of a node's jobs: files in its folder, shared by workers, supervisor and the client's commands.

There is a folder for each call, ``<job>/<index>``, in which only new names appear, each with its content:

- ``call``: the call;
- ``base``: number of runs that it has used up on other nodes, if there are any;
- ``claim-<n>``: the worker of run ``n``;
- ``end-<n>``: the outcome of run ``n``, or the note that another run follows;
- ``cancelled``: the wish to end it;
- ``output/``: its lines (:mod:`skyward.events.log_files`).

Claims and ends get their names by a hard link, which fails where the name exists: of two that want one, one has it. A
call's state follows from the names, so a process that dies at any point leaves nothing to repair.
"""

from __future__ import annotations

import errno
import filecmp
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from skyward.base.platform import sync_folder
from skyward.events import LogLine
from skyward.events.log_files import KeptReader
from skyward.node.storage.mount_registry import PART
from skyward.shipping.job_file import DamagedJobFileError, JobEnd, JobOutcome, outcome_parts, read_end, read_head

log = logging.getLogger("skyward.node.jobs.store")

JOBS_FOLDER: Final = "jobs"
"""The store's folder in a node's own."""
_WAKE: Final = ".wake"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AGAIN: Final = b"again"
_PART: Final = ".part-"
_NO_WORKER: Final = -1
"""Owner of a claim that keeps workers away from a cancelled call."""


class JobExistsError(ValueError):
    """Another job of this name is here."""


class UnknownJobError(LookupError):
    """No such job, or call of it, is here."""


class CallStage(StrEnum):
    """State of a call; once it is over, its state is the text of its :class:`~skyward.shipping.job_file.JobEnd`."""

    WAITING = "waiting"
    """It waits for a worker."""
    RUNNING = "running"
    """A worker has claimed it."""
    OVER = "over"
    """Its outcome is here."""


Content = bytes | bytearray | memoryview
_UNFINISHED: Final = (CallStage.WAITING, CallStage.RUNNING)


@dataclass(frozen=True, slots=True)
class LookForJobs:
    """Order of the supervisor to a worker: calls of jobs were added, cancelled or released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Run of a call.

    Attributes:
        job: the job.
        index: index of the call in it.
        attempt: number of the run, from 1.
        worker: index of the worker on its node.
        incarnation: id of the worker's process.
        since: its beginning, in seconds since the epoch.
    """

    job: str
    index: int
    attempt: int
    worker: int
    incarnation: str
    since: float

    @property
    def name(self) -> str:
        """``job/index``."""
        return f"{self.job}/{self.index}"


class CallFolder:
    """One call's folder, as it was when this object was made.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        names: the names in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = frozenset(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):  # its job was removed
            self.names = frozenset[str]()

    @cached_property
    def base(self) -> int:
        """Number of runs used up on other nodes."""
        text = (self.path / "base").read_text() if "base" in self.names else ""
        return int(text) if text.isdecimal() else 0

    @cached_property
    def attempt(self) -> int:
        """Number of the last run here that began, or of the last one elsewhere; 0 if there was none."""
        claims = (name[6:] for name in self.names if name.startswith("claim-"))
        return max((int(number) for number in claims if number.isdecimal()), default=self.base)

    @cached_property
    def state(self) -> CallStage | None:
        """Its state; None for a folder without a call."""
        if "call" not in self.names:
            return None
        if f"end-{self.attempt}" in self.names:
            return CallStage.WAITING if self._runs_again else CallStage.OVER
        return CallStage.RUNNING if f"claim-{self.attempt}" in self.names else CallStage.WAITING

    @property
    def _runs_again(self) -> bool:
        try:
            with self.path.joinpath(f"end-{self.attempt}").open("rb") as file:
                return file.read(len(_AGAIN)) == _AGAIN
        except FileNotFoundError:  # its job was removed
            return False

    @property
    def outcome(self) -> Path:
        """File of the outcome, once it is over."""
        return self.path / f"end-{self.attempt}"

    def claim(self) -> Claim:
        """Return the last claim; a damaged one is no process's."""
        path = self.path / f"claim-{self.attempt}"
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
        except ValueError:  # the machine lost its power just after the claim
            values = {"worker": 0, "incarnation": "", "since": path.stat().st_mtime}
        return Claim(job=self.path.parent.name, index=int(self.path.name), attempt=self.attempt, **values)


class JobStore:
    """The jobs of a node. Any process of the user may use one at any time.

    Args:
        folder: the store's folder; made when the first job is added.
        results: folder in a volume that gets a copy of what calls return, raise or exceed; None without one.
    """

    def __init__(self, folder: Path, results: Path | None = None) -> None:
        self._folder = folder
        self._results = results
        # What is over stays over: it is not looked at again.
        self._over: set[tuple[str, str]] = set()
        self._settled: dict[str, int] = {}
        self._candidates: deque[Path] = deque()

    # --- the client -------------------------------------------------------------------------------------------------

    def add(self, job: str, index: int, content: Iterable[Content], *, runs: int = 0) -> None:
        """Add a call, of which ``runs`` runs are used up on other nodes. Does nothing if the same one is here.

        Raises:
            JobExistsError: another call is here under this name.
            ValueError: the name has odd characters.
        """
        folder = self._path(job, index)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = _write_part(folder, content)
        try:
            if runs and not folder.joinpath("call").exists():
                _replace(folder / "base", [b"%d" % runs])
            if not _link(part, folder / "call") and not filecmp.cmp(part, folder / "call", shallow=False):
                raise JobExistsError(f"a job {job!r} is here already; choose another name")
        finally:
            part.unlink()

    def cancel(self, job: str, index: int) -> bool:
        """Cancel a call. Return True if it runs: the supervisor ends it, once it is woken. Idempotent."""
        call = self._find(job, index)
        if call.state is CallStage.OVER:
            return False
        call.path.joinpath("cancelled").touch(mode=0o600)
        if call.state is CallStage.WAITING and (claim := _claim(call, _NO_WORKER, "")) is not None:
            self._end_cancelled(claim)
        call = CallFolder(call.path)  # a worker may have claimed it meanwhile
        if call.state is not CallStage.RUNNING:
            return False
        claim = call.claim()
        if claim.worker == _NO_WORKER:  # of a process that died in between
            self._end_cancelled(claim)
        return claim.worker != _NO_WORKER

    def states(self, job: str = "") -> dict[str, dict[str, dict[str, Any]]]:
        """Return the facts about each call, by job and index, for the client; of one job if it is named."""
        jobs = [job] if job else self._jobs()
        return {name: facts for name in jobs if (facts := dict(self._facts_of(name)))}

    def lines(self, job: str, index: int, at: str, most_bytes: int) -> tuple[list[LogLine], str, bool]:
        """Return lines of a call from the place ``at``, the place after them, and whether more follow.

        Args:
            job: the job.
            index: index of the call.
            at: the place after the lines that were read before; empty for the beginning.
            most_bytes: size of the lines at which it is enough.
        """
        reader = KeptReader(self._find(job, index).path / "output", json.loads(at) if at else {})
        lines: list[LogLine] = []
        for line in reader.news():
            lines.append(line)
            most_bytes -= len(line.line)
            if most_bytes <= 0:
                return lines, json.dumps(reader.seen), True
        return lines, json.dumps(reader.seen), False

    def outcome(self, job: str, index: int) -> Path:
        """Return the file of the outcome of a call that is over.

        Raises:
            UnknownJobError: there is no such call, or it is not over.
        """
        call = self._find(job, index)
        if call.state is not CallStage.OVER:
            raise UnknownJobError(f"{job}/{index} has no outcome yet: it is {call.state}")
        return call.outcome

    def wake(self) -> bool:
        """Have the node's workers look; return False if no supervisor is here: the next one looks when it starts."""
        try:
            descriptor = os.open(self._folder / _WAKE, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"!")
            finally:
                os.close(descriptor)
        except OSError as error:  # with any other error it is full: the supervisor has yet to look
            return error.errno not in (errno.ENOENT, errno.ENXIO, errno.EPIPE)
        return True

    # --- workers ----------------------------------------------------------------------------------------------------

    def claim(self, worker: int, incarnation: str) -> Claim | None:
        """Claim the oldest call that waits, for a worker's process; None if there is none."""
        for _ in range(2):
            while self._candidates:
                call = CallFolder(self._candidates.popleft())
                is_free = call.state is CallStage.WAITING and "cancelled" not in call.names
                if is_free and (claim := _claim(call, worker, incarnation)) is not None:
                    return claim
            # One look for many claims: each worker would look through all calls before each call.
            waiting = [call.path for call in self._unfinished() if call.state is CallStage.WAITING]
            self._candidates = deque(sorted(waiting, key=_added_at))
        return None

    def call_file(self, claim: Claim) -> Path:
        """Return the file of a claimed call."""
        return self._path(claim.job, claim.index) / "call"

    def output_folder(self, claim: Claim) -> Path:
        """Return the folder for the lines of a claimed call; make it."""
        folder = self._path(claim.job, claim.index) / "output"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def finish(self, claim: Claim, outcome: JobOutcome) -> bool:
        """Store the outcome of a run; return False if the run was ended for its worker's death before."""
        return self._end(claim, outcome_parts(outcome), copied=True)

    def give_back(self, claim: Claim) -> None:
        """Take the claim of a call back that has not begun."""
        self._path(claim.job, claim.index).joinpath(f"claim-{claim.attempt}").unlink()

    # --- the supervisor ---------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Forget what was found to be over: a job of the same name may have taken its place. Thread-safe."""
        self._over.clear()
        self._settled.clear()

    def open_wake(self) -> int:
        """Return a descriptor that can be read once :meth:`wake` was called. Makes the store's folder."""
        path = self._folder / _WAKE
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # without a writer of its own, it would be at its end for ever

    def close_wake(self) -> None:
        """Remove what :meth:`open_wake` has made, but not the jobs."""
        with suppress(OSError):
            self._folder.joinpath(_WAKE).unlink()
            self._folder.rmdir()

    def unfinished(self) -> int:
        """Return the number of calls that wait or run here."""
        return sum(1 for _ in self._unfinished())

    def claims(self, incarnation: str = "") -> list[Claim]:
        """Return the claims of calls that run, of one process or of all."""
        claims: list[Claim] = []
        for call in self._unfinished():
            if call.state is CallStage.RUNNING:
                with suppress(FileNotFoundError):  # it was given back
                    claims.append(call.claim())
        return [claim for claim in claims if incarnation in ("", claim.incarnation)]

    def is_to_end(self, claim: Claim) -> bool:
        """Return whether a call is cancelled and still runs."""
        call = CallFolder(self._path(claim.job, claim.index))
        return "cancelled" in call.names and call.state is CallStage.RUNNING and call.attempt == claim.attempt

    def facts(self, claim: Claim) -> Mapping[str, Any]:
        """Return the facts about a claimed call: its ``retries``, ``timeout_s``, ``memory_bytes`` and ``name``."""
        try:
            return read_head(self.call_file(claim))
        except DamagedJobFileError:  # it cannot run again
            return {"retries": 0, "timeout_s": 0.0, "memory_bytes": 0, "name": ""}

    def release(self, claim: Claim, loss: JobOutcome, *, final: bool = False) -> bool:
        """End a run whose worker is dead. Return True if the call runs again, having a retry left.

        Args:
            claim: the run.
            loss: the outcome if it does not.
            final: True if it may not.
        """
        call = CallFolder(self._path(claim.job, claim.index))
        for name in call.names:
            if name.startswith(_PART):  # half an outcome
                (call.path / name).unlink(missing_ok=True)
        if "cancelled" in call.names:
            self._end_cancelled(claim)
            return False
        if not final and claim.attempt <= self.facts(claim)["retries"]:
            return self._end(claim, [_AGAIN])
        self._end(claim, outcome_parts(loss), copied=final)  # a lost call may run again on another machine
        return False

    # --- the folders ------------------------------------------------------------------------------------------------

    def _end(self, claim: Claim, content: Iterable[Content], *, copied: bool = False) -> bool:
        folder = self._path(claim.job, claim.index)
        part = _write_part(folder, content, on_disk=True)
        try:
            if copied and self._results is not None:
                # First, so that a call that is over has its copy. That of a run given up meanwhile is as good.
                _copy(part, self._results / claim.job / str(claim.index) / f"end-{claim.attempt}")
            return _link(part, folder / f"end-{claim.attempt}")
        finally:
            part.unlink()
            sync_folder(folder)

    def _end_cancelled(self, claim: Claim) -> None:
        runs = claim.attempt - (claim.worker == _NO_WORKER)
        message = f"job {claim.job} was cancelled"
        outcome = JobOutcome(end=JobEnd.CANCELLED, node=-1, worker=claim.worker, attempt=runs, message=message)
        self._end(claim, outcome_parts(outcome))

    def _path(self, job: str, index: int) -> Path:
        if not _NAME.fullmatch(job):
            raise ValueError(f"a job's name has letters, digits, '.', '_' and '-', 100 at most, got {job!r}")
        return self._folder / job / str(index)

    def _find(self, job: str, index: int) -> CallFolder:
        call = CallFolder(self._path(job, index))
        if call.state is None:
            raise UnknownJobError(f"no call {index} of a job {job!r} is here")
        return call

    def _jobs(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self._folder) if _NAME.fullmatch(name))
        return []

    def _indices(self, job: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self._folder / job), key=_as_number)
        return []

    def _unfinished(self) -> Iterator[CallFolder]:
        for job in self._jobs():
            with suppress(FileNotFoundError):  # it was removed
                # The time at which a call was added last: a supervisor looks once a second, and a job may have 10,000.
                stamp = self._folder.joinpath(job).stat().st_mtime_ns
                if self._settled.get(job) != stamp:
                    yield from self._unfinished_of(job)
                    if all((job, name) in self._over for name in self._indices(job)):
                        self._settled[job] = stamp

    def _unfinished_of(self, job: str) -> Iterator[CallFolder]:
        for name in self._indices(job):
            if (job, name) in self._over:
                continue
            call = CallFolder(self._folder / job / name)
            if call.state in _UNFINISHED:
                yield call
            elif call.state is CallStage.OVER:
                self._over.add((job, name))

    def _facts_of(self, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in self._indices(job):
            call = CallFolder(self._folder / job / name)
            with suppress(FileNotFoundError):  # it was removed
                if call.state is not None:
                    yield name, _facts(call)


def _facts(call: CallFolder) -> dict[str, Any]:
    try:
        head = read_head(call.path / "call")
    except DamagedJobFileError:  # its worker says so
        head = {"label": "", "retries": 0}
    claim = call.claim() if f"claim-{call.attempt}" in call.names else None
    facts: dict[str, Any] = {"state": call.state, "label": head["label"], "retries": head["retries"]}
    facts |= {"runs": call.attempt, "outcome_bytes": 0, "cancelled": "cancelled" in call.names}
    if claim is not None:
        facts |= {"worker": claim.worker, "incarnation": claim.incarnation, "since": claim.since}
    if call.state is CallStage.OVER:
        facts["state"] = JobEnd.LOST
        with suppress(DamagedJobFileError):  # its reader says so
            ended = read_end(call.outcome)
            facts |= {"state": ended.end, "runs": ended.attempt, "worker": ended.worker, "seconds": ended.seconds}
        facts |= {"outcome_bytes": call.outcome.stat().st_size}
        facts |= {"path": f"{call.path.parent.name}/{call.path.name}/{call.outcome.name}"}
    return facts


def _claim(call: CallFolder, worker: int, incarnation: str) -> Claim | None:
    """Claim the next run of a call; None if another process was faster."""
    claim = Claim(
        job=call.path.parent.name,
        index=int(call.path.name),
        attempt=call.attempt + 1,
        worker=worker,
        incarnation=incarnation,
        since=time.time(),
    )
    facts = {"worker": worker, "incarnation": incarnation, "since": claim.since}
    part = _write_part(call.path, [json.dumps(facts).encode()])
    try:
        if not _link(part, call.path / f"claim-{claim.attempt}"):
            return None
    finally:
        part.unlink()
    return claim


def _write_part(folder: Path, content: Iterable[Content], *, on_disk: bool = False) -> Path:
    """Write a file of another name, which only a whole one gives up for its own; with ``on_disk``, sync it."""
    part = folder / f"{_PART}{uuid.uuid4().hex}"
    try:
        with open(part, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.writelines(content)
            if on_disk:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:  # a full disk
        part.unlink(missing_ok=True)
        raise
    return part


def _link(part: Path, path: Path) -> bool:
    """Give a file its name; return False if another one has it."""
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    return True


def _copy(part: Path, path: Path) -> None:
    """Copy an outcome into a volume, whole or not at all; log a failure, as the node still has the outcome."""
    copy = path.with_name(f"{PART}{uuid.uuid4().hex}")  # such names are not written back
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part, copy)
        try:
            os.rename(copy, path)
        except OSError:  # Mountpoint cannot rename; there, an object appears when its file is closed
            copy.unlink()
            shutil.copyfile(part, path)
    except OSError:
        log.exception("%s was not copied to %s: it is lost with its node", part.parent, path)


def _replace(path: Path, content: Iterable[Content]) -> None:
    os.replace(_write_part(path.parent, content), path)


def _added_at(path: Path) -> int:
    try:
        return path.joinpath("call").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _as_number(name: str) -> int:
    return int(name) if name.isdecimal() else -1
