"""Seam between volumes and the stores that keep them: access is granted on the client and used on a node."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from skyward.request.volume import GrantedVolume, Volume, VolumeAccess

if TYPE_CHECKING:  # nodes mount storage, and know no providers
    from skyward.providers.base import Provider

_STORES: Mapping[str, str] = {"S3Volume": "skyward.providers.aws.s3"}
"""Module that implements each kind of volume, by the name of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object of a store.

    Attributes:
        name: its key below the volume's folder, unchanged; not validated as a path.
        nbytes: its size.
        tag: version of its content; changes whenever the content does.
        modified_at: Unix time of its last write.
    """

    name: str
    nbytes: int
    tag: str
    modified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MountWay:
    """One program that can mount a volume.

    Attributes:
        program: its name.
        argv: the command that mounts and returns; the mount outlives it.
        env: variables for it, which hold no secret unless ``key_text`` is empty.
        key_text: content of a file of mode 0600, whose path is ``{key_file}`` in ``env``; empty for none.
        install: commands, each run as root, that install the program, by the installer they need; empty where the
            program must be present already.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    key_text: str = field(default="", repr=False)
    install: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict[str, Sequence[tuple[str, ...]]])


class Store(Protocol):
    """Part of a store that holds one volume, used on a node.

    Every verb blocks, is thread-safe, raises Skyward's errors, and retries transient failures itself.
    """

    def listing(self) -> Iterable[StoredObject]:
        """Yield every object of the volume."""
        ...

    def download(self, name: str, file: BinaryIO) -> None:
        """Write an object's content into a seekable file. Idempotent.

        Raises FileNotFoundError when the object does not exist any more.
        """
        ...

    def upload(self, path: str, name: str) -> str:
        """Replace the object's content with the file's, atomically; return the object's tag. Idempotent."""
        ...


class StoreKind(Protocol):
    """Module that implements one kind of volume."""

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float, here: bool) -> Sequence[VolumeAccess]:
        """Check that the volumes exist and may be used, and return a machine's access to them. Creates nothing.

        Args:
            volumes: volumes used together.
            lifetime_s: desired lifetime of the access; the store may allow less.
            here: True if the machine is this one, which has the user's own keys anyway.

        Raises:
            ConfigurationError: a volume does not exist.
            AuthenticationError: it may not be used, or access cannot be delegated; names the permission.
            UnreachableError: the store does not answer.
        """
        ...

    def open_store(self, granted: GrantedVolume) -> Store:
        """Return the store, on a node."""
        ...

    def mount_ways(self, granted: GrantedVolume, machine: str) -> Sequence[MountWay]:
        """Return the ways to mount the volume on a ``machine`` (``uname -m``), best first. Pure."""
        ...


def store_kind(volume: Volume) -> StoreKind:
    """Return the module that implements this kind of volume."""
    return cast("StoreKind", importlib.import_module(_STORES[type(volume).__name__]))


async def grant_volumes(
    provider: Provider, volumes: Sequence[Volume], *, lifetime_s: float, here: bool
) -> tuple[GrantedVolume, ...]:
    """Grant a machine of ``provider`` access to ``volumes``; errors as :meth:`StoreKind.grant`."""
    if not volumes:
        return ()
    if provider.supports("grant"):
        accesses = await provider.grant(volumes, lifetime_s=lifetime_s)
    else:
        accesses = await store_kind(volumes[0]).grant(volumes, lifetime_s=lifetime_s, here=here)
    return tuple(GrantedVolume(volume=volume, access=access) for volume, access in zip(volumes, accesses, strict=True))
