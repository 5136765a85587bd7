"""Providers that installed packages register, by entry points of one group."""

from __future__ import annotations

import importlib.metadata
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint
from typing import Any, Final

from skyward.errors import ConfigurationError

__all__ = ["GROUP", "load_registered", "registered"]

GROUP: Final = "skyward.providers"
"""Group of the entry points: ``name = "module:Class"``."""

_logger = logging.getLogger("skyward")


def registered() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points by name: more than one if several packages claim the name.

    A package whose metadata cannot be read is left out, with a warning in the log.
    """
    found: defaultdict[str, dict[str, EntryPoint]] = defaultdict(dict)
    for distribution in importlib.metadata.distributions():
        for entry in _entries(distribution):
            found[entry.name].setdefault(entry.value, entry)  # of two versions of a package, the first on the path
    return {name: tuple(entries.values()) for name, entries in sorted(found.items())}


def load_registered(name: str, entries: Sequence[EntryPoint]) -> Any:
    """Return the class that entry points register under a name.

    Raises:
        ConfigurationError: several packages claim the name, or the class cannot be imported.
    """
    if len(entries) > 1:
        claims = " and ".join(_described(entry) for entry in entries)
        raise ConfigurationError(f"provider {name!r} is registered by {claims}: uninstall all but one of them")
    (entry,) = entries
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"provider {name!r} cannot be loaded from {_described(entry)}: {type(error).__name__}: {error}; install a "
            "working version of that package, or uninstall it"
        ) from error


def _entries(distribution: Distribution) -> Sequence[EntryPoint]:
    try:
        return [entry for entry in distribution.entry_points if entry.group == GROUP]
    except Exception as error:
        metadata = distribution.read_text("METADATA") or ""
        name = next((line for line in metadata.splitlines() if line.startswith("Name:")), "an installed package")
        _logger.warning("cannot read the entry points of %s: %s", name.removeprefix("Name:").strip(), error)
        return ()


def _described(entry: EntryPoint) -> str:
    package = entry.dist
    return f"{entry.value!r}" + (f" of {package.name} {package.version}" if package is not None else "")
