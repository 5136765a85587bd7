"""Local files and folders of ``Image(includes=)``, checked and packed for a node."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from skyward.errors import ConfigurationError
from skyward.request.ignored import GitRules, unwanted

__all__ = ["ExcludedPath", "IncludedFile", "describe_includes", "included_files", "pack_files", "select_files"]

_COMPRESSION = 1
_LARGE_BYTES = 100 << 20
_COUNTED = 50_000
"""Files of left-out folders whose sizes are looked up."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPath:
    """File or folder below an included folder that stays here.

    Attributes:
        path: its path.
        why: what it is: ``"repository"``, ``"environment"``, ``"cache"``, ``"compiled Python"``, ``".gitignore"``.
    """

    path: Path
    why: str


def included_files(includes: Sequence[str]) -> tuple[IncludedFile, ...]:
    """Return the files to send; see :func:`select_files`."""
    return select_files(includes)[0]


def describe_includes(includes: Sequence[str]) -> Iterator[str]:
    """Yield lines for the user: what is left out, with sizes, and a warning if much is sent. Blocks."""
    files, left_out = select_files(includes)
    sent = sum(file.path.stat().st_size for file in files if not file.link and file.path.is_file())
    if sent > _LARGE_BYTES:
        largest = max(files, key=lambda file: 0 if file.link else file.path.stat().st_size)
        yield (
            f"includes are {_size(sent)}, which every node gets from here; the largest file is {largest.path} "
            f"({_size(largest.path.stat().st_size)}). A volume, or an argument of calls, is better for data"
        )
    if left_out:
        counted = _Counted()
        listed = [f"{name} ({_size(counted.size_of(paths))})" for name, paths in _grouped(left_out).items()]
        more = " or more" if counted.is_full else ""
        yield (
            f"includes leave out {', '.join(listed)}{more}: repositories, environments, caches and what git ignores. "
            "A file that is named itself is sent"
        )


def select_files(includes: Sequence[str]) -> tuple[tuple[IncludedFile, ...], tuple[ExcludedPath, ...]]:
    """Return all files below the paths in ``includes``, each path under its last name, and what is left out of them.

    Left out are repositories' own files, Python environments, caches, compiled Python, and what git ignores; never a
    path that is named itself.

    Raises :class:`~skyward.errors.ConfigurationError`, which names the path: it does not exist, would bring this
    program's whole folder, has another one's name, holds a link that leads out of it, or nothing of it would be sent.
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
    files: list[IncludedFile] = []
    left_out: list[ExcludedPath] = []
    for parameter, root in roots:
        count = len(left_out)
        below = list(_below(parameter, root, left_out))
        if len(left_out) > count and all(file.path.is_dir() and not file.link for file in below):
            named = ", ".join(str(each.path) for each in left_out[count : count + 3])
            raise ConfigurationError(
                f"{parameter} would send nothing: all of it is ignored by git, or belongs to a repository, an "
                f"environment or a cache ({named}). Name the files themselves, which are sent then"
            )
        files += below
    return tuple(files), tuple(left_out)


def pack_files(files: Iterable[IncludedFile], into: IO[bytes]) -> None:
    """Write the files as a compressed tar archive without their owners; calls may write into the folders.

    Raises :class:`OSError`, which names the file: it is gone, cannot be read, or became shorter meanwhile.
    """
    with tarfile.open(fileobj=into, mode="w:gz", compresslevel=_COMPRESSION) as archive:
        for file in files:
            member = archive.gettarinfo(str(file.path), file.name)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode &= 0o777
            if file.link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, file.link, 0
                archive.addfile(member)
            elif member.isdir():
                member.mode |= 0o700  # a pool's folder must be removable
                archive.addfile(member)
            else:
                member.type = tarfile.REGTYPE  # hard links are sent as copies
                _add_content(archive, member, file.path)


def _add_content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    with path.open("rb") as content:
        member.size = os.fstat(content.fileno()).st_size  # what is added to it from now on is left out
        try:
            archive.addfile(member, content)
        except OSError as error:
            if content.tell() < member.size:
                raise OSError(f"{path} became shorter while it was read: leave it out of includes") from error
            raise


def _numbered(includes: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, path in enumerate(includes):
        yield f"includes[{i}] ({path!r})", path


def _below(parameter: str, root: Path, left_out: list[ExcludedPath]) -> Iterator[IncludedFile]:
    top = root.resolve()
    yield _entry(parameter, root.name, top, top)
    if not top.is_dir():
        return
    rules = GitRules(top)
    for here, folders, files in os.walk(top, onerror=_raise):
        kept: list[Path] = []
        for name in sorted((*folders, *files)):
            path = Path(here, name)
            is_folder = name in folders and not path.is_symlink()
            why = unwanted(path, is_folder=is_folder)
            why = why or (".gitignore" if rules.ignores(path, is_folder=is_folder) else "")
            if why:
                left_out.append(ExcludedPath(path=path, why=why))
            else:
                kept.append(path)
        folders[:] = sorted({path.name for path in kept}.intersection(folders))
        for path in kept:
            yield _entry(parameter, root.name, top, path)


def _grouped(left_out: Sequence[ExcludedPath]) -> Mapping[str, Sequence[Path]]:
    """Return what is left out by what it is called in a message: folders by name, files by the reason."""
    groups: dict[str, list[Path]] = {}
    for each in left_out:
        is_ignored = each.why in (".gitignore", "compiled Python")
        groups.setdefault(each.why if is_ignored else each.path.name, []).append(each.path)
    return {
        name if len(paths) == 1 and paths[0].name == name else f"{len(paths)} x {name}": paths
        for name, paths in groups.items()
    }


class _Counted:
    """Sizes of files and folders, of so many files that it takes no time that anyone notices."""

    def __init__(self) -> None:
        self._left = _COUNTED

    @property
    def is_full(self) -> bool:
        """True if not all files could be looked at."""
        return self._left <= 0

    def size_of(self, paths: Iterable[Path]) -> int:
        """Return the size of files, and of those in folders, in bytes."""
        return sum(self._size(file) for path in paths for file in self._files(path))

    def _files(self, path: Path) -> Iterator[str]:
        if path.is_symlink() or not path.is_dir():
            yield str(path)
            return
        for here, _, files in os.walk(path):
            for name in files:
                if self._left <= 0:
                    return
                self._left -= 1
                yield os.path.join(here, name)

    @staticmethod
    def _size(path: str) -> int:
        try:
            return os.lstat(path).st_size
        except OSError:
            return 0


def _size(count: int) -> str:
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_:
            return f"{count / bytes_:.{0 if count >= 10 * bytes_ else 1}f} {unit}"
    return f"{count} bytes"


def _entry(parameter: str, name: str, top: Path, path: Path) -> IncludedFile:
    kind = path.lstat().st_mode
    link = ""
    if stat.S_ISLNK(kind):
        target = Path(os.path.realpath(path))  # Path.resolve() fails for a link to itself, before Python 3.13
        if not target.is_relative_to(top):
            raise ConfigurationError(f"{parameter} holds a link that leads out of it: {path} to {target}")
        link = os.path.relpath(target, path.parent)
    elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise ConfigurationError(f"{parameter} holds something that is neither a file nor a folder: {path}")
    elif not os.access(path, os.R_OK):
        raise ConfigurationError(f"{parameter} holds a file that you may not read: {path}")
    return IncludedFile(name=(Path(name) / path.relative_to(top)).as_posix(), path=path, link=link)


def _raise(error: OSError) -> None:
    raise ConfigurationError(f"includes: {error.filename} cannot be read: {error.strerror}") from error
