"""Folders of pools in the user's state folder; they outlive their pools, within bounds."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

import platformdirs

from skyward._concurrency.descriptors import keep_from_forks

__all__ = ["PoolFolder", "is_in_use", "known_folders"]

KEPT_POOLS: Final = 50
KEPT_BYTES: Final = 1 << 30
"""Bounds of the folders of closed pools; the newest are kept."""
_LOCK: Final = "open"


class PoolFolder:
    """Folder of one open pool, for its user only. A lock marks it as in use until :meth:`close` or the process's end.

    Attributes:
        path: the folder.
        logs: its folder of logs.

    Raises:
        OSError: the state folder cannot be written to.
    """

    def __init__(self, pool_id: str) -> None:
        self.path = _home() / pool_id
        self.logs = self.path / "logs"
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)  # `parents` are made with the umask's mode
        # A forked child would hold the lock as long as it lives.
        self._lock = keep_from_forks(FileIO(self.path / _LOCK, "a", opener=partial(os.open, mode=0o600)))
        try:  # Ctrl-C too would leave it open: the pool does not have this object yet
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _forget_old()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Mark the folder as that of a closed pool. Idempotent."""
        self._lock.close()


def known_folders() -> Sequence[Path]:
    """Return the folders of open and closed pools, the newest first."""
    found: list[tuple[float, Path]] = []
    with suppress(FileNotFoundError), os.scandir(_home()) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_dir():
                    found.append((entry.stat().st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def is_in_use(folder: Path) -> bool:
    """Return True while a process has the pool of this folder open."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was deleted meanwhile, or belongs to another user, as after sudo
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _home() -> Path:
    return platformdirs.user_state_path("skyward") / "pools"


def _forget_old() -> None:
    """Delete the oldest folders of closed pools beyond the bounds."""
    size = 0
    for pools, folder in enumerate(known_folders(), start=1):
        size += _size(folder)
        if (pools > KEPT_POOLS or size > KEPT_BYTES) and not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be deleting it too


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:  # another process is deleting it
        return 0
