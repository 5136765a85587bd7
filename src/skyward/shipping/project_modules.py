"""The user's own modules: which they are, their sources, and when these have changed.

The metadata of distributions decides who owns a module, not the name of a folder: ``pip install --target``,
``uv run --with``, a layer or a zip put packages anywhere on ``sys.path``. A module that a distribution owns goes by
name. One of the user's goes by name too, with its source: workers import it from that
(:mod:`skyward.shipping.received_modules`), so that everything that looks up a class by its name works. The imports
of a source are followed, those inside functions included; so are those of functions that go by value.

* A module that this process has imported goes as it was when it was first needed, and again after
  :func:`importlib.reload`. One that it has not is read again whenever its file changes. Values that the program
  assigned to it from outside stay here, which a warning says.
* With the first package of a project go the other files in its folder, up to a bound: data, compiled modules, and
  modules that no import statement names.
"""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import importlib.util
import logging
import os
import site
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from itertools import islice, pairwise
from operator import attrgetter, is_
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any, Final, cast
from weakref import WeakSet

from skyward.shipping.references import code_imports, inner_code
from skyward.wire.messages import ModuleSource

log = logging.getLogger("skyward.wire")

OWN_PACKAGES = frozenset({"skyward", "skyward_dask", "skyward_joblib"})
"""Packages of Skyward, which every node has, from wherever they are imported here."""

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_the_users(module: ModuleType) -> bool:
    """Return True if an imported module comes from a file of the user's own."""
    place = place_of(getattr(module, "__spec__", None)) or stated_place(module)
    return place is not None and not is_installed_at(module.__name__, place)


def place_of(spec: ModuleSpec | None) -> str | None:
    """Return the path of a module's file, or of its folder; None if it has neither, as built-in modules."""
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), None)


def stated_place(module: ModuleType) -> str | None:
    """Return the path that an imported module states as its own; None if it states none."""
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
    if "." in name and (outer := _place_of_package(package)) is not None and _is_inside(place, os.path.dirname(outer)):
        return is_installed_at(package, outer)
    absolute, resolved = Path(os.path.abspath(place)), Path(_resolved(place))
    if any(_is_inside(str(resolved), folder) for folder in _folders_of_python()) or _is_in_package_folder(resolved):
        return True
    return any(_is_recorded(name, path) for path in dict.fromkeys((absolute, resolved)))


# Texts, not paths: this is asked of every module of the program, and a path takes 30 us.
def _is_inside(place: str, folder: str) -> bool:
    return place.startswith(folder.rstrip(os.sep) + os.sep)


def _resolved(place: str) -> str:
    folder, name = os.path.split(place)
    path = os.path.join(_resolved_folder(folder), name)
    return os.path.realpath(path) if os.path.islink(path) else path


@functools.lru_cache(maxsize=4096)
def _resolved_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _place_of_package(package: str) -> str | None:
    """Return the file of an imported package, by which the modules in its folder are judged; None for a namespace."""
    place = place_of(getattr(sys.modules.get(package), "__spec__", None))
    return place if place is not None and os.path.basename(place).startswith("__init__.") else None


def search_path_state() -> tuple[object, ...]:
    """Return a value that changes when a top-level module appears in a folder of ``sys.path`` or goes from one."""
    return tuple((folder, _mtime_ns(folder)) for folder in sys.path)


def added_package_folders() -> list[str]:
    """Return the folders and archives with packages that this program itself has put onto ``sys.path``.

    Another program of this interpreter does not find what is in them, as in a PEX or after a bootstrap of a layer.
    """
    known = {*_folders_of_python()}
    known |= {str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    known |= {line for folder in map(Path, [*known]) for line in _lines_of_pth_files(folder)}
    entries = [str(Path(entry).resolve()) for entry in sys.path if entry]
    return [entry for entry in dict.fromkeys(entries) if entry not in known and _has_packages(Path(entry))]


def _lines_of_pth_files(folder: Path) -> Iterator[str]:
    with suppress(OSError):  # another user's folder, as after `sudo -u`
        for file in folder.glob("*.pth"):
            with suppress(OSError, UnicodeDecodeError):
                yield from file.read_text(encoding="utf-8").splitlines()


def _has_packages(entry: Path) -> bool:
    with suppress(OSError):
        if any((entry / package / "__init__.py").is_file() for package in OWN_PACKAGES):
            return True
    return any(True for _ in importlib.metadata.distributions(path=[str(entry)]))


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    folders += [entry for entry in sys.path if PurePath(entry).name == zipped]
    return tuple(os.path.realpath(folder) for folder in folders)


def _is_in_package_folder(place: Path) -> bool:
    # The metadata of an egg is inside it, and that of a wheel which is imported as it is, too.
    return any(part in _PACKAGE_FOLDERS or part.endswith((".egg", ".whl")) for part in place.parts[:-1])


def _is_recorded(name: str, place: Path) -> bool:
    """Return True if a distribution in a folder that the module may have been found in lists its file."""
    package = name.partition(".")[0]
    for root in _roots(name, place):
        path = place.relative_to(root).as_posix()
        entries = f"\n{path},", f"\n{path}/", f"\n{package}{_ALL_OF_IT}"
        likely = importlib.metadata.distributions(name=package, path=[str(root)])
        if any(entry in _listing(owner) for owner in likely for entry in entries):
            return True
        if any(entry in _listings(str(root), _mtime_ns(str(root))) for entry in entries):
            return True
    return False


def _roots(name: str, place: Path) -> Iterator[Path]:
    """Yield the folders from which this path may have been imported: by the module's name, and those on the path."""
    above = place.parent if place.name.startswith("__init__.") else place
    named = [*above.parents][name.count(".") :][:1]
    searched = [Path(os.path.abspath(entry)) for entry in sys.path]
    yield from dict.fromkeys(root for root in (*named, *searched) if root in place.parents)


@functools.lru_cache(maxsize=64)
def _listings(root: str, _: int) -> str:
    """Return the listings of all distributions in a folder or zip, as it was at a time."""
    return "".join(map(_listing, importlib.metadata.distributions(path=[root])))


_ALL_OF_IT = "/*,"


def _listing(distribution: importlib.metadata.Distribution) -> str:
    """Return the files of a distribution, each on a line of its own and before a comma, or else its packages."""
    if (record := _metadata(distribution, "RECORD")) is not None:
        return f"\n{record}"
    if (record := _metadata(distribution, "installed-files.txt")) is not None:
        return f"\n{record}".replace("\n../", "\n").replace("\n", ",\n")
    if _metadata(distribution, "SOURCES.txt") is not None:  # the by-product of an editable installation, or of a build
        return ""
    names = (_metadata(distribution, "top_level.txt") or "").split() or [_name(distribution).replace("-", "_")]
    return "".join(f"\n{name}{_ALL_OF_IT}" for name in names)


def _metadata(distribution: importlib.metadata.Distribution, name: str) -> str | None:
    try:
        return distribution.read_text(name)
    except (OSError, UnicodeError):  # damaged, or in another encoding: as if it were not there
        return None


def _name(distribution: importlib.metadata.Distribution) -> str:
    try:
        return str(cast("Any", distribution.metadata).get("Name"))  # indexed, it warns where there is none
    except (OSError, UnicodeError, KeyError, TypeError):
        return ""


_FILE_BYTES = 1 << 20
_FILES_BYTES = 8 << 20
_ENTRIES = 2000
_NO_DATA = frozenset({"__init__.py", "__pycache__", "node_modules"})
_SETTLED_NS = 2_000_000_000
"""A file that was changed less than this before it was read may change again within one tick of its times."""


class ServedLoader(SourceFileLoader):
    """Loader of a module that was received.

    Attributes:
        received: its source.

    Args:
        received: its source.
        path: its file here.
    """

    def __init__(self, received: ModuleSource, path: str) -> None:
        super().__init__(received.name, path)
        self.received = received

    def is_package(self, fullname: str) -> bool:
        """See :class:`importlib.abc.InspectLoader`."""
        del fullname
        return self.received.is_package

    def get_source(self, fullname: str) -> str:
        """See :class:`importlib.abc.InspectLoader`."""
        del fullname
        return self.received.text

    def get_code(self, fullname: str) -> CodeType:
        """See :class:`importlib.abc.InspectLoader`; tracebacks name the file that the module has at its origin."""
        del fullname
        return self.source_to_code(self.received.text, self.received.origin)


class Way(Enum):
    """How definitions in a module travel."""

    INSTALLED = "installed"
    """By name: nodes have the module's package."""
    SOURCE = "source"
    """By name, next to the module's source."""
    VALUE = "value"
    """By value: nodes cannot get the module."""


_SPEC = attrgetter("__spec__")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class SourceSet:
    """Sources of some modules and of everything that they import, and what shows that they are still the ones to send.

    Attributes:
        sources: the sources, by name.
        loaded: names of the modules that are imported here.
        modules: these modules.
        specs: their specs, which a reload replaces.
        unloaded: names of the others, their files and the stamps of these.
        search_path: ``sys.path``.
        folders: state of its folders, if a module that may be needed is not found here, and may appear later; else
            None.
    """

    sources: tuple[ModuleSource, ...]
    loaded: tuple[str, ...] = ()
    modules: tuple[ModuleType, ...] = ()
    specs: tuple[ModuleSpec, ...] = ()
    unloaded: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    search_path: tuple[str, ...] = ()
    folders: tuple[object, ...] | None = None

    def is_current(self) -> bool:
        """Return True if all sources are still the ones to send. Looks at the files of modules not imported here."""
        # It is asked for each call: 2 µs for 30 modules.
        return (
            all(map(is_, map(sys.modules.get, self.loaded), self.modules))
            and all(map(is_, map(_SPEC, self.modules), self.specs))
            and tuple(sys.path) == self.search_path
            and all(stamp and name not in sys.modules and _stamp(file) == stamp for name, file, stamp in self.unloaded)
            and (self.folders is None or self.folders == search_path_state())
        )

    @property
    def editions(self) -> tuple[tuple[str, int], ...]:
        """Names and editions of the sources."""
        return tuple((source.name, source.edition_ns) for source in self.sources)


class SentSources:
    """Record of the sources that one connection has carried, so that each edition goes over it once."""

    def __init__(self) -> None:
        self._editions: dict[str, int] = {}
        self._sets: WeakSet[SourceSet] = WeakSet()

    def missing(self, sources: SourceSet) -> list[ModuleSource]:
        """Return the sources to send now; they count as sent."""
        if sources in self._sets:
            return []
        missing = [source for source in sources.sources if self._editions.get(source.name, 0) < source.edition_ns]
        self._editions |= {source.name: source.edition_ns for source in missing}
        self._sets.add(sources)
        return missing


def way_of(name: str) -> Way:
    """Return how definitions in the module of this name travel."""
    module = sys.modules.get(name)
    known = _ways.get(name)
    if known is not None and known[0] is module:
        return known[1]
    way = _way(name)
    _ways[name] = module, way
    return way


# By name, with the module object that was judged.
_ways: dict[str, tuple[Any, Way]] = {}


def _way(name: str) -> Way:
    module = sys.modules.get(name)
    package = name.partition(".")[0]
    if package in OWN_PACKAGES:
        return Way.INSTALLED
    if module is None or name == "__main__":
        return Way.VALUE
    spec = getattr(module, "__spec__", None)
    if isinstance(getattr(spec, "loader", None), ServedLoader):
        return Way.SOURCE
    if place_of(spec) is None and not getattr(module, "__file__", None) and not getattr(module, "__path__", None):
        # Built in, or made by a program: one that a package makes is made on nodes too.
        return (
            Way.INSTALLED if spec is not None or (package != name and way_of(package) is Way.INSTALLED) else Way.VALUE
        )
    if not is_the_users(module):
        return Way.INSTALLED
    return Way.SOURCE if _shelf().source(name) is not None else Way.VALUE


def sources_of(names: Iterable[str]) -> tuple[ModuleSource, ...]:
    """Return the user's own modules among ``names``, with their packages and imports, by name. Imports nothing."""
    sources = source_set(names)
    return sources.sources if sources is not None else ()


def source_set(names: Iterable[str]) -> SourceSet | None:
    """Return the sources of the user's own modules among ``names``, and of their imports.

    None if there are none, and each of the modules is found here.
    """
    return _shelf().set_of(frozenset(names))


def loaded_by_the_user() -> dict[str, list[str]]:
    """Return the names of the user's own modules that are loaded here, by their top-level package."""
    return _shelf().loaded()


def made_here(source: ModuleSource) -> bool:
    """Return True if this process has made ``source``, of a module that it has as it is."""
    return source.name in sys.modules and _shelf().source(source.name) == source


class _Shelf:
    """Sources by name."""

    def __init__(self) -> None:
        self._editions: dict[str, ModuleSource] = {}
        self._known: dict[str, tuple[ModuleSpec, ModuleSource | None]] = {}  # as last read
        self._sets: dict[frozenset[str], SourceSet | None] = {}
        self._installed: set[str] = set()
        self._path: list[str] = []
        self._loaded: dict[str, list[str]] = {}
        self._loaded_at: tuple[int, tuple[str, ...]] | None = None
        self._last_edition_ns = 0
        self._lock = threading.RLock()

    def set_of(self, names: frozenset[str]) -> SourceSet | None:
        with self._lock:
            sources = self._sets.get(names)
            if sources is None or not sources.is_current():
                sources = self._set_of(names)
                if len(self._sets) >= _ENTRIES:
                    self._sets.clear()
                self._sets[names] = sources
            return sources

    def _set_of(self, names: frozenset[str]) -> SourceSet | None:
        sources: dict[str, ModuleSource] = {}
        seen: set[str] = set()
        waiting = set(names)
        while waiting:
            seen.add(name := waiting.pop())
            if (source := self.source(name)) is not None:
                sources[name] = source
                waiting |= needed_with(source) - seen
        taken = dict(sources)
        for name in [*sources]:
            for outer in packages_around(name):
                if outer not in sources and ((spec := _spec_of(outer)) is None or spec.origin is None):
                    sources[outer] = self._edition(outer, "", is_package=True, origin="")
        folders = search_path_state() if any(map(self._is_absent, names)) else None
        if not sources and folders is None:
            return None
        loaded = {name: module for name in taken if (module := sys.modules.get(name)) is not None}
        files = {name: source.origin for name, source in taken.items() if name not in loaded}
        return SourceSet(
            sources=tuple(sources[name] for name in sorted(sources)),
            loaded=tuple(loaded),
            modules=tuple(loaded.values()),
            specs=tuple(map(_SPEC, loaded.values())),
            unloaded=tuple((name, file, _settled(_stamp(file))) for name, file in files.items()),
            search_path=tuple(sys.path),
            folders=folders,
        )

    def source(self, name: str) -> ModuleSource | None:
        """Return the source to send for this module now; None if it is not the user's, or has none."""
        if name == "__main__" or self._is_known_as_installed(name.partition(".")[0]):
            return None
        with self._lock:
            spec = _spec_of(name)
            if spec is None:
                return None
            if isinstance(spec.loader, ServedLoader):
                return spec.loader.received
            known_spec, source = self._known.get(name, (None, None))
            if known_spec is not spec or name not in sys.modules:
                source = self._read(name, spec)
                self._known[name] = spec, source
            return source

    def _read(self, name: str, spec: ModuleSpec) -> ModuleSource | None:
        place = place_of(spec)
        if place is None or is_installed_at(name, place):
            if "." not in name and spec.origin is not None:  # no namespace, of which the user may have a part
                self._installed.add(name)
            return None
        text = _text(name, spec)
        if text is None:
            compiled = _compiled_file(spec) if "." not in name else ()
            return (
                self._edition(name, "", is_package=False, origin=str(spec.origin), files=compiled) if compiled else None
            )
        is_package = spec.submodule_search_locations is not None
        origin = spec.origin if spec.has_location and spec.origin else next(iter(_folders(spec)), name)
        is_outermost = is_package and spec.origin and not self._is_inside_a_package(name)
        files = _files_in(_folders(spec)[0]) if is_outermost and _folders(spec) else ()
        return self._edition(name, text, is_package=is_package, origin=origin, files=files)

    def _is_inside_a_package(self, name: str) -> bool:
        """Return True if the files in a package's folder go with a package that it is in."""
        return any((spec := _spec_of(outer)) is not None and spec.has_location for outer in packages_around(name))

    def _edition(
        self, name: str, text: str, *, is_package: bool, origin: str, files: tuple[tuple[str, bytes], ...] = ()
    ) -> ModuleSource:
        latest = self._editions.get(name)
        if latest is None or (latest.text, latest.origin, latest.is_package, latest.files) != (
            text,
            origin,
            is_package,
            files,
        ):
            # Later than every earlier edition, even if the clock was set back: workers keep the latest one.
            self._last_edition_ns = edition_ns = max(time.time_ns(), self._last_edition_ns + 1)
            latest = self._editions[name] = ModuleSource(
                name=name, text=text, is_package=is_package, origin=origin, edition_ns=edition_ns, files=files
            )
        return latest

    def loaded(self) -> dict[str, list[str]]:
        """Return the user's loaded modules by package; search again, at first for 10 ms, when modules come or go."""
        state = len(sys.modules), tuple(sys.path)
        if self._loaded_at != state:
            loaded: dict[str, list[str]] = {}
            for name in list(sys.modules):
                if way_of(name) is Way.SOURCE:
                    loaded.setdefault(name.partition(".")[0], []).append(name)
            self._loaded, self._loaded_at = loaded, state
        return self._loaded

    def _is_absent(self, name: str) -> bool:
        """Return True if the top-level package of ``name`` is not found here."""
        package = name.partition(".")[0]
        return not self._is_known_as_installed(package) and _spec_of(package) is None

    def _is_known_as_installed(self, package: str) -> bool:
        if self._path != sys.path:  # another folder may come first now
            self._installed, self._path = set(OWN_PACKAGES), list(sys.path)
        return package in self._installed


@functools.cache
def _shelf() -> _Shelf:
    return _Shelf()


def _stamp(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(stamp: tuple[int, ...]) -> tuple[int, ...]:
    return stamp if stamp and time.time_ns() - stamp[-1] > _SETTLED_NS else ()


def packages_around(name: str) -> Iterator[str]:
    """Yield the names of the packages that a module is in, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def _text(name: str, spec: ModuleSpec) -> str | None:
    """None where no source can be read: of an extension, a module made by hand, a file that is gone or damaged."""
    if not spec.has_location or spec.origin is None:
        return "" if spec.submodule_search_locations is not None else None
    loader: Any = spec.loader
    try:
        if spec.origin.endswith(".py") and os.path.isfile(spec.origin):
            return importlib.util.decode_source(Path(spec.origin).read_bytes())
        return loader.get_source(name) if hasattr(loader, "get_source") else None  # in a zip
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


def _compiled_file(spec: ModuleSpec) -> tuple[tuple[str, bytes], ...]:
    """Return the file of a compiled module of 8 MiB at most; empty for any other module."""
    path = Path(spec.origin or "")
    try:
        is_meant = spec.has_location and path.name.endswith(tuple(EXTENSION_SUFFIXES))
        return ((path.name, path.read_bytes()),) if is_meant and path.stat().st_size <= _FILES_BYTES else ()
    except OSError:
        return ()


def _files_in(folder: str) -> tuple[tuple[str, bytes], ...]:
    """Return the files in a package's folder that go with it: each of 1 MiB at most, together 8 MiB at most."""
    files: list[tuple[str, bytes]] = []
    room = _FILES_BYTES
    for path in islice(_paths_in(folder), _ENTRIES):
        try:
            size = path.stat().st_size
            if path.is_file() and size <= min(_FILE_BYTES, room):
                files.append((path.relative_to(folder).as_posix(), path.read_bytes()))
                room -= size
        except OSError:  # it has just gone, or may not be read
            continue
    return tuple(files)


def _paths_in(folder: str) -> Iterator[Path]:
    for inside, folders, files in islice(os.walk(folder), _ENTRIES):
        shown = sorted(name for name in folders if not name.startswith(".") and name not in _NO_DATA)
        folders[:] = [name for name in shown if not os.path.exists(os.path.join(inside, name, "pyvenv.cfg"))]
        yield from (Path(inside, name) for name in sorted(files) if not name.startswith(".") and name not in _NO_DATA)


def _spec_of(name: str) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, but without importing the packages that it is in."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__spec__", None)
    package = name.rpartition(".")[0]
    if not package:
        return found_here(name, None)
    inside = _spec_of(package)
    return None if inside is None or inside.submodule_search_locations is None else _find_inside(name, _folders(inside))


def found_here(name: str, path: Sequence[str] | None, besides: MetaPathFinder | None = None) -> ModuleSpec | None:
    """Return what the finders of this process find, all but one of them."""
    finders = (finder for finder in sys.meta_path if finder is not besides)
    specs = (finder.find_spec(name, path) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _find_inside(name: str, folders: list[str]) -> ModuleSpec | None:
    try:
        return found_here(name, folders)
    except KeyError:  # a folder without __init__.py, whose spec can only be made when the package it is in is imported
        spec = ModuleSpec(name, None, is_package=True)
        last = name.rpartition(".")[2]
        spec.submodule_search_locations = [
            inner for folder in folders if os.path.isdir(inner := os.path.join(folder, last))
        ]
        return spec


def _folders(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or ())


def needed_with(source: ModuleSource) -> frozenset[str]:
    """Return the names in a source's import statements, and the package that it is in."""
    return _needed(source.name, source.text, source.origin, source.is_package)


@functools.lru_cache(maxsize=4096)  # not by the source, whose files of up to 8 MiB it would keep
def _needed(name: str, text: str, origin: str, is_package: bool, /) -> frozenset[str]:  # noqa: FBT001
    outer = name.rpartition(".")[0]
    try:
        code = code_here(name) or compile(text, origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # its import fails on the worker, as it would here
        return frozenset((outer,)) if outer else frozenset()
    imports = code_imports(code, name if is_package else outer)
    return imports | {outer} if outer else imports


def code_here(name: str) -> CodeType | None:
    """Return the code of a module that was imported here from a file: Python keeps it, and to compile is slow."""
    loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
    try:
        return loader.get_code(name) if type(loader) is SourceFileLoader else None
    except (ImportError, OSError):
        return None


_PLAIN_TYPES: Final = (bool, int, float, str, type(None))
_STORES: Final = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME")
_STORE_GLOBAL: Final = dis.opmap["STORE_GLOBAL"]
_reported: set[tuple[str, str]] = set()
_examined: WeakSet[SourceSet] = WeakSet()


def report_assigned(sources: SourceSet | None) -> None:
    """Log a warning, once for each, for values in loaded modules of ``sources`` that calls will not see."""
    if sources is None or sources in _examined:
        return
    _examined.add(sources)
    for source in sources.sources:
        module, code = sys.modules.get(source.name), code_here(source.name)
        if module is None or code is None:
            continue
        for name, before, now in assigned_from_outside(module, code):
            if (source.name, name) not in _reported:
                _reported.add((source.name, name))
                log.warning(
                    "%s.%s is %r here, and %r in calls: they import %s themselves, from its source. Pass the value as "
                    "an argument, or assign it in the call",
                    *(source.name, name, now, before, source.name),
                )


def assigned_from_outside(module: ModuleType, code: CodeType) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, former and present value of numbers, texts and the like that were assigned from another module.

    Those that the module's own code sets once, to a constant, and no function of it sets anew.
    """
    for name, before in _constants(code).items():
        now = vars(module).get(name, before)
        if isinstance(now, _PLAIN_TYPES) and repr(now) != repr(before):  # 1 is True, and NaN is not NaN
            yield name, before, now


def _constants(code: CodeType) -> Mapping[str, Any]:
    """Return the names that a module's code sets to a plain constant, and that nothing in it sets again."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    stores = [(step.argval, before) for before, step in pairwise(steps) if step.opname in _STORES]
    times = Counter([*(name for name, _ in stores), *_set_by_functions(code)])
    return {name: before.argval for name, before in stores if times[name] == 1 and _is_plain_constant(before)}


def _is_plain_constant(step: dis.Instruction) -> bool:
    return step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and isinstance(step.argval, _PLAIN_TYPES)


def _set_by_functions(code: CodeType) -> Iterator[str]:
    for inner in inner_code(code):
        if _STORE_GLOBAL in inner.co_code[::2]:
            yield from (step.argval for step in dis.get_instructions(inner) if step.opname == "STORE_GLOBAL")
        yield from _set_by_functions(inner)
