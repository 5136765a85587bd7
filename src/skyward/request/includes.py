"""Local files and folders of ``Image(includes=)``: what is sent of them, and what stays as git would have it."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    import re

    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

_REPOSITORIES = frozenset({".git", ".hg", ".svn", ".bzr", ".jj"})
_CACHES = frozenset(
    {
        *("__pycache__", "__pypackages__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
        *(".eggs", ".hypothesis", ".nox", ".tox", "node_modules"),
    }
)
_CACHE_TAG = b"Signature: 8a477f597d28d172789f06886806bc55"
"""Beginning of CACHEDIR.TAG in folders of caches (https://bford.info/cachedir/)."""

_GIT_TIMEOUT_S = 20.0
_OF_A_REPOSITORY = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"})
"""Variables by which hooks of git name another repository than the folder's."""


def unwanted(path: Path, *, is_folder: bool) -> str:
    """Return what a file or folder is if no call needs it, as text for people; empty for all others."""
    if path.name in _REPOSITORIES:
        return "repository"
    if not is_folder:
        return "compiled Python" if path.suffix == ".pyc" else ""
    if path.name in _CACHES or _is_tagged(path):
        return "cache"
    if (path / "pyvenv.cfg").is_file() or (path / "conda-meta").is_dir():
        return "environment"
    return ""


def _is_tagged(folder: Path) -> bool:
    try:
        with (folder / "CACHEDIR.TAG").open("rb") as tag:
            return tag.read(len(_CACHE_TAG)) == _CACHE_TAG
    except OSError:
        return False


class GitRules:
    """Rules by which git ignores files below a folder, with the precedence that git gives them.

    These are, from the strongest: the ``.gitignore`` of the file's folder, of the folders above up to the repository's,
    the repository's ``info/exclude``, and the user's ``core.excludesFile``. Where there is no repository, the folders
    up to the current one count, if the folder is within that. A rule that means the folder itself, or one that it is
    in, does not hold: the folder was asked for. Files that the repository has are not ignored.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        repository = next((folder for folder in (top, *top.parents) if (folder / ".git").exists()), None)
        here = Path.cwd().resolve()
        self._base = repository or (here if top.is_relative_to(here) else top)
        self._rules: dict[Path, Sequence[GitIgnoreSpecPattern]] = {}
        excludes = [_users_excludes(top), *([] if repository is None else [_info_exclude(repository)])]
        self._outermost = [self._read(path, self._base) for path in reversed(excludes)]
        self._tracked = frozenset[Path]() if repository is None else _tracked_though_ignored(top)
        self._only_tracked: set[Path] = set()
        self._with_tracked = {parent for path in self._tracked for parent in path.parents}

    def ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Return True if git ignores a file or folder below the top. Folders come before what is in them."""
        if path in self._tracked:
            return False
        ignored = path.parent in self._only_tracked or self._rule_out(path, "/" if is_folder else "")
        if ignored and path in self._with_tracked:
            self._only_tracked.add(path)
            return False
        return ignored

    def _rule_out(self, path: Path, end: str) -> bool:
        for folder in self._folders_above(path):
            verdict = _verdict(self._of(folder), path.relative_to(folder).as_posix() + end)
            if verdict is not None:
                return verdict
        name = path.relative_to(self._base).as_posix() + end
        verdicts = (_verdict(rules, name) for rules in self._outermost)
        return next((verdict for verdict in verdicts if verdict is not None), False)

    def _folders_above(self, path: Path) -> Iterator[Path]:
        for folder in path.parents:
            yield folder
            if folder == self._base:
                return

    def _of(self, folder: Path) -> Sequence[GitIgnoreSpecPattern]:
        if folder not in self._rules:
            self._rules[folder] = self._read(folder / ".gitignore", folder)
        return self._rules[folder]

    def _read(self, path: Path, folder: Path) -> Sequence[GitIgnoreSpecPattern]:
        """Read the rules of a file for a folder, without those that ignore the top as a whole."""
        try:
            text = path.read_bytes().decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        except OSError:
            return ()
        if not text.strip():
            return ()
        from pathspec import GitIgnoreSpec

        lines = filter(_is_rule, text.replace("\r\n", "\n").split("\n"))
        rules = [rule for rule in GitIgnoreSpec.from_lines(lines).patterns if rule.include is not None]
        parts = self._top.relative_to(folder).parts if self._top.is_relative_to(folder) else ()
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[:count]) + "/"
            if _verdict(rules, name):
                rules = [rule for rule in rules if not rule.include or not _means(rule, name)]
        return rules


def _verdict(rules: Sequence[GitIgnoreSpecPattern], name: str) -> bool | None:
    """Return what the last rule that means a path says of it; None if no rule does."""
    return next((rule.include for rule in reversed(rules) if _means(rule, name)), None)


def _means(rule: GitIgnoreSpecPattern, name: str) -> bool:
    """Return True if a rule is about a path itself.

    pathspec's expressions match everything below a folder as well, and end with a group at the separator after what the
    rule names. Git decides on each folder before what is in it, so that a rule such as ``!name/`` brings back no more.
    """
    expression = cast("re.Pattern[str]", rule.regex)
    return any(match.lastgroup is None or match.end() == len(name) for match in expression.finditer(name))


def _is_rule(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:  # git passes over it, too
        return False
    return True


def _info_exclude(repository: Path) -> Path:
    place = repository / ".git"
    if place.is_file():  # of a further working tree: its repository is elsewhere
        common = _git(repository, "rev-parse", "--git-common-dir").strip()
        place = repository / common if common else place
    return place / "info" / "exclude"


def _users_excludes(folder: Path) -> Path:
    stated = _git(folder, "config", "--type=path", "--get", "core.excludesFile").strip("\n")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(stated) if stated else Path(config, "git", "ignore")


def _tracked_though_ignored(top: Path) -> frozenset[Path]:
    """Return the files below a folder that its repository has although its rules ignore them."""
    names = _git(top, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard")
    return frozenset(top / name for name in names.split("\0") if name)


def _git(folder: Path, *arguments: str) -> str:
    """Return what git answers; nothing if there is no git, or it refuses."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    # A repository's settings must not start a program of its choice.
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *arguments]
    try:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(ran.stdout) if ran.returncode == 0 else ""


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


def included_files(includes: Sequence[str]) -> tuple[IncludedFile, ...]:
    """Return the files to send; see :func:`select_files`."""
    return select_files(includes)[0]


def describe_includes(includes: Sequence[str]) -> Iterator[str]:
    """Yield lines for the user: what is left out, with sizes, and a warning if much is sent. Blocks."""
    files, left_out = select_files(includes)
    sent = bytes_of(files)
    if sent > _LARGE_BYTES:
        largest = max(files, key=lambda file: 0 if file.link else file.path.stat().st_size)
        yield (
            f"includes are {size_words(sent)}, which every node gets from here; the largest file is {largest.path} "
            f"({size_words(largest.path.stat().st_size)}). A volume, or an argument of calls, is better for data"
        )
    if left_out:
        looks = iter(range(_COUNTED))
        sizes = {
            name: sum(_bytes_of(file) for file, _ in zip(_files_in(paths), looks, strict=False))
            for name, paths in _grouped(left_out).items()
        }
        listed = [f"{name} ({size_words(count)})" for name, count in sizes.items()]
        more = " or more" if next(looks, None) is None else ""
        yield (
            f"includes leave out {', '.join(listed)}{more}: repositories, environments, caches and what git ignores. "
            "A file that is named itself is sent"
        )


def bytes_of(files: Iterable[IncludedFile]) -> int:
    """Return the size of all files together; links and folders have none. Blocks."""
    return sum(file.path.stat().st_size for file in files if not file.link and file.path.is_file())


def select_files(includes: Sequence[str]) -> tuple[tuple[IncludedFile, ...], Mapping[Path, str]]:
    """Return all files below the paths in ``includes``, each path under its last name, and what is left out, with why.

    Left out are repositories' own files, Python environments, caches, compiled Python, and what git ignores; never a
    path that is named itself.

    Raises :class:`~skyward.errors.ConfigurationError`, which names the path: it does not exist, would bring this
    program's whole folder, has another one's name, holds a link that leads out of it, or nothing of it would be sent.
    """
    roots = [
        (f"includes[{i}] ({path!r})", Path(os.path.abspath(os.path.expanduser(path))))
        for i, path in enumerate(includes)
    ]
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
    left_out: dict[Path, str] = {}
    for parameter, root in roots:
        without: dict[Path, str] = {}
        below = list(_below(parameter, root, without))
        if without and all(file.path.is_dir() and not file.link for file in below):
            named = ", ".join(map(str, [*without][:3]))
            raise ConfigurationError(
                f"{parameter} would send nothing: all of it is ignored by git, or belongs to a repository, an "
                f"environment or a cache ({named}). Name the files themselves, which are sent then"
            )
        files += below
        left_out |= without
    return tuple(files), left_out


def files_below(folder: Path) -> tuple[IncludedFile, ...]:
    """Return the files of a folder, under its name, without what :func:`select_files` leaves out.

    Raises :class:`~skyward.errors.ConfigurationError`: a link leads out of it, or a file cannot be read.
    """
    return tuple(_below(str(folder), folder, {}))


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


def _below(parameter: str, root: Path, left_out: dict[Path, str]) -> Iterator[IncludedFile]:
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
                left_out[path] = why
            else:
                kept.append(path)
        folders[:] = sorted({path.name for path in kept}.intersection(folders))
        for path in kept:
            yield _entry(parameter, root.name, top, path)


def _grouped(left_out: Mapping[Path, str]) -> Mapping[str, Sequence[Path]]:
    """Return what is left out by what it is called in a message: folders by name, files by the reason."""
    groups: dict[str, list[Path]] = {}
    for path, why in left_out.items():
        groups.setdefault(why if why in (".gitignore", "compiled Python") else path.name, []).append(path)
    return {
        name if len(paths) == 1 and paths[0].name == name else f"{len(paths)} x {name}": paths
        for name, paths in groups.items()
    }


def _files_in(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            yield path
        else:
            yield from (Path(folder, name) for folder, _, files in os.walk(path) for name in files)


def _bytes_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0


def size_words(count: int) -> str:
    """Return a number of bytes with a unit, in two digits."""
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
