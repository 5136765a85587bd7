"""Who a pool belongs to: the client's process, and whether it still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19
"""Of what follows the name in ``/proc/PID/stat``: clock ticks from boot to the process's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told apart from every later one that gets the same number.

    Attributes:
        pid: its number.
        started: when it started, as text that is only compared. It does not move when the system's clock is set.
        host: name of the machine it runs on.
    """

    pid: int
    started: str
    host: str

    @classmethod
    def this_process(cls) -> Owner:
        """The process that asks."""
        return cls(pid=os.getpid(), started=_started(os.getpid()) or "", host=socket.gethostname())

    def lives(self) -> bool | None:
        """Whether it still runs; a zombie does not. None for another machine's, which nobody here can tell."""
        if self.host != socket.gethostname():
            return None
        return _started(self.pid) == self.started


def _started(pid: int) -> str | None:
    """When the process started; None if there is none."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if not _BOOT_ID.exists():
            return f"{process.create_time():.2f}"
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        return f"{_BOOT_ID.read_text().strip()}/{rest.split()[_START_FIELD]}"
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
