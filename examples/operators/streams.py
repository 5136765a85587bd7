"""Streams: items of a generator as they are made, and results of any number of calls, with bounded memory.

usage: python examples/operators/streams.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example. A generator waits when its items are not read, and is
closed when the loop is left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import skyward as sky


@sky.compute
def training_losses(rate: float) -> Iterator[tuple[int, float]]:
    """Fit one number by gradient descent, without an end; yield the loss of every step."""
    weight = 0.0
    for step in count():
        yield step, (weight - 3.0) ** 2
        weight -= rate * 2 * (weight - 3.0)


@sky.compute
def thrown(seed: int) -> int:
    """Throw five dice, and return their sum."""
    dice = random.Random(seed)
    return sum(dice.randint(1, 6) for _ in range(5))


def main() -> None:
    """Watch a training and stop it, then search among calls without an end."""
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        for step, loss in training_losses(0.1) >> pool:
            if step % 5 == 0:
                print(f"step {step}: loss {loss:.4f}")
            if loss < 0.01:
                print(f"good enough after {step} steps")
                break

        throws = sky.gather(map(thrown, count()), stream=True) >> pool
        for seed, total in enumerate(throws):
            if total == 30:
                print(f"five sixes with seed {seed}")
                break


if __name__ == "__main__":
    main()
