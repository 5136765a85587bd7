"""A filter before a port that a framework opens at every address of the machine."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address

__all__ = ["filter_program", "only_reached_at", "restrict"]

_LOOK_S = 0.01

# Of Linux: asm-generic/socket.h, linux/filter.h, linux/bpf_common.h.
_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = -0x100000 & 0xFFFFFFFF
_LOAD_WORD, _LOAD_BYTE = 0x20, 0x30
_AND, _EQUAL = 0x54, 0x15
_RETURN = 0x06
_PASS, _DROP = 0xFFFFFFFF, 0


@contextmanager
def only_reached_at(address: str, port: int) -> Generator[None]:
    """As soon as this process listens at ``port``, have the system drop what does not come to ``address``.

    Loopback stays open too. Where the system is not Linux nothing is dropped.
    """
    over = threading.Event()
    watching = threading.Thread(target=_watch, args=(address, port, over), name="skyward-port", daemon=True)
    if sys.platform == "linux":
        watching.start()
    try:
        yield
    finally:
        over.set()
        if sys.platform == "linux":
            watching.join()


def restrict(listener: socket.socket, address: str) -> None:
    """Have the system drop what comes to ``listener``, but for packets to ``address`` and to loopback."""
    import ctypes

    program = ctypes.create_string_buffer(filter_program(address))
    described = struct.pack("@HP", len(program.raw) // _INSTRUCTION.size, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


_INSTRUCTION = struct.Struct("=HBBI")


def filter_program(address: str) -> bytes:
    """What decides on a packet, in the instructions of Linux's socket filters."""
    wanted = int(IPv4Address(address))
    steps = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_EQUAL, 0, 4, 0x40),  # IPv4?
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 16),  # its destination
        (_EQUAL, 10, 0, wanted),
        (_AND, 0, 0, 0xFF000000),
        (_EQUAL, 8, 9, 127 << 24),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 24),  # IPv6's destination
        (_EQUAL, 0, 7, 0),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 28),
        (_EQUAL, 0, 5, 0),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 32),
        (_EQUAL, 0, 3, 0),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 36),
        (_EQUAL, 0, 1, 1),
        (_RETURN, 0, 0, _PASS),
        (_RETURN, 0, 0, _DROP),
    ]
    return b"".join(_INSTRUCTION.pack(*step) for step in steps)


def _watch(address: str, port: int, over: threading.Event) -> None:
    listener = None
    while listener is None and not over.wait(_LOOK_S):
        listener = _find_listener(port)
    if listener is not None:
        with listener:
            restrict(listener, address)


def _find_listener(port: int) -> socket.socket | None:
    """A duplicate of this process's socket that listens at ``port``; None if there is none."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), ExitStack() as looking:  # it may be closed by now
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            found = looking.enter_context(socket.socket(fileno=os.dup(descriptor)))
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                looking.pop_all()
                return found
    return None
