"""Copy of a store's objects in a folder, and of changed files in the store: a volume where nothing can be mounted."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from skyward.errors import ConfigurationError
from skyward.node.storage.mount_registry import PART, FileRecord, MountPath
from skyward.providers.storage import Store, StoredObject

log = logging.getLogger("skyward.node.storage.mirror")

_THREADS = 8
_LONGEST_NAME_BYTES = 255  # NAME_MAX of Linux file systems; a key may have 1,024 bytes without a slash
_READ_ONLY_FILE = 0o444
_GIB = 1 << 30


def path_of(name: str) -> PurePosixPath | None:
    """Return an object's path below the folder; None if no file can have it, or it leads out of the folder."""
    parts = name.removesuffix("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part or part.startswith(PART) for part in parts):
        return None
    if any(len(part.encode(errors="surrogatepass")) > _LONGEST_NAME_BYTES for part in parts):
        return None
    return PurePosixPath(*parts)


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """Content that the folder should have.

    Attributes:
        files: objects, by path.
        folders: folders that have a key of their own.
        refused: names that cannot be paths.
    """

    files: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])
    folders: set[str] = field(default_factory=set[str])
    refused: list[str] = field(default_factory=list[str])


class Mirror:
    """Copy of one volume in one folder. The caller holds the mount path's lock.

    Args:
        mount_path: the folder, and the records of its files.
        open_store: returns the store; called only when it is needed.
    """

    def __init__(self, mount_path: MountPath, open_store: Callable[[], Store]) -> None:
        self._mount_path = mount_path
        self._root = mount_path.folder
        self._open_store = open_store

    def fetch(self) -> Sequence[str]:
        """Bring the folder up to date with the store; return notes for the user.

        Fetches new and changed objects. Where the volume is writable, keeps files that were changed here. Removes
        unchanged files whose object was removed.

        Raises Skyward's errors, or OSError.
        """
        store = self._open_store()
        wanted = _sorted_out(store.listing())
        missing = {path: each for path, each in wanted.files.items() if not self._is_there(path, each)}
        gone = [
            path for path in self._mount_path.files if path not in wanted.files and self._mount_path.is_as_noted(path)
        ]
        self._check_room(sum(each.nbytes for each in missing.values()))
        folders = wanted.folders | {str(parent) for path in wanted.files for parent in PurePosixPath(path).parents}
        if missing or gone or not all((self._root / folder).is_dir() for folder in folders):
            with self._mount_path.opened():
                self._bring(store, missing, gone, folders)
        log.info("%s: %d files, %d of them fetched", self._root, len(wanted.files), len(missing))
        return _notes(wanted.refused)

    def push(self, *, quiet_s: float) -> int:
        """Store every new or changed file without a write in the last ``quiet_s``; return their number.

        Raises Skyward's errors, or OSError, once every file was tried.
        """
        changed = list(self._changed(quiet_s))
        if not changed:
            return 0
        store = self._open_store()  # not before: most times there is nothing to store
        errors: list[Exception] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in as_completed([pool.submit(self._give, store, path) for path in changed]):
                if (error := done.exception()) is None:
                    self._mount_path.note(*done.result())
                elif isinstance(error, FileNotFoundError):  # removed meanwhile
                    continue
                else:
                    errors.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if errors:
            log.error("%s: %d files could not be written back", self._root, len(errors))
            raise errors[0]
        log.info("%s: %d files written back", self._root, len(changed))
        return len(changed)

    def _is_there(self, path: str, wanted: StoredObject) -> bool:
        record = self._mount_path.files.get(path)
        if self._mount_path.is_as_noted(path):
            return record is not None and record.tag == wanted.tag
        return not self._mount_path.read_only and (self._root / path).is_file()

    def _check_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if nbytes > free:
            raise ConfigurationError(
                f"{self._root} has {free / _GIB:.1f} GiB free, and {nbytes / _GIB:.1f} GiB have to be fetched: "
                "take a smaller prefix, or a mount_path where there is more room"
            )

    def _bring(
        self, store: Store, missing: dict[str, StoredObject], gone: Iterable[str], folders: Iterable[str]
    ) -> None:
        for path in self._mount_path.walk():
            if _is_part(path):  # left by a fetch that was killed
                path.unlink()
        for path in gone:
            (self._root / path).unlink()
            del self._mount_path.files[path]
        for folder in sorted(folders):
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = [pool.submit(self._get, store, path, wanted, n) for n, (path, wanted) in enumerate(missing.items())]
            try:
                for done in as_completed(jobs):
                    if (fetched := done.result()) is not None:
                        part, path, record = fetched
                        os.replace(part, self._root / path)  # whole or not there: calls may list the folder
                        # After it: a record of a file that a kill kept away would have the former one written back.
                        self._mount_path.note(path, record)
            except BaseException:
                # Otherwise the end of the `with` would fetch all the other files before the error is raised.
                pool.shutdown(cancel_futures=True)
                raise

    def _get(self, store: Store, path: str, wanted: StoredObject, number: int) -> tuple[Path, str, FileRecord] | None:
        part = (self._root / path).parent / f"{PART}{os.getpid()}-{number}"
        try:
            with part.open("wb") as file:
                store.download(wanted.name, file)
        except FileNotFoundError:
            log.info("%s was removed from the store meanwhile", wanted.name)
            part.unlink()
            return None
        # Before the record is made: a file with another time counts as changed by the user.
        os.utime(part, (wanted.modified_at, wanted.modified_at))
        if self._mount_path.read_only:
            part.chmod(_READ_ONLY_FILE)
        found = part.stat()
        record = FileRecord(tag=wanted.tag, nbytes=found.st_size, mtime_ns=found.st_mtime_ns)
        return part, path, record

    def _give(self, store: Store, name: str) -> tuple[str, FileRecord]:
        path = self._root / name
        found = path.stat()  # before it is read: a write meanwhile counts as a change the next time
        tag = store.upload(str(path), name)
        return name, FileRecord(tag=tag, nbytes=found.st_size, mtime_ns=found.st_mtime_ns)

    def _changed(self, quiet_s: float) -> Iterator[str]:
        now = time.time()
        for path in self._mount_path.walk():
            name = path.relative_to(self._root).as_posix()
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode) or _is_part(path) or self._mount_path.is_as_noted(name):
                continue
            try:
                name.encode()
            except UnicodeEncodeError:  # keys are UTF-8; names of files are any bytes
                log.warning("%s: %r cannot be a key, and is not written back", self._root, name)
                continue
            # abs: a time in the future, as programs may set, must not keep the file from being stored.
            if quiet_s <= 0 or abs(now - found.st_mtime) >= quiet_s:
                yield name


def _sorted_out(listing: Iterable[StoredObject]) -> _Wanted:
    wanted = _Wanted()
    for each in listing:
        path = path_of(each.name)
        if path is None or (each.name.endswith("/") and each.nbytes):
            wanted.refused.append(each.name)
        elif each.name.endswith("/"):
            wanted.folders.add(str(path))
        else:
            wanted.files[str(path)] = each
    inner = {str(parent) for path in wanted.files for parent in PurePosixPath(path).parents} | wanted.folders
    for path in inner & wanted.files.keys():  # "a" next to "a/b": a file cannot be a folder as well
        wanted.refused.append(wanted.files.pop(path).name)
    return wanted


def _notes(refused: Sequence[str]) -> Sequence[str]:
    if not refused:
        return ()
    shown = ", ".join(map(repr, refused[:5]))
    log.warning("no file can be made of these keys: %s", ", ".join(map(repr, refused)))
    return (f"{len(refused)} keys were left out, as no file of the folder can be called so: {shown}",)


def _is_part(path: Path) -> bool:
    return path.name.startswith(PART)
