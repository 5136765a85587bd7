"""Sources of the user's modules that a function imports while it runs; they travel next to the function's pickle.

Objects in a function's globals are pickled by value (:mod:`skyward.wire.code.pickling`). Imports inside a function
appear in its code only: their names are read from the bytecode, the user's own modules among them are followed through
their own imports, and the sources of all are sent. At the other end a finder serves them from memory.

* A module that the process itself has outside its installed packages wins over a source that came along; so nothing
  changes in the process that sent it. An installed one, or a mere folder, of the same name does not win: where the
  function comes from, the user's module was found first. The exception is a package installed with the very texts that
  were sent, as a mirrored one is: it has data and compiled parts, too.
* A changed source replaces the older one, and all served modules are imported again, since one may hold another.
* Names that no import statement shows (``importlib.import_module``) and modules without source are not followed.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import linecache
import os
import pickle
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = [
    "OWN_PACKAGES",
    "ModuleSource",
    "SourceFinder",
    "any_absent",
    "came_along",
    "imported_by",
    "is_installed_at",
    "loaded_by_the_user",
    "search_path_state",
    "sources_of",
    "take_sources",
    "with_sources",
]

OWN_PACKAGES = frozenset({"skyward", "skyward_dask", "skyward_joblib"})
"""Packages of Skyward, which every node has."""

_NEVER_THE_USERS = OWN_PACKAGES | sys.stdlib_module_names | {"__main__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """Source of a module.

    Attributes:
        name: full name.
        text: source text; empty for a package without ``__init__.py``.
        is_package: True if it has submodules.
        origin: path at its origin, for ``__file__`` and tracebacks.
        edition_ns: time at which this text was first seen there, in ns since the epoch; the latest edition counts.
    """

    name: str
    text: str
    is_package: bool
    origin: str
    edition_ns: int


def imported_by(function: FunctionType) -> frozenset[str]:
    """Return names of modules outside the standard library that import statements in ``function`` may refer to."""
    module = function.__globals__
    package = module.get("__package__") or ""
    return _imports(function.__code__, package)


def sources_of(names: Iterable[str]) -> tuple[ModuleSource, ...]:
    """Return the user's own modules among ``names``, with their packages and imports, by name. Imports nothing."""
    found: dict[str, ModuleSource] = {}
    seen: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        source = _shelf().source(name)
        if source is not None:
            found[name] = source
            waiting |= _imports_of_source(source)
            waiting.add(name.rpartition(".")[0] or name)
    return tuple(found[name] for name in sorted(found))


def with_sources(data: bytes, buffers: Sequence[memoryview], names: Iterable[str]) -> bytes:
    """Return ``data`` together with the sources of ``names``; ``data`` itself if none is the user's.

    Args:
        data: a pickle.
        buffers: its out-of-band buffers; the result has the same.
        names: modules that the functions in it import.
    """
    sources = sources_of(names)
    if not sources:
        return data
    return pickle.dumps(_Accompanied(sources, data, buffers), protocol=5, buffer_callback=lambda _: False)


def any_absent(names: Iterable[str]) -> bool:
    """Return True if the top-level package of one of these modules is not found here, and may appear later."""
    return any(map(_shelf().is_absent, names))


def search_path_state() -> tuple[object, ...]:
    """Return a value that changes when a top-level module appears in a folder of ``sys.path`` or goes from one."""
    return tuple((folder, _mtime_ns(folder)) for folder in sys.path)


def take_sources(sources: Iterable[ModuleSource]) -> None:
    """Make modules importable in this process from their sources; see :meth:`SourceFinder.add`."""
    _finder().add(sources)


def loaded_by_the_user() -> dict[str, list[str]]:
    """Return the names of the user's own modules that are loaded here, by their top-level package."""
    return _shelf().loaded()


def came_along(module: ModuleType) -> bool:
    """Return True if ``module`` is served from a source that came with a call."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


@functools.lru_cache(maxsize=1024)
def is_installed_at(location: str) -> bool:
    """Return True if a module at this path belongs to the standard library or an installed package."""
    path = Path(location).resolve()
    return any(path.is_relative_to(folder) for folder in _install_folders())


class SourceFinder(MetaPathFinder):
    """Finder of modules in memory; first in ``sys.meta_path``, it leaves the process's own modules alone."""

    def __init__(self) -> None:
        self._sources: dict[str, ModuleSource] = {}
        self._left: set[str] = set()  # packages that are installed here just as they were sent
        self._lock = threading.Lock()

    def add(self, sources: Iterable[ModuleSource]) -> None:
        """Take sources; if one changes, all served modules are imported again. Safe from any thread."""
        with self._lock:
            for source in sources:
                old = self._sources.get(source.name)
                if old is not None and old.edition_ns >= source.edition_ns:
                    continue
                self._sources[source.name] = source
                if old is not None:
                    self._forget(old)
                self._take_over(source.name.partition(".")[0])
            if self._sources and self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        del target  # only reloads have one
        source = self._sources.get(fullname)
        if source is None:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not came_along(parent):  # a submodule of another package than the one sent
            return None
        if parent is None and self._leaves(fullname, _find(fullname, path, besides=self)):
            return None
        spec = ModuleSpec(fullname, _Loader(source), origin=source.origin, is_package=source.is_package)
        spec.has_location = True  # else the module would get no __file__
        return spec

    def _leaves(self, name: str, found: ModuleSpec | None) -> bool:
        """Return True for a top-level module that the process imports from its own place."""
        if _is_the_processes_own(found):
            return True
        if found is None or not self._is_as_sent(name, found):
            return False
        self._left.add(name)  # with its data and its compiled parts, which are not sent
        return True

    def _is_as_sent(self, package: str, found: ModuleSpec) -> bool:
        sent = [source for name, source in self._sources.items() if name.partition(".")[0] == package]
        return bool(found.origin) and all(_installed_text(source, str(found.origin)) == source.text for source in sent)

    def _take_over(self, package: str) -> None:
        """Have a package imported from its sources from now on, if they are no longer those installed here."""
        found = getattr(sys.modules.get(package), "__spec__", None)
        if package in self._left and found is not None and not self._is_as_sent(package, found):
            self._left.discard(package)
            for name in [each for each in sys.modules if each.partition(".")[0] == package]:
                del sys.modules[name]

    def _forget(self, old: ModuleSource) -> None:
        for name in self._sources:
            if (module := sys.modules.get(name)) is not None and came_along(module):
                sys.modules.pop(name, None)
        linecache.cache.pop(old.origin, None)  # it does not check sources of loaders for changes


class _Loader(InspectLoader):
    def __init__(self, source: ModuleSource) -> None:
        self.source = source

    def is_package(self, fullname: str) -> bool:
        del fullname
        return self.source.is_package

    def get_source(self, fullname: str) -> str:
        del fullname
        return self.source.text

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self.source_to_code(self.source.text, self.source.origin)


class _Accompanied:
    """Pickle with sources: unpickles to the content of ``data``, after the sources were taken."""

    def __init__(self, sources: tuple[ModuleSource, ...], data: bytes, buffers: Sequence[memoryview]) -> None:
        self._sources = sources
        self._data = data
        self._buffers = buffers

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._sources, self._data, *map(pickle.PickleBuffer, self._buffers))


def _arrive(sources: tuple[ModuleSource, ...], data: bytes, *buffers: Any) -> Any:
    take_sources(sources)
    return pickle.loads(data, buffers=buffers)


@functools.cache
def _finder() -> SourceFinder:
    return SourceFinder()


class _Shelf:
    """Sources by name. Files are read each time: their size and times do not show every change."""

    def __init__(self) -> None:
        self._known: dict[str, ModuleSource] = {}
        self._installed: set[str] = set()
        self._path: list[str] = []
        self._loaded: dict[str, list[str]] = {}
        self._loaded_at: tuple[int, tuple[str, ...]] | None = None
        self._last_edition_ns = 0

    def source(self, name: str) -> ModuleSource | None:
        """Return the source to send for this module now; None if it is not the user's."""
        spec = _spec_of(name) if self.is_the_users(name.partition(".")[0]) else None
        if spec is None:
            return None
        if isinstance(spec.loader, _Loader):
            return spec.loader.source
        text = _text(spec)
        if text is None:
            return None
        is_package = spec.submodule_search_locations is not None
        origin = spec.origin or next(iter(_folders(spec)), name)
        old = self._known.get(name)
        if old is None or (old.text, old.origin, old.is_package) != (text, origin, is_package):
            # Later than every earlier edition, even if the clock was set back: workers keep the latest one.
            self._last_edition_ns = max(time.time_ns(), self._last_edition_ns + 1)
            edition_ns = self._last_edition_ns
            old = ModuleSource(name=name, text=text, is_package=is_package, origin=origin, edition_ns=edition_ns)
        self._known[name] = old
        return old

    def loaded(self) -> dict[str, list[str]]:
        """Return the user's loaded modules by package; search again, for 1 ms, when the number of modules changes."""
        state = len(sys.modules), tuple(sys.path)
        if self._loaded_at != state:
            self._loaded, self._loaded_at = {}, state
            for name in list(sys.modules):
                package = name.partition(".")[0]
                if package in self._loaded or self.is_the_users(package):
                    self._loaded.setdefault(package, []).append(name)
        return self._loaded

    def is_absent(self, name: str) -> bool:
        """Return True if the top-level package of ``name`` is not found here."""
        package = name.partition(".")[0]
        return not self._is_known_as_installed(package) and _spec_of(package) is None

    def is_the_users(self, package: str) -> bool:
        """Return True if ``package`` is found here, and is no installed one."""
        if self._is_known_as_installed(package):
            return False
        spec = _spec_of(package)
        if spec is None:  # not yet, maybe
            return False
        if isinstance(spec.loader, _Loader) or not _is_installed(spec):
            return True
        self._installed.add(package)
        return False

    def _is_known_as_installed(self, package: str) -> bool:
        if self._path != sys.path:  # another folder may come first now
            self._installed, self._path = set(_NEVER_THE_USERS), list(sys.path)
        return package in self._installed


@functools.cache
def _shelf() -> _Shelf:
    return _Shelf()


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _text(spec: ModuleSpec) -> str | None:
    """None where there is no source: an extension, a module made by hand, a file that is gone."""
    if spec.origin is None:
        return "" if spec.submodule_search_locations is not None else None
    if spec.origin.endswith(".py") and os.path.isfile(spec.origin):
        return importlib.util.decode_source(Path(spec.origin).read_bytes())
    return None


def _installed_text(source: ModuleSource, package_file: str) -> str | None:
    """Return the text that an installed package has for a module; None if it lacks it."""
    place = Path(package_file)
    if place.name == "__init__.py":
        inside = source.name.split(".")[1:]
        place = place.parent.joinpath(*inside, "__init__.py") if source.is_package else place.parent.joinpath(*inside)
        place = place if source.is_package else place.with_name(f"{place.name}.py")
    try:
        return importlib.util.decode_source(place.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _is_the_processes_own(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.origin is not None and not _is_installed(spec)


def _is_installed(spec: ModuleSpec) -> bool:
    location = spec.origin if spec.has_location else next(iter(_folders(spec)), None)
    return location is None or is_installed_at(location)


def _spec_of(name: str) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, but without importing the packages that it is in."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__spec__", None)
    package = name.rpartition(".")[0]
    if not package:
        return _find(name, None)
    inside = _spec_of(package)
    return None if inside is None or inside.submodule_search_locations is None else _find_inside(name, _folders(inside))


def _find(name: str, path: Sequence[str] | None, besides: MetaPathFinder | None = None) -> ModuleSpec | None:
    finders = (finder for finder in sys.meta_path if finder is not besides)
    specs = (finder.find_spec(name, path) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _find_inside(name: str, folders: list[str]) -> ModuleSpec | None:
    try:
        return _find(name, folders)
    except KeyError:  # a folder without __init__.py, whose spec can only be made when the package it is in is imported
        spec = ModuleSpec(name, None, is_package=True)
        last = name.rpartition(".")[2]
        spec.submodule_search_locations = [here for each in folders if os.path.isdir(here := os.path.join(each, last))]
        return spec


def _folders(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or ())


@functools.lru_cache(maxsize=1024)
def _imports_of_source(source: ModuleSource) -> frozenset[str]:
    try:
        code = compile(source.text, source.origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # its import fails on the worker, as it would here
        return frozenset()
    return _imports(code, source.name if source.is_package else source.name.rpartition(".")[0])


@functools.lru_cache(maxsize=1024)
def _imports(code: CodeType, package: str) -> frozenset[str]:
    return frozenset(name for name in _imported(code, package) if name.partition(".")[0] not in _NEVER_THE_USERS)


def _imported(code: CodeType, package: str) -> Iterator[str]:
    before: list[Any] = [None, None]  # IMPORT_NAME follows two loads: the level and the imported members
    for step in dis.get_instructions(code):
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


@functools.cache
def _install_folders() -> tuple[Path, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(Path(folder).resolve() for folder in folders)
