"""This process's installed distributions, as their metadata states them."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyward.wire.code.ownership import search_path_state

__all__ = ["Distribution", "InstalledDistributions", "Origin", "installed_distributions", "marker_environment"]


class Origin(Enum):
    """Place that a distribution was installed from."""

    INDEX = "index"
    """A package index, or unknown."""
    FOLDER = "folder"
    """A folder of sources of this machine, editable or not."""
    ARCHIVE = "archive"
    """A wheel or a source archive of this machine."""
    ADDRESS = "address"
    """A URL of an archive."""
    REPOSITORY = "repository"
    """A commit of a repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Installed distribution.

    Attributes:
        name: canonical name.
        version: its version.
        requires: its requirements, those of extras included.
        origin: the place it was installed from.
        place: path or URL of that place, a repository's in pip's notation; empty for an index.
        imports: folders that an editable installation adds to the import path.
    """

    name: str
    version: str
    requires: tuple[Requirement, ...] = ()
    origin: Origin = Origin.INDEX
    place: str = ""
    imports: tuple[str, ...] = ()


class InstalledDistributions(Mapping[str, Distribution]):
    """Installed distributions by canonical name, each read when it is asked for; of two with one name the first."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._paths: dict[str, Path] = {}
        self._read: dict[str, Distribution] = {}
        self._packages: dict[str, frozenset[str]] = {}
        for folder in folders:
            for path in sorted(Path(folder or ".").glob("*.*-info")):
                if path.suffix in (".dist-info", ".egg-info"):
                    self._paths.setdefault(canonicalize_name(path.stem.partition("-")[0]), path)

    def __getitem__(self, name: str) -> Distribution:
        if name not in self._read:
            self._read[name] = _read(name, importlib.metadata.Distribution.at(self._paths[name]))
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def packages_of(self, name: str) -> frozenset[str]:
        """Return the names of the top-level modules and packages that a distribution has."""
        if name not in self._packages:
            self._packages[name] = frozenset(_top_levels(importlib.metadata.Distribution.at(self._paths[name])))
        return self._packages[name]

    def owners_of(self, package: str) -> Sequence[str]:
        """Return the distributions that have a top-level module; several share a namespace."""
        likely = canonicalize_name(package)
        if likely in self and package in self.packages_of(likely):
            return [likely]
        return [name for name in self if package in self.packages_of(name)]


def installed_distributions() -> InstalledDistributions:
    """Return this environment's distributions. Blocks: reads the folders of the import path, if they changed."""
    return _installed(search_path_state())


@functools.lru_cache(maxsize=1)
def _installed(_: tuple[object, ...]) -> InstalledDistributions:
    return InstalledDistributions(sys.path)


def _top_levels(found: importlib.metadata.Distribution) -> Iterator[str]:
    if stated := (found.read_text("top_level.txt") or "").split():
        yield from stated
        return
    for file in found.files or ():
        first = file.parts[0]
        if len(file.parts) > 1 or first.endswith((".py", ".so")):
            yield first.partition(".")[0]


def marker_environment(extra: str = "") -> dict[str, str]:
    """Return the values of markers on nodes: Linux, with this process's version of Python."""
    from packaging.markers import default_environment

    here = {name: str(value) for name, value in default_environment().items()}
    if here["sys_platform"] != "linux":
        here |= {"platform_machine": "x86_64", "platform_release": "", "platform_version": ""}
    return here | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": extra}


def _read(name: str, found: importlib.metadata.Distribution) -> Distribution:
    origin, place = Origin.INDEX, ""
    if (text := found.read_text("direct_url.json")) is not None:
        origin, place = _origin(json.loads(text))
    return Distribution(
        name=name,
        version=found.version,
        requires=tuple(_requirements(found.requires or ())),
        origin=origin,
        place=place,
        imports=tuple(_import_folders(found)) if origin is Origin.FOLDER else (),
    )


def _origin(stated: Mapping[str, Any]) -> tuple[Origin, str]:
    """Return origin and place from ``direct_url.json`` (https://packaging.python.org/specifications/direct-url/)."""
    url = _without_credentials(str(stated["url"]))
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    match stated:
        case {"vcs_info": dict()}:
            within = f"#subdirectory={stated['subdirectory']}" if stated.get("subdirectory") else ""
            commit: Mapping[str, str] = stated["vcs_info"]
            return Origin.REPOSITORY, f"{commit['vcs']}+{url}@{commit['commit_id']}{within}"
        case {"dir_info": _}:
            return Origin.FOLDER, str(Path(path) / str(stated.get("subdirectory", "")))
        case _ if path:
            return Origin.ARCHIVE, path
        case _:
            return Origin.ADDRESS, url


def _without_credentials(url: str) -> str:
    """Return a URL without a password or token, which its installer should not have kept; ``ssh://git@`` stays."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl() if parts.scheme in ("http", "https") or ":" in user else url


def _requirements(lines: list[str] | tuple[str, ...]) -> Iterator[Requirement]:
    for line in lines:
        try:
            yield Requirement(line)
        except InvalidRequirement:  # of a distribution older than the standard; its installer passed over it too
            continue


def _import_folders(found: importlib.metadata.Distribution) -> Iterator[str]:
    for file in found.files or ():
        if file.suffix == ".pth" and len(file.parts) == 1:
            lines = Path(str(file.locate())).read_text(encoding="utf-8").splitlines()
            yield from (line for line in lines if line and not line.startswith(("import ", "import\t", "#")))
