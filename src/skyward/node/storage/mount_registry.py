"""Where volumes are on a machine: what is known of each mount path, and which nodes use it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from skyward.errors import ConfigurationError
from skyward.node.processes import SUPERVISOR_LOG, descendants
from skyward.request.volume import GrantedVolume

__all__ = ["PART", "FileRecord", "Place", "claimed", "held"]

PART = ".skyward-part-"
"""What the names of files begin with that are not whole yet."""

_RECORDS = "/var/tmp"
"""Not below a home: two homes may share the folder that this is about."""
_STARTING_S = 90.0
"""How long a node may take from its volumes to its first lasting process."""
_SUDO_S = 30.0
_OPEN, _READ_ONLY = 0o755, 0o555


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was when it was last the same as its object.

    Attributes:
        tag: the object's.
        nbytes: the file's size.
        mtime_ns: the file's time.
    """

    tag: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """A node that uses a mount path.

    Attributes:
        came_at: since when, in Unix time.
        workdir: its own folder.
    """

    came_at: float
    workdir: str

    def is_starting(self, now: float) -> bool:
        """Whether it may have no lasting process yet."""
        return now - self.came_at < _STARTING_S and not os.path.exists(os.path.join(self.workdir, SUPERVISOR_LOG))


@dataclass(slots=True, kw_only=True)
class _Head:
    """What is known of a mount path, but for its files.

    Attributes:
        location: the volume that is there, with its endpoint.
        read_only: whether it is only read.
        mode: the folder's own mode, if it was there before; None if it was not.
        made: folders that were made for it, the innermost first.
        holders: the nodes that use it, by instance id.
        mounted: the program that has mounted it; empty where it is a copy.
    """

    location: str
    read_only: bool
    mode: int | None
    made: list[str]
    holders: dict[str, _Holder]
    mounted: str = ""


class Place:
    """A mount path that is in use, for whoever holds its lock.

    Attributes:
        folder: the mount path.
        base: the path of what is known of it, but for the suffix.
        head: what is known of it.
        files: those that were as they are in the store, by path below the folder; perhaps changed since.
    """

    def __init__(self, folder: Path, base: Path, head: _Head, files: Mapping[str, FileRecord]) -> None:
        self.folder = folder
        self.base = base
        self.head = head
        self.files = dict(files)
        self._journal: IO[str] | None = None

    @property
    def read_only(self) -> bool:
        """Whether the volume is only read."""
        return self.head.read_only

    def note(self, path: str, record: FileRecord) -> None:
        """The file is now as the store has it. Survives a crash."""
        self.files[path] = record
        if self._journal is None:
            self._journal = self.base.with_suffix(".files").open("a", encoding="utf-8")
        self._journal.write(_line(path, record))
        self._journal.flush()

    def is_as_noted(self, path: str) -> bool:
        """Whether the file is there, unchanged since it was noted."""
        record = self.files.get(path)
        if record is None:
            return False
        try:
            found = (self.folder / path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == (record.nbytes, record.mtime_ns)

    def used_by_others(self, instance_id: str = "") -> bool:
        """Whether another node uses the folder; of those that have died nothing is known any more."""
        now = time.time()
        for holder, known in list(self.head.holders.items()):
            if not (holder == instance_id or known.is_starting(now) or descendants(holder)):
                del self.head.holders[holder]
        return bool(self.head.holders.keys() - {instance_id})

    def walk(self) -> Iterator[Path]:
        """Everything in the folder but folders; links are not followed."""
        for folder, folders, names in os.walk(self.folder):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            yield from (Path(folder, name) for name in (*names, *links))

    @contextmanager
    def opened(self) -> Generator[None]:
        """What is only read can be changed in here."""
        if not self.read_only:
            yield
            return
        self._set_modes(_OPEN)
        try:
            yield
        finally:
            self._set_modes(_READ_ONLY)

    def empty(self) -> Sequence[str]:
        """Remove every file that the store has too, then what is empty; returns the files that are left."""
        left: list[str] = []
        self._set_modes(_OPEN)
        for path in self.walk():
            name = path.relative_to(self.folder).as_posix()
            if stat.S_ISREG(path.lstat().st_mode) and not self.is_as_noted(name) and not path.name.startswith(PART):
                left.append(name)
            else:  # links and the like cannot be stored
                path.unlink()
        for folder, _, _ in os.walk(self.folder, topdown=False):
            if Path(folder) != self.folder:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)
        return left

    def save(self) -> None:
        """Keep what is known, each part whole or not at all."""
        self.end_journal()
        _write(self.base.with_suffix(".files"), "".join(_line(path, record) for path, record in self.files.items()))
        _write(self.base.with_suffix(".json"), json.dumps({"folder": str(self.folder), **asdict(self.head)}))

    def close(self) -> None:
        """Remove the folder if it was made for the volume and is empty; know nothing of it any more."""
        self.end_journal()
        if self.head.mode is not None:
            os.chmod(self.folder, self.head.mode)
        for made in self.head.made:
            with suppress(OSError):  # somebody else has put something there, or it was made by root for this user
                os.rmdir(made)
        for suffix in (".json", ".files"):
            self.base.with_suffix(suffix).unlink(missing_ok=True)

    def end_journal(self) -> None:
        """What was noted is kept; whoever gets the lock next reads it. Idempotent."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _set_modes(self, mode: int) -> None:
        if self.read_only:
            os.chmod(self.folder, mode)
            for folder, folders, _ in os.walk(self.folder):
                for name in folders:
                    if not os.path.islink(path := os.path.join(folder, name)):
                        os.chmod(path, mode)


@contextmanager
def claimed(granted: GrantedVolume, instance_id: str, workdir: str) -> Generator[Place]:
    """The volume's place, made if it is missing, for a node that uses it from now on. Locked meanwhile.

    Raises:
        ConfigurationError: the folder cannot be made, or is somebody else's.
    """
    volume, folder = granted.volume, Path(granted.volume.mount_path)
    location = f"{volume.location} {granted.access.endpoint_url}".strip()
    with _locked(folder) as base:
        place = _known(folder, base)
        if place is not None and (place.head.location, place.read_only) != (location, volume.read_only):
            _give_way(place, instance_id)
            place = None
        if place is None:
            place = Place(folder, base, _make(folder, location, granted), {})
        place.head.holders[instance_id] = _Holder(came_at=time.time(), workdir=workdir)
        place.save()
        try:
            yield place
            place.save()
        finally:
            place.end_journal()


@contextmanager
def held(granted: GrantedVolume) -> Generator[Place | None]:
    """The volume's place; None where nothing is known of it any more. Locked meanwhile."""
    folder = Path(granted.volume.mount_path)
    with _locked(folder) as base:
        place = _known(folder, base)
        try:
            yield place
        finally:
            if place is not None:
                place.end_journal()


def _give_way(place: Place, instance_id: str) -> None:
    """Another volume is to be where one is, if nobody uses that."""
    there = f"{place.head.location}{' (read-only)' if place.read_only else ''}"
    if place.used_by_others(instance_id):
        raise ConfigurationError(f"mount_path {place.folder} is in use there for {there}: choose another one")
    left = place.empty()
    if left:
        place.save()
        raise ConfigurationError(
            f"mount_path {place.folder} still has files for {there} that a node could not write back, {left[0]!r} "
            "among them: save them and remove the folder, or open a pool with that volume, which writes them back"
        )
    place.close()


def _make(folder: Path, location: str, granted: GrantedVolume) -> _Head:
    made: list[str] = []
    mode = None
    try:
        if folder.is_dir():
            mode = stat.S_IMODE(folder.stat().st_mode)
        else:
            made = _make_folders(folder, granted)
        used = next(iter(os.listdir(folder)), "")
    except OSError as error:
        raise ConfigurationError(
            f"mount_path {folder} cannot be made there: {error.strerror or error}. Choose a folder that the user "
            f"may make, or have it made for them: sudo install -d -o USER {folder}"
        ) from error
    if used:
        raise ConfigurationError(
            f"mount_path {folder} is not empty there, it has {used!r}: choose a folder that is, or that does not exist"
        )
    return _Head(location=location, read_only=granted.volume.read_only, mode=mode, made=made, holders={})


def _make_folders(folder: Path, granted: GrantedVolume) -> list[str]:
    made: list[str] = []
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.is_dir()]:
        try:
            missing.mkdir(mode=_OPEN)
        except PermissionError:
            if not granted.access.mountable:
                raise
            command = ["sudo", "-n", "install", "-d", "-o", str(os.getuid()), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SUDO_S)
            if done.returncode:
                raise
            return made
        made.insert(0, str(missing))
    return made


def _known(folder: Path, base: Path) -> Place | None:
    try:
        values: dict[str, Any] = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not folder.is_dir():
        return None
    values.pop("folder")
    values["holders"] = {name: _Holder(**holder) for name, holder in values["holders"].items()}
    return Place(folder, base, _Head(**values), _read_files(base.with_suffix(".files")))


def _read_files(path: Path) -> Mapping[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return files
    for line in lines:
        try:
            name, record = json.loads(line)
        except ValueError:  # a crash cut the last one off
            continue
        files[name] = FileRecord(**record)
    return files


def _line(path: str, record: FileRecord) -> str:
    return json.dumps([path, asdict(record)]) + "\n"


def _write(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


@contextmanager
def _locked(folder: Path) -> Generator[Path]:
    """Hold a mount path against every other process of this user; yields the path of what is known of it.

    Raises PermissionError when somebody else has made the folder of the records.
    """
    root = Path(_RECORDS, f"skyward-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    if root.lstat().st_uid != os.getuid() or not stat.S_ISDIR(root.lstat().st_mode):
        raise PermissionError(f"{root} belongs to another user")
    base = root / hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
    lock = base.with_suffix(".lock")
    with _taken(lock):
        yield base
        if not base.with_suffix(".json").exists():
            lock.unlink()
    with suppress(OSError):  # other places are known
        root.rmdir()


@contextmanager
def _taken(lock: Path) -> Generator[None]:
    """Hold ``lock``, which its last user removes, whatever becomes of the folder meanwhile."""
    while True:
        lock.parent.mkdir(mode=0o700, exist_ok=True)
        with lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_still(lock, file.fileno()):
                yield
                return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
