"""Owner of a pool: the client's process, and a test for its life."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from skyward._concurrency.linux_parts import boot_id, pid_namespace, start_ticks

__all__ = ["Owner"]

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
