"""Package indexes: which of the installed distributions they have for the nodes, and as which files."""

from __future__ import annotations

import hashlib
import json
import netrc
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from urllib.parse import urlsplit
from urllib.request import url2pathname  # pyright: ignore[reportDeprecated]

import platformdirs

from skyward.environment.package_sources import (
    PUBLIC_INDEX,
    client_uv,
    package_sources,
    pip_settings,
    pip_variables,
    uv_options,
    variables_for_uv,
)
from skyward.errors import ConfigurationError
from skyward.request.checks import bare_url, without_credentials
from skyward.request.image import ImageSettings

_TIMEOUT_S = 120.0
_KEPT_PINS = 5000
_MAIN = "main"
_MISSING = re.compile(r"(?:Because|and|that) ([A-Za-z0-9._-]+) was not found|no version of ([A-Za-z0-9._-]+)==")
_UNKNOWN = re.compile(
    r"was not found|needs to be downloaded|no versions? of|no wheels|not provided by|no usable wheels|build.* disabled"
)
"""Parts of the resolver's reasons that say what these indexes lack, which those of nodes may have."""

_REASON = re.compile(r"(?:╰─▶|cause:)(.*?)(?:hint:|$)", re.DOTALL)
_UV_PLACES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")
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


def sources_here(image: ImageSettings) -> Mapping[str, str]:
    """Return the sources that this machine can use: those of its pip and uv, and the image's before them."""
    settings = settings_here()
    own = settings.get("index-url") or PUBLIC_INDEX
    more = {"extra-index-url": f"{settings.get('extra-index-url', '')} {own}"} if image.pip_index_url else {}
    return _of_this_machine(package_sources(image, {**settings, **more}))


def sources_of_nodes(image: ImageSettings) -> Mapping[str, str]:
    """Return the sources that nodes have too, as far as it can be foreseen: the image's, and the main index."""
    settings = settings_here()
    shared = {name: settings[name] for name in ("trusted-host", "cert", "proxy") if name in settings}
    index = passable_index(settings)
    options = {**shared, "index-url": index} if index else shared
    return _of_this_machine(package_sources(image, {**options, **uv_options(image.env), **pip_variables(image.env)}))


def settings_here() -> Mapping[str, str]:
    """Return this machine's options of package sources, by pip's names: those of pip, and above them those of uv."""
    return {**pip_settings(), **uv_options(os.environ)}


def _of_this_machine(sources: Mapping[str, str]) -> Mapping[str, str]:
    """Return the sources without folders that exist on nodes only."""
    links = [place for place in sources.get("find-links", "").split() if not _is_of_nodes(place)]
    others = {name: value for name, value in sources.items() if name != "find-links"}
    return {**others, "find-links": " ".join(links)} if links else others


def _is_of_nodes(place: str) -> bool:
    path = url2pathname(urlsplit(place).path) if place.startswith("file:") else place  # pyright: ignore[reportDeprecated]
    return ("://" not in place or place.startswith("file:")) and not os.path.exists(path)


def passable_index(settings: Mapping[str, str]) -> str | None:
    """Return this machine's main index if nodes can use its URL: one in a network, for which no one logs in."""
    text = settings.get("index-url", "")
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or bare_url(text) != text or _logs_in(url.hostname or "", settings):
        return None
    return text


def _logs_in(host: str, settings: Mapping[str, str]) -> bool:
    """Return True if installers here look a password for an index up: in ~/.netrc or in a keyring."""
    provider = settings.get("keyring-provider") or os.environ.get("UV_KEYRING_PROVIDER", "disabled")
    if provider not in ("disabled", "auto"):  # pip's "auto" asks a keyring only after a refusal
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, ValueError, KeyError):
        return False


def check_pins(pins: Mapping[str, str], *, here: Mapping[str, str], nodes: Mapping[str, str]) -> Availability:
    """Look for versions in package sources. Blocks: one short request for each name.

    Versions that were found once are not looked for again: an index does not take them back.

    Args:
        pins: names to exact versions.
        here: the sources that this machine can use.
        nodes: those that nodes can use.
    """
    index = nodes.get("index-url", PUBLIC_INDEX)
    if _is_of_nodes(index):
        return Availability(unchecked=f"{index} is a folder of the nodes")
    known = _FoundVersions.of(here, nodes)
    new = {name: version for name, version in pins.items() if (name, version) not in known.versions}
    try:
        nowhere = _missing(new, _variables(here))
        versions = {name: version for name, version in new.items() if name not in nowhere}
        lacking = _missing(versions, _variables(nodes)) if here != nodes else frozenset[str]()
    except _UncheckedError as error:
        return Availability(unchecked=str(error))
    known.add({(name, version): name not in lacking for name, version in versions.items()})
    only_here = [name for name, version in pins.items() if known.versions.get((name, version)) is False]
    return Availability(nowhere=nowhere, only_here=frozenset(only_here))


def find_conflict(requirements: Sequence[str], engine: Sequence[str], sources: Mapping[str, str]) -> str:
    """Return the resolver's explanation if requirements exclude each other; empty if not, or if it cannot tell.

    Blocks: reads the metadata of all that they require. Builds nothing, so what has no wheel is not judged.

    Args:
        requirements: the requirements.
        engine: Skyward's, which are left out of the question if these sources lack them: nodes may have others.
        sources: the sources.
    """
    for lines in ([*requirements, *engine], requirements):
        try:
            ran = _compile(lines, _variables(sources), "--no-build")
        except _UncheckedError:
            return ""
        if not ran.returncode or "No solution found" not in ran.stderr:
            return ""
        if not _UNKNOWN.search(ran.stderr):
            reason = _REASON.search(ran.stderr)
            return " ".join(without_credentials(reason[1] if reason else ran.stderr).split())
    return ""


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
    def of(cls, here: Mapping[str, str], nodes: Mapping[str, str]) -> _FoundVersions:
        """Return those of these sources."""
        names = ("index-url", "extra-index-url", "find-links", "no-index")
        parts = [[sources.get(name) for name in names] for sources in (here, nodes)]
        parts += [[sys.platform, python_version()]]
        name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        return cls(platformdirs.user_cache_path("skyward") / "wheels" / f"found-{name}.json")

    def add(self, versions: Mapping[tuple[str, str], bool]) -> None:
        """Take further versions, and write all down."""
        if not versions:
            return
        self.versions |= versions
        rows = [[*pin, _MAIN if in_main else "elsewhere"] for pin, in_main in self.versions.items()][-_KEPT_PINS:]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        new.write_text(json.dumps(rows), encoding="utf-8")
        new.replace(self._path)


class _UncheckedError(Exception):
    """Why the indexes could not be queried."""


def _variables(sources: Mapping[str, str]) -> Mapping[str, str]:
    """Return uv's environment with these sources alone."""
    kept = {name: value for name, value in os.environ.items() if name not in (*_UV_PLACES, "UV_TORCH_BACKEND")}
    return {**kept, **variables_for_uv(sources, already_set=kept)}


def _missing(pins: Mapping[str, str], environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names that the sources lack; the resolver names one at a time, so it is asked again for the rest."""
    missing: set[str] = set()
    while requirements := [f"{name}=={version}" for name, version in pins.items() if name not in missing]:
        ran = _compile(requirements, environment, "--no-deps")
        if not ran.returncode:
            break
        new = {name for pair in _MISSING.findall(ran.stderr) for name in pair if name} & {*pins} - missing
        if not new:
            explanation = without_credentials(ran.stderr.strip())
            why = (explanation.splitlines() or [f"exit code {ran.returncode}"])[0]
            if _UNREACHABLE.search(ran.stderr):
                raise _UncheckedError(why)
            raise ConfigurationError(f"this environment's distributions cannot be found for nodes: {explanation}")
        missing |= new
    return frozenset(missing)


def _compile(
    requirements: Collection[str], environment: Mapping[str, str], option: str
) -> subprocess.CompletedProcess[str]:
    # Nodes run Linux; on Linux the machine's own processor counts, which is the likeliest one.
    platform: Sequence[str] = () if sys.platform == "linux" else ("--python-platform", "x86_64-unknown-linux-gnu")
    # Not in a project's folder: its settings for uv would count.
    command = [str(client_uv() or "uv"), "pip", "compile", "--quiet", option, "--no-config", "--no-header"]
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
