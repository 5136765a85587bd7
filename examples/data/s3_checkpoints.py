"""A training on a spot machine that the provider may take back: its checkpoints are in S3, the next machine goes on.

usage: python examples/data/s3_checkpoints.py BUCKET [STEPS]

Run it twice with the same bucket, the second time with more STEPS: it goes on where the first run ended.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import skyward as sky

FOLDER = Path("/tmp/skyward-example-checkpoints")


@sky.compute
def train(steps: int) -> float:
    """Learn the slope of y = 3 x from the last checkpoint on; write one after every step."""
    saved = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("step-*.json"))]
    slope, first = (saved[-1]["slope"], saved[-1]["step"] + 1) if saved else (0.0, 0)
    print(f"begins with step {first}")
    for step in range(first, steps):
        slope += 0.02 * (3 - slope)
        threading.Event().wait(0.1)  # in place of a longer computation
        # A new file for every checkpoint, written at once: a mounted bucket cannot change files.
        Path(FOLDER, f"step-{step:06}.json").write_text(json.dumps({"step": step, "slope": slope}))
    return slope


def main(bucket: str, steps: str = "150") -> None:
    """Train on one spot machine; a call whose machine is taken back runs again on the next one."""
    volume = sky.S3Volume(mount_path=str(FOLDER), bucket=bucket, prefix="checkpoints/", read_only=False)
    with sky.ComputePool(provider=sky.AWS(), cpu=2, volume=[volume], max_cost=1.0) as pool:
        pool.on(sky.LogLine, lambda event: print(event.line))
        pool.on(sky.InstancePreempted, lambda event: print(f"node {event.node} is taken back"))
        slope = train(int(steps)) >> pool
    print(f"slope after {steps} steps: {slope:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
