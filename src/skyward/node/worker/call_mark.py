"""Mark of a worker: its process, its last call and that call's limits, its output. Memory that outlives the process.

The worker stores the position of each call before it runs the call, and whether it runs calls or waits for one. The
supervisor reads the mark once the process has ended, by any cause. Calls after that position have certainly not run
(docs/decisions/014).

Before a call with limits the worker stores those, too, and the supervisor ends the worker when one is exceeded: its own
process cannot while a call holds the interpreter's lock (docs/decisions/026). A call may begin, and hold that lock,
before the supervisor has the worker's report that it runs: its process is in the mark, too.

A worker that waits for calls is looked at once a second, else ten times. The supervisor stores which of the two holds,
and a worker that begins to run calls asks for the other. Each side stores its own number before it reads the other's; a
processor that swaps the two makes the next look a second late.

The mark says whether a node that ends should wait a moment for handlers of the running call
(:func:`skyward.on_notice`), and up to where the worker's log has arrived at the client (docs/decisions/015).
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Generator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

log = logging.getLogger("skyward.node.worker.call_mark")

Mark = MutableSequence[int] | memoryview
"""Numbers of a worker's mark; a list where no file could be made."""

_MOST = (1 << 64) - 1
_POSITION, _LIMITED, _DEADLINE, _MOST_MEMORY, _PROCESS, ARRIVED, RUNNING, WATCHED, HEEDS = range(9)
_BYTES = 9 * 8
JOB: Final = 1 << 63
"""Position of a call of a job, which is none among those that the client has sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """Limit that a call has exceeded.

    Attributes:
        position: position of the call.
        of_memory: True for its memory, False for its time.
    """

    position: int
    of_memory: bool


def blank_mark() -> Mark:
    """Return a mark that no other process reads."""
    mark = [0] * (_BYTES // 8)
    mark[WATCHED] = 1  # there is no one to ask
    return mark


def enter(mark: Mark) -> None:
    """Store the id of this process, which is about to accept calls."""
    mark[_PROCESS] = os.getpid()


def process_of(mark: memoryview | None) -> int | None:
    """Return the id of the worker's process; None if that accepts no calls yet, or there is no mark."""
    return (mark[_PROCESS] or None) if mark is not None else None


def may_run(mark: memoryview | None) -> bool:
    """Return whether the worker runs calls now; True if there is no mark."""
    return mark is None or mark[RUNNING] != 0


def arm(mark: Mark, *, timeout_s: float, memory_bytes: int, of_job: bool = False) -> None:
    """Store the limits of the call that the mark names, or of one of a job; from now on they hold. Zero is no limit."""
    mark[_DEADLINE] = min(time.monotonic_ns() + round(timeout_s * 1e9), _MOST) if timeout_s else 0
    # Memory that earlier calls have left is not the call's.
    mark[_MOST_MEMORY] = min(psutil.Process().memory_info().rss + memory_bytes, _MOST) if memory_bytes else 0
    mark[_LIMITED] = JOB if of_job else mark[_POSITION]


def disarm(mark: Mark) -> None:
    """End the limits: the call is over."""
    mark[_LIMITED] = 0


@contextmanager
def paused(mark: Mark) -> Generator[None]:
    """Leave the limits out of force inside the block, whose time is not the call's."""
    limited, began = mark[_LIMITED], time.monotonic_ns()
    mark[_LIMITED] = 0
    try:
        yield
    finally:
        if mark[_DEADLINE]:
            mark[_DEADLINE] = min(mark[_DEADLINE] + time.monotonic_ns() - began, _MOST)
        mark[_LIMITED] = limited


def overrun(mark: Mark, memory_bytes: Callable[[], int]) -> Overrun | None:
    """Return the limit that the running call exceeds; None if it exceeds none.

    Args:
        mark: the worker's mark.
        memory_bytes: returns the present memory of the worker.
    """
    position, deadline, most = mark[_LIMITED], mark[_DEADLINE], mark[_MOST_MEMORY]
    if position and deadline and time.monotonic_ns() > deadline:  # the clock is the same in all processes
        return Overrun(position=position, of_memory=False)
    if position and most and memory_bytes() > most:
        return Overrun(position=position, of_memory=True)
    return None


def mark_path(folder: str, incarnation: str) -> str:
    """Return the path of the mark of a worker's process."""
    return str(Path(folder, f"begun-{incarnation}"))


def make_mark(path: str) -> None:
    """Create the file of a mark, for a worker that is about to start. Log a failure; there is no mark then."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, bytes(_BYTES))  # a store into a hole of a full disk would end the worker (SIGBUS)
        finally:
            os.close(descriptor)
    except OSError as error:  # the worker does without: after its end, every call that it was sent may have begun
        log.warning("no mark of the calls begun: %s", error)
        Path(path).unlink(missing_ok=True)


def open_mark(path: str) -> memoryview | None:
    """Map a mark, as a sequence of integers, the first of which is the position; return None if there is none.

    Raises:
        OSError: the file can be neither used nor removed: left as it is, it would deny that calls have begun.
    """
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")
    except (OSError, ValueError) as error:
        log.warning("no mark of the calls begun: %s", error)
        Path(path).unlink(missing_ok=True)
        return None


def take_mark(path: str) -> int | None:
    """Return the mark of a process that has ended, and remove its file; None if there is none."""
    try:
        data = Path(path).read_bytes()
        os.unlink(path)
    except OSError:
        return None
    return memoryview(data).cast("Q")[0] if len(data) == _BYTES else None
