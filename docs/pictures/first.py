"""The program of the terminal cast, and of the first block of the README and of the landing page."""

import random

import skyward as sky


@sky.compute
def estimate(seed: int, n: int = 200_000) -> float:
    chance = random.Random(seed).random
    tries = (chance() ** 2 + chance() ** 2 for _ in range(n))
    return 4 * sum(each < 1 for each in tries) / n


@sky.compute
def add(numbers: list[int]) -> int:
    part = sky.shard(numbers)
    print(f"{len(part)} numbers, the first is {part[0]}")
    return sum(part)


with sky.ComputePool(
    provider=sky.Local(),
    nodes=2,
    concurrency=2,
) as pool:
    print(estimate(0) >> pool)  # 3.14288
    numbers = list(range(100))
    print(add(numbers) @ pool)  # (300, 925, 1550, 2175)
    calls = [estimate(seed) for seed in range(20)]
    results = sky.gather(*calls) >> pool
    print(f"{sum(results) / 20:.4f}")  # 3.1416
