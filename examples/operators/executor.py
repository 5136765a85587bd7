"""A pool where code expects a `concurrent.futures.Executor`: here a library that also takes threads or processes.

usage: python examples/operators/executor.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor, as_completed

import skyward as sky


def largest_prime_below(limit: int) -> int:
    """Return the largest prime number below ``limit``."""
    return next(n for n in range(limit - 1, 1, -1) if all(n % divisor for divisor in range(2, int(n**0.5) + 1)))


def library_code(executor: Executor) -> list[int]:
    """Stand for a library that takes any executor."""
    futures = {executor.submit(largest_prime_below, 10**exponent): exponent for exponent in range(2, 9)}
    found = {futures[future]: future.result() for future in as_completed(futures)}
    return [found[exponent] for exponent in sorted(found)]


def main() -> None:
    """Run it in threads of this process, and on a fleet."""
    with ThreadPoolExecutor() as threads:
        here = library_code(threads)
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool, pool.executor() as executor:
        there = library_code(executor)
        squares = list(executor.map(pow, range(5), [2] * 5, chunksize=2))

    print(f"threads: {here}")
    print(f"fleet:   {there}")
    print(f"map:     {squares}")


if __name__ == "__main__":
    main()
