"""The same tour on two machines over SSH, which two SSH servers of this machine simulate.

usage: python examples/demo_ssh.py
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from demo import search_grid, show_operators

import skyward as sky
from skyward.integrations import ScikitLearnPool
from skyward.testing.hosts import SshHost, write_known_hosts


def main() -> None:
    """Start two servers, open a pool on them, use it, and list the remaining files."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyward-demo-")))
        hosts = [stack.enter_context(SshHost(folder / f"host-{n}", address=f"127.0.0.{n}")) for n in (2, 3)]
        known_hosts = write_known_hosts(folder / "known_hosts", *hosts)
        provider = sky.SSH(
            hosts=[f"{host.address}:{host.port}" for host in hosts],
            key_path=str(hosts[0].key_path),
            known_hosts=str(known_hosts),
        )
        with ScikitLearnPool(provider=provider, nodes=2, concurrency=2) as pool:
            show_operators(pool)
            best = search_grid()
        print(f"best score: {best:.4f}")
        for host in hosts:
            left = sorted(path.name for path in (host.home / ".cache/skyward").iterdir())
            print(f"left on {host.address}: {', '.join(left)}")


if __name__ == "__main__":
    main()
