"""One H100 cut into two isolated halves (MIG), each with a worker of its own, and whole again at the end.

usage: python examples/operators/gpu_partitions.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example. This machine must have an H100, and you must be root.
"""

from __future__ import annotations

import os

import skyward as sky
from skyward import Accelerator


@sky.compute
def describe() -> str:
    """Return the part that this worker has; a framework such as torch sees it as its only GPU."""
    info = sky.instance_info()
    shown = os.environ["CUDA_VISIBLE_DEVICES"]
    kind = "a partition" if shown.startswith("MIG-") else "a whole GPU"
    return f"worker {info.worker} of {info.workers_per_node} has {kind} of {', '.join(info.accelerators)}"


@sky.compute
def partition() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    """Ask for as many halves as fit, which are two."""
    half = Accelerator.NVIDIA.H100(mig="3g.40gb")
    with sky.ComputePool(provider=sky.Local(), accelerator=half) as pool:
        print(*(describe() @ pool), sep="\n")
        print("different partitions:", len(set(partition() @ pool)))


if __name__ == "__main__":
    main()
