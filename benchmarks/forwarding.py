"""A port forwarded over SSH, no line between: Skyward's transport beside OpenSSH's own client."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median

from benchmarks.far_side import FarSide, Place, far_side
from benchmarks.measured import Measured, seconds_of

__all__ = ["latency", "throughput"]

_ECHOES = 300
_REPEATS = 5
_MIB = 256
_PATIENCE_S = 20


def latency(name: str) -> Measured:
    """Send a byte there and back; a repeat is the mean of a block."""
    with far_side(1) as far, _FORWARDS[name](far) as place, _connected(place, b"E") as connection:

        def block() -> None:
            for _ in range(_ECHOES):
                connection.sendall(b"?")
                connection.recv(1)

        block()
        return Measured(seconds=tuple(seconds_of(block) / _ECHOES for _ in range(_REPEATS)))


def throughput(name: str) -> Measured:
    """256 MiB up, then 256 MiB down; the time is that of both."""
    with far_side(1) as far, _FORWARDS[name](far) as place:
        _up(place)
        ups = [seconds_of(lambda: _up(place)) for _ in range(_REPEATS)]
        downs = [seconds_of(lambda: _down(place)) for _ in range(_REPEATS)]
    figures = {"up_mb_per_s": _mb_per_s(ups), "down_mb_per_s": _mb_per_s(downs)}
    return Measured(seconds=tuple(up + down for up, down in zip(ups, downs, strict=True)), figures=figures)


def _mb_per_s(seconds: list[float]) -> float:
    return _MIB * 1.048576 / median(seconds)


def _up(place: Place) -> None:
    block = bytes(1 << 20)
    with _connected(place, b"S") as connection:
        for _ in range(_MIB):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"."


def _down(place: Place) -> None:
    block = bytearray(1 << 20)
    got = 0
    with _connected(place, b"G" + _MIB.to_bytes(2, "big")) as connection:
        while count := connection.recv_into(block):
            got += count
    assert got == _MIB << 20


def _connected(place: Place, wanted: bytes) -> socket.socket:
    connection = socket.create_connection(place, timeout=_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(wanted)
    return connection


# --- who forwards -------------------------------------------------------------------------------------------------


@contextmanager
def _skyward(far: FarSide) -> Iterator[Place]:
    from skyward.base.loop import acquire_loop
    from skyward.machine.ssh import SshTransport
    from skyward.machine.ssh_config import SSHTarget

    (host, port), loop = far.hosts[0], acquire_loop()
    target = SSHTarget(host=host, port=port, user=far.user, key_path=far.key_path, known_hosts=far.known_hosts)
    transport = SshTransport(target)
    try:
        yield loop.call(transport.forward(*far.echo))
    finally:
        loop.call(transport.close())
        loop.release()


@contextmanager
def _openssh(far: FarSide) -> Iterator[Place]:
    (host, port), (echo_host, echo_port) = far.hosts[0], far.echo
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = probe.getsockname()
    options = [f"UserKnownHostsFile={far.known_hosts}", "BatchMode=yes", "ExitOnForwardFailure=yes"]
    with subprocess.Popen(
        ["ssh", "-F", "none", "-N", "-i", far.key_path, "-p", str(port), f"{far.user}@{host}"]
        + ["-L", f"{place[0]}:{place[1]}:{echo_host}:{echo_port}"]
        + [word for option in options for word in ("-o", option)]
    ) as process:
        try:
            _wait_for(place)
            yield place
        finally:
            process.terminate()


def _wait_for(place: Place) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection(place).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        else:
            return


_FORWARDS: dict[str, Callable[[FarSide], AbstractContextManager[Place]]] = {"skyward": _skyward, "OpenSSH": _openssh}
