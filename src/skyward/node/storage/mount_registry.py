"""Registry of a machine's volumes: one record for each mount path, with its files and the nodes that use it."""

from __future__ import annotations

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
from skyward.node.processes import SUPERVISOR_LOG, carriers
from skyward.request.volume import GrantedVolume

PART = ".skyward-part-"
"""Prefix of the names of files that are not whole yet."""

_RECORDS = "/var/tmp"
"""Folder of the records. Not below a home: processes with different homes may share a mount path."""
_STARTING_S = 90.0
"""Seconds that a node may take from its volumes to its first lasting process."""
_SUDO_S = 30.0
_OPEN, _READ_ONLY = 0o755, 0o555


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """State of a file when it last equalled its object.

    Attributes:
        tag: the object's version.
        nbytes: the file's size.
        mtime_ns: the file's time of modification.
    """

    tag: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """Node that uses a mount path.

    Attributes:
        came_at: start of the use, in Unix time.
        workdir: the node's own folder.
    """

    came_at: float
    workdir: str

    def is_starting(self, now: float) -> bool:
        """Return True if the node may have no lasting process yet."""
        # Once it has a supervisor, its processes carry the node's id.
        return now - self.came_at < _STARTING_S and not os.path.exists(os.path.join(self.workdir, SUPERVISOR_LOG))


@dataclass(slots=True, kw_only=True)
class _Head:
    """Record of a mount path, except its files.

    Attributes:
        location: the volume there, with its endpoint.
        read_only: True if nodes may only read it.
        mode: the folder's mode before the volume; None if the folder did not exist.
        made: folders that were made for it, the innermost first.
        holders: the nodes that use it, by instance id.
        mounted: the program that has mounted it; empty for a copy.
    """

    location: str
    read_only: bool
    mode: int | None
    made: list[str]
    holders: dict[str, _Holder]
    mounted: str = ""


class MountPath:
    """Mount path in use, for the process that holds its lock.

    Attributes:
        folder: the mount path.
        base: path of its records, without the suffix.
        head: its record.
        files: files that equalled their objects once, by path below the folder; perhaps changed since.
    """

    def __init__(self, folder: Path, base: Path, head: _Head, files: Mapping[str, FileRecord]) -> None:
        self.folder = folder
        self.base = base
        self.head = head
        self.files = dict(files)
        self._journal: IO[str] | None = None

    @property
    def read_only(self) -> bool:
        """True if nodes may only read the volume."""
        return self.head.read_only

    def note(self, path: str, record: FileRecord) -> None:
        """Record that a file equals its object. Survives a crash of the process."""
        self.files[path] = record
        # Appended and flushed for each file: after a crash, whole files are not fetched a second time.
        if self._journal is None:
            self._journal = self.base.with_suffix(".files").open("a", encoding="utf-8")
        self._journal.write(_line(path, record))
        self._journal.flush()

    def is_as_noted(self, path: str) -> bool:
        """Return True if the file exists, unchanged since it was noted."""
        record = self.files.get(path)
        if record is None:
            return False
        try:
            found = (self.folder / path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == (record.nbytes, record.mtime_ns)

    def used_by_others(self, instance_id: str = "") -> bool:
        """Return True if another node uses the folder; forget the nodes that have died."""
        now = time.time()
        for holder, known in list(self.head.holders.items()):
            # A node that was killed could not release it: no process carries its id any more.
            if not (holder == instance_id or known.is_starting(now) or carriers(holder)):
                del self.head.holders[holder]
        return bool(self.head.holders.keys() - {instance_id})

    def walk(self) -> Iterator[Path]:
        """Yield everything in the folder except folders. Does not follow links."""
        for folder, folders, names in os.walk(self.folder):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            yield from (Path(folder, name) for name in (*names, *links))

    @contextmanager
    def opened(self) -> Generator[None]:
        """Make a read-only folder writable inside the context."""
        if not self.read_only:
            yield
            return
        self._set_modes(_OPEN)
        try:
            yield
        finally:
            self._set_modes(_READ_ONLY)

    def empty(self) -> Sequence[str]:
        """Remove every file that the store has, then empty folders; return the remaining files."""
        left: list[str] = []
        self._set_modes(_OPEN)
        for path in self.walk():
            name = path.relative_to(self.folder).as_posix()
            if stat.S_ISREG(path.lstat().st_mode) and not self.is_as_noted(name) and not path.name.startswith(PART):
                left.append(name)
            else:  # in the store, or nothing that can be stored, such as a link
                path.unlink()
        for folder, _, _ in os.walk(self.folder, topdown=False):
            if Path(folder) != self.folder:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)
        return left

    def save(self) -> None:
        """Write both records, each whole or not at all."""
        self.end_journal()
        _write(self.base.with_suffix(".files"), "".join(_line(path, record) for path, record in self.files.items()))
        _write(self.base.with_suffix(".json"), json.dumps({"folder": str(self.folder), **asdict(self.head)}))

    def close(self) -> None:
        """Remove the records, and the folder if it was made for the volume and is empty."""
        self.end_journal()
        if self.head.mode is not None:
            os.chmod(self.folder, self.head.mode)
        for made in self.head.made:
            with suppress(OSError):  # not empty, or made by root: its parent is not this user's
                os.rmdir(made)
        for suffix in (".json", ".files"):
            self.base.with_suffix(suffix).unlink(missing_ok=True)

    def end_journal(self) -> None:
        """Close the journal, which the next holder of the lock reads. Idempotent."""
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
def claimed(granted: GrantedVolume, instance_id: str, workdir: str) -> Generator[MountPath]:
    """Lock the volume's mount path, make it if it is missing, and record the node as one of its users.

    Raises:
        ConfigurationError: the folder cannot be made, or is in use for something else.
    """
    volume, folder = granted.volume, Path(granted.volume.mount_path)
    location = f"{volume.location} {granted.access.endpoint_url}".strip()
    with _locked(folder) as base:
        mount_path = _known(folder, base)
        if mount_path is not None and (mount_path.head.location, mount_path.read_only) != (location, volume.read_only):
            _give_way(mount_path, instance_id)
            mount_path = None
        if mount_path is None:
            mount_path = MountPath(folder, base, _make(folder, location, granted), {})
        mount_path.head.holders[instance_id] = _Holder(came_at=time.time(), workdir=workdir)
        # Before the files come: if this process is killed, the record has the folders that another node must remove.
        mount_path.save()
        try:
            yield mount_path
            mount_path.save()
        finally:
            mount_path.end_journal()


@contextmanager
def held(granted: GrantedVolume) -> Generator[MountPath | None]:
    """Lock the volume's mount path; yield None where it has no record any more."""
    folder = Path(granted.volume.mount_path)
    with _locked(folder) as base:
        mount_path = _known(folder, base)
        try:
            yield mount_path
        finally:
            if mount_path is not None:
                mount_path.end_journal()


def _give_way(mount_path: MountPath, instance_id: str) -> None:
    """Remove a volume that no node uses, to make room for another one."""
    there = f"{mount_path.head.location}{' (read-only)' if mount_path.read_only else ''}"
    if mount_path.used_by_others(instance_id):
        raise ConfigurationError(f"mount_path {mount_path.folder} is in use there for {there}: choose another one")
    left = mount_path.empty()
    if left:
        mount_path.save()
        raise ConfigurationError(
            f"mount_path {mount_path.folder} still has files for {there} that a node could not write back, {left[0]!r} "
            "among them: save them and remove the folder, or open a pool with that volume, which writes them back"
        )
    mount_path.close()


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
    if used:  # its files would look like changes of the volume, and be written back
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
            if not granted.access.mountable:  # the user's own machine, on which nothing is done as root
                raise
            command = ["sudo", "-n", "install", "-d", "-o", str(os.getuid()), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SUDO_S)
            if done.returncode:
                raise
            return made  # without the folders made by root, which this user cannot remove
        made.insert(0, str(missing))
    return made


def _known(folder: Path, base: Path) -> MountPath | None:
    try:
        values: dict[str, Any] = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not folder.is_dir():  # removed by the user, and its record is worthless
        return None
    values.pop("folder")  # for users who read the record, whose name is a hash
    values["holders"] = {name: _Holder(**holder) for name, holder in values["holders"].items()}
    return MountPath(folder, base, _Head(**values), _read_files(base.with_suffix(".files")))


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
    # In the same folder, for the rename: a process that is killed in between leaves the old record whole.
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


@contextmanager
def _locked(folder: Path) -> Generator[Path]:
    """Lock a mount path against every other process of this user; yield the path of its records.

    Raises PermissionError when another user has made the folder of the records.
    """
    root = Path(_RECORDS, f"skyward-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    # Every user may write to /var/tmp: a folder, or a link, of somebody else's would choose the files to be replaced.
    if root.lstat().st_uid != os.getuid() or not stat.S_ISDIR(root.lstat().st_mode):
        raise PermissionError(f"{root} belongs to another user")
    # A hash: the name of a file is limited to 255 bytes, a path to 4,096.
    base = root / hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
    lock = base.with_suffix(".lock")
    with _taken(lock):
        yield base
        if not base.with_suffix(".json").exists():
            lock.unlink()
    with suppress(OSError):  # it has records of other mount paths
        root.rmdir()


@contextmanager
def _taken(lock: Path) -> Generator[None]:
    """Hold ``lock``, a file that its last user removes."""
    import fcntl  # the client imports this module on Windows, too

    # The file may be removed between its opening and its locking; then the lock is of no use, and taken again.
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
