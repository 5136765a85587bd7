"""Volumes: storage that nodes see as a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

from skyward.spec._checks import flag, refusal, text

__all__ = ["S3Volume", "Volume"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Volume:
    """A part of an S3 bucket, mounted on every node.

    Attributes:
        mount_path: absolute folder on the node.
        bucket: the bucket's name.
        prefix: only keys below it, e.g. ``"datasets/"``; empty is the whole bucket.
        read_only: whether writing is refused.
    """

    mount_path: str
    bucket: str
    prefix: str = ""
    read_only: bool = True

    def __post_init__(self) -> None:
        path = PurePosixPath(text("mount_path", self.mount_path))
        if not path.is_absolute() or len(path.parts) == 1 or ".." in path.parts:
            raise refusal("mount_path", "an absolute folder other than / and without ..", self.mount_path)
        if not _BUCKET.fullmatch(text("bucket", self.bucket)):
            raise refusal("bucket", "an S3 bucket name (3 to 63 lower-case letters, digits, dots, dashes)", self.bucket)
        if self.prefix != "" and text("prefix", self.prefix).startswith("/"):
            raise refusal("prefix", "text that does not start with /", self.prefix)
        flag("read_only", self.read_only)


Volume: TypeAlias = S3Volume
"""Every kind of volume that ``ComputePool(volume=...)`` takes."""
