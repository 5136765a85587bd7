"""Who owns a module: Python, an installed distribution, or the user.

The metadata of distributions decides, not the name of a folder: ``pip install --target``, ``uv run --with``, a layer or
a zip put packages anywhere on ``sys.path``. A module of the user's may have the name of any other one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import ModuleType

__all__ = ["OWN_PACKAGES", "added_package_folders", "is_installed_at", "is_the_users", "place_of", "search_path_state"]

OWN_PACKAGES = frozenset({"skyward", "skyward_dask", "skyward_joblib"})
"""Packages of Skyward, which every node has, from wherever they are imported here."""

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_the_users(module: ModuleType) -> bool:
    """Return True if an imported module comes from a file of the user's own."""
    place = place_of(getattr(module, "__spec__", None)) or _stated_place(module)
    return place is not None and not is_installed_at(module.__name__, place)


def place_of(spec: ModuleSpec | None) -> str | None:
    """Return the path of a module's file, or of its folder; None if it has neither, as built-in modules."""
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), None)


def _stated_place(module: ModuleType) -> str | None:
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return place if isinstance(place, str) else None


@functools.lru_cache(maxsize=4096)
def is_installed_at(name: str, place: str) -> bool:
    """Return True if the module of this full name, at this path, belongs to Python or to a distribution.

    Reads metadata only where the path does not tell, of the folder that the module was found in, and once.
    """
    package = name.partition(".")[0]
    if package in OWN_PACKAGES:
        return True
    if "." in name and (outer := _place_of_package(package)) is not None and Path(outer).parent in Path(place).parents:
        return is_installed_at(package, outer)
    given, resolved = Path(os.path.abspath(place)), Path(place).resolve()
    if any(resolved.is_relative_to(folder) for folder in _folders_of_python()) or _is_in_package_folder(resolved):
        return True
    return any(_is_recorded(name, path) for path in dict.fromkeys((given, resolved)))


def _place_of_package(package: str) -> str | None:
    """Return the file of an imported package, by which the modules in its folder are judged; None for a namespace."""
    place = place_of(getattr(sys.modules.get(package), "__spec__", None))
    return place if place is not None and PurePath(place).stem == "__init__" else None


def search_path_state() -> tuple[object, ...]:
    """Return a value that changes when a top-level module appears in a folder of ``sys.path`` or goes from one."""
    return tuple((folder, _mtime_ns(folder)) for folder in sys.path)


def added_package_folders() -> list[str]:
    """Return the folders and archives with packages that this program itself has put onto ``sys.path``.

    Another program of this interpreter does not find what is in them, as in a PEX or after a bootstrap of a layer.
    """
    known = {str(folder) for folder in _folders_of_python()}
    known |= {str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    known |= {line for folder in map(Path, [*known]) for file in folder.glob("*.pth") for line in _lines(file)}
    entries = [str(Path(entry).resolve()) for entry in sys.path if entry]
    return [entry for entry in dict.fromkeys(entries) if entry not in known and _has_packages(Path(entry))]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _has_packages(entry: Path) -> bool:
    if any((entry / package / "__init__.py").is_file() for package in OWN_PACKAGES):
        return True
    return any(True for _ in importlib.metadata.distributions(path=[str(entry)]))


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


@functools.cache
def _folders_of_python() -> tuple[Path, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders += [entry for entry in sys.path if PurePath(entry).name == zipped]
    return tuple(Path(folder).resolve() for folder in folders)


def _is_in_package_folder(place: Path) -> bool:
    # The metadata of an egg is inside it, and that of a wheel which is imported as it is, too.
    return any(part in _PACKAGE_FOLDERS or part.endswith((".egg", ".whl")) for part in place.parts[:-1])


def _is_recorded(name: str, place: Path) -> bool:
    """Return True if a distribution in a folder that the module may have been found in lists its file."""
    package = name.partition(".")[0]
    for root in _roots(name, place):
        path = place.relative_to(root).as_posix()
        likely = importlib.metadata.distributions(name=package, path=[str(root)])
        if any(_lists(_listing(found), package, path) for found in likely):
            return True
        if any(_lists(each, package, path) for each in _listings(str(root), _mtime_ns(str(root)))):
            return True
    return False


def _roots(name: str, place: Path) -> Iterator[Path]:
    """Yield the folders from which this path may have been imported: by the module's name, and those on the path."""
    above = place.parent if place.name.startswith("__init__.") else place
    named = [*above.parents][name.count(".") :][:1]
    searched = [Path(os.path.abspath(entry)) for entry in sys.path]
    yield from dict.fromkeys(root for root in (*named, *searched) if root in place.parents)


@functools.lru_cache(maxsize=64)
def _listings(root: str, _: int) -> tuple[tuple[str, str], ...]:
    """Return the listings of all distributions in a folder or zip, as it was at a time."""
    return tuple(_listing(found) for found in importlib.metadata.distributions(path=[root]))


def _listing(found: importlib.metadata.Distribution) -> tuple[str, str]:
    """Return how a distribution's metadata lists its files, and the list; empty for one in a folder of sources."""
    if (record := _text(found, "RECORD")) is not None:
        return "files", f"\n{record}"
    if (record := _text(found, "installed-files.txt")) is not None:
        return "files", f"\n{record}".replace("\n../", "\n").replace("\n", ",\n")
    if _text(found, "SOURCES.txt") is not None:  # the by-product of an editable installation, or of a build
        return "nothing", ""
    names = (_text(found, "top_level.txt") or "").split() or [_name(found).replace("-", "_")]
    return "packages", "\n".join(["", *names, ""])


def _text(found: importlib.metadata.Distribution, name: str) -> str | None:
    try:
        return found.read_text(name)
    except (OSError, UnicodeError):  # damaged, or in another encoding: as if it were not there
        return None


def _name(found: importlib.metadata.Distribution) -> str:
    try:
        return str(found.metadata["Name"])
    except (OSError, UnicodeError, KeyError, TypeError):
        return ""


def _lists(listing: tuple[str, str], package: str, path: str) -> bool:
    how, listed = listing
    match how:
        case "files":
            return f"\n{path}," in listed or f"\n{path}/" in listed
        case "packages":
            return f"\n{package}\n" in listed
        case _:
            return False
