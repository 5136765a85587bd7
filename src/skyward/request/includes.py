"""Local files and folders of ``Image(includes=)``, checked and packed for a node."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyward.errors import ConfigurationError

__all__ = ["IncludedFile", "included_files", "pack_files"]

_COMPRESSION = 1
_LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncludedFile:
    """One file, folder or link on its way to a node.

    Attributes:
        name: its path on the node, below the folder of the node's files.
        path: its path here.
        link: the link's target, relative to the link's folder; empty for a file or folder.
    """

    name: str
    path: Path
    link: str = ""


def included_files(includes: Sequence[str]) -> tuple[IncludedFile, ...]:
    """Return all files below the paths in ``includes``, each path under its last name, without compiled Python.

    Raises :class:`~skyward.errors.ConfigurationError`, which names the path: it does not exist, would bring this
    program's whole folder, has another one's name, or holds a link that leads out of it.
    """
    roots = [(parameter, Path(os.path.abspath(os.path.expanduser(path)))) for parameter, path in _numbered(includes)]
    names: dict[str, Path] = {}
    for parameter, root in roots:
        if not root.exists():
            raise ConfigurationError(f"{parameter} does not exist: there is no {root}")
        if Path.cwd().resolve().is_relative_to(root.resolve()):
            raise ConfigurationError(
                f"{parameter} is {root}, which holds this program's current folder: name the files and folders in it "
                "that calls need"
            )
        if names.setdefault(root.name, root) != root:
            raise ConfigurationError(f"{parameter} is {root}, and {names[root.name]} has that name already")
    return tuple(file for parameter, root in roots for file in _below(parameter, root))


def pack_files(files: Iterable[IncludedFile]) -> bytes:
    """Return the files as a compressed tar archive without their owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=_COMPRESSION) as archive:
        for file in files:
            member = archive.gettarinfo(str(file.path), file.name)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if file.link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, file.link, 0
                archive.addfile(member)
            elif member.isdir():
                archive.addfile(member)
            else:
                member.type = tarfile.REGTYPE  # hard links are sent as copies
                member.size = file.path.stat().st_size
                with file.path.open("rb") as content:
                    archive.addfile(member, content)
    return buffer.getvalue()


def _numbered(includes: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, path in enumerate(includes):
        yield f"includes[{i}] ({path!r})", path


def _below(parameter: str, root: Path) -> Iterator[IncludedFile]:
    top = root.resolve()
    yield _entry(parameter, root.name, top, top)
    for here, folders, files in os.walk(top, onerror=_raise) if top.is_dir() else ():
        folders[:] = sorted(set(folders).difference(_LEFT_OUT))
        for name in sorted((*folders, *files)):
            path = Path(here, name)
            if path.suffix != ".pyc":
                yield _entry(parameter, root.name, top, path)


def _entry(parameter: str, name: str, top: Path, path: Path) -> IncludedFile:
    kind = path.lstat().st_mode
    link = ""
    if stat.S_ISLNK(kind):
        target = path.resolve()
        if not target.is_relative_to(top):
            raise ConfigurationError(f"{parameter} holds a link that leads out of it: {path} to {target}")
        link = os.path.relpath(target, path.parent)
    elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise ConfigurationError(f"{parameter} holds something that is neither a file nor a folder: {path}")
    return IncludedFile(name=(Path(name) / path.relative_to(top)).as_posix(), path=path, link=link)


def _raise(error: OSError) -> None:
    raise ConfigurationError(f"includes: {error.filename} cannot be read: {error.strerror}") from error
