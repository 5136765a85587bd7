"""Files of a folder that its user does not mean by its name: what git ignores, environments, caches, repositories."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import re

    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

__all__ = ["GitRules", "unwanted"]

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
