"""Modules that this program's own code imports, and the distributions that have them."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from skyward.environment.installed import InstalledDistributions
from skyward.shipping import project_modules, references
from skyward.shipping.pickling import goes_by_name
from skyward.wire.messages import ModuleSource

_WRAPPERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Distribution that code imports.

    Attributes:
        name: its canonical name.
        module: the imported module.
        importer: the module or function that imports it.
    """

    name: str
    module: str
    importer: str


@dataclass(frozen=True, slots=True)
class _Reference:
    """Object that a function refers to.

    Attributes:
        value: the object.
        importer: name of the function.
        runs: False for one that only travels along, in a module of which other things are used.
    """

    value: object
    importer: str
    _: KW_ONLY
    runs: bool


def own_modules() -> list[ModuleType]:
    """Return the user's imported modules, ``__main__`` included: those that are not installed."""
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]  # pyright: ignore[reportUnnecessaryIsInstance]
    return [module for module in loaded if module.__name__ == "__main__" or project_modules.is_the_users(module)]


def needs_of_program(here: InstalledDistributions) -> Mapping[str, Needed]:
    """Return the distributions that the user's modules import, by name. Reads sources; imports nothing.

    Modules count that are imported already, or that their import statements name, also those within functions. Where
    the main module has no source, as in a notebook, the objects in it count.
    """
    names: dict[str, str] = {}
    for module in own_modules():
        for name in _imports_of_module(module):
            names.setdefault(name, module.__name__)
        names.setdefault(module.__name__, "this program")  # a module of an editable installation
    for source in project_modules.sources_of(names):
        for name in _imports_of_source(source).required:
            names.setdefault(name, source.name)
        names.setdefault(source.name, "this program")
    return distributions_of(names, here)


def needs_of(function: Callable[..., Any], *, conditional: bool = False) -> Mapping[str, str]:
    """Return the names of modules that nodes import to run ``function``, each with its importer.

    These are the modules of everything that the function refers to, directly or through other functions, classes and
    modules of the user's, and those that it imports while it runs; under a condition only if ``conditional`` is True.
    """
    names: dict[str, str] = {}
    seen: set[tuple[int, bool]] = set()
    waiting = [_Reference(function, _name_of(function), runs=True)]
    while waiting:
        reached = waiting.pop()
        value, importer = reached.value, reached.importer
        if (id(value), reached.runs) in seen:
            continue
        seen.add((id(value), reached.runs))
        if (inner := _function_of(value)) is not value:
            waiting.append(_Reference(inner, importer, runs=reached.runs))
        module = _module_of(value)
        if module is None:
            continue
        if not travels(module):
            names.setdefault(module, importer)
            continue
        if _goes_by_name(value, module):
            names = dict(_imported_with(module)) | names
        used = reached.runs and not isinstance(value, ModuleType)
        waiting += [_Reference(referred, importer, runs=used) for referred in _referred(value, module)]
        if reached.runs and isinstance(value, FunctionType):
            waiting += [_Reference(referred, importer, runs=True) for referred in _used_of_modules(value)]
            for name, where in _imported_while_running(value, conditional=conditional):
                names.setdefault(name, where)
    return names


def distributions_of(names: Mapping[str, str], here: InstalledDistributions) -> Mapping[str, Needed]:
    """Return the installed distributions that have the named modules, by their names.

    Args:
        names: full names of modules, each with its importer.
        here: the installed distributions.
    """
    needed: dict[str, Needed] = {}
    for module, importer in names.items():
        for name in _owners(module, here):
            needed.setdefault(name, Needed(name=name, module=module, importer=importer))
    return needed


class LoadedNames(Container[str]):
    """Names of the distributions of which this program has imported something."""

    def __init__(self, here: InstalledDistributions) -> None:
        self._here = here

    def __contains__(self, name: object) -> bool:
        return name in self._here and not sys.modules.keys().isdisjoint(self._here.packages_of(str(name)))


def _owners(module: str, here: InstalledDistributions) -> Collection[str]:
    package = module.partition(".")[0]
    if package == "__main__" or _is_on_every_node(package):
        return ()
    if travels(module):
        return _editable_owner(module, here)
    owners = here.owners_of(package)
    if len(owners) < 2:  # noqa: PLR2004 - one or none
        return owners
    # A namespace that several distributions share: those that have the very module.
    exact = [name for name in owners if here.has_module(name, module)]
    return exact or owners


def _editable_owner(module: str, here: InstalledDistributions) -> Collection[str]:
    """Return the editable distribution whose folder on the import path has a module of the user's."""
    package = module.partition(".")[0]
    editable = here.from_folders()
    if by_name := [distribution.name for distribution in editable if package in here.packages_of(distribution.name)]:
        return by_name
    module_here = sys.modules.get(package)
    location = (
        project_modules.stated_place(module_here)
        if module_here is not None
        else project_modules.place_of(importlib.util.find_spec(package))
    )
    if location is None:
        return ()
    place = Path(location)
    roots = {place.parent, place.parent.parent} if place.name == "__init__.py" else {place.parent}
    return [
        distribution.name for distribution in editable if any(Path(folder) in roots for folder in distribution.imports)
    ]


def _is_on_every_node(package: str) -> bool:
    return package in project_modules.OWN_PACKAGES or (package in sys.stdlib_module_names and not travels(package))


def travels(name: str) -> bool:
    """Return True if a module is the user's, and so is sent with calls."""
    package = name.partition(".")[0]
    if package == "__main__":
        return True
    module = sys.modules.get(package)
    return bool(project_modules.sources_of([package])) if module is None else project_modules.is_the_users(module)


def _imports_of_module(module: ModuleType) -> Iterator[str]:
    file = getattr(module, "__file__", None)
    if file and file.endswith(".py") and Path(file).is_file():
        if module.__name__ != "__main__" or not project_modules.is_installed_at(module.__name__, file):
            yield from references.imports_in(
                Path(file).read_text("utf-8", "replace"), module.__package__ or ""
            ).required
        return
    for value in list(vars(module).values()):  # a notebook or an interactive session
        name = _module_of(value)
        if name is not None and name != module.__name__:
            yield name
        if isinstance(function := _function_of(value), FunctionType) and function.__module__ == module.__name__:
            yield from references.imports_of(function)


def _imports_of_source(source: ModuleSource) -> references.SourceImports:
    return references.imports_in(source.text, source.name if source.is_package else source.name.rpartition(".")[0])


def _used_of_modules(function: FunctionType) -> Iterator[object]:
    """Yield the attributes of the user's modules that a function's code names."""
    attributes = frozenset(references.names_in(function.__code__))
    for module in references.global_values(function):
        if isinstance(module, ModuleType) and travels(module.__name__):
            yield from (value for key, value in list(vars(module).items()) if key in attributes)


def _goes_by_name(value: Any, module: str) -> bool:
    """Return True if nodes import the module of one of the user's objects to get it."""
    is_definition = isinstance(value, type | FunctionType | ModuleType)
    return is_definition and project_modules.way_of(module) is project_modules.Way.SOURCE and goes_by_name(value)


def _imported_with(module: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that are imported with one of the user's, directly or through others of theirs."""
    sources = {source.name: source for source in project_modules.sources_of([module])}
    waiting, seen = {module, *project_modules.packages_around(module)} & sources.keys(), set[str]()
    while waiting:
        source = sources[waiting.pop()]
        seen.add(source.name)
        for name in _imports_of_source(source).first:
            own = {name, *project_modules.packages_around(name)} & sources.keys()
            waiting |= own - seen
            if not own:
                yield name, source.name


def _imported_while_running(value: FunctionType, *, conditional: bool) -> Iterator[tuple[str, str]]:
    """Yield the modules that a function's own imports bring, with the imports of the user's modules among them."""
    # Its lines as tracebacks show them: those of a notebook's cell are in no file.
    text = "".join(linecache.getlines(value.__code__.co_filename))
    stated = references.imports_in(text, value.__globals__.get("__package__") or "")
    names = references.imports_of(value) - stated.optional - (frozenset() if conditional else stated.conditional)
    yield from ((name, _name_of(value)) for name in names)
    for source in project_modules.sources_of(names):
        yield from ((name, source.name) for name in _imports_of_source(source).first)


def _module_of(value: object) -> str | None:
    """Return the name of the module that an object needs; None for values of the language itself."""
    match value:
        case ModuleType():
            return value.__name__
        case type() | FunctionType():
            name = value.__module__
        case MethodType():
            name = value.__func__.__module__
        case _:
            name = getattr(value, "__module__", None) or type(value).__module__
    return name if isinstance(name, str) and not _is_on_every_node(name.partition(".")[0]) else None


def _function_of(value: Any) -> Any:
    """Return the function below its wrappers."""
    for _ in range(_WRAPPERS):
        # Statically: proxies and mocks have every attribute.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if not isinstance(wrapped, FunctionType):
            break
        value = wrapped
    return value


def _referred(value: object, module: str) -> Iterator[object]:
    """Yield the objects that travel along with one of the user's."""
    match value:
        case ModuleType() if _goes_by_name(value, module):
            return
        case FunctionType():
            yield from (*references.global_values(value), *references.function_parts(value))
        case ModuleType():
            yield from list(vars(value).values())
        case type():
            yield from value.__mro__[1:]
            yield from list(vars(value).values())
        case MethodType():
            yield from (value.__func__, value.__self__)
        case staticmethod() | classmethod():
            yield cast("Any", value).__func__
        case property():
            yield from (accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None)
        case _:
            yield type(value)


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
