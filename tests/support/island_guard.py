"""Guard of a test host on an island: first process of the host, in a network namespace that leads nowhere.

Run as a script with the place of its network and a command line as arguments; what follows is as with
``skyward/testing/_guard.py``.

The place is ``ADDRESS:PORT=OWN:OWN_PORT``: a relay accepts connections at ``ADDRESS:PORT`` outside (port 0: a free one)
and passes them on to ``OWN:OWN_PORT`` inside. With ``@PID`` after it, the namespace is that of process PID. With
``<ADDRESS:PORT`` at the end, that place outside is reached inside at the same address and port. The first line of
output, before any order, is the port outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import threading

from skyward.testing._guard import become_guard, obey_orders

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_RELAY = b"network-relay"
_RELAY_BYTES = 256 << 10


def _enter_network(libc: ctypes.CDLL, place: str) -> int:
    """Move this process into the network namespace of that place, with a relay; return the relay's port outside."""
    outside, _, rest = place.partition("=")
    rest, _, reached = rest.partition("<")
    inside, _, pid = rest.partition("@")
    # A socket belongs to the namespace in which it was made, whatever becomes of its process.
    with open("/proc/self/ns/net", "rb") as home:
        with socket.create_server(_pair(outside), backlog=128) as listener:
            _change_network(libc, pid)
            _fork_relay(libc, listener, _pair(inside))
            port = int(listener.getsockname()[1])
        if reached:
            with socket.create_server(_pair(reached), backlog=128) as listener:
                _fork_relay(libc, listener, _pair(reached), home.fileno())
    return port


def _change_network(libc: ctypes.CDLL, pid: str) -> None:
    """Move this process into the network namespace of that process, or into a new one."""
    if pid:
        with open(f"/proc/{pid}/ns/net", "rb") as namespace:
            _check(libc.setns(namespace.fileno(), _CLONE_NEWNET))
    else:
        _check(libc.unshare(_CLONE_NEWNET))
        _raise_loopback()


def _fork_relay(libc: ctypes.CDLL, listener: socket.socket, place: tuple[str, int], namespace: int = -1) -> None:
    """Relay the listener's connections in a process of its own; it dials ``place`` in that network namespace."""
    if not os.fork():
        try:
            if namespace >= 0:
                _check(libc.setns(namespace, _CLONE_NEWNET))
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            libc.prctl(_PR_SET_NAME, _RELAY, 0, 0, 0)
            os.close(0)  # the orders are the parent's
            os.close(1)
            _relay(listener, place)
        finally:
            os._exit(1)


def _pair(place: str) -> tuple[str, int]:
    address, _, port = place.rpartition(":")
    return address, int(port)


def _check(outcome: int) -> None:
    if outcome:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    """Bring up the interface ``lo`` of this namespace, as ``ip link set lo up`` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", asked, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _relay(listener: socket.socket, inside: tuple[str, int]) -> None:
    """Pass every connection of the listener on to ``inside``, for ever."""
    while True:
        outer = listener.accept()[0]
        try:
            inner = socket.create_connection(inside)
        except OSError:
            outer.close()
            continue
        for source, target in ((outer, inner), (inner, outer)):
            threading.Thread(target=_pass, args=(source, target), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(_RELAY_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
        target.shutdown(socket.SHUT_WR)
        return
    for sock in (source, target):  # reset at one end: the other ends, too
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    library = become_guard()
    print(_enter_network(library, sys.argv[1]), flush=True)
    obey_orders(library, sys.argv[2:])
