"""``__main__`` of the client, on a worker: what came of it is found there under its name.

Functions of a script or a notebook go by value. Those of one pickle share the names of one module, which is
``sys.modules["__main__"]`` while a call of theirs runs: so pickles, type hints and ``sys.modules[__name__]`` find the
classes that the call uses. Each pickle has its own module: a later one changes no names of a call that still runs.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, cast

import cloudpickle.cloudpickle as _cloudpickle

from skyward.wire.code.served import received_source

__all__ = ["MainNames", "define_in_main", "enter_main", "main_of_tasks", "receiving", "with_annotated"]

MAIN = "__main__"


class MainNames:
    """Names of ``__main__`` in one pickle; it is rebuilt as the dictionary of a module.

    Args:
        names: the names that all functions have, such as ``__file__``.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return _names_of_main, (self._names,)


class _MainLoader(InspectLoader):
    """Loader of a received ``__main__``, by which its source is found; holds the module for its functions.

    Attributes:
        module: the module.
        defined: the definitions that were received for it, by name.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.defined: dict[str, Any] = {}

    def get_source(self, fullname: str) -> str:
        """See :class:`importlib.abc.InspectLoader`."""
        if (source := received_source(fullname)) is None:
            raise ImportError(f"the source of {fullname} was not sent", name=fullname)
        return source.text

    def get_code(self, fullname: str) -> CodeType:
        """Raise: it ran where it comes from."""
        raise ImportError(f"{fullname} runs where it comes from", name=fullname)


class _Main(ModuleType):
    """``__main__`` of the client, as far as it was received."""

    def __getattr__(self, name: str) -> type:
        """Return a class that came by another way, as with a task of Dask's; the newest of that name."""
        # Dask pickles with cloudpickle, whose record of classes is the only trace of where they were found.
        known = cast("Any", _cloudpickle)._DYNAMIC_CLASS_TRACKER_BY_CLASS  # noqa: SLF001 - it has no public way
        found = [each for each in list(known) if each.__module__ == MAIN and each.__qualname__ == name]
        if not found:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}", name=name, obj=self)
        return found[-1]


class _Receiving(threading.local):
    """Gathering of the definitions of ``__main__`` that this thread unpickles.

    Attributes:
        active: whether it unpickles a part of a call: what it receives may go back to the client as a name.
        main: their module; None if there are none yet.
    """

    active: bool = False
    main: ModuleType | None = None


receiving: Final = _Receiving()
# A context manager for it would take two microseconds of every call.


def define_in_main(name: str, value: object) -> None:
    """Record a definition of ``__main__`` that is being received."""
    if receiving.active and "." not in name:
        module = _main()
        _loader_of(module).defined[name] = value
        setattr(module, name, value)


def main_of_tasks() -> None:
    """Have tasks find the client's classes, until a call brings its own main module."""
    sys.modules[MAIN] = _main()


def with_annotated(value: type | FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a reduction of a definition of ``__main__`` with what its annotations name as text, for type hints."""
    names = _annotated(value)
    if not names:
        return reduced
    make, arguments, state, items, pairs, set_state = reduced
    return make, arguments, (set_state, state, names), items, pairs, _set_with_names


def _annotated(value: type | FunctionType) -> dict[str, Any]:
    scope = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[MAIN])
    stated: Mapping[str, object] = vars(value).get("__annotations__") or {} if isinstance(value, type) else {}
    if isinstance(value, FunctionType) and scope.get("__name__") == MAIN:
        stated = value.__annotations__
    words = {word for text in stated.values() for word in re.findall(r"[^\W\d]\w*", _text_of(text))}
    return {word: scope[word] for word in sorted(words & scope.keys()) if _is_for_hints(scope[word])}


def _text_of(annotation: object) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation)) if not isinstance(annotation, type) else ""


def _is_for_hints(value: object) -> bool:
    """Return True for the client's own classes and for what annotations are made of; packages may be missing here."""
    if isinstance(value, ModuleType):
        return value.__name__ in ("typing", "collections.abc")
    if isinstance(value, type):
        return value.__module__ == MAIN or value.__module__ in sys.stdlib_module_names
    return type(value).__module__ in ("typing", "types")


def _set_with_names(value: Any, sent: tuple[Any, Any, dict[str, Any]]) -> None:
    set_state, state, names = sent
    set_state(value, state)
    for name, each in names.items():
        if receiving.active and name not in vars(_main()):
            define_in_main(name, each)


def enter_main(of_function: ModuleType | None, of_arguments: ModuleType | None) -> None:
    """Make the module that a call's function comes from, or else its arguments, this process's ``__main__``.

    Classes in the arguments are found in it, too.
    """
    main = of_function or of_arguments
    if main is None:
        return
    if of_arguments is not None and main is not of_arguments:
        for name, value in _loader_of(of_arguments).defined.items():
            if isinstance(value, type) or not hasattr(main, name):
                setattr(main, name, value)
    sys.modules[MAIN] = main


def _loader_of(module: ModuleType) -> _MainLoader:
    return cast("_MainLoader", module.__loader__)


def _names_of_main(names: dict[str, Any]) -> dict[str, Any]:
    module = _main()
    vars(module).update(names)
    # The name keeps multiprocessing's children from running the client's script, if they find a file of its name.
    package = names.get("__package__")
    module.__spec__ = ModuleSpec(f"{package}.{MAIN}" if package else MAIN, _loader_of(module))
    return vars(module)


def _main() -> ModuleType:
    if receiving.active and receiving.main is not None:
        return receiving.main
    module = _Main(MAIN)
    module.__loader__ = _MainLoader(module)
    module.__spec__ = ModuleSpec(MAIN, module.__loader__)
    if receiving.active:
        receiving.main = module
    return module
