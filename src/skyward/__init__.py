"""Ephemeral accelerator compute: ordinary Python on machines that exist only while they work.

::

    import skyward as sky

    @sky.compute
    def square(x: int) -> int:
        return x * x

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        four = square(2) >> pool

``__init__.pyi`` lists the public names. Each is loaded on first use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib

_homes: dict[str, str] = {}


def _home_of(name: str) -> str | None:
    """Return the module that a public name lies in; None if there is no such name."""
    if not _homes:
        import pkgutil
        import re

        stub = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
        _homes.update((name, home) for home, name in re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE))
    return _homes.get(name)


def __getattr__(name: str) -> object:
    home = _home_of(name)
    if name == "__all__":
        return sorted(_homes)
    if home is None:
        raise AttributeError(f"module 'skyward' has no attribute {name!r}")
    if home == __name__:
        return importlib.import_module(f"{home}.{name}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    _home_of("")
    return sorted(_homes)
