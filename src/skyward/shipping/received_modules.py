"""Modules that were received: this process imports them from their sources, under their names.

* A received module wins over one of that name which is installed here: where it comes from, the user's was found first.
  Code of the process itself (Skyward, Dask, the standard library) keeps the other one, also where it imports it
  later.
  The exception is a package that is here just as it was sent, such as a mirrored one, or on the machine that sent it:
  that one is complete.
* When a source changes, it and the modules that import it are imported again.
* ``__file__`` names the module's place on the machine that it comes from, if this one has it there, too; else a copy.
  Programs that calls start, such as loky's, find the copies on their path.
"""

from __future__ import annotations

import builtins
import functools
import io
import linecache
import logging
import os
import pickle
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import cache_from_source, decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from skyward.shipping.project_modules import (
    OWN_PACKAGES,
    ServedLoader,
    found_here,
    is_installed_at,
    made_here,
    needed_with,
    place_of,
    sources_of,
)
from skyward.wire.messages import ModuleSource

log = logging.getLogger("skyward.wire")

_IMPORTERS: Final = OWN_PACKAGES | {"dask", "distributed", "tornado"} | (sys.stdlib_module_names - {"pickle"})


class _Shadows:
    """Hidden modules, by their top-level package; while there are any, this process's import statements pass here.

    Attributes:
        aside: the hidden packages that a thread imports at the moment (``importing``): the received ones stand aside.
    """

    def __init__(self) -> None:
        self.aside = threading.local()
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._lock = threading.RLock()
        self._import: Callable[..., Any] = builtins.__import__

    def hide(self, package: str) -> None:
        """Hide a package, whether it is imported by now or not."""
        with self._lock:
            self._hidden.setdefault(package, {}).update(_taken_out(package))
            if builtins.__import__ != self._dispatch:
                self._import, builtins.__import__ = builtins.__import__, self._dispatch

    def _dispatch(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - as Python calls it
        locals: Mapping[str, Any] | None = None,  # noqa: A002 - as above
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        package = ((globals or {}).get("__package__") or "" if level else name).partition(".")[0]
        hidden = self._hidden.get(package)
        # A list comes from C: it is an unpickler that looks a name up.
        if hidden is None or isinstance(fromlist, list) or not _gets_the_hidden(globals, package):
            return self._import(name, globals, locals, fromlist, level)
        if package in getattr(self.aside, "importing", ()):  # a module of the hidden package, which is in place
            return self._import(name, globals, locals, fromlist, level)
        if level == 0 and name in hidden and all(hasattr(hidden[name], member) for member in fromlist or ()):
            return hidden[name] if fromlist else hidden[package]
        with self._swapped(package, hidden):
            return self._import(name, globals, locals, fromlist, level)

    @contextmanager
    def _swapped(self, package: str, hidden: dict[str, ModuleType]) -> Generator[None]:
        with self._lock:
            received = _taken_out(package)
            sys.modules.update(hidden)
            importing: tuple[str, ...] = getattr(self.aside, "importing", ())
            self.aside.importing = (*importing, package)
            try:
                yield
            finally:
                self.aside.importing = importing
                hidden.update(_taken_out(package))
                sys.modules.update(received)


def _taken_out(package: str) -> dict[str, ModuleType]:
    names = [name for name in list(sys.modules) if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def _gets_the_hidden(importer: Mapping[str, Any] | None, package: str) -> bool:
    if importer is None or isinstance(getattr(importer.get("__spec__"), "loader", None), ServedLoader):
        return False
    top = str(importer.get("__name__")).partition(".")[0]
    return importer.get("__spec__") is not None and (top in _IMPORTERS or top == package)


def take_sources(sources: Iterable[ModuleSource]) -> None:
    """Make modules importable in this process from their sources; see :meth:`SourceFinder.add`."""
    _finder().add(sources)


def is_received(module: ModuleType) -> bool:
    """Return True if ``module`` is served from a source that was received."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ServedLoader)


def received_source(name: str) -> ModuleSource | None:
    """Return the source that was received for a module."""
    return _finder().sources.get(name)


def with_sources(data: bytes, buffers: Sequence[memoryview], names: Iterable[str]) -> bytes:
    """Return ``data`` together with the sources of ``names``; ``data`` itself if none is the user's.

    Args:
        data: a pickle.
        buffers: its out-of-band buffers; the result has the same.
        names: modules that the pickle names, or that the functions in it import.
    """
    sources = sources_of(names)
    if not sources:
        return data
    return pickle.dumps(_Accompanied(sources, data, buffers), protocol=5, buffer_callback=lambda _: False)


class SourceFinder(MetaPathFinder):
    """Finder of received modules; first in ``sys.meta_path``, it leaves the process's own modules alone.

    Attributes:
        sources: the newest edition of each source, by name.
    """

    def __init__(self) -> None:
        self.sources: dict[str, ModuleSource] = {}
        self._left: set[str] = set()  # packages that are here just as they were sent
        self._shadows = _Shadows()
        self._lock = threading.Lock()

    def add(self, sources: Iterable[ModuleSource]) -> None:
        """Take sources; of those that change, the modules are imported again. Safe from any thread."""
        with self._lock:
            taken, changed = set[str](), set[str]()
            for source in sources:
                old = self.sources.get(source.name)
                if made_here(source) or (old is not None and old.edition_ns >= source.edition_ns):
                    continue
                self.sources[source.name] = source
                taken.add(source.name)
                try:
                    _copy(source)
                except OSError as error:  # its import tries again, and fails in the call that needs it
                    log.warning("the module %s could not be stored: %s", source.name, error)
                if old is not None:
                    changed.add(source.name)
                    linecache.cache.pop(old.origin, None)  # it does not check sources of loaders for changes
            for package in {name.partition(".")[0] for name in taken}:
                self._take_over(package)
            if changed:
                self._forget(changed)
            if self.sources and self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        del target  # only reloads have one
        source = self.sources.get(fullname)
        if source is None or getattr(self._shadows.aside, "importing", ()):
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not is_received(parent) and not _is_namespace(parent.__spec__):
            return None  # a submodule of another package than the one sent
        installed = self._found(fullname, path)
        if "." not in fullname and self._is_as_sent(fullname, installed):  # with its data and its compiled parts
            self._left.add(fullname)
            return None
        return None if _is_unneeded(source, installed) else _spec(source)

    def _found(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return what this process would import without the received sources."""
        spec = found_here(name, path, besides=self)
        place = place_of(spec)
        return None if place is not None and _is_copy(place) else spec

    def _is_as_sent(self, package: str, spec: ModuleSpec | None) -> bool:
        if spec is None or not spec.origin:
            return False
        sent = [source for name, source in list(self.sources.items()) if name.partition(".")[0] == package]
        return all(_text_here(source, spec.origin) == source.text for source in sent)

    def _take_over(self, package: str) -> None:
        """Have a package imported from its sources from now on, if it is not here as it was sent."""
        module = sys.modules.get(package)
        if module is not None and is_received(module):
            return
        spec = module.__spec__ if module is not None else self._found(package, None)
        if spec is None or _is_unneeded(self.sources.get(package), spec):
            return
        if self._is_as_sent(package, spec):
            if module is not None:
                self._left.add(package)
            return
        if package in self._left or not _is_installed(spec):
            self._left.discard(package)
            for name in [module_name for module_name in list(sys.modules) if module_name.partition(".")[0] == package]:
                del sys.modules[name]
        else:
            self._shadows.hide(package)

    def _forget(self, changed: set[str]) -> None:
        """Drop the modules whose sources have changed, and those that import them."""
        while True:
            holders = {name for name, source in self.sources.items() if not changed.isdisjoint(needed_with(source))}
            if holders <= changed:
                break
            changed |= holders
        for name in changed:
            if (module := sys.modules.get(name)) is not None and is_received(module):
                del sys.modules[name]
                self._unbind(name, module)

    def _unbind(self, name: str, module: ModuleType) -> None:
        """Delete a module's name in its package, where ``from package import module`` would find the old one."""
        outer, _, last = name.rpartition(".")
        if vars(sys.modules.get(outer, module)).get(last) is module:
            delattr(sys.modules[outer], last)


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


def _is_namespace(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


def _is_unneeded(source: ModuleSource | None, spec: ModuleSpec | None) -> bool:
    """Return True for a namespace of the user's of which packages here have a part."""
    if source is None or not source.is_namespace or spec is None:
        return False
    return spec.submodule_search_locations is not None and _is_installed(spec)


def _is_installed(spec: ModuleSpec) -> bool:
    place = place_of(spec)
    return place is None or is_installed_at(spec.name, place)


def _text_here(source: ModuleSource, package_file: str) -> str | None:
    """Return the text that a package in this process has for a module; None if it lacks it."""
    place = Path(package_file)
    if place.name == "__init__.py":
        inside = source.name.split(".")[1:]
        place = place.parent.joinpath(*inside, "__init__.py") if source.is_package else place.parent.joinpath(*inside)
        place = place if source.is_package else place.with_name(f"{place.name}.py")
    return _text_at(place)


def _text_at(place: Path) -> str | None:
    try:
        return decode_source(place.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _spec(source: ModuleSource) -> ModuleSpec | None:
    if not source.is_namespace:
        file = _file_of(source)
        return spec_from_file_location(
            source.name, file, loader=None if source.is_compiled else ServedLoader(source, file)
        )
    is_here = _copies() is None or os.path.isdir(source.origin)
    folder = source.origin if is_here else str(_copy_of(source).parent)
    spec = ModuleSpec(source.name, ServedLoader(source, os.path.join(folder, "__init__.py")), is_package=True)
    spec.submodule_search_locations = [folder]
    return spec


def _file_of(source: ModuleSource) -> str:
    """Return the module's file: at its origin if this machine has the same one there, else its copy."""
    if _copies() is None or (not source.is_compiled and _text_at(Path(source.origin)) == source.text):
        return source.origin
    place = _copy_of(source)
    if not place.exists() or (not source.is_compiled and _text_at(place) != source.text):  # there was no room
        _copy(source)
    return str(place)


def _copy(source: ModuleSource) -> None:
    """Write a module, and the files of its package, into the folder of copies."""
    if _copies() is None:
        return
    place = _copy_of(source)
    for path, data in source.files:
        _write(place.parent / path, data)
    if not (source.is_namespace or source.is_compiled):
        _write(place, _encoded(source.text))


def _encoded(text: str) -> bytes:
    """Return a source in the encoding that it states."""
    try:
        return text.encode(tokenize.detect_encoding(io.BytesIO(text.encode()).readline)[0])
    except (SyntaxError, UnicodeError):
        return text.encode()


def _is_copy(place: str) -> bool:
    try:
        folder = _copies()
    except OSError:  # there is no room for one
        return False
    return folder is not None and place.startswith(folder)


def _copy_of(source: ModuleSource) -> Path:
    """Return the path of a copy of the module."""
    if source.is_compiled:
        return Path(str(_copies()), source.files[0][0])
    inside = Path(str(_copies()), *source.name.split("."))
    return inside / "__init__.py" if source.is_package else inside.with_name(f"{inside.name}.py")


def _write(place: Path, data: bytes) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.write_bytes(data)
    if place.suffix == ".py":  # its times and size do not show every change
        Path(cache_from_source(str(place))).unlink(missing_ok=True)


@functools.cache
def _copies() -> str | None:
    """Return the folder of this process's copies, which ends with its node; None if it is not on a node."""
    node = os.environ.get("SKYWARD_BLOB_DIRS", "").rpartition(os.pathsep)[2]
    if not node:
        return None
    folder = tempfile.mkdtemp(prefix="modules-", dir=node)
    sys.path.append(folder)  # last: here the names of others are theirs
    return folder
