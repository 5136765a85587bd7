"""A job that outlives the program that spawned it, and is read by another one.

usage: python examples/operators/long_job.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example, and `keep` with the time that you need to come back for
the result.
"""

from __future__ import annotations

import subprocess
import sys

import skyward as sky

NAME = "long-job"


@sky.compute(retries=1)
def train(rate: float) -> float:
    """Return what is left of the loss after ten steps."""
    loss = 1.0
    for step in range(10):
        loss *= 1 - rate
        print(f"step {step}: {loss:.3f}")
    return round(loss, 3)


def spawn() -> None:
    """Spawn a training, and leave it to its machine."""
    with sky.ComputePool(provider=sky.Local(), name=NAME, keep="10m", display="quiet") as pool:
        pool.spawn(train(0.2), name="training")


def read() -> None:
    """Read its result and its output: in this program, or in any later one."""
    job = sky.job("training")
    print(f"{job.id} on {job.pool}: {job.result()}")
    print([line.line for line in job.logs()][-1])
    print(job.state)


def main() -> None:
    """Spawn, read, and end the machines."""
    spawn()
    read()
    subprocess.run([sys.executable, "-m", "skyward", "down", NAME], stdout=subprocess.DEVNULL, check=True)
    print(f"after the machines: {sky.job('training').result()}")


if __name__ == "__main__":
    main()
