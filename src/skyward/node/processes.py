"""Processes of one node: finding, showing and ending them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import psutil

from skyward.base.platform import (
    name_thread,
    open_descriptors,
    orphan_to_reap,
    wait_for_end,
)
from skyward.base.waiting import NotYet, wait_until
from skyward.errors import UnreachableError

SUPERVISOR_LOG = "supervisor.log"
"""File in a node's folder, from the start of its supervisor: messages of all its processes."""

log = logging.getLogger("skyward.node.processes")

_FIRST_FIELD = 3
_ARG_START, _ENV_START = 48, 50
"""Numbers of fields of ``/proc/self/stat``, in proc(5); each is followed by the field of the area's end."""

_END_S = 15.0
_LOG_CHARS = 2000
# Seconds that a supervisor may take to end once its connection has closed: it closes its connections a moment before it
# ends, and a zygote that lives ends the node's processes itself (docs/decisions/003).
_DEATH_S = 1.0


def name_process(role: str) -> None:
    """Name this process ``sky-<role>`` in lists of processes. Does nothing except on Linux."""
    # Forks share a command line, so ps and top would show all of a node's processes alike.
    name_thread(f"sky-{role}")


def close_all_but(kept: Collection[int]) -> None:
    """Close every descriptor of this process except ``kept``."""
    for descriptor in open_descriptors():
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # the one that the listing itself had open
                os.close(descriptor)


def close_on_exec() -> None:
    """Close this process's open descriptors, except the standard streams, in programs that it will start."""
    for descriptor in set(open_descriptors()) - {0, 1, 2}:
        with contextlib.suppress(OSError):  # the one that the listing itself had open
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only


def read_commands(received: BufferedReader) -> Iterator[Any]:
    """Yield a fork's commands until their sender closes the connection."""
    while received.peek():
        yield pickle.load(received)


def exit_reason(exit_code: int | None) -> str:
    """Return a fork's exit code in plain English; a negative one is a signal, None that it is lost."""
    if exit_code is None:
        return "ended with the process that it was forked from"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    return f"killed by signal {-exit_code}{name}"


def end_of_log(workdir: str) -> str:
    """Return the last lines of the supervisor's log, with messages of all processes of the node."""
    try:
        return Path(workdir, SUPERVISOR_LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:].strip()
    except OSError as error:
        return str(error)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped, as by SIGSTOP, and so runs no more until it is continued."""
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def rss_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def descendants(instance_id: str) -> list[psutil.Process]:
    """Return the living processes below this one, and those of this user that carry the instance's id."""
    # Where nothing adopts orphans (macOS), only the id in the environment finds a daemon.
    me = psutil.Process()
    below = {child.pid: child for child in me.children(recursive=True)}
    below |= {process.pid: process for process in _carrying(instance_id) if process.pid != me.pid}
    return [process for process in below.values() if _lives(process)]


def carriers(instance_id: str) -> list[psutil.Process]:
    """Return the living processes of this user that carry the instance's id in their environment."""
    return [process for process in _carrying(instance_id) if _lives(process)]


def kill_all(instance_id: str, *, keep: Collection[int] = ()) -> int:
    """Send SIGKILL to :func:`descendants`, except those below the pids in ``keep``; return their number."""
    kept = set(keep)
    for pid in keep:
        with contextlib.suppress(psutil.NoSuchProcess):
            kept.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    doomed = [process for process in descendants(instance_id) if process.pid not in kept]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if not _is_resource_tracker(process):  # it is counted, and not killed
                process.kill()
    return len(doomed)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return True for multiprocessing's tracker.

    It ends by itself once the processes that it serves are gone, and only then removes their named semaphores and
    shared memory.
    """
    return any("resource_tracker" in word for word in process.cmdline())


async def end_all(instance_id: str) -> bool:
    """Kill all of :func:`descendants` until none is left; return False if some could not be ended within 15 s."""

    async def none_left() -> bool | NotYet:
        count = kill_all(instance_id)  # again and again: one may fork between the list and its end
        reap_orphans(())
        return NotYet(f"{count} processes") if count else True

    try:
        await wait_until(none_left, deadline_s=_END_S, interval_s=0.01, what="every process of the node to end")
    except UnreachableError:
        log.exception("some processes could not be ended")
        return False
    return True


def end_with_supervisor(supervisor: int, zygote: int, *, instance_id: str, folder: str) -> NoReturn:
    """End this process, whose supervisor has closed the connection; if the zygote was killed too, all of the node's.

    Args:
        supervisor: pid of the supervisor.
        zygote: pid of the zygote.
        instance_id: id that all processes of the node carry.
        folder: folder in which the processes agree on the one that ends the others.
    """
    try:
        if wait_for_end(supervisor, within_s=_DEATH_S) and wait_for_end(zygote, within_s=_END_S):
            Path(folder, "ending").touch(exist_ok=False)
            asyncio.run(end_all(instance_id))
    finally:
        os._exit(0)


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of a session, such as the children of a worker that led it."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == session and not _is_resource_tracker(psutil.Process(pid)):
                os.kill(pid, signal.SIGKILL)


def reap_orphans(children: Collection[int]) -> None:
    """Collect the exit status of dead adopted processes, except ``children``, for which other code waits.

    A dead process behind one of ``children`` is collected once that one is.
    """
    # The kernel answers in microseconds. A list of the machine's 150 processes took 4 ms, four times a second in each
    # node (docs/decisions/016).
    with contextlib.suppress(ChildProcessError):  # no child, or none any more
        while (dead := orphan_to_reap()) is not None and dead not in children:
            os.waitpid(dead, os.WNOHANG)


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


# --- what other programs see below /proc ------------------------------------------------------------------------------


# Other programs find arguments and variables there. A fork shows those of the program that it was forked from, which
# lie in memory at fixed places. They are overwritten there with text of the same length: prctl(PR_SET_MM_MAP) would
# allow any length, and is missing from many kernels.


def fits_arguments(arguments: Sequence[str | bytes]) -> bool:
    """Return whether this process and its forks can show ``arguments``."""
    return sys.platform == "linux" and len(_encoded(arguments)) < len(_read(_ARG_START))


def show_arguments(arguments: Sequence[str | bytes], path: str) -> None:
    """Show ``arguments`` and an absolute path from now on, in this process and its forks.

    The path has slashes put before it or loses its beginning, so that everything is as long as it was.

    Raises:
        ValueError: the arguments alone are longer.
    """
    old = _read(_ARG_START)
    new = _encoded(arguments)
    left = max(0, len(old) - len(new) - 1)
    encoded = os.fsencode(path)
    new += encoded[len(encoded) - left :] if len(encoded) > left else encoded.rjust(left, b"/")
    _overwrite(_ARG_START, 0, old, new + b"\0")


def show_variable(present: str, name: str, value: str) -> None:
    """Show ``name=value`` in the place of the environment variable called ``present``.

    Raises:
        ValueError: there is no such variable, or its text is not as long.
    """
    area = _read(_ENV_START)
    found = f"\0{present}=".encode()
    at = (b"\0" + area).find(found)
    if at < 0:
        raise ValueError(f"{present} was not in the environment when the program started")
    old = area[at : area.index(b"\0", at) + 1]
    _overwrite(_ENV_START, at, old, f"{name}={value}\0".encode())


def _encoded(arguments: Sequence[str | bytes]) -> bytes:
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def _bounds(field: int) -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = fields[field - _FIRST_FIELD : field - _FIRST_FIELD + 2]
    return int(start), int(end)


def _read(field: int) -> bytes:
    start, end = _bounds(field)
    return ctypes.string_at(start, end - start)


def _overwrite(field: int, offset: int, old: bytes, new: bytes) -> None:
    if len(new) != len(old):
        raise ValueError(f"{len(new)} bytes do not replace {len(old)} in the memory of this process")
    ctypes.memmove(_bounds(field)[0] + offset, new, len(new))
