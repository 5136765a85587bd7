"""Mark of the last call that a worker began: eight bytes of memory that outlive the worker's process.

The worker stores the position of each call before it runs the call. Its nanny reads the mark once the process has
ended, by any cause. Calls after that position have certainly not run (docs/decisions/014).
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

__all__ = ["make_mark", "open_mark", "take_mark"]

log = logging.getLogger("skyward.node.worker.begun")

_BYTES = 8


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
    """Map a mark, as a sequence of one integer; return None if there is none.

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
