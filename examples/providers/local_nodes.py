"""Nodes of this machine: no account and no cost, and what they do is what rented machines do.

usage: python examples/providers/local_nodes.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import skyward as sky


@sky.compute
def describe() -> str:
    """Write a file into the node's folder, and return the worker's place and its environment."""
    info = sky.instance_info()
    Path(f"worker-{info.worker}.txt").write_text("hello")
    return f"worker {info.worker} of node {info.node}, in mode {os.environ['MODE']}"


def main() -> None:
    """Run on every worker of two nodes, and list the files of each node's folder."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, env={"MODE": "test"}) as pool:
        print(*(describe() @ pool), sep="\n")
        with tempfile.TemporaryDirectory() as folder:
            for path in sorted(pool.fetch("*.txt", to=folder)):
                print(f"node {path.parent.name} wrote {path.name}: {path.read_text()}")


if __name__ == "__main__":
    main()
