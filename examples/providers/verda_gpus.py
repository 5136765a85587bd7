"""GPUs on spot at Verda, in whichever location has them cheapest, for at most two dollars.

usage: python examples/providers/verda_gpus.py [MACHINE]

MACHINE is a machine type, such as ``CPU.4V.16G``; without one, a machine with a V100 is taken.
"""

from __future__ import annotations

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
    return f"node {info.node + 1} of {info.total_nodes}, {', '.join(info.accelerators) or 'no GPU'}"


def main(name: str | None = None) -> None:
    """Run on two machines, which need not reach each other."""
    wanted: dict[str, Any] = {"accelerator": "V100"} if name is None else {"machine": name}
    with sky.ComputePool(provider=sky.Verda(), nodes=2, spot="if-available", max_cost=2.0, **wanted) as pool:
        print(*sorted(machine() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*[squares(i, i + 10) for i in range(0, 100, 10)]) >> pool))


if __name__ == "__main__":
    main(*sys.argv[1:])
