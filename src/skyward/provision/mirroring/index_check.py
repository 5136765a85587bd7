"""Check that package indexes have distributions, before any machine is asked to install them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from urllib.parse import urlsplit

import platformdirs

from skyward.errors import ConfigurationError
from skyward.provision.preparing.sources import PackageSources, client_uv, package_sources, pip_settings
from skyward.request.image import Image

__all__ = ["Availability", "check_pins", "passable_index", "sources_here"]

_TIMEOUT_S = 120.0
_KEPT = 5000
_MAIN = "main"
_MISSING = re.compile(r"(?:Because|and|that) ([A-Za-z0-9._-]+) was not found|no version of ([A-Za-z0-9._-]+)==")
_UNREACHABLE = re.compile(r"Failed to fetch|error sending request|Network connectivity|dns error", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Result of a check.

    Attributes:
        nowhere: names that no source of this machine has in that version.
        only_here: names that this machine's other sources have, and the main index lacks.
        unchecked: the reason for which nothing could be checked; empty if it could.
    """

    nowhere: frozenset[str] = frozenset()
    only_here: frozenset[str] = frozenset()
    unchecked: str = ""


def sources_here() -> PackageSources:
    """Return this machine's package sources: pip's configuration and variables."""
    return package_sources(Image(), pip_settings())


def passable_index(sources: PackageSources) -> str | None:
    """Return this machine's main index if nodes can be given its URL: one in a network, without credentials."""
    url = urlsplit(sources.index_url)
    return sources.index_url if url.scheme in ("http", "https") and "@" not in url.netloc else None


def check_pins(pins: Mapping[str, str], sources: PackageSources) -> Availability:
    """Look for versions in the package sources of this machine. Blocks: one short request for each name.

    Versions that were found once are not looked for again: an index does not take them back.

    Args:
        pins: names to exact versions.
        sources: the sources.
    """
    known = _FoundVersions.of(sources)
    new = {name: version for name, version in pins.items() if (name, version) not in known.versions}
    try:
        nowhere = _missing(new, _variables(sources))
        found = {name: version for name, version in new.items() if name not in nowhere}
        lacking = frozenset(found) if sources.no_index else _not_in_main(found, sources)
    except _UncheckedError as error:
        return Availability(unchecked=str(error))
    known.add({(name, version): name not in lacking for name, version in found.items()})
    only_here = [name for name, version in pins.items() if known.versions.get((name, version)) is False]
    return Availability(nowhere=nowhere, only_here=frozenset(only_here))


def _not_in_main(found: Mapping[str, str], sources: PackageSources) -> frozenset[str]:
    has_others = sources.extra_index_urls or sources.find_links or sources.index_url != (passable_index(sources) or "")
    return _missing(found, _variables(_main(sources), alone=True)) if has_others else frozenset()


class _FoundVersions:
    """Versions that were found before in the same sources, by name and version; True if the main index has them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.versions: dict[tuple[str, str], bool] = {}
        try:
            rows: list[list[str]] = json.loads(path.read_bytes())
            self.versions = {(name, version): where == _MAIN for name, version, where in rows}
        except (OSError, ValueError):  # there is none yet, or another program has written it
            return

    @classmethod
    def of(cls, sources: PackageSources) -> _FoundVersions:
        """Return those of these sources."""
        parts = [sources.index_url, *sources.extra_index_urls, *sources.find_links, sys.platform, python_version()]
        name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        return cls(platformdirs.user_cache_path("skyward") / "wheels" / f"found-{name}.json")

    def add(self, found: Mapping[tuple[str, str], bool]) -> None:
        """Take further versions, and write all down."""
        if not found:
            return
        self.versions |= found
        rows = [[*pin, _MAIN if in_main else "elsewhere"] for pin, in_main in self.versions.items()][-_KEPT:]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        new.write_text(json.dumps(rows), encoding="utf-8")
        new.replace(self._path)


def _main(sources: PackageSources) -> PackageSources:
    """Return the sources that nodes have too, as far as it can be foreseen: the main index."""
    return PackageSources(
        index_url=passable_index(sources) or "",
        trusted_hosts=sources.trusted_hosts,
        cert=sources.cert,
        proxy=sources.proxy,
    )


class _UncheckedError(Exception):
    """Reason for which the sources could not be asked."""


def _variables(sources: PackageSources, *, alone: bool = False) -> Mapping[str, str]:
    """Return uv's environment; ``alone`` drops the sources that variables of uv add."""
    dropped = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS") if alone else ()
    kept = {name: value for name, value in os.environ.items() if name not in (*dropped, "UV_TORCH_BACKEND")}
    return {**kept, **sources.for_uv(already_set=kept)}


def _missing(pins: Mapping[str, str], environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names that the sources lack; the resolver names one at a time, so it is asked again for the rest."""
    missing: set[str] = set()
    while left := [f"{name}=={version}" for name, version in pins.items() if name not in missing]:
        ran = _compile(left, environment)
        if not ran.returncode:
            break
        new = {name for pair in _MISSING.findall(ran.stderr) for name in pair if name} & {*pins} - missing
        if not new:
            why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[0]
            if _UNREACHABLE.search(ran.stderr):
                raise _UncheckedError(why)
            raise ConfigurationError(
                f"this environment's distributions cannot be found for nodes: {ran.stderr.strip()}"
            )
        missing |= new
    return frozenset(missing)


def _compile(requirements: Collection[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # Nodes run Linux; on Linux the machine's own processor counts, which is the likeliest one.
    platform: Sequence[str] = () if sys.platform == "linux" else ("--python-platform", "x86_64-unknown-linux-gnu")
    # Not in a project's folder: its settings for uv would count.
    command = [str(client_uv() or "uv"), "pip", "compile", "--quiet", "--no-deps", "--no-config", "--no-header"]
    command += ["--python-version", python_version(), *platform, "-"]
    try:
        return subprocess.run(
            command,
            input="\n".join(requirements),
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _UncheckedError(str(error)) from error
