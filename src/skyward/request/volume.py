"""Volumes: storage that nodes see as a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeAlias

from skyward.request.checks import explain_options, flag, refusal, text

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@explain_options
@dataclass(frozen=True, slots=True, kw_only=True)
class S3Volume:
    """A part of an S3 bucket, mounted on every node.

    Attributes:
        mount_path: absolute folder on the node.
        bucket: the bucket's name.
        prefix: only keys below it, e.g. ``"datasets/"``, with or without the slash; empty is the whole bucket.
        read_only: True refuses writing; otherwise changes are written back to the bucket.
    """

    requirements: ClassVar[tuple[str, ...]] = ("boto3",)
    """Packages that both ends need for it, in the same version."""

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

    @property
    def folder(self) -> str:
        """Common prefix of the volume's keys: empty, or a path that ends with a slash."""
        return f"{self.prefix.rstrip('/')}/" if self.prefix else ""

    @property
    def location(self) -> str:
        """The volume in messages: ``s3://bucket/prefix/``."""
        return f"s3://{self.bucket}/{self.folder}"


Volume: TypeAlias = S3Volume
"""Every kind of volume that ``ComputePool(volume=...)`` takes."""


def volume_at(location: str) -> Volume:
    """Return a volume of what is at a :attr:`S3Volume.location`; it is mounted nowhere."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    return S3Volume(mount_path="/nowhere", bucket=bucket, prefix=prefix, read_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKey:
    """Credentials for a store.

    Attributes:
        id: the public part.
        secret: the secret part.
        token: session token of a short-lived key; empty for a permanent one.
    """

    id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeAccess:
    """Access of a machine to a volume.

    Attributes:
        region: region of the store; empty where that has no meaning.
        endpoint_url: address of the store, unless it is the usual one.
        key: credentials; None means those of the machine itself.
        mountable: True if software for mounting may be installed on the machine.
    """

    region: str = ""
    endpoint_url: str = ""
    key: StorageKey | None = field(default=None, repr=False)
    mountable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedVolume:
    """A volume, and the way to it. Secret: never in an argument, a variable or a log."""

    volume: Volume
    access: VolumeAccess = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GrantedVolume:
        """Return the volume of such values."""
        access = dict(values["access"])
        key = access.pop("key", None)
        granted = VolumeAccess(**access, key=None if key is None else StorageKey(**key))
        return cls(volume=S3Volume(**values["volume"]), access=granted)
