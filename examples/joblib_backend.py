"""joblib loops on a fleet: a pool of their own, and one that is already open."""

from __future__ import annotations

from joblib import Parallel, delayed

import skyward as sky
from skyward.integrations import JoblibPool, joblib_backend


def count_primes(start: int, stop: int) -> int:
    """Count the primes in ``range(start, stop)``."""
    return sum(all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in range(start, stop))


def main() -> None:
    """Count primes twice."""
    tasks = [delayed(count_primes)(start, start + 5_000) for start in range(2, 100_000, 5_000)]

    with JoblibPool(provider=sky.Local(), nodes=2, concurrency=1):
        print(f"{sum(Parallel(n_jobs=-1)(tasks)):,} primes")

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool, joblib_backend(pool):
        for count in Parallel(return_as="generator")(tasks[:4]):
            print(f"{count:,} primes")


if __name__ == "__main__":
    main()
