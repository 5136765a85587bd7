"""Wheels that lie on the client and travel to a machine: what ``Image(find_links=)`` names and the client has."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from skyward.request.image import Image

__all__ = ["Wheelhouse", "gather_wheels", "mapped_file"]

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheelhouse:
    """The places of an image's wheels, apart by whose they are.

    Attributes:
        digest: names the set of wheels by its content; empty if there are none.
        wheels: file names to files of this machine; of two with one name the first place's counts.
        places: the image's ``find_links``, in order; empty text stands for the wheels.
    """

    digest: str
    wheels: Mapping[str, Path]
    places: tuple[str, ...]

    def find_links(self, folder: str) -> tuple[str, ...]:
        """The places as the machine sees them, with the wheels in ``folder``."""
        return tuple(_link(place or folder) for place in self.places)


def gather_wheels(image: Image) -> Wheelhouse:
    """Find and read the image's wheels: folders that exist here. Reads all of them: not for the event loop."""
    wheels: dict[str, Path] = {}
    places: list[str] = []
    for place in image.find_links:
        folder = Path(place)
        ours = "://" not in place and folder.is_dir()
        if ours:
            wheels = {path.name: path for path in sorted(folder.glob("*.whl"))} | wheels
        if not ours or "" not in places:
            places.append("" if ours else place)
    return Wheelhouse(digest=_digest(wheels) if wheels else "", wheels=wheels, places=tuple(places))


def mapped_file(path: Path) -> memoryview:
    """A file's content, read as it is needed."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _digest(wheels: Mapping[str, Path]) -> str:
    digest = blake3()
    for name, path in sorted(wheels.items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update_mmap(path)
    return digest.hexdigest(_DIGEST_BYTES)


def _link(place: str) -> str:
    """One word, for what takes several apart at spaces or commas."""
    return Path(place).as_uri() if place.startswith("/") else place
