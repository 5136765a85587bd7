"""Modules of this process that received ones of the same name hide from the user's code, and from that alone.

Skyward, Dask and the standard library import some of theirs only when they need them. They go on to get their own.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from skyward.wire.code.modules import ServedLoader
from skyward.wire.code.ownership import OWN_PACKAGES

__all__ = ["Shadows"]

_IMPORTERS: Final = OWN_PACKAGES | {"dask", "distributed", "tornado"} | (sys.stdlib_module_names - {"pickle"})


class Shadows:
    """Hidden modules, by their top-level package; while there are any, this process's import statements pass here.

    Attributes:
        aside: set in a thread while it imports a hidden module: the received ones stand aside.
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
        if level == 0 and name in hidden and all(hasattr(hidden[name], each) for each in fromlist or ()):
            return hidden[name] if fromlist else hidden[package]
        with self._swapped(package, hidden):
            return self._import(name, globals, locals, fromlist, level)

    @contextmanager
    def _swapped(self, package: str, hidden: dict[str, ModuleType]) -> Generator[None]:
        with self._lock:
            received = _taken_out(package)
            sys.modules.update(hidden)
            self.aside.active = True
            try:
                yield
            finally:
                self.aside.active = False
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
