"""Skyward's own distribution: its name, its pinned requirements, and its code as one wheel.

Nodes receive this wheel, never a release from a package index: both ends of a connection must run the same code.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from skyward.request.distribution_names import DISTRIBUTION
from skyward.request.front_ends import FRONT_ENDS

ENGINE_PACKAGES = ("cloudpickle", "msgpack")
"""Packages that both ends of a connection need in the same version; skyward's own requirements are pinned too."""

_PACKAGES = ("skyward", "skyward_joblib", "skyward_dask")
_DIGEST_BYTES = 8
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = 0o100644 << 16


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
    of_front_ends = [name for each in FRONT_ENDS.values() if each.is_installed for name in each.on_nodes]
    names = {canonicalize_name(name) for name in (*ENGINE_PACKAGES, *needed, *of_front_ends)} - _CLIENT_ONLY
    return tuple(sorted(f"{name}=={version(name)}" for name in names))


@cache
def own_wheel() -> OwnWheel:
    """Return the wheel of the code that runs here; equal files give equal wheels. Blocks on files."""
    contents = dict(_code())
    contents |= _metadata(contents)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(contents):
            digest.update(f"{name}\0{len(contents[name])}\0".encode())
            digest.update(contents[name])
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = _REGULAR_FILE
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, contents[name])
    return OwnWheel(data=buffer.getvalue(), digest=digest.hexdigest())


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


def _metadata(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # run from its sources
        version, requires = "0", list[str]()
    else:
        version, requires = installed.version, installed.requires or []
    folder = f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    tags = ["Wheel-Version: 1.0", "Generator: skyward", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    ours = {f"{folder}/METADATA": _lines(metadata), f"{folder}/WHEEL": _lines(tags)}
    record = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in sorted({**contents, **ours}.items())]
    return ours | {f"{folder}/RECORD": _lines([*record, f"{folder}/RECORD,,"])}


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
