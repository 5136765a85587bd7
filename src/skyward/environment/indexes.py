"""Package indexes: which of the installed distributions they have for the nodes, and as which files."""

from __future__ import annotations

import base64
import hashlib
import json
import netrc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from urllib.parse import urlsplit
from urllib.request import url2pathname  # pyright: ignore[reportDeprecated]

import platformdirs
from blake3 import blake3
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from skyward.environment.installed import Distribution, Origin
from skyward.environment.sources import (
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
    given = {**shared, "index-url": index} if index else shared
    return _of_this_machine(package_sources(image, {**given, **uv_options(image.env), **pip_variables(image.env)}))


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
        found = {name: version for name, version in new.items() if name not in nowhere}
        lacking = _missing(found, _variables(nodes)) if here != nodes else frozenset[str]()
    except _UncheckedError as error:
        return Availability(unchecked=str(error))
    known.add({(name, version): name not in lacking for name, version in found.items()})
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

    def add(self, found: Mapping[tuple[str, str], bool]) -> None:
        """Take further versions, and write all down."""
        if not found:
            return
        self.versions |= found
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
    while left := [f"{name}=={version}" for name, version in pins.items() if name not in missing]:
        ran = _compile(left, environment, "--no-deps")
        if not ran.returncode:
            break
        new = {name for pair in _MISSING.findall(ran.stderr) for name in pair if name} & {*pins} - missing
        if not new:
            told = without_credentials(ran.stderr.strip())
            why = (told.splitlines() or [f"exit code {ran.returncode}"])[0]
            if _UNREACHABLE.search(ran.stderr):
                raise _UncheckedError(why)
            raise ConfigurationError(f"this environment's distributions cannot be found for nodes: {told}")
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


# --- wheels that are built here -------------------------------------------------------------------------------------

_BUILD_TIMEOUT_S = 900.0
_LOG_LINES = 15
_KEPT_BUILDS = 3
"""Builds kept of each distribution, the newest ones."""

_READ_BYTES = 1 << 20
"""Larger files of a project count by size and time, not by content: a folder may hold data."""

_ADDRESS = re.compile(
    rb"^(Requires-Dist:\s*[\w.-]+\s*(?:\[[^\]\r\n]*\])?)\s*(@\s*\S+)([^\r\n]*)", re.IGNORECASE | re.MULTILINE
)
"""Requirement with a URL in a wheel's metadata: name and extras, URL, markers."""

_NO_SOURCES = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


def local_wheel(distribution: Distribution, environment: Mapping[str, str]) -> Path:
    """Return the wheel of a distribution that was installed from elsewhere than an index. Blocks, maybe for minutes.

    It lies alone in its folder of the user's cache, named by the content of its sources.

    Args:
        distribution: the distribution.
        environment: variables of the installers, which may have to bring a build's requirements.

    Raises:
        ConfigurationError: the sources are gone, cannot be built, or give a wheel for another system than nodes have.
    """
    cache = platformdirs.user_cache_path("skyward") / "wheels"
    folder = cache / f"{distribution.name}-{_key(distribution)}"
    if not (found := sorted(folder.glob("*.whl"))):
        _build(distribution, folder, environment)
        found = sorted(folder.glob("*.whl"))
        _forget_older(cache, distribution.name, folder)
    if not found:
        raise _failure(distribution, "the build left no wheel")
    _refuse_other_systems(distribution, found[0])
    return found[0]


def _build(distribution: Distribution, folder: Path, environment: Mapping[str, str]) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Made beside its place, and moved there at once: other processes may build the same.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        out = Path(made) / "out"
        out.mkdir()
        if distribution.origin is Origin.FILES:
            _pack(distribution, out)
        elif distribution.origin is Origin.ARCHIVE and distribution.place.endswith(".whl"):
            shutil.copy2(distribution.place, out)
        else:
            _run(distribution, _command(distribution, out), {**environment, **_outside_of_sources(Path(made))})
        for wheel in out.glob("*.whl"):
            try:
                _drop_addresses(wheel)
            except zipfile.BadZipFile as error:
                raise _failure(distribution, f"{distribution.place or wheel.name} is no wheel") from error
        try:
            out.rename(folder)
        except OSError:  # another process has put the same there meanwhile
            if not any(folder.glob("*.whl")):
                raise


def _drop_addresses(wheel: Path) -> None:
    """Have a wheel require other distributions by name where it names a URL.

    That URL may hold a token (``git+https://TOKEN@github.com/…``); and nodes get the distribution from elsewhere: it is
    mirrored itself.
    """
    with zipfile.ZipFile(wheel) as old:
        place = next((name for name in old.namelist() if name.endswith(".dist-info/METADATA")), None)
        before = b"" if place is None else old.read(place)
        after = _ADDRESS.sub(rb"\1\3", before)
        if place is None or after == before:
            return
        record = f"{place.rpartition('/')[0]}/RECORD"
        row = f"{place},sha256={_digest_in_records(after)},{len(after)}"
        new = wheel.with_suffix(".new")
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as made:
            for member in old.infolist():
                content = after if member.filename == place else old.read(member)
                if member.filename == record:
                    rows = content.decode("utf-8", "replace").splitlines()
                    rows = [row if each.partition(",")[0] == place else each for each in rows]
                    content = "".join(f"{each}\n" for each in rows).encode()
                made.writestr(member, content)
    new.replace(wheel)


def _pack(distribution: Distribution, out: Path) -> None:
    """Make a wheel of the installed files, without what installers wrote about this installation."""
    name = distribution.name.replace("-", "_")
    info = f"{name}-{distribution.version}.dist-info"
    kept = distribution.metadata or Path()
    records: list[str] = []
    with zipfile.ZipFile(out / f"{name}-{distribution.version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(place: str, content: bytes) -> None:
            wheel.writestr(zipfile.ZipInfo(place), content)  # without the time: equal content, equal wheel
            records.append(f"{place},sha256={_digest_in_records(content)},{len(content)}\n")

        for path in sorted(distribution.pure_files):
            if kept not in path.parents:
                add(path.relative_to(kept.parent).as_posix(), path.read_bytes())
        for path in (kept / "entry_points.txt", kept / "top_level.txt"):
            if path.is_file():
                add(f"{info}/{path.name}", path.read_bytes())
        required = "".join(f"Requires-Dist: {line}\n" for line in distribution.requires)
        head = f"Metadata-Version: 2.1\nName: {distribution.name}\nVersion: {distribution.version}\n"
        add(f"{info}/METADATA", f"{head}{required}".encode())
        add(f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: skyward\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{''.join(records)}{info}/RECORD,,\n")


def _digest_in_records(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _outside_of_sources(made: Path) -> Mapping[str, str]:
    """Return variables that keep setuptools from writing into the sources it builds.

    Its ``build/`` would stay there, and modules that are deleted later would still be in the next wheel.
    """
    settings = made / "setuptools.cfg"
    settings.write_text(f"[build]\nbuild_base = {made / 'build'}\n[egg_info]\negg_base = {made}\n", encoding="utf-8")
    return {
        "DIST_EXTRA_CONFIG": str(settings)
    }  # https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html


def _command(distribution: Distribution, out: Path) -> Sequence[str]:
    uv = str(client_uv() or "uv")
    match distribution.origin:
        case Origin.FOLDER | Origin.ARCHIVE:
            return [uv, "build", "--wheel", "--python", sys.executable, "--out-dir", str(out), distribution.place]
        case Origin.REPOSITORY | Origin.ADDRESS:
            wanted = f"{distribution.name} @ {distribution.place}"
            return [*_pip(uv), "wheel", "--no-deps", "--no-input", "--retries=1", "--wheel-dir", str(out), wanted]
        case Origin.INDEX | Origin.FILES:
            wanted = f"{distribution.name}=={distribution.version}"
            return [*_pip(uv), "download", "--no-deps", "--only-binary=:all:", *_platform(), "--dest", str(out), wanted]


def _pip(uv: str) -> Sequence[str]:
    """Return the command of pip, which environments made by uv lack."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [uv, "tool", "run", "--python", sys.executable, "pip"]


def _platform() -> Sequence[str]:
    if sys.platform == "linux":
        return []
    return ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]


def _run(distribution: Distribution, command: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        ran = subprocess.run(
            command,
            env={"GIT_TERMINAL_PROMPT": "0", **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failure(distribution, str(error)) from error
    if ran.returncode:
        tail = without_credentials("\n".join(ran.stdout.strip().splitlines()[-_LOG_LINES:]))
        raise _failure(distribution, f"exit code {ran.returncode}\n{tail}")


def _failure(distribution: Distribution, why: str) -> ConfigurationError:
    place = distribution.place or "this machine's package indexes"
    login = (
        "its URL held a password or the like, which Skyward neither uses nor sends: let git or ~/.netrc know it, or "
        "put the wheel into a folder for Image(find_links=[…])"
    )
    return ConfigurationError(
        f"no wheel of {distribution.name} {distribution.version} can be made here from {place}, and nodes need one; "
        f"{login if distribution.needs_login else 'correct that'}, or leave it out: "
        f"Image.mirror(exclude=[{distribution.name!r}]). The attempt: {why}"
    )


def _refuse_other_systems(distribution: Distribution, wheel: Path) -> None:
    try:
        tags = parse_wheel_filename(wheel.name)[3]
    except InvalidWheelFilename as error:
        raise _failure(distribution, str(error)) from error
    if not any(tag.platform == "any" or "linux" in tag.platform for tag in tags):
        platforms = ", ".join(sorted({tag.platform for tag in tags}))
        raise ConfigurationError(
            f"the wheel of {distribution.name} {distribution.version} from {distribution.place or 'the index'} is for "
            f"{platforms}, and nodes run Linux: put one for Linux into a folder for Image(find_links=[…]), or leave it "
            f"out: Image.mirror(exclude=[{distribution.name!r}])"
        )


def _key(distribution: Distribution) -> str:
    digest = blake3(f"{distribution.version}\0{distribution.place}\0{sys.version_info[:2]}\0".encode())
    for path in sorted(distribution.pure_files) if distribution.origin is Origin.FILES else ():
        digest.update(f"{path}\0".encode())
        digest.update(_content(path))
    place = Path(distribution.place)
    if distribution.origin in (Origin.FOLDER, Origin.ARCHIVE):
        if not place.exists():
            raise _failure(distribution, f"there is no {place}")
        for path in sorted(_sources(place)):
            digest.update(f"{path}\0".encode())
            digest.update(_content(path))
    return digest.hexdigest(length=10)


def _sources(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for folder, inside, files in os.walk(place):
        inside[:] = [name for name in inside if not _is_no_source(Path(folder), name)]
        yield from (path for name in files if (path := Path(folder, name)).is_file() and not name.endswith(".pyc"))


def _is_no_source(folder: Path, name: str) -> bool:
    hidden = name.startswith(".") or name in _NO_SOURCES or name.endswith(".egg-info")
    return hidden or (folder / name / "pyvenv.cfg").exists()


def _content(path: Path) -> bytes:
    seen = path.stat()
    if seen.st_size > _READ_BYTES:
        return f"{seen.st_size} {seen.st_mtime_ns}".encode()
    return blake3(path.read_bytes()).digest()


def _forget_older(cache: Path, name: str, newest: Path) -> None:
    builds = [each for each in cache.glob(f"{name}-*") if each.name.rpartition("-")[0] == name and each != newest]
    for old in sorted(builds, key=lambda each: each.stat().st_mtime, reverse=True)[_KEPT_BUILDS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
