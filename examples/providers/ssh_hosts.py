"""Machines that you can log in to, such as those of your laboratory: nothing is installed there, nothing stays running.

usage: python examples/providers/ssh_hosts.py HOST...

Hosts are names of your `~/.ssh/config`, or `user@host:port`. Two servers on this machine stand in for hosts in
`examples/demo_ssh.py`.
"""

from __future__ import annotations

import sys

import skyward as sky


@sky.compute
def describe() -> str:
    """Return the node of this call."""
    info = sky.instance_info()
    return f"node {info.node} of {info.total_nodes}: {', '.join(info.accelerators) or 'no GPU'}"


@sky.compute
def square(x: int) -> int:
    """Return the square of a number."""
    return x * x


def main(*hosts: str) -> None:
    """Open a pool on all hosts, and call functions on one and on every one of them."""
    with sky.ComputePool(provider=sky.SSH(hosts=list(hosts)), nodes=len(hosts)) as pool:
        print(*(describe() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*map(square, range(100))) >> pool))


if __name__ == "__main__":
    main(*sys.argv[1:])
