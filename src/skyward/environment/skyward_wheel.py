"""Skyward's own distribution: its name, its pinned requirements, and its code as one wheel.

Nodes receive this wheel, never a release from a package index: both ends of a connection must run the same code.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from skyward.environment.local_wheels import pack_wheel
from skyward.request.distribution_names import DISTRIBUTION
from skyward.request.front_ends import FRONT_ENDS

ENGINE_PACKAGES = ("cloudpickle", "msgpack")
"""Packages that both ends of a connection need in the same version; skyward's own requirements are pinned too."""

_PACKAGES = ("skyward", "skyward_joblib", "skyward_dask")
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWheel:
    """Skyward's code as a wheel.

    Attributes:
        data: a wheel's bytes.
        digest: 16 hexadecimal characters, a hash of its content.
    """

    data: bytes = field(repr=False)
    digest: str


_CLIENT_ONLY = frozenset({"uv"})
"""Requirements that nodes do without: uv builds their environments from outside, and is a program of 37 MiB."""


@cache
def engine_pins() -> tuple[str, ...]:
    """Return ``name==version`` of every engine package and requirement of skyward, sorted.

    The versions are those installed here. Front-ends that can be used here add what they need on nodes.
    """
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        declared = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        declared = []
    needed = [r.name for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    of_front_ends = [name for front_end in FRONT_ENDS.values() if front_end.is_installed for name in front_end.on_nodes]
    names = {canonicalize_name(name) for name in (*ENGINE_PACKAGES, *needed, *of_front_ends)} - _CLIENT_ONLY
    return tuple(sorted(f"{name}=={version(name)}" for name in names))


@cache
def own_wheel() -> OwnWheel:
    """Return the wheel of the code that runs here; equal files give equal wheels. Blocks on files."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # run from its sources
        version, requires = "0", list[str]()
    else:
        version, requires = installed.version, installed.requires or []
    contents = dict(_code())
    digest = hashlib.blake2b(f"{version}\0{requires}".encode(), digest_size=_DIGEST_BYTES)
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return OwnWheel(data=pack_wheel(DISTRIBUTION, version, requires, contents), digest=digest.hexdigest())


def read_own_wheel() -> None:
    """Have :func:`own_wheel` answer at once from now on. Raises nothing: the first use reports it."""
    with suppress(Exception):
        own_wheel()


def code_folders() -> Iterator[Path]:
    """Yield the folders of Skyward's packages."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def _code() -> Iterator[tuple[str, bytes]]:
    for folder in code_folders():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(folder.parent).as_posix(), path.read_bytes()
