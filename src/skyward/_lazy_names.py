"""Public names of a package, which its stub ``__init__.pyi`` lists with their homes; each is loaded on first use."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def attach_stub(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package; its ``__all__`` has the names of the stub."""
    homes: dict[str, str] = {}

    def list_names() -> list[str]:
        if not homes:
            import pkgutil
            import re

            stub = (pkgutil.get_data(package, "__init__.pyi") or b"").decode()
            homes.update((name, home) for home, name in re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE))
        return sorted(homes)

    def load_name(name: str) -> object:
        names = list_names()
        if name == "__all__":
            return names
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(importlib.import_module(package), name, value)
        return value

    return load_name, list_names
