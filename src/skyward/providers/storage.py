"""The seam between volumes and the stores that keep them: granting access here, using it on a node."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, cast, runtime_checkable

from skyward.providers import STORES
from skyward.providers.base import Provider
from skyward.request.volume import GrantedVolume, Volume, VolumeAccess

__all__ = ["GrantsVolumes", "MountWay", "Store", "StoreKind", "StoredObject", "grant_volumes", "store_kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object of a store.

    Attributes:
        name: its key below the volume's folder, as it is: not yet a path.
        nbytes: its size.
        tag: changes whenever its content does.
        modified_at: when it was written, in Unix time.
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
        key_text: what has to be in a file of mode 0600, whose path is ``{key_file}`` in ``env``; empty for none.
        install: commands, each to be run as root, that bring the program, by the installer they need; empty where the
            program has to be there.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    key_text: str = field(default="", repr=False)
    install: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict[str, Sequence[tuple[str, ...]]])


class Store(Protocol):
    """A volume's part of a store, on a node. Every verb blocks, may be used by several threads, and raises Skyward's
    errors; what can be tried again was.
    """

    def listing(self) -> Iterable[StoredObject]:
        """Every object of the volume."""
        ...

    def download(self, name: str, file: BinaryIO) -> None:
        """Write an object's content into a file that can be sought. Idempotent.

        Raises FileNotFoundError when it is not there any more.
        """
        ...

    def upload(self, path: str, name: str) -> str:
        """Make the file's content the object's, whole or not at all; returns the object's tag. Idempotent."""
        ...


class StoreKind(Protocol):
    """A module that knows one kind of volume."""

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float, here: bool) -> Sequence[VolumeAccess]:
        """Check that the volumes are there and may be used, and give a machine access to them. Creates nothing.

        Args:
            volumes: to be used together.
            lifetime_s: for how long, at least where that is to be had.
            here: whether the machine is this one, which has this user's own keys anyway.

        Raises:
            ConfigurationError: one is not there.
            AuthenticationError: it may not be used, or access cannot be handed on; names the permission.
            UnreachableError: the store does not answer.
        """
        ...

    def open_store(self, granted: GrantedVolume) -> Store:
        """The store, on a node."""
        ...

    def mount_ways(self, granted: GrantedVolume, machine: str) -> Sequence[MountWay]:
        """How the volume can be mounted on a ``machine`` (``uname -m``), best first. Pure."""
        ...


@runtime_checkable
class GrantsVolumes(Protocol):
    """A provider that has a say in how its machines get at volumes."""

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float) -> Sequence[VolumeAccess]:
        """As :meth:`StoreKind.grant`, for its machines."""
        ...


def store_kind(volume: Volume) -> StoreKind:
    """Who knows this kind of volume."""
    return cast("StoreKind", importlib.import_module(STORES[type(volume).__name__]))


async def grant_volumes(
    provider: Provider, volumes: Sequence[Volume], *, lifetime_s: float, here: bool
) -> tuple[GrantedVolume, ...]:
    """Access to ``volumes`` for a machine of ``provider``'s; errors as :meth:`StoreKind.grant`."""
    if not volumes:
        return ()
    if isinstance(provider, GrantsVolumes):
        accesses = await provider.grant(volumes, lifetime_s=lifetime_s)
    else:
        accesses = await store_kind(volumes[0]).grant(volumes, lifetime_s=lifetime_s, here=here)
    return tuple(GrantedVolume(volume=volume, access=access) for volume, access in zip(volumes, accesses, strict=True))
