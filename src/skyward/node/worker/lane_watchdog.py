"""Watch of a worker over itself: a process that lives but cannot serve its lane any more ends.

User code shares the process. It may close descriptors that it does not own, end or block the thread of the event loop,
or leave no descriptor for the next connection; then no answer would ever arrive. A call that holds the interpreter's
lock does none of that, however long it takes. This thread does not run meanwhile either: it counts its own looks, and
only those that were in time. A loop that waits for a disk or a file server is not blocked by a call either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from skyward.base.loop import LoopThread

DEAF: Final = 86
"""Exit status of a worker that could not serve its lane any more."""
DEAF_REASON: Final = (
    "it could not answer any more: a call closed connections or files that it had not opened, as os.closerange() does, "
    "or ended or blocked a thread of its worker"
)

_LOOK_S: Final = 1.0
_LATE_S: Final = 2.0
_SILENT_LOOKS: Final = 10


class Watchdog:
    """Regular questions to the thread of a lane's event loop.

    Args:
        loop: the thread.
        trouble: called on the loop with each question; returns why the lane can carry nothing any more, else "".
        end: called with a reason to end the process; does not return.
    """

    def __init__(self, loop: LoopThread, trouble: Callable[[], str], *, end: Callable[[str], None]) -> None:
        self._loop = loop
        self._trouble = trouble
        self._end = end
        self._silent = 0
        self._asked = False
        self._over = threading.Event()

    def start(self) -> None:
        """Start watching, in a separate thread."""
        threading.Thread(target=self._watch, name="skyward-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the thread; the process is about to end in order."""
        self._over.set()

    def look(self, *, after_s: float) -> None:
        """Ask, and end the process if the loop has ended or has not answered for ten looks.

        Args:
            after_s: seconds since the last look. One that is late does not count: the interpreter's lock was held.
                Nor does one while the loop waits for a disk.
        """
        if not self._loop.runs:
            self._end("its event loop has ended")
        if not self._asked:
            self._silent = 0
            self._asked = True
            self._loop.call_soon(self._answer)
        elif after_s < _LATE_S and not self._loop.waits_for_disk:
            self._silent += 1
        if self._silent >= _SILENT_LOOKS:
            self._end(f"its event loop has not answered for {self._silent * _LOOK_S:g} s, while other threads ran")

    def _watch(self) -> None:
        while not self._over.is_set():
            with suppress(BaseException):  # user code may raise in any thread
                began = time.monotonic()
                if not self._over.wait(_LOOK_S):
                    self.look(after_s=time.monotonic() - began)

    def _answer(self) -> None:
        self._asked = False
        if reason := self._trouble():
            self._end(reason)


def end_process(reason: str) -> NoReturn:
    """End this process at once, with the reason as its last words."""
    with suppress(OSError):  # not by logging: a thread that is stuck may hold its locks
        os.write(2, f"this worker can serve its client no more, and ends: {reason}\n".encode())
    os._exit(DEAF)
