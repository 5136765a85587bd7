"""State of the process that tests share: one that leaves it changed fails, before the test that it would break."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from skyward.base import exits

__all__ = ["StateError", "kept_state"]


class StateError(AssertionError):
    """A test or a fixture left the process changed for the next one."""


def kept_state() -> Iterator[None]:
    """Fail where the process is not the same after the ``yield``; the body of a fixture."""
    before = _state()
    before["os.environ"].pop("PYTEST_CURRENT_TEST", None)
    yield
    after = _state()
    # Libraries add variables where they are imported.
    after["os.environ"] = {name: value for name, value in after["os.environ"].items() if name in before["os.environ"]}
    changed = [f"{name}: {_difference(before[name], after[name])}" for name in before if before[name] != after[name]]
    if changed:
        raise StateError("left changed: " + "; ".join(changed))


def _state() -> dict[str, Any]:
    return {
        "os.environ": os.environ.copy(),
        "os.getcwd()": os.getcwd(),
        "sys.path": dict(enumerate(sys.path)),
        "sys.argv": dict(enumerate(sys.argv)),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "signals": dict(_handlers()),
        "limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "recursion limit": sys.getrecursionlimit(),
        "gc.isenabled()": gc.isenabled(),
        "logging": {"disabled": logging.root.manager.disable, "level": logging.root.level},
    }


def _handlers() -> Iterator[tuple[str, Any]]:
    for number in signal.Signals:
        handler = signal.getsignal(number)
        if handler is exits._unwind and exits._Held.pools:
            handler = signal.SIG_DFL  # a test may close its fixture's pool
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
