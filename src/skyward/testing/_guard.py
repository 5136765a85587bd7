"""First process of a test host, like init on a machine: starts sshd, adopts orphans, and ends everything at last.

Run as a script with the place of its network and sshd's command line as arguments. Each line on standard input is an
order: ``up`` starts the daemon, ``down`` ends it and its connections. The answer is a line with the daemon's pid, 0 for
none. When the input ends, because the host stops or the process at the other end died, every process below ends.

The place is ``-`` for the network of this machine. ``ADDRESS:PORT=OWN:OWN_PORT`` makes a network namespace that leads
nowhere; a relay accepts connections at ``ADDRESS:PORT`` outside (port 0: a free one) and passes them on to
``OWN:OWN_PORT`` inside. With ``@PID`` after it, the namespace is that of process PID. With ``<ADDRESS:PORT`` at the
end, that place outside is reached inside at the same address and port. The first line of output, before any order, is
the port outside, 0 without a namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_RELAY = b"network-relay"
_RELAY_BYTES = 256 << 10
_KILL_S = 1.0
_ROUNDS = 8


def _main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies, adopted processes included
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    print(_enter_network(libc, sys.argv[1]), flush=True)  # noqa: T201 - the first answer

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    try:
        for order in sys.stdin:
            _end([process for process in _below() if process.ppid() == _own_pid() and _is_daemon(process)])
            _end([process for process in _below() if _is_daemon(process)])
            pid = 0
            if order.strip() == "up":
                pid = _start(prepare)
            print(pid, flush=True)  # noqa: T201 - the answer
    finally:
        # Resource trackers end by themselves, after they have removed the named semaphores of their ended processes.
        _end([process for process in _below() if "resource_tracker" not in _command(process)])
        psutil.wait_procs(_below(), timeout=_KILL_S)
        for _ in range(_ROUNDS):
            _end(_below())


def _enter_network(libc: ctypes.CDLL, place: str) -> int:
    """Move this process into the network namespace of that place, with a relay; return the relay's port outside."""
    if place == "-":
        return 0
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


def _start(prepare: Callable[[], None]) -> int:
    null = subprocess.DEVNULL
    return subprocess.Popen(sys.argv[2:], stdin=null, stdout=null, preexec_fn=prepare).pid  # noqa: PLW1509 - one thread


def _own_pid() -> int:
    return psutil.Process().pid


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)


if __name__ == "__main__":
    _main()
