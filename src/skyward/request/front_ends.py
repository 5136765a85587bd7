"""Front-ends that the core knows by name. Nothing of them is imported here: they are found by this table when used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from skyward.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """A package that submits to pools.

    Attributes:
        package: its import package.
        extra: the extra that installs what it requires.
        requires: import packages that it requires in the client's environment.
        on_nodes: distributions that nodes get in the versions installed here, if ``requires`` is.
        counterparts: distributions whose versions must be the same here and on nodes.
    """

    package: str
    extra: str
    requires: tuple[str, ...]
    on_nodes: tuple[str, ...] = ()
    counterparts: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """True if this environment has what it requires. Imports nothing."""
        return all(importlib.util.find_spec(name) is not None for name in self.requires)


FRONT_ENDS: Final[Mapping[str, FrontEnd]] = {
    "joblib": FrontEnd(package="skyward_joblib", extra="joblib", requires=("joblib",)),
    "dask": FrontEnd(
        package="skyward_dask",
        extra="dask",
        requires=("dask", "distributed"),
        on_nodes=("dask", "distributed", "tornado"),
        # Dask pickles its messages with these: other versions at the other end fail later, and less clearly.
        counterparts=("dask", "distributed", "cloudpickle"),
    ),
}
"""Front-ends by name."""

COUNTERPARTS: Final = tuple(sorted({name for front_end in FRONT_ENDS.values() for name in front_end.counterparts}))
"""Distributions whose versions nodes report."""


def needs(what: str, name: str) -> str:
    """Return the message for ``what`` in an environment without the requirements of front-end ``name``."""
    front_end = FRONT_ENDS[name]
    packages = " and ".join(front_end.requires)
    are, they = ("are", "they") if front_end.requires[1:] else ("is", "it")
    return (
        f"{what} needs {packages} in this environment, and {they} {are} not installed here: "
        f"pip install 'skyward-fleet[{front_end.extra}]'"
    )


def load_front_end(name: str, what: str) -> ModuleType:
    """Import the package of a front-end.

    Args:
        name: a name of :data:`FRONT_ENDS`.
        what: what it is needed for, for the error.

    Raises:
        ConfigurationError: its requirements are missing here; the message has the line that installs them.
    """
    front_end = FRONT_ENDS[name]
    if not front_end.is_installed:
        raise ConfigurationError(needs(what, name))
    return importlib.import_module(front_end.package)
