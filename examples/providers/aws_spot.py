"""Two spot machines for a minute, with the cost at the end and nothing left behind.

usage: python examples/providers/aws_spot.py [REGION]
"""

from __future__ import annotations

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


def main(region: str = "us-east-1") -> None:
    """Open the pool, call functions with each operator, and print the cost."""
    costs: list[sky.CostFinal] = []
    with sky.ComputePool(
        provider=sky.AWS(region=region),
        nodes=2,
        cpu=2,
        memory="2GB",
        spot="if-available",
        max_cost=1.0,
        timeout=1800,
    ) as pool:
        pool.on(sky.CostFinal, costs.append)
        print(*(describe() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*map(square, range(100))) >> pool))
    print(f"cost: ${costs[0].total_cost:.4f}, saved ${costs[0].savings_vs_ondemand:.4f} against on-demand")


if __name__ == "__main__":
    main(*sys.argv[1:])
