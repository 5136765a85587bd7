"""The processes of one node: adopting orphans, and ending all of them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Collection, Iterator

import psutil

from skyward._concurrency.waiting import NotYet, wait_until
from skyward.errors import UnreachableError

__all__ = [
    "SUPERVISOR_LOG",
    "become_subreaper",
    "descendants",
    "end_all",
    "exit_reason",
    "has_ended",
    "kill_all",
    "kill_session",
    "name_process",
    "raise_descriptor_limit",
    "reap_orphans",
]

SUPERVISOR_LOG = "supervisor.log"
"""In a node's folder, from the moment that its supervisor starts."""

log = logging.getLogger("skyward.node.processes")

_DESCRIPTORS = 1 << 16
_END_S = 15.0
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt what a descendant leaves behind, instead of process 1. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(role: str) -> None:
    """Have this process listed as ``sky-<role>``: forks share a command line. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, f"sky-{role}".encode(), 0, 0, 0)


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts from now on, open as many files as the system allows, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft not in {resource.RLIM_INFINITY, wanted} and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def exit_reason(exit_code: int) -> str:
    """An exit code in plain English; a negative one is a signal."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    return f"killed by signal {-exit_code}{name}"


def descendants(instance_id: str) -> list[psutil.Process]:
    """Every living process below this one, and every other one of this user that carries the instance's id."""
    me = psutil.Process()
    below = {child.pid: child for child in me.children(recursive=True)}
    below |= {process.pid: process for process in _carrying(instance_id) if process.pid != me.pid}
    return [process for process in below.values() if _lives(process)]


def kill_all(instance_id: str, *, keep: Collection[int] = ()) -> int:
    """SIGKILL every one of :func:`descendants`, but those below the pids in ``keep``; returns how many there were.

    Python's resource trackers are counted and not killed: they end by themselves once those they serve are gone, and
    remove their named semaphores then.
    """
    kept = set(keep)
    for pid in keep:
        with contextlib.suppress(psutil.NoSuchProcess):
            kept.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    doomed = [process for process in descendants(instance_id) if process.pid not in kept]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
    return len(doomed)


async def end_all(instance_id: str) -> bool:
    """Kill all of :func:`descendants` until none is left, and return whether that is so."""

    async def none_left() -> bool | NotYet:
        count = kill_all(instance_id)
        reap_orphans(())
        return NotYet(f"{count} processes") if count else True

    try:
        await wait_until(none_left, deadline_s=_END_S, interval_s=0.01, what="every process of the node to end")
    except UnreachableError:
        log.exception("some processes could not be ended")
        return False
    return True


def has_ended(pid: int, *, within_s: float) -> bool:
    """Wait for the end of any process; return whether it came, and False where the system has no way to wait."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    try:
        poll = select.poll()  # select() knows descriptors below 1,024 only
        poll.register(process, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(process)


def kill_session(session: int) -> None:
    """SIGKILL every process of a session: what a worker that led it has left behind."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def reap_orphans(children: Collection[int]) -> None:
    """Collect the exit status of dead adopted processes; ``children`` are those that somebody else waits for."""
    for process in psutil.Process().children():
        if process.pid not in children and not _lives(process):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _carrying(instance_id: str) -> Iterator[psutil.Process]:
    uid = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.uids().real == uid and process.environ().get("SKYWARD_INSTANCE") == instance_id:
                yield process


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
