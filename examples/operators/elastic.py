"""A pool that has machines only while there is work: none before the first burst, none after the last one.

usage: python examples/operators/elastic.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example, and leave `idle` at its five minutes. There a machine
takes a minute to boot, for which the next burst would have to wait.
"""

from __future__ import annotations

import threading

import skyward as sky
from skyward.events import InstanceProvisioned, InstanceStopping


@sky.compute
def fit(parameter: int) -> int:
    """Take half a second, and return a score."""
    threading.Event().wait(0.5)
    return -((parameter - 7) ** 2)


def main() -> None:
    """Submit two bursts of calls, and wait in between until the machines are gone."""
    gone = threading.Semaphore(0)
    with sky.ComputePool(provider=sky.Local(), nodes=(0, 3), idle="2s") as pool:
        pool.on(InstanceProvisioned, lambda event: print("a node comes") if event.node == 0 else None)
        pool.on(InstanceStopping, lambda _: gone.release())
        print(f"{pool.status.wanted} nodes of at most {pool.capacity}")
        for burst in (range(12), range(6, 9)):
            scores = sky.gather(*[fit(parameter) for parameter in burst]) >> pool
            print(f"the best of {len(scores)}: {burst[scores.index(max(scores))]}")
            while pool.status.wanted:
                gone.acquire()
            print(f"{pool.status.wanted} nodes again")


if __name__ == "__main__":
    main()
