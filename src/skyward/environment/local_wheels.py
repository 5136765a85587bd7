"""Wheels that this machine makes for nodes: of its own files, of projects, and of what no index has."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from blake3 import blake3
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from skyward.environment.installed import Distribution, Origin
from skyward.environment.package_sources import client_uv
from skyward.errors import ConfigurationError
from skyward.request.checks import without_credentials

_EPOCH = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = 0o100644 << 16


def info_folder(name: str, version: str) -> str:
    """Return the folder of a distribution's metadata in its wheel."""
    return f"{name.replace('-', '_')}-{version}.dist-info"


def pack_wheel(name: str, version: str, requires: Iterable[str], contents: Mapping[str, bytes]) -> bytes:
    """Return a wheel for every system with these files; equal contents give equal wheels."""
    folder = info_folder(name, version)
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    tags = ["Wheel-Version: 1.0", "Generator: skyward", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    members = {**contents, f"{folder}/METADATA": _lines(metadata), f"{folder}/WHEEL": _lines(tags)}
    rows = [f"{place},sha256={_digest_in_records(data)},{len(data)}" for place, data in sorted(members.items())]
    members[f"{folder}/RECORD"] = _lines([*rows, f"{folder}/RECORD,,"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for place, data in sorted(members.items()):
            entry = zipfile.ZipInfo(place, _EPOCH)
            entry.external_attr = _REGULAR_FILE
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _lines(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _digest_in_records(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


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
    if not (wheels := sorted(folder.glob("*.whl"))):
        _build(distribution, folder, environment)
        wheels = sorted(folder.glob("*.whl"))
        _forget_older(cache, distribution.name, folder)
    if not wheels:
        raise _failure(distribution, "the build left no wheel")
    _refuse_other_systems(distribution, wheels[0])
    return wheels[0]


def _build(distribution: Distribution, folder: Path, environment: Mapping[str, str]) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Made beside its place, and moved there at once: other processes may build the same.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        out = Path(temporary) / "out"
        out.mkdir()
        if distribution.origin is Origin.FILES:
            name = distribution.name.replace("-", "_")
            (out / f"{name}-{distribution.version}-py3-none-any.whl").write_bytes(_pack(distribution))
        elif distribution.origin is Origin.ARCHIVE and distribution.place.endswith(".whl"):
            shutil.copy2(distribution.place, out)
        else:
            _run(distribution, _command(distribution, out), {**environment, **_outside_of_sources(Path(temporary))})
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
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as rewritten:
            for member in old.infolist():
                content = after if member.filename == place else old.read(member)
                if member.filename == record:
                    rows = content.decode("utf-8", "replace").splitlines()
                    rows = [row if line.partition(",")[0] == place else line for line in rows]
                    content = "".join(f"{line}\n" for line in rows).encode()
                rewritten.writestr(member, content)
    new.replace(wheel)


def _pack(distribution: Distribution) -> bytes:
    """Make a wheel of the installed files, without what installers wrote about this installation."""
    metadata = distribution.metadata or Path()
    code = [path for path in distribution.pure_files if metadata not in path.parents]
    contents = {path.relative_to(metadata.parent).as_posix(): path.read_bytes() for path in code}
    for path in (metadata / "entry_points.txt", metadata / "top_level.txt"):
        if path.is_file():
            contents[f"{info_folder(distribution.name, distribution.version)}/{path.name}"] = path.read_bytes()
    return pack_wheel(distribution.name, distribution.version, map(str, distribution.requires), contents)


def _outside_of_sources(root: Path) -> Mapping[str, str]:
    """Return variables that keep setuptools from writing into the sources it builds.

    Its ``build/`` would stay there, and modules that are deleted later would still be in the next wheel.
    """
    settings = root / "setuptools.cfg"
    settings.write_text(f"[build]\nbuild_base = {root / 'build'}\n[egg_info]\negg_base = {root}\n", encoding="utf-8")
    return {
        "DIST_EXTRA_CONFIG": str(settings)
    }  # https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html


def _command(distribution: Distribution, out: Path) -> Sequence[str]:
    uv = str(client_uv() or "uv")
    match distribution.origin:
        case Origin.FOLDER | Origin.ARCHIVE:
            return [uv, "build", "--wheel", "--python", sys.executable, "--out-dir", str(out), distribution.place]
        case Origin.REPOSITORY | Origin.ADDRESS:
            requirement = f"{distribution.name} @ {distribution.place}"
            return [*_pip(uv), "wheel", "--no-deps", "--no-input", "--retries=1", "--wheel-dir", str(out), requirement]
        case Origin.INDEX | Origin.FILES:
            pin = f"{distribution.name}=={distribution.version}"
            return [*_pip(uv), "download", "--no-deps", "--only-binary=:all:", *_platform(), "--dest", str(out), pin]


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
    status = path.stat()
    if status.st_size > _READ_BYTES:
        return f"{status.st_size} {status.st_mtime_ns}".encode()
    return blake3(path.read_bytes()).digest()


def _forget_older(cache: Path, name: str, newest: Path) -> None:
    builds = [build for build in cache.glob(f"{name}-*") if build.name.rpartition("-")[0] == name and build != newest]
    for old in sorted(builds, key=lambda build: build.stat().st_mtime, reverse=True)[_KEPT_BUILDS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
