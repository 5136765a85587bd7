"""Coverage plugin that saves a process's new data twice a second, because a node's processes end by SIGKILL.

Without it the processes of workers report nothing at all: `make coverage` loads it, by pyproject.toml. Data without a
new branch is not saved: coverage walks through all the source at each save, a tenth of a processor for an idle node.
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
    saved: dict[str, set[Any]] = {}
    while not over.wait(_PERIOD_S):
        coverage = Coverage.current()
        collector = coverage and coverage._collector  # private: nothing public says what is new
        if coverage is None or collector is None:
            continue
        new = {file: found - saved.get(file, set()) for file, found in _copied(collector.data).items()}
        if any(new.values()):
            for file, branches in new.items():
                saved.setdefault(file, set()).update(branches)
            with _saving:
                coverage.save()


def _copied(data: dict[str, set[Any]]) -> dict[str, set[Any]]:
    # Copies of a dict and of a set are atomic, and other threads add to both.
    return {file: found.copy() for file, found in data.copy().items()}


def _hold() -> None:
    _saving.acquire()


def _let_go() -> None:
    _saving.release()


def _replace() -> None:
    global _saving  # noqa: PLW0603 - the parent's lock may be held by a thread that the child does not have
    _saving = threading.Lock()


# A fork in the middle of a save would leave SQLite's own locks held in the child.
os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_replace)
