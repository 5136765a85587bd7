"""GPUs by bids on VastAI's marketplace: the lowest prices, on hosts whose owners can read everything that runs there.

usage: python examples/providers/vastai_bids.py [MACHINE]

MACHINE is a class of machines, such as ``"2x RTX 3090"`` or ``"CPU"``; without one, machines with an RTX 4090 are
taken. Two nodes on different hosts in North America, for at most two dollars. A node that is outbid is replaced.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import skyward as sky


@sky.compute
def squares(start: int, stop: int) -> int:
    """Return a sum of squares."""
    return sum(number * number for number in range(start, stop))


@sky.compute
def machine() -> str:
    """Return the node and its GPUs."""
    info = sky.instance_info()
    return (
        f"node {info.node + 1} of {info.total_nodes}: {platform.system()}, {', '.join(info.accelerators) or 'no GPU'}"
    )


def report(event: sky.SkywardEvent) -> None:
    """Print the final cost, without traffic."""
    if isinstance(event, sky.CostFinal):
        print(f"cost: ${event.total_cost:.4f}")


def main(name: str | None = None) -> None:
    """Run on two machines, which do not reach each other."""
    wanted: dict[str, Any] = {"accelerator": "RTX-4090"} if name is None else {"machine": name}
    provider = sky.VastAI(regions=["US", "CA"], min_reliability=0.98)
    with sky.ComputePool(provider=provider, nodes=2, max_cost=2.0, on_event=report, **wanted) as pool:
        print(*sorted(machine() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*[squares(i, i + 10) for i in range(0, 100, 10)]) >> pool))


if __name__ == "__main__":
    main(*sys.argv[1:])
