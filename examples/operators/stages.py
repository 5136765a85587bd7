"""Two stages on two pools: small machines prepare data, a large one trains on each part as soon as it is ready.

usage: python examples/operators/stages.py

On a cloud each stage has machines of its own kind: give the first pool `provider=sky.AWS(), cpu=2, nodes=4`, and the
second one `provider=sky.AWS(), accelerator="L4"`. The pools are opened in parallel.
"""

from __future__ import annotations

from concurrent.futures import as_completed

import skyward as sky

PARTS = 6


def prepare(part: int) -> list[float]:
    """Return the samples of one part: measurements of 3 x without the invalid ones."""
    return [x / 1000 for x in range(part * 1000, (part + 1) * 1000) if x % 7]


def fit(slope: float, samples: list[float]) -> float:
    """Return the slope after one pass of gradient descent over the samples."""
    for x in samples:
        slope += 0.01 * (3 * x - slope * x) * x
    return slope


def main() -> None:
    """Prepare all parts at once, train on them in the order in which they become ready."""
    slope = 0.0
    with sky.MultiPool(
        sky.ComputePool(provider=sky.Local(), nodes=2),
        sky.ComputePool(provider=sky.Local()),
    ) as (preparing, training):
        futures = {preparing.submit(prepare, part): part for part in range(PARTS)}
        for ready in as_completed(futures):
            slope = training.submit(fit, slope, ready.result()).result()
        print(f"{len(futures)} parts from {preparing.instance_count} nodes, trained on {training.instance_count}")
    print(f"slope: {slope:.3f}")


if __name__ == "__main__":
    main()
