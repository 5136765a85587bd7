"""Sockets and locked files that forked children do not keep open.

A node takes an open connection for a living client. A child that outlives its parent, such as a data loader's worker or
a daemon, would hold the connection open, and the node would wait for ``away`` instead of ``lease``.
It would hold locks of files, too.
"""

from __future__ import annotations

import os
import socket
import weakref
from io import FileIO
from typing import TypeVar

__all__ = ["abandon", "keep_from_forks"]

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
