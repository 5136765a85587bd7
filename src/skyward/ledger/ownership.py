"""Owners of pools: the client's process, and the pool's folder that it has locked; times that outlive a process."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, Self

import platformdirs

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import boot_id, elapsed_s, pid_namespace, start_ticks, try_lock
from skyward.wire.node_config import CHECKPOINTS

_MACHINE_ID = Path("/etc/machine-id")
_FIRST_NAMESPACE = "pid:[4026531836]"
"""PID namespace of a Linux machine outside all containers; the number is the kernel's constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, distinguished from every later one with the same number, here and in other containers.

    Attributes:
        pid: its number.
        started: its start time, as text for comparison only. Setting the system's clock does not change it.
        host: name of its machine. Containers and machines may share it.
        machine: id of that machine's installation; empty where it has none.
        boot: id of the machine's boot; empty where it has none.
        namespace: PID namespace in which the number counts; empty where there are none.
    """

    pid: int
    started: str
    host: str
    machine: str = ""
    boot: str = ""
    namespace: str = ""

    @classmethod
    def this_process(cls) -> Owner:
        """Return the present process."""
        return cls(
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            host=socket.gethostname(),
            machine=_machine_id(),
            boot=boot_id(),
            namespace=pid_namespace(),
        )

    def lives(self, here: Owner | None = None) -> bool | None:
        """Return True if it still runs, False if not or if it is a zombie, None if that cannot be judged from here.

        Processes of other machines and of other containers cannot be judged: their numbers belong to other processes
        here. After a reboot of the same machine it has ended, unless it ran in a container.

        Args:
            here: a process on the judging machine; None is this process.
        """
        here = here or Owner.this_process()
        if (self.host, self.namespace) != (here.host, here.namespace):
            return None
        if self.boot != here.boot:
            same_machine = self.namespace == _FIRST_NAMESPACE and bool(self.machine) and self.machine == here.machine
            return False if same_machine else None
        return _started(self.pid) == self.started


def _machine_id() -> str:
    try:
        return _MACHINE_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of the process; None if there is none."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return start_ticks(pid) or f"{process.create_time():.2f}"
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A time that other processes read, too. Setting the clock does not move it until the machine starts again.

    Attributes:
        boot: id of the machine's boot.
        elapsed: reading of that boot's clock, asleep or awake, in seconds.
        unix: the same time by the wall clock, for other boots and machines.
    """

    boot: str
    elapsed: float
    unix: float

    @classmethod
    def after(cls, seconds: float = 0.0) -> Self:
        """Return the time in so many seconds."""
        return cls(boot=boot_id(), elapsed=elapsed_s() + seconds, unix=time.time() + seconds)

    def later(self, seconds: float) -> Moment:
        """Return the time so many seconds after this one."""
        return Moment(boot=self.boot, elapsed=self.elapsed + seconds, unix=self.unix + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; negative once it has passed."""
        return self.elapsed - elapsed_s() if self.boot and self.boot == boot_id() else self.unix - time.time()


# --- folders of pools -----------------------------------------------------------------------------------------------

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
            if not try_lock(self._lock.fileno()):
                raise BlockingIOError(errno.EWOULDBLOCK, f"another process has the pool's folder {self.path} open")
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
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:  # it was deleted meanwhile, or belongs to another user, as after sudo
        return False
    try:
        return not try_lock(lock)
    finally:
        os.close(lock)


def _home() -> Path:
    return platformdirs.user_state_path("skyward") / "pools"


def _forget_old() -> None:
    """Delete the oldest folders of closed pools beyond the bounds."""
    size = 0
    for pools, folder in enumerate(known_folders(), start=1):
        checkpoints = folder / CHECKPOINTS
        if checkpoints.exists() and not is_in_use(folder):  # its process was killed: no call of it will need them
            shutil.rmtree(checkpoints, ignore_errors=True)
        size += _size(folder)
        if (pools > KEPT_POOLS or size > KEPT_BYTES) and not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be deleting it too


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:  # another process is deleting it
        return 0
