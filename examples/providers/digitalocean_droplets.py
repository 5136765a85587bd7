"""Two droplets for some minutes, with the cost at the end and nothing left behind.

usage: python examples/providers/digitalocean_droplets.py [REGION]

The token is that of DIGITALOCEAN_TOKEN, or doctl's. With a token of the scope droplet:delete in REAPER_TOKEN, droplets
delete themselves even if this program is killed.
"""

from __future__ import annotations

import os
import platform
import sys

import skyward as sky


@sky.compute
def describe() -> str:
    """Return the place of this call."""
    info = sky.instance_info()
    return f"node {info.node} of {info.total_nodes}: {platform.system()} {platform.machine()}"


@sky.compute
def square(x: int) -> int:
    """Return the square of a number."""
    return x * x


def main(region: str = "nyc1") -> None:
    """Open the pool, call functions with each operator, and print the cost."""
    costs: list[sky.CostFinal] = []
    provider = sky.DigitalOcean(region=region, reaper_token=os.environ.get("REAPER_TOKEN"))
    with sky.ComputePool(provider=provider, nodes=2, cpu=2, memory="4GB", max_cost=1.0, timeout=1800) as pool:
        pool.on(sky.CostFinal, costs.append)
        print(*(describe() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*map(square, range(100))) >> pool))
    print(f"cost: ${costs[0].total_cost:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
