"""A call that continues from its checkpoint after the loss of its worker, and one that stops in time for its timeout.

usage: python examples/operators/checkpoints.py

On a cloud: replace `sky.Local()` with `sky.AWS(), spot="always"`, for example. A training whose machine is taken back
continues on the next one.
"""

from __future__ import annotations

import os
import signal

import skyward as sky

STEPS = 100


@sky.compute
def train(steps: int) -> str:
    """Add up the numbers of the steps; in the first run, lose the worker at step 50."""
    state = sky.checkpoint_folder() / "state"
    first, total = map(int, state.read_text().split()) if state.exists() else (0, 0)
    for step in range(first, steps):
        total += step
        if step % 20 == 0:  # renamed, so that every copy is whole
            part = state.with_suffix(".part")
            part.write_text(f"{step + 1} {total}")
            part.rename(state)
        if step == 50 and not first:
            os.kill(os.getpid(), signal.SIGKILL)
    return f"the last run began with step {first}, the sum is {total}"


@sky.compute(timeout=8, grace=5)
def search() -> str:
    """Search for as long as the call may take, and return what was found until then."""
    tried = 0
    try:
        while True:
            tried += 1
    except sky.TimeLimit:
        return "stopped in time" if tried else "no time for a single try"


def main() -> None:
    """Run both."""
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        print(train(STEPS) >> pool)
        print(search() >> pool)


if __name__ == "__main__":
    main()
