"""The user's own modules on their way: which they are, their sources, and when these have changed.

A module that a distribution owns goes by name (:mod:`skyward.wire.code.ownership`). One of the user's goes by name too,
with its source: workers import it from that (:mod:`skyward.wire.code.served`), so that everything that looks up a
class by its name works. The imports of a source are followed, those inside functions included; so are those of
functions that go by value.

* A module that this process has imported goes as it was when it was first needed, and again after
  :func:`importlib.reload`. One that it has not is read again whenever its file changes.
* With the first package of a project go the other files in its folder, up to a bound: data, compiled modules, and
  modules that no import statement names.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import count
from operator import attrgetter, is_
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from skyward.wire.code.ownership import OWN_PACKAGES, is_installed_at, is_the_users, place_of

__all__ = [
    "ModuleSource",
    "SentSources",
    "ServedLoader",
    "SourceSet",
    "Way",
    "any_absent",
    "code_here",
    "found_here",
    "imported_by",
    "loaded_by_the_user",
    "made_here",
    "needed_with",
    "source_set",
    "sources_of",
    "way_of",
]

_FILE_BYTES = 1 << 20
_FILES_BYTES = 8 << 20
_ENTRIES = 2000
_SETTLED_NS = 2_000_000_000
"""A file that was changed less than this before it was read may change again within one tick of its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """Source of a module.

    Attributes:
        name: full name.
        text: source text; empty for a package without ``__init__.py``.
        is_package: True if it has submodules.
        origin: path at its origin, for tracebacks; empty if it has none.
        edition_ns: time at which this text was first seen there, in ns since the epoch; the latest edition counts.
        files: other files in the folder of a project's first package, by their path in it.
    """

    name: str
    text: str
    is_package: bool
    origin: str
    edition_ns: int
    files: tuple[tuple[str, bytes], ...] = field(default=(), compare=False, repr=False)

    @property
    def is_namespace(self) -> bool:
        """Whether it is a package without ``__init__.py``."""
        return self.is_package and not self.text and not self.origin.endswith(".py")


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Observed:
    """Modules of the user's, as they were when their sources were taken.

    Attributes:
        names: names of the modules that are imported here.
        modules: these modules.
        specs: their specs, which a reload replaces.
        unloaded: names of the others, their files and the stamps of these.
        search_path: ``sys.path``.
    """

    names: tuple[str, ...]
    modules: tuple[ModuleType, ...]
    specs: tuple[ModuleSpec, ...]
    unloaded: tuple[tuple[str, str, tuple[int, ...]], ...]
    search_path: tuple[str, ...]

    def are_unchanged(self) -> bool:
        # It is asked for each call: 2 µs for 30 modules.
        return (
            all(map(is_, map(sys.modules.get, self.names), self.modules))
            and all(map(is_, map(_SPEC_OF_MODULE, self.modules), self.specs))
            and tuple(sys.path) == self.search_path
            and all(stamp and name not in sys.modules and _stamp(file) == stamp for name, file, stamp in self.unloaded)
        )


_SPEC_OF_MODULE = attrgetter("__spec__")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceSet:
    """Sources of some modules and of everything that they import.

    Attributes:
        sources: the sources, by name.
        number: number of this set in this process; an unchanged set keeps it.
    """

    sources: tuple[ModuleSource, ...]
    number: int
    observed: _Observed

    def is_current(self) -> bool:
        """Return True if all sources are still the ones to send. Looks at the files of modules not imported here."""
        return self.observed.are_unchanged()

    @property
    def editions(self) -> tuple[tuple[str, int], ...]:
        """Names and editions of the sources."""
        return tuple((each.name, each.edition_ns) for each in self.sources)


class SentSources:
    """Record of the sources that one connection has carried, so that each edition goes over it once."""

    def __init__(self) -> None:
        self._editions: dict[str, int] = {}
        self._sets: set[int] = set()

    def missing(self, wanted: SourceSet) -> list[ModuleSource]:
        """Return the sources to send now; they count as sent."""
        if wanted.number in self._sets:
            return []
        missing = [each for each in wanted.sources if self._editions.get(each.name, 0) < each.edition_ns]
        self._editions |= {each.name: each.edition_ns for each in missing}
        self._sets.add(wanted.number)
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


def imported_by(function: FunctionType) -> frozenset[str]:
    """Return names of modules outside the standard library that import statements in ``function`` may refer to."""
    module = function.__globals__
    package = module.get("__package__") or ""
    return _imports(function.__code__, package)


def sources_of(names: Iterable[str]) -> tuple[ModuleSource, ...]:
    """Return the user's own modules among ``names``, with their packages and imports, by name. Imports nothing."""
    found = source_set(names)
    return found.sources if found is not None else ()


def source_set(names: Iterable[str]) -> SourceSet | None:
    """Return the sources of the user's own modules among ``names``, and of their imports; None if there are none."""
    return _shelf().set_of(frozenset(names))


def any_absent(names: Iterable[str]) -> bool:
    """Return True if the top-level package of one of these modules is not found here, and may appear later."""
    return any(map(_shelf().is_absent, names))


def loaded_by_the_user() -> dict[str, list[str]]:
    """Return the names of the user's own modules that are loaded here, by their top-level package."""
    return _shelf().loaded()


def made_here(source: ModuleSource) -> bool:
    """Return True if this process has made ``source``, of a module that it has as it is."""
    return _shelf().made(source)


class _Shelf:
    """Sources by name."""

    def __init__(self) -> None:
        self._known: dict[str, ModuleSource] = {}
        self._of_loaded: dict[str, tuple[ModuleSpec, ModuleSource | None]] = {}
        self._sets: dict[frozenset[str], SourceSet | None] = {}
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}
        self._counter = count()
        self._installed: set[str] = set()
        self._path: list[str] = []
        self._loaded: dict[str, list[str]] = {}
        self._loaded_at: tuple[int, tuple[str, ...]] | None = None
        self._last_edition_ns = 0
        self._lock = threading.RLock()

    def set_of(self, names: frozenset[str]) -> SourceSet | None:
        with self._lock:
            known = self._sets.get(names)
            if known is not None and known.is_current():
                return known
            found = self._set_of(names)
            if len(self._sets) >= _ENTRIES:
                self._sets.clear()
            self._sets[names] = found
            return found

    def _set_of(self, names: frozenset[str]) -> SourceSet | None:
        found: dict[str, ModuleSource] = {}
        seen: set[str] = set()
        waiting = set(names)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            source = self.source(name)
            if source is not None:
                found[name] = source
                waiting |= needed_with(source)
        observed = _observed(found.values())
        for name in [*found]:
            for outer in _outer(name):
                if outer not in found and ((spec := _spec_of(outer)) is None or spec.origin is None):
                    found[outer] = self._edition(outer, "", is_package=True, origin="")
        if not found:
            return None
        sources = tuple(found[name] for name in sorted(found))
        editions = tuple((each.name, each.edition_ns) for each in sources)
        number = self._numbers.setdefault(editions, next(self._counter))
        return SourceSet(sources=sources, number=number, observed=observed)

    def source(self, name: str) -> ModuleSource | None:
        """Return the source to send for this module now; None if it is not the user's, or has none."""
        if name == "__main__" or self._is_known_as_installed(name.partition(".")[0]):
            return None
        with self._lock:
            module = sys.modules.get(name)
            spec = _spec_of(name)
            if spec is None:
                return None
            if isinstance(spec.loader, ServedLoader):
                return spec.loader.received
            if module is None:
                return self._read(name, spec)
            known = self._of_loaded.get(name)
            if known is None or known[0] is not spec:
                self._of_loaded[name] = known = spec, self._read(name, spec)
            return known[1]

    def made(self, source: ModuleSource) -> bool:
        module = sys.modules.get(source.name)
        if module is None or self._known.get(source.name) != source:
            return False
        known = self._of_loaded.get(source.name)
        return known is None or getattr(module, "__spec__", None) is known[0]

    def _read(self, name: str, spec: ModuleSpec) -> ModuleSource | None:
        if self._is_installed(name, spec):
            return None
        text = _text(name, spec)
        if text is None:
            return None
        is_package = spec.submodule_search_locations is not None
        origin = spec.origin if spec.has_location and spec.origin else next(iter(_folders(spec)), name)
        folders = _folders(spec) if is_package and spec.origin and not self._is_inside_a_package(name) else []
        return self._edition(name, text, is_package=is_package, origin=origin, files=_files_in(folders[:1]))

    def _is_inside_a_package(self, name: str) -> bool:
        """Return True if the files in a package's folder go with a package that it is in."""
        return any((spec := _spec_of(outer)) is not None and spec.has_location for outer in _outer(name))

    def _edition(
        self, name: str, text: str, *, is_package: bool, origin: str, files: tuple[tuple[str, bytes], ...] = ()
    ) -> ModuleSource:
        old = self._known.get(name)
        if old is None or (old.text, old.origin, old.is_package, old.files) != (text, origin, is_package, files):
            # Later than every earlier edition, even if the clock was set back: workers keep the latest one.
            self._last_edition_ns = max(time.time_ns(), self._last_edition_ns + 1)
            edition_ns = self._last_edition_ns
            old = ModuleSource(
                name=name, text=text, is_package=is_package, origin=origin, edition_ns=edition_ns, files=files
            )
        self._known[name] = old
        return old

    def loaded(self) -> dict[str, list[str]]:
        """Return the user's loaded modules by package; search again, for 1 ms, when the number of modules changes."""
        state = len(sys.modules), tuple(sys.path)
        if self._loaded_at != state:
            self._loaded, self._loaded_at = {}, state
            for name in list(sys.modules):
                if way_of(name) is Way.SOURCE:
                    self._loaded.setdefault(name.partition(".")[0], []).append(name)
        return self._loaded

    def is_absent(self, name: str) -> bool:
        """Return True if the top-level package of ``name`` is not found here."""
        package = name.partition(".")[0]
        return not self._is_known_as_installed(package) and _spec_of(package) is None

    def _is_installed(self, name: str, spec: ModuleSpec | None = None) -> bool:
        """Return True if a module is found here, and is Python's or a distribution's."""
        spec = spec or _spec_of(name)
        place = place_of(spec)
        if spec is None:
            return False
        if place is not None and not is_installed_at(name, place):
            return False
        if "." not in name and spec.origin is not None:  # no namespace, of which the user may have a part
            self._installed.add(name)
        return True

    def _is_known_as_installed(self, package: str) -> bool:
        if self._path != sys.path:  # another folder may come first now
            self._installed, self._path = set(OWN_PACKAGES), list(sys.path)
        return package in self._installed


def _observed(sources: Iterable[ModuleSource]) -> _Observed:
    loaded = {each.name: module for each in sources if (module := sys.modules.get(each.name)) is not None}
    others = [each for each in sources if each.name not in loaded]
    return _Observed(
        names=tuple(loaded),
        modules=tuple(loaded.values()),
        specs=tuple(map(_SPEC_OF_MODULE, loaded.values())),
        unloaded=tuple((each.name, each.origin, _settled(_stamp(each.origin))) for each in others),
        search_path=tuple(sys.path),
    )


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


def _outer(name: str) -> Iterator[str]:
    """Yield the packages that a module is in."""
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


def _files_in(folders: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
    """Return the files in a package's folder that go with it: each of 1 MiB at most, together 8 MiB at most."""
    found: list[tuple[str, bytes]] = []
    left = _FILES_BYTES
    for folder in folders:
        for path in _walk(folder):
            try:
                size = os.stat(path).st_size
                if size <= min(_FILE_BYTES, left):
                    found.append((Path(path).relative_to(folder).as_posix(), Path(path).read_bytes()))
                    left -= size
            except OSError:  # it has just gone, or may not be read
                continue
    return tuple(found)


def _walk(folder: str) -> Iterator[str]:
    entries = 0
    waiting = [folder]
    while waiting:
        try:
            inside = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in inside:
            entries += 1
            if entries > _ENTRIES:
                return
            if entry.name.startswith(".") or entry.name in ("__pycache__", "node_modules"):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                    waiting.append(entry.path)
            elif entry.is_file() and entry.name != "__init__.py":
                yield entry.path


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
        spec.submodule_search_locations = [here for each in folders if os.path.isdir(here := os.path.join(each, last))]
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
    found = _imports(code, name if is_package else outer)
    return found | {outer} if outer else found


def code_here(name: str) -> CodeType | None:
    """Return the code of a module that was imported here from a file: Python keeps it, and to compile is slow."""
    loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
    try:
        return loader.get_code(name) if type(loader) is SourceFileLoader else None
    except (ImportError, OSError):
        return None


_IMPORT_NAME: Final = dis.opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def _imports(code: CodeType, package: str) -> frozenset[str]:
    return frozenset(_imported(code, package))


def _imported(code: CodeType, package: str) -> Iterator[str]:
    before: list[Any] = [None, None]  # IMPORT_NAME follows two loads: the level and the imported members
    for step in dis.get_instructions(code) if _IMPORT_NAME in code.co_code[::2] else ():
        if step.opname == "IMPORT_NAME":
            yield from _meant(step.argval, level=before[0], members=before[1] or (), package=package)
        if step.opname != "EXTENDED_ARG":
            before = [before[1], step.argval]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported(constant, package)


def _meant(name: str, *, level: int, members: Sequence[str], package: str) -> Iterator[str]:
    if level:
        outer = package.rsplit(".", level - 1)
        if not package or len(outer) < level:
            return  # it fails where it runs, as it would here
        name = f"{outer[0]}.{name}" if name else outer[0]
    yield name
    # A member may be a submodule; `sources_of` passes over the others.
    yield from (f"{name}.{member}" for member in members if member != "*")
