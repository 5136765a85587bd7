"""State of the process that tests share: one that leaves it changed fails, before the test that it would break."""

from __future__ import annotations

import builtins
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["StateError", "kept_state"]


class StateError(AssertionError):
    """A test or a fixture changed what the next one relies on."""


def kept_state() -> Iterator[None]:
    """Fail if what runs at the ``yield`` changes the process; a fixture's body."""
    before = _state()
    yield
    after = _state()
    changed = [f"{name}: {_difference(before[name], after[name])}" for name in before if before[name] != after[name]]
    if changed:
        raise StateError("left changed: " + "; ".join(changed))


def _state() -> dict[str, Any]:
    ignored = ("PYTEST_CURRENT_TEST", "KMP_")  # the latter are set where scikit-learn is imported
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    return {
        "os.environ": environment,
        "os.getcwd()": os.getcwd(),
        "sys.path": dict(enumerate(sys.path)),
        "sys.argv": dict(enumerate(sys.argv)),
        "hooks of sys and threading": {
            "excepthook": sys.excepthook,
            "displayhook": sys.displayhook,
            "breakpointhook": sys.breakpointhook,
            "threading": threading.excepthook,
        },
        "signals": dict(_handlers()),
        "limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "processors": os.sched_getaffinity(0),
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "recursion limit": sys.getrecursionlimit(),
        "gc.isenabled()": gc.isenabled(),
        "logging": {"disabled": logging.root.manager.disable, "level": logging.root.level},
        "builtins": dict.fromkeys(vars(builtins)),
        "multiprocessing": multiprocessing.get_start_method(),
    }


def _handlers() -> Iterator[tuple[str, Any]]:
    for number in signal.Signals:
        handler = signal.getsignal(number)
        if (
            getattr(handler, "__module__", "") == "skyward._concurrency.exits"
        ):  # a fixture's pool may be closed by a test
            handler = signal.SIG_DFL
        if number is not signal.SIGALRM:  # pytest-timeout's
            yield number.name, handler


def _difference(before: Any, after: Any) -> str:
    if not isinstance(before, dict):
        return f"{before!r} -> {after!r}"
    names = [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]
    return ", ".join(f"{name}: {before.get(name, _ABSENT)!r} -> {after.get(name, _ABSENT)!r}" for name in names)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
