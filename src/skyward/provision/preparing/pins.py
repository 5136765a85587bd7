"""The engine's packages, pinned to what this process runs, so that both ends of a lane agree."""

from __future__ import annotations

from functools import cache

__all__ = ["DISTRIBUTION", "ENGINE_PACKAGES", "engine_pins"]

DISTRIBUTION = "skyward-fleet"
"""Name of the distribution that holds Skyward's packages; on the public index, ``skyward`` is another project."""

ENGINE_PACKAGES = ("cloudpickle", "dask", "distributed", "msgpack", "tornado")
"""What both ends of a connection must have in the same version; skyward's own requirements are pinned too."""


@cache
def engine_pins() -> tuple[str, ...]:
    """``name==version`` of every engine package and requirement of skyward installed here, sorted."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        declared = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        declared = []
    needed = [r.name for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    return tuple(
        sorted(f"{name}=={version(name)}" for name in {canonicalize_name(n) for n in (*ENGINE_PACKAGES, *needed)})
    )
