"""Folder here that receives a node's files: modes, links, and names that are one on this disk."""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path, PurePosixPath

from skyward.errors import FetchError

_WRITABLE = 0o700


class TargetFolder:
    """Folder here that receives a node's files. Nothing is written outside of it: links in it are replaced.

    Args:
        path: the folder; made if there is none.
        identify: returns what a disk has at a path as one value, None if there is nothing there. Two names may be one
            to a disk, such as ``A`` and ``a``, or differently composed umlauts.
    """

    def __init__(self, path: Path, identify: Callable[[Path], Hashable] | None = None) -> None:
        self._path = path
        self._identify = identify or _device_and_inode
        self._names: dict[Hashable, str] = {}
        self._folders: dict[str, int] = {}

    def make_folders(self, modes: Mapping[str, int]) -> list[FetchError]:
        """Make folders that can be written until :meth:`set_modes`; return an error for each that could not be made."""
        self._path.mkdir(parents=True, exist_ok=True)
        errors: list[FetchError] = []
        for name in sorted(modes, key=lambda name: PurePosixPath(name).parts):
            try:
                path = self.claim(name)
                if path.is_symlink():
                    path.unlink()
                path.mkdir(exist_ok=True)
            except FetchError as error:
                errors.append(error)
            except OSError as error:
                errors.append(FetchError(f"folder {name!r} was not made: {error}"))
            else:
                self._folders[name] = modes[name]
                self.keep(name)
                set_mode(path, modes[name] | _WRITABLE)
        return errors

    def claim(self, name: str) -> Path:
        """Return the path for a file, folder or link of this name.

        Raises :class:`~skyward.errors.FetchError` if its folder was not made, or has another name's there.
        """
        path = self._path / name
        folder = posixpath.dirname(name)
        if folder and folder not in self._folders:
            raise FetchError(f"{name!r} was not fetched, as its folder was not made")
        other = self._names.get(self._identify(path), name)
        if other != name:
            raise FetchError(
                f"{name!r} was not fetched: to the disk of {self._path} it is the same name as {other!r}, which was. "
                "Fetch each to a folder of its own, or have a call rename one"
            )
        return path

    def keep(self, name: str) -> None:
        """Refuse other names from now on where this one is."""
        self._names[self._identify(self._path / name)] = name

    def put_link(self, name: str, target: str) -> Path:
        """Make a relative link to another name in this folder, and return its path.

        Raises OSError where it cannot be made, and as :meth:`claim` does.
        """
        path = self.claim(name)
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        part.symlink_to(posixpath.relpath(f"/{target}", f"/{posixpath.dirname(name)}"))
        try:
            os.replace(part, path)
        except OSError:
            part.unlink()
            raise
        self.keep(name)
        return path

    def set_modes(self) -> None:
        """Give the folders their modes, inner ones first."""
        for name in reversed(self._folders):
            set_mode(self._path / name, self._folders[name])


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions of a file or folder of this user's, on a disk that has any."""
    with contextlib.suppress(OSError):  # FAT, network disks, a folder that others own: what matters is the content
        path.chmod(mode)


def _device_and_inode(path: Path) -> Hashable:
    try:
        seen = path.lstat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino
