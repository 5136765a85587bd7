"""Read the files of an S3 bucket from every node, without a copy on the laptop.

usage: python examples/providers/aws_volume.py BUCKET [PREFIX]
"""

from __future__ import annotations

import sys
from pathlib import Path

import skyward as sky

DATA = Path("/tmp/skyward-example-data")


@sky.compute
def sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of this worker's part of the files in ``folder``, by name."""
    mine = sky.shard(sorted(path for path in folder.rglob("*") if path.is_file()))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in mine}


def main(bucket: str, prefix: str = "") -> None:
    """Mount the bucket, and add up the sizes from all workers."""
    volume = sky.S3Volume(mount_path=str(DATA), bucket=bucket, prefix=prefix)
    with sky.ComputePool(provider=sky.AWS(), nodes=2, cpu=2, volume=[volume], max_cost=1.0) as pool:
        parts = sizes(DATA) @ pool
    print(f"{sum(map(len, parts))} files, {sum(sum(part.values()) for part in parts)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
