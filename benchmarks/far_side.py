"""Hosts at the far end of a long line, in a process of their own, so that the line costs the measured client nothing.

``python -m benchmarks.far_side FOLDER HOSTS LATENCY_S BYTES_PER_S`` runs them; :func:`far_side` is what measures.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.chaos import ChaosProxy, Link

from skyward.testing.hosts import SshHost, write_known_hosts

__all__ = ["BYTES_PER_S", "ROUND_TRIP_S", "FarSide", "Place", "far_side"]

ROUND_TRIP_S = 0.05
BYTES_PER_S = 100e6 / 8

_CACHE = Path(__file__).parents[1] / "build" / "ssh-cache"
_BLOCK = 1 << 20

Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FarSide:
    """The hosts, and what is needed to log in.

    Attributes:
        hosts: where they are, without the line.
        behind: where they are reached through the line. All of them share it.
        echo: where :func:`_serve` answers, without the line.
        user: who logs in.
        key_path: with what.
        known_hosts: the file that knows them, at either place.
    """

    hosts: tuple[Place, ...]
    behind: tuple[Place, ...]
    echo: Place
    user: str
    key_path: str
    known_hosts: str
    _process: subprocess.Popen[str]

    def bytes_up(self) -> int:
        """Return the number of bytes sent up the line so far."""
        return int(self._ask("bytes_up"))

    def lengthen(self, place: Place) -> Place:
        """Where ``place`` is reached through the line."""
        host, port = self._ask("lengthen", *place)
        return host, port

    def round_trip_s(self) -> float:
        """Measure the time of a round trip on the line by itself."""
        with socket.create_connection(self.lengthen(self.echo)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"E")
            return median(_echo_s(connection) for _ in range(20))

    def _ask(self, *question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def far_side(hosts: int, *, latency_s: float = ROUND_TRIP_S / 2, bytes_per_s: float = BYTES_PER_S) -> Iterator[FarSide]:
    """Hosts, until the block ends; what was installed on them is kept for the next time."""
    with tempfile.TemporaryDirectory(prefix="far-") as folder:
        arguments = [folder, hosts, latency_s, bytes_per_s]
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.far_side", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            places = {name: tuple(map(tuple, found.pop(name))) for name in ("hosts", "behind")}
            yield FarSide(**places, echo=tuple(found.pop("echo")), **found, _process=process)
            process.communicate()


def _echo_s(connection: socket.socket) -> float:
    started = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    return time.perf_counter() - started


# --- in the process of the hosts ----------------------------------------------------------------------------------


def _main(folder: Path, count: int, latency_s: float, bytes_per_s: float) -> None:
    with ExitStack() as stack:
        link = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
        hosts = [stack.enter_context(_host(folder, number)) for number in range(count)]
        proxies = [
            stack.enter_context(ChaosProxy(f"127.0.1.{number + 2}", (host.address, host.port), link=link))
            for number, host in enumerate(hosts)
        ]
        behind = {proxy.place: host for proxy, host in zip(proxies, hosts, strict=True)}
        about = {
            "hosts": [(host.address, host.port) for host in hosts],
            "behind": [proxy.place for proxy in proxies],
            "echo": _listening().getsockname(),
            "user": hosts[0].user,
            "key_path": str(hosts[0].key_path),
            "known_hosts": str(write_known_hosts(folder / "known_hosts", *hosts, through=behind)),
        }
        print(json.dumps(about), flush=True)
        for line in sys.stdin:
            match json.loads(line):
                case ["bytes_up"]:
                    answer: object = sum(proxy.bytes_up for proxy in proxies)
                case ["lengthen", host, port]:
                    proxies.append(stack.enter_context(ChaosProxy("127.0.1.1", (host, port), link=link)))
                    answer = proxies[-1].place
                case other:
                    raise AssertionError(other)
            print(json.dumps(answer), flush=True)


def _host(folder: Path, number: int) -> SshHost:
    """One whose cache of environments is that of all the others, and of later runs."""
    host = SshHost(folder / f"host-{number}", address=f"127.0.0.{number + 2}")
    _CACHE.mkdir(parents=True, exist_ok=True)
    (host.home / ".cache").mkdir()
    (host.home / ".cache/skyward").symlink_to(_CACHE)
    return host


def _listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return listener


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """Serve by the first byte: E, all echoed; S, all swallowed and then acknowledged; G and a number, that
    many MiB.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    block = bytearray(_BLOCK)
    with connection:
        match connection.recv(1):
            case b"E":
                while data := connection.recv(_BLOCK):
                    connection.sendall(data)
            case b"S":
                while connection.recv_into(block):
                    pass
                connection.sendall(b".")
            case b"G":
                for _ in range(int.from_bytes(connection.recv(2), "big")):
                    connection.sendall(block)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
