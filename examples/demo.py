"""A tour in a minute: four workers on two nodes of this machine.

usage: python examples/demo.py
"""

from __future__ import annotations

import os
import time

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import skyward as sky
from skyward.integrations import ScikitLearnPool


@sky.compute
def estimate_pi(points: int, seed: int) -> float:
    """Throw points at a square and count those in the circle."""
    import random

    chance = random.Random(seed)
    inside = sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(points))
    print(f"{inside} of {points} points are inside")
    return 4 * inside / points


@sky.compute
def introduce() -> str:
    """Return the worker, the node and the process of this call."""
    info = sky.instance_info()
    return f"worker {info.worker} of node {info.node}, process {os.getpid()}"


@sky.compute
def sum_of_my_part(numbers: list[int]) -> int:
    """Return the sum of this worker's part of the data."""
    return sum(sky.shard(numbers))


def show_operators(pool: sky.ComputePool) -> None:
    """Run one call, calls in parallel, and one call on every worker."""
    print(f"\n>>      pi is about {estimate_pi(200_000, 0) >> pool}")

    first, second = (estimate_pi(200_000, 1) & estimate_pi(200_000, 2)) >> pool
    print(f"&       {first} and {second}, side by side")

    guesses = sky.gather(*[estimate_pi(200_000, seed) for seed in range(8)]) >> pool
    print(f"gather  the mean of {len(guesses)} is {sum(guesses) / len(guesses):.4f}")

    for line in introduce() @ pool:
        print(f"@       {line}")

    parts = sum_of_my_part(list(range(1000))) @ pool
    print(f"shard   {' + '.join(map(str, parts))} = {sum(parts)}")

    started = time.perf_counter()
    sky.gather(*[introduce() for _ in range(2000)]) >> pool
    print(f"speed   {2000 / (time.perf_counter() - started):,.0f} calls per second\n")


def search_grid() -> float:
    """Run a grid search with all fits on the fleet, and return the best score."""
    images, labels = load_digits(return_X_y=True)
    grid = {"C": [1, 10], "gamma": [0.0005, 0.001, 0.005]}
    search = GridSearchCV(SVC(), grid, cv=3, n_jobs=-1).fit(images, labels)
    return float(search.best_score_)


def main() -> None:
    """Open a pool of 2 nodes with 2 workers each, and use it."""
    with ScikitLearnPool(provider=sky.Local(), nodes=2, concurrency=2) as pool:
        show_operators(pool)
        best = search_grid()
    print(f"best score: {best:.4f}")


if __name__ == "__main__":
    main()
