"""This process's installed distributions, as their metadata states them.

Metadata is foreign data: builders leave folders of their own machines in it, failed installations leave half of it, and
installers keep tokens in it. What cannot be read counts as absent; what may be a secret is never read.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from skyward.request.checks import bare_url
from skyward.shipping.project_modules import search_path_state

_MACHINES_OWN = frozenset({".so", ".pyd", ".dylib", ".dll", ".a", ".pth"})
"""Endings of files that are for this machine only."""

_NAME = re.compile(r"[A-Z0-9]([A-Z0-9._-]*[A-Z0-9])?", re.ASCII | re.IGNORECASE)
"""Names that installers accept; pip renames what it removes to ``~umpy``, and a crash leaves that behind."""


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
    FILES = "files"
    """No place that still exists: the installed files themselves are all there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Installed distribution.

    Attributes:
        name: canonical name.
        version: its version; empty if its metadata states none that an installer accepts.
        requires: its requirements, those of extras included.
        origin: the place it was installed from.
        place: path or URL of that place, a repository's in pip's notation; empty for an index.
        imports: folders that an editable installation adds to the import path.
        needs_login: True if its URL held something that may be a secret, which ``place`` lacks.
        note: why it is not taken from the place that its metadata states; empty if it is.
        metadata: the folder or file of its metadata.
    """

    name: str
    version: str
    requires: tuple[Requirement, ...] = ()
    origin: Origin = Origin.INDEX
    place: str = ""
    imports: tuple[str, ...] = ()
    needs_login: bool = False
    note: str = ""
    metadata: Path | None = None

    @property
    def pure_files(self) -> Sequence[Path]:
        """Its installed files if they are nothing but Python and data, and all exist; else none."""
        if self.metadata is None or self.metadata.suffix != ".dist-info":
            return ()
        inside = [path for path in _Metadata(self.metadata).listed if ".." not in path.parts and not path.is_absolute()]
        files = [self.metadata.parent / path for path in inside if path.suffix != ".pyc"]
        code = [path for path in files if self.metadata not in path.parents]
        whole = all(path.is_file() and path.suffix not in _MACHINES_OWN for path in code)
        return files if whole and any(path.suffix == ".py" for path in code) else ()


class InstalledDistributions(Mapping[str, Distribution]):
    """Installed distributions by canonical name, each read when it is asked for.

    Of two with one name the first on the path counts that can be read, as for imports; in one folder the newest: an
    upgrade that failed halfway leaves the older one's metadata behind.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._found: dict[str, _Metadata] = {}
        self._read: dict[str, Distribution] = {}
        self._packages: dict[str, frozenset[str]] = {}
        for folder in folders:
            for name, places in _metadata_in(Path(folder or ".")).items():
                best = max(map(_Metadata, places), key=_Metadata.rank) if len(places) > 1 else _Metadata(places[0])
                if name not in self._found or (best.is_readable and not self._found[name].is_readable):
                    self._found[name] = best

    def without(self, names: Collection[str]) -> InstalledDistributions:
        """Return all but those of these names."""
        others = InstalledDistributions(())
        others._found = {name: found for name, found in self._found.items() if name not in names}
        return others

    def __getitem__(self, name: str) -> Distribution:
        if name not in self._read:
            self._read[name] = self._found[name].distribution(name)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def packages_of(self, name: str) -> frozenset[str]:
        """Return the names of the top-level modules and packages that a distribution has."""
        if name not in self._packages:
            self._packages[name] = frozenset(self._found[name].top_levels(name))
        return self._packages[name]

    def from_folders(self) -> Sequence[Distribution]:
        """Return the distributions that were installed from a folder of sources. Reads little of the others."""
        return [self[name] for name, found in self._found.items() if found.source.origin is Origin.FOLDER]

    def owners_of(self, package: str) -> Sequence[str]:
        """Return the distributions that have a top-level module; several share a namespace."""
        likely = canonicalize_name(package)
        if likely in self and package in self.packages_of(likely):
            return [likely]
        return [name for name in self if package in self.packages_of(name)]

    def has_module(self, name: str, module: str) -> bool:
        """Return True if a distribution lists a file of this very module."""
        path = module.replace(".", "/")
        return any(str(file).startswith((f"{path}/", f"{path}.")) for file in self._found[name].listed)


def installed_distributions() -> InstalledDistributions:
    """Return this environment's distributions. Blocks: reads the folders of the import path, if they changed."""
    return _installed(search_path_state())


@functools.lru_cache(maxsize=1)
def _installed(_: tuple[object, ...]) -> InstalledDistributions:
    return InstalledDistributions(sys.path)


def _metadata_in(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Return the places of metadata in a folder of the import path, by the names of the distributions."""
    places_by_name: dict[str, list[Path]] = {}
    places = [path for path in folder.glob("*.*-info") if path.suffix in (".dist-info", ".egg-info")]
    if folder.suffix == ".egg" and (folder / "EGG-INFO").is_dir():
        places_by_name[canonicalize_name(folder.name.partition("-")[0])] = [folder / "EGG-INFO"]
    for path in sorted(places):
        name = path.stem.partition("-")[0]
        if _NAME.fullmatch(name):
            places_by_name.setdefault(canonicalize_name(name), []).append(path)
    return places_by_name


def marker_environment(extra: str = "") -> dict[str, str]:
    """Return the values of markers on nodes: Linux, with this process's version of Python."""
    from packaging.markers import default_environment

    markers = {name: str(value) for name, value in default_environment().items()}
    if markers["sys_platform"] != "linux":
        markers |= {"platform_machine": "x86_64", "platform_release": "", "platform_version": ""}
    return markers | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": extra}


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


class _Source(NamedTuple):
    """Place that metadata states; see :class:`Distribution`."""

    origin: Origin = Origin.INDEX
    place: str = ""
    needs_login: bool = False
    note: str = ""


class _Metadata(importlib.metadata.Distribution):
    """Metadata of one distribution in a ``.dist-info`` or ``.egg-info``, read whatever state it is in."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def read_text(self, filename: str) -> str:
        """Return the text of a file of the metadata, or of the metadata that is one file; empty if there is none."""
        return _text_of(self._place / filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return the path of an installed file."""
        return self._place.parent / path

    def rank(self) -> tuple[bool, Version]:
        """Return a key by which the distribution is chosen that its folder really has."""
        return self.is_readable, Version(self._version or "0")

    @property
    def is_readable(self) -> bool:
        """True if it states a version."""
        return bool(self._headers) and bool(self._version)

    def distribution(self, name: str) -> Distribution:
        """Return the distribution."""
        source = self.source
        return Distribution(
            name=name,
            version=self._version,
            requires=tuple(self._requirements()),
            imports=tuple(self._import_folders()) if source.origin is Origin.FOLDER else (),
            metadata=self._place,
            **source._asdict(),
        )

    def top_levels(self, name: str) -> Iterator[str]:
        """Yield the names of the top-level modules; without a list, that of the distribution if it lies beside."""
        if stated := [word for word in self.read_text("top_level.txt").split() if word.isidentifier()]:
            yield from stated
            return
        for file in self.listed:
            first = file.parts[0]
            if len(file.parts) > 1 or first.endswith((".py", ".so")):
                yield first.partition(".")[0]
        module = name.replace("-", "_")
        if not self.listed and any((self._place.parent / path).exists() for path in (module, f"{module}.py")):
            yield module

    @functools.cached_property
    def listed(self) -> Sequence[PurePosixPath]:
        """The installed files, relative to the folder of the import path."""
        lines = (self.read_text("RECORD") or self.read_text("SOURCES.txt")).replace("\0", "").splitlines()
        try:
            names = [row[0] for row in csv.reader(lines) if row]
        except csv.Error:  # a quotation that does not end
            names = [line.partition(",")[0] for line in lines]
        installed = self.read_text("installed-files.txt").splitlines()  # relative to the metadata
        names += [os.path.relpath(os.path.join(self._place, name), self._place.parent) for name in installed]
        return [path for name in names if (path := PurePosixPath(name)).parts]

    @functools.cached_property
    def _headers(self) -> Any:
        return self.metadata

    @functools.cached_property
    def _version(self) -> str:
        """The version; if the file states none, that in the folder's name."""
        for version in (*self._headers.get_all("Version", ()), self._place.stem.partition("-")[2].partition("-")[0]):
            try:
                Version(version)
            except InvalidVersion:
                continue
            return version.strip()
        return ""

    def _requirements(self) -> Iterator[Requirement]:
        for line in self.requires or ():
            try:
                yield Requirement(line)
            except InvalidRequirement:  # of a distribution older than the standard; its installer passed over it too
                continue

    @functools.cached_property
    def source(self) -> _Source:
        """Return where the distribution was installed from, as far as it exists here.

        A folder or an archive that does not exist was on the machine of the package's builder, or has moved: only an
        index may have that version.
        """
        if self.read_text("INSTALLER").strip() == "conda":
            return _Source()
        sources = self._place.parent
        if self._place.suffix == ".egg-info" and self._place.is_dir() and _is_project(sources):
            return _Source(Origin.FOLDER, str(sources))  # `setup.py develop`, or a project's folder on the path
        stated = _stated_source(self.read_text("direct_url.json"))
        if stated.origin is Origin.FOLDER and not _is_project(Path(stated.place)):
            return _Source(note=f"there is no project in {stated.place}, where it was installed from")
        if stated.origin is Origin.ARCHIVE and not Path(stated.place).is_file():
            return _Source(note=f"there is no {stated.place}, which it was installed from")
        return stated

    def _import_folders(self) -> Iterator[str]:
        if self._place.suffix == ".egg-info":
            yield str(self._place.parent)
        for file in self.listed:
            if file.suffix == ".pth" and len(file.parts) == 1:
                text = _text_of(self._place.parent / file)
                yield from (line for line in text.splitlines() if line and not line.startswith(("import", "#")))


def _stated_source(text: str) -> _Source:
    """Read ``direct_url.json`` (https://packaging.python.org/specifications/direct-url/)."""
    try:
        stated = cast("dict[str, Any]", json.loads(text))
        url = urlsplit(str(stated["url"]))
    except (ValueError, KeyError, TypeError):
        return _Source()
    path = unquote(url.path) if url.scheme == "file" else ""
    within = str(stated.get("subdirectory") or "")
    bare = bare_url(url.geturl())
    needs_login = bare != url.geturl()
    match stated:
        case {"vcs_info": {"vcs": str(system), "commit_id": str(commit)}}:
            place = f"{system}+{bare}@{commit}" + (f"#subdirectory={within}" if within else "")
            return _Source(Origin.REPOSITORY, place, needs_login=needs_login)
        case {"vcs_info": _}:
            return _Source()
        case {"dir_info": _}:
            return _Source(Origin.FOLDER, str(Path(path, within))) if path else _Source()
        case _:
            return _Source(Origin.ARCHIVE, path) if path else _Source(Origin.ADDRESS, bare, needs_login=needs_login)


def _is_project(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg"))


def is_satisfied(requirements: Sequence[str]) -> bool:
    """Return True if the running interpreter satisfies every requirement, extras included."""
    return all(_has(requirement) for requirement in requirements)


def without_implied(requirements: Sequence[str], pins: Sequence[str]) -> Sequence[str]:
    """Return the requirements that the pins do not imply: ``numpy==2.4.6`` implies ``numpy>=2``."""
    fixed: dict[str, Requirement] = {canonicalize_name(pin.name): pin for pin in map(Requirement, pins)}
    return [text for text in requirements if not _is_implied(text, fixed)]


def _is_implied(text: str, fixed: Mapping[str, Requirement]) -> bool:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:  # a path
        return False
    pin = fixed.get(canonicalize_name(requirement.name))
    if pin is None or requirement.extras or requirement.url:
        return False
    versions = [each.version for each in pin.specifier if each.operator == "=="]
    return not requirement.specifier or any(requirement.specifier.contains(each, prereleases=True) for each in versions)


def _has(text: str, extra: str = "") -> bool:
    try:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            return True
        distribution = importlib.metadata.distribution(requirement.name)
        fits = not requirement.url and requirement.specifier.contains(distribution.version, prereleases=True)
        return fits and all(_has_extra(distribution, name) for name in requirement.extras)
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False
    except (KeyError, TypeError, ValueError):  # its metadata is damaged
        return False


def _has_extra(distribution: importlib.metadata.Distribution, extra: str) -> bool:
    of_extra = [text for text in distribution.requires or () if "extra" in text.partition(";")[2]]
    return all(_has(text, extra) for text in of_extra)
