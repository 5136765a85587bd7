"""``python -m benchmarks.many_hosts COUNT [--quick]``: a node behind each of so many SSH sessions.

Prints the figures as JSON. The sessions are real ones of OpenSSH's server; a process of it listens at sixteen loopback
addresses, which is its limit.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.many_lanes import measure_calls, resident_bytes, scale_client
from skyward.machine.ssh import SSHAccess
from skyward.testing.hosts import SshHost

__all__ = ["measure"]

_ADDRESSES_A_SERVER = 16
_CONNECT_S = 120.0


def measure(hosts: int, *, quick: bool) -> dict[str, float]:
    """Log in everywhere, open a control connection and a lane through each session, and call; return the figures."""
    with ssh_accesses(hosts) as accesses, scale_client(hosts) as client:
        client.make_nodes(accesses)
        figures, process = client.figures, psutil.Process()
        before, threads, descriptors = resident_bytes(), threading.active_count(), process.num_fds()
        with client.timed("logins"):
            client.each_node(lambda node: node.transport.run(["true"], timeout_s=_CONNECT_S))
        figures["bytes_a_host"] = (resident_bytes() - before) / hosts
        figures["threads_a_host"] = (threading.active_count() - threads) / hosts
        with client.timed("command", hosts):
            client.each_node(lambda node: node.transport.run(["true"], timeout_s=_CONNECT_S))
        with client.timed("lanes"):
            client.open_controls()
            client.open_lanes()
        measure_calls(client, quick=quick)
        figures["bytes_a_host_after"] = (resident_bytes() - before) / hosts
        figures["threads_a_host_after"] = (threading.active_count() - threads) / hosts
        figures["descriptors_a_host"] = (process.num_fds() - descriptors) / hosts
    return figures


@contextmanager
def ssh_accesses(count: int) -> Iterator[Sequence[SSHAccess]]:
    """Start SSH servers with so many addresses; yield the access to each address."""
    addresses = [f"127.98.{1 + number // 250}.{1 + number % 250}" for number in range(count)]
    together = [addresses[start : start + _ADDRESSES_A_SERVER] for start in range(0, count, _ADDRESSES_A_SERVER)]
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, ExitStack() as stack:
        servers = [_server(Path(folder), *several) for several in together]
        with ThreadPoolExecutor(8) as threads:
            for server in servers:
                stack.callback(server.stop)
            list(threads.map(SshHost.start, servers))
        yield [
            SSHAccess(target=replace(server.target(), host=address), address=address, workdir="/")
            for server, several in zip(servers, together, strict=True)
            for address in several
        ]


def _server(folder: Path, first: str, *others: str) -> SshHost:
    with socket.create_server((first, 0)) as probe:
        port = probe.getsockname()[1]
    options = [f"ListenAddress {address}:{port}" for address in others]
    host = SshHost(folder / first, address=first, client_key=folder / "key", sshd_options=options)
    host.port = port
    return host


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), quick="--quick" in sys.argv), indent=1))
