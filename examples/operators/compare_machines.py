"""The same work on several kinds of machine at the same time, to choose the one for a long run.

usage: python examples/operators/compare_machines.py

On clouds, compare machines or providers: `sky.ComputePool(provider=sky.AWS(), accelerator="L4")` with
`sky.ComputePool(provider=sky.RunPod(), accelerator="L4")`. `skyward offers` lists machines with their prices.
"""

from __future__ import annotations

import time

import skyward as sky

CALLS = 16


@sky.compute
def work(seed: int) -> int:
    """Count the steps of Collatz sequences: plain Python, so one core for each call."""
    steps = 0
    for start in range(seed * 1000 + 1, (seed + 1) * 1000):
        number = start
        while number != 1:
            number = number // 2 if number % 2 == 0 else 3 * number + 1
            steps += 1
    return steps


def seconds(pool: sky.ComputePool) -> float:
    """Return the duration of all calls on a pool that has run one before."""
    work(0) >> pool
    began = time.perf_counter()
    sky.gather(*[work(seed) for seed in range(CALLS)]) >> pool
    return time.perf_counter() - began


def main() -> None:
    """Open the candidates in parallel, and measure one after the other."""
    candidates = {
        "one worker": sky.ComputePool(provider=sky.Local()),
        "two workers": sky.ComputePool(provider=sky.Local(), concurrency=2),
    }
    with sky.MultiPool(*candidates.values()) as pools:
        measured = {name: seconds(pool) for name, pool in zip(candidates, pools, strict=True)}

    slowest = max(measured.values())
    for name, duration in measured.items():
        print(f"{name:<12} {duration:.2f} s, {slowest / duration:.1f} times the slowest one's speed")


if __name__ == "__main__":
    main()
