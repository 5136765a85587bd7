"""Descriptors of this process: their limit, those that user code may close, and those that forked children release.

A pool needs some seven descriptors for each SSH machine, and most systems start a login with a soft limit of 1,024,
which some 140 machines use up. The hard limit is far above it.

A node takes an open connection for a living client. A child that outlives its parent, such as a data loader's worker or
a daemon, would hold the connection open, and the node would wait for ``away`` instead of ``lease``. It would hold locks
of files, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Generator
from io import FileIO
from typing import TypeVar

from skyward.base.platform import descriptor_limits, run_in_forks, set_descriptor_limit

_MOST = 1 << 16
_MOST_OF_MACOS = 10_240
"""Highest limit that setrlimit(2) accepts there, where the limit shown is infinite: OPEN_MAX of sys/syslimits.h."""


class _Raised:
    """Users of the raised limit in this process, and the soft limit from before the first of them."""

    lock = threading.Lock()
    users = 0
    before: float = 0


def raise_descriptor_limit() -> None:
    """Raise the limit of open files, for this process and its later children, to the system's, at most 65,536."""
    soft, hard = descriptor_limits()
    for limit in (min(hard, _MOST), _MOST_OF_MACOS):
        if soft >= limit:
            return
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than the limit that it shows
            set_descriptor_limit(limit)
            return


@contextlib.contextmanager
def raised_descriptor_limit() -> Generator[None]:
    """Raise the limit of open files inside the block; the last of several blocks restores it.

    Descriptors that are open by then stay open. A limit that the program has set meanwhile is kept.
    """
    with _Raised.lock:
        if _Raised.users == 0:
            _Raised.before = descriptor_limits()[0]
            raise_descriptor_limit()
        _Raised.users += 1
        raised = descriptor_limits()[0]
    try:
        yield
    finally:
        with _Raised.lock:
            _Raised.users -= 1
            if _Raised.users == 0 and descriptor_limits()[0] == raised:
                with contextlib.suppress(ValueError, OSError):
                    set_descriptor_limit(_Raised.before)


class Descriptors:
    """Open descriptors of this process, remembered with the files that they refer to.

    Args:
        descriptors: their numbers.

    Raises:
        OSError: one is closed already.
    """

    def __init__(self, *descriptors: int) -> None:
        self._files = {descriptor: _file_of(descriptor) for descriptor in descriptors}

    @property
    def intact(self) -> bool:
        """True while each of them refers to the same file. Takes half a microsecond for each."""
        try:
            return all(_file_of(descriptor) == file for descriptor, file in self._files.items())
        except OSError:
            return False


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


_Opened = TypeVar("_Opened", socket.socket, FileIO)
_opened: weakref.WeakSet[socket.socket | FileIO] = weakref.WeakSet()


def keep_from_forks(opened: _Opened) -> _Opened:
    """Release a socket or file in every child forked from now on; return it. Started programs never inherit it."""
    _opened.add(opened)
    return opened


def abandon(*descriptors: int) -> None:
    """Release inherited descriptors in a forked child: they refer to the null device from now on."""
    # Not closed: objects here still hold their numbers, and would close other files that get these numbers later.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _abandon_all() -> None:
    files = (each for each in _opened if not (isinstance(each, FileIO) and each.closed))
    if descriptors := [number for each in files if (number := each.fileno()) >= 0]:
        abandon(*descriptors)


run_in_forks(_abandon_all)
