"""Five clouds and machines of your own as one pool: the cheapest first, and the next where one has no more.

usage: python examples/providers/many_clouds.py [HOST...]

HOST is a machine that you can log in to; it costs nothing, and comes first. Clouds without an account are left out.
"""

from __future__ import annotations

import sys

import skyward as sky


@sky.compute
def squares(start: int, stop: int) -> int:
    """Return a sum of squares."""
    return sum(number * number for number in range(start, stop))


def main(*hosts: str) -> None:
    """Run on three machines, wherever they can be had."""
    own = [sky.SSH(hosts=hosts)] if hosts else []
    clouds = [sky.AWS(), sky.DigitalOcean(), sky.RunPod(), sky.VastAI(), sky.Verda()]
    with sky.ComputePool(
        provider=[*own, *clouds],
        nodes=3,
        cpu=2,
        memory="2GB",
        spot="never",
        spread=True,
        max_price_per_hour=0.20,
        max_cost=1.00,
        wait_for_capacity="10m",
    ) as pool:
        print("sum of squares:", sum(sky.gather(*[squares(i, i + 10) for i in range(0, 100, 10)]) >> pool))
        for price, machine in sorted((node.price_per_hour or 0.0, node.instance_type) for node in pool.status.nodes):
            print(f"${price:.4f} an hour: {machine}")


if __name__ == "__main__":
    main(*sys.argv[1:])
