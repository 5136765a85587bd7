"""Coverage plugin that saves a process's new data twice a second, because a node's processes end by SIGKILL.

Without it the processes of workers report nothing at all: `make coverage` loads it, by pyproject.toml. Only new
branches are written, and without coverage's own `save`: it looks for source that was never imported, which took a third
of a processor for a busy node.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from coverage import Coverage

__all__ = ["coverage_init"]

_PERIOD_S = 0.5
_STARTED = os.getpid()
_IS_TEMPLATE = any("import run_template" in each for each in sys.orig_argv)
_saving = threading.Lock()


def coverage_init(_registry: Any, _options: Any) -> None:
    """Start to save; coverage calls this in every process, and again in the child of a fork.

    A template of nodes forks none while it has a second thread; it saves before each fork.
    """
    if _IS_TEMPLATE and os.getpid() == _STARTED:
        return
    threading.Thread(target=_save, name="saved_coverage", daemon=True).start()


def _save() -> None:
    over = threading.Event()
    saved: dict[str, set[Any]] = {}
    while not over.wait(_PERIOD_S):
        collector = _collector()
        if collector is None:
            continue
        new = {file: found - saved.get(file, set()) for file, found in _copied(collector.data).items()}
        if any(new.values()):
            for file, branches in new.items():
                saved.setdefault(file, set()).update(branches)
            with _saving:
                collector.flush_data()


def _collector() -> Any:
    coverage = Coverage.current()
    return coverage and coverage._collector  # private: nothing public says what is new, or writes only that


def _copied(data: dict[str, set[Any]]) -> dict[str, set[Any]]:
    # Copies of a dict and of a set are atomic, and other threads add to both.
    return {file: found.copy() for file, found in data.copy().items()}


def _hold() -> None:
    _saving.acquire()
    if _IS_TEMPLATE and os.getpid() == _STARTED and (collector := _collector()):
        collector.flush_data()


def _let_go() -> None:
    _saving.release()


def _replace() -> None:
    global _saving  # noqa: PLW0603 - the parent's lock may be held by a thread that the child does not have
    _saving = threading.Lock()


# A fork in the middle of a save would leave SQLite's own locks held in the child.
os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_replace)
