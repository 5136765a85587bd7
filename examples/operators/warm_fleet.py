"""A fleet that stays warm between two programs: the second one has its machines at once.

usage: python examples/operators/warm_fleet.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example. There the first opening takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import skyward as sky

NAME = "warm"


@sky.compute
def greet() -> str:
    """Return a greeting that the node's environment sets."""
    return os.environ.get("GREETING", "hello")


def program(env: dict[str, str]) -> str:
    """Run as a program of its own would: take the fleet over, or open it, and leave it."""
    with sky.ComputePool(provider=sky.Local(), name=NAME, keep="10m", env=env, display="quiet") as pool:
        print(greet() >> pool)
        return pool.status.nodes[0].instance_id


def main() -> None:
    """Run it twice, the second time with another environment, and end the machines."""
    first, second = program({}), program({"GREETING": "good evening"})
    print("the same machine:", first == second)
    subprocess.run([sys.executable, "-m", "skyward", "down", NAME], stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
