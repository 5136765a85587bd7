"""Containers with GPUs at RunPod, in whichever data center has them in stock, for at most two dollars.

usage: python examples/providers/runpod_pods.py [MACHINE]

MACHINE is a kind of pod, such as ``"2x NVIDIA L4"`` or ``"4x cpu5c"``; without one, pods with an L4 are taken.
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
def pod() -> str:
    """Return the node and its GPUs."""
    info = sky.instance_info()
    return f"node {info.node + 1} of {info.total_nodes}, {', '.join(info.accelerators) or 'no GPU'}"


def main(name: str | None = None) -> None:
    """Run on two pods, which do not reach each other."""
    wanted: dict[str, Any] = {"accelerator": "L4"} if name is None else {"machine": name}
    with sky.ComputePool(provider=sky.RunPod(), nodes=2, spot="never", max_cost=2.0, **wanted) as pool:
        print(*sorted(pod() @ pool), sep="\n")
        print("sum of squares:", sum(sky.gather(*[squares(i, i + 10) for i in range(0, 100, 10)]) >> pool))


if __name__ == "__main__":
    main(*sys.argv[1:])
