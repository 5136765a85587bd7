"""Coverage plugin that saves a process's data twice a second, because a node's processes end by SIGKILL.

Without it the processes of workers report nothing at all: `make coverage` loads it, by pyproject.toml.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from coverage import Coverage

__all__ = ["coverage_init"]

_PERIOD_S = 0.5
_saving = threading.Lock()


def coverage_init(_registry: Any, _options: Any) -> None:
    """Start to save; coverage calls this in every process, and again in the child of a fork."""
    threading.Thread(target=_save, name="saved_coverage", daemon=True).start()


def _save() -> None:
    over = threading.Event()
    while not over.wait(_PERIOD_S):
        if coverage := Coverage.current():
            with _saving:
                coverage.save()


def _hold() -> None:
    _saving.acquire()


def _let_go() -> None:
    _saving.release()


def _replace() -> None:
    global _saving  # noqa: PLW0603 - the parent's lock may be held by a thread that the child does not have
    _saving = threading.Lock()


# A fork in the middle of a save would leave SQLite's own locks held in the child.
os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_replace)
