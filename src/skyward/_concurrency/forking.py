"""Sockets that forked children do not keep open.

A node takes an open connection for a living client. A child that outlives its parent, such as a data loader's worker or
a daemon, would hold the connection open, and the node would wait for ``away`` instead of ``lease``.
"""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["abandon", "keep_from_forks"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_forks(sock: socket.socket) -> socket.socket:
    """Release ``sock`` in every child forked from now on; return it. Started programs never inherit it."""
    _sockets.add(sock)
    return sock


def abandon(*descriptors: int) -> None:
    """Release inherited descriptors in a forked child: they refer to the null device from now on."""
    # Not closed: objects here still hold their numbers, and would close other files that get these numbers later.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _abandon_all() -> None:
    if descriptors := [sock.fileno() for sock in _sockets if sock.fileno() >= 0]:
        abandon(*descriptors)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
