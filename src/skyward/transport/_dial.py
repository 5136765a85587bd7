"""The socket that a connection runs over: TCP, or a command of the user's."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from skyward._concurrency.forking import keep_from_forks

__all__ = ["Dialled", "dial_command", "dial_tcp"]

_ADDRESS_TIMEOUT_S: Final = 10.0
_POLL_S = 0.1
_COMPLAINT_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A connected socket.

    Attributes:
        socket: it.
        hang_up: to be called when it is closed.
        complaint: after that, what the command that carried it had to say.
    """

    socket: socket.socket
    hang_up: Callable[[], None] | None = None
    complaint: Callable[[], str] = str


def dial_tcp(host: str, port: int, *, deadline: float, stopped: threading.Event) -> Dialled:
    """Connect to the first address that answers; IPv4 comes first.

    Args:
        host: name or address.
        port: of TCP.
        deadline: on the monotonic clock.
        stopped: ends the attempt when set.

    Raises:
        OSError: none answered; the last one's reason.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"no host can be called {host!r}") from error
    failure: OSError = TimeoutError("it has no address")
    for family, kind, protocol, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        sock = keep_from_forks(socket.socket(family, kind, protocol))
        try:
            _connect(sock, address, min(deadline, time.monotonic() + _ADDRESS_TIMEOUT_S), stopped)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return Dialled(socket=sock)
    raise failure


def _connect(sock: socket.socket, address: object, deadline: float, stopped: threading.Event) -> None:
    sock.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        sock.connect(address)  # pyright: ignore[reportArgumentType]
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while not selector.select(_POLL_S):
            if stopped.is_set():
                raise ConnectionAbortedError("given up")
            if time.monotonic() >= deadline:
                raise TimeoutError("no answer")
    if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def dial_command(command: str) -> Dialled:
    """Have a command of the SSH configuration's carry the connection, as its input and output.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = map(keep_from_forks, socket.socketpair())
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `hang_up`
    with theirs:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            complaints.close()
            raise

    said = ""

    def hang_up() -> None:
        nonlocal said
        process.kill()
        process.wait()
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
        complaints.close()

    return Dialled(socket=ours, hang_up=hang_up, complaint=lambda: said)
