"""First process of a test host, like init on a machine: starts sshd, adopts orphans, and ends everything at last.

Run as a script with sshd's command line as arguments. Each line on standard input is an order: ``up`` starts the
daemon, ``down`` ends it and its connections. The answer is a line with the daemon's pid, 0 for none. When the input
ends, because the host stops or the process at the other end died, every process below ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 1.0
_ROUNDS = 8


def become_guard() -> ctypes.CDLL:
    """Have this process adopt orphans and outlive its signals; return the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies, adopted processes included
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return libc


def obey_orders(libc: ctypes.CDLL, command: Sequence[str]) -> None:
    """Obey the orders on standard input for the daemon of that command line, until the input ends."""

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    try:
        for order in sys.stdin:
            _end([process for process in _below() if process.ppid() == os.getpid() and _is_daemon(process)])
            _end([process for process in _below() if _is_daemon(process)])
            pid = 0
            if order.strip() == "up":
                pid = _start(command, prepare)
            print(pid, flush=True)  # noqa: T201 - the answer
    finally:
        # Resource trackers end by themselves, after they have removed the named semaphores of their ended processes.
        _end([process for process in _below() if "resource_tracker" not in _command(process)])
        psutil.wait_procs(_below(), timeout=_KILL_S)
        for _ in range(_ROUNDS):
            _end(_below())


def _start(command: Sequence[str], prepare: Callable[[], None]) -> int:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, preexec_fn=prepare).pid  # noqa: PLW1509 - one thread


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)


if __name__ == "__main__":
    obey_orders(become_guard(), sys.argv[1:])
