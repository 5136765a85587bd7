"""A machine to prepare, on this one: a cache of its own, and a path that holds what the test puts there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.environment import bootstrap as module
from skyward.environment import package_sources
from skyward.environment.bootstrap import Environment, bootstrap, quote
from skyward.environment.image import Image
from skyward.environment.skyward_wheel import OwnWheel
from skyward.errors import BootstrapError, UnreachableError
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport

TOOLS = (
    *("sh", "cat", "chmod", "date", "df", "env", "flock", "grep", "id", "ln", "mkdir", "mv", "rm", "sed", "sleep"),
    *("tail", "timeout", "touch", "true", "uname"),
)
"""What every machine has."""

PROGRAMS = ("supervisor/supervisor", "supervisor/service_process", "worker/worker")


class Machine(LocalTransport):
    """This machine with a cache of its own, and only the programs on its path that the test gives it.

    Attributes:
        runs: the arguments of each command.
        puts: where each file went.
        drops: names of steps whose next command is run, but its answer lost.
        cuts: names of steps whose next command goes on, while the link is lost.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalAccess(address="127.0.0.1", workdir=str(folder / "node")))
        self.folder = folder
        self.runs: list[list[str]] = []
        self.puts: list[str] = []
        self.drops: list[str] = []
        self.cuts: list[str] = []
        self.going_on: list[asyncio.Task[Completed]] = []

    @property
    def cache(self) -> Path:
        return self.folder / "my cache"

    def add(self, name: str, body: str) -> None:
        """A program that notes its arguments and does ``body``."""
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        note = f'echo {name} "$@" >>{quote(str(self.folder / "calls"))}'
        path.write_text(f"#!/bin/sh\n{note}\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def calls(self, start: str) -> int:
        """How often a program was called with arguments that begin so."""
        path = self.folder / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return sum(line.startswith(start) for line in lines)

    def read(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8")

    def unlink(self, path: str) -> None:
        Path(path).unlink()

    def written(self) -> bytes:
        """Everything in every file of the machine."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return b"\n".join(path.read_bytes() for path in files if path.parent.name != "bin")

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        self.runs.append(list(argv))
        path = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder / "home")}
        running = super().run(argv, env={**(env or {}), **path}, stdin=stdin, timeout_s=timeout_s)
        if argv[-2] in self.cuts:
            self.cuts.remove(argv[-2])
            self.going_on.append(asyncio.create_task(running))
            raise UnreachableError("the link is down")
        completed = await running
        self._maybe_drop(argv[-2])
        return completed

    async def put(self, data: Any, path: str, *, mode: int = 0o600) -> None:
        self.puts.append(path)
        self._maybe_drop(Path(path).name)
        await super().put(data, path, mode=mode)

    def _maybe_drop(self, name: str) -> None:
        if name in self.drops:
            self.drops.remove(name)
            raise UnreachableError("the link is down")

    async def prepare(self, image: Image | None = None, steps: list[str] | None = None) -> Environment:
        """Bootstrap it, as node 2."""
        progress = [] if steps is None else steps
        return await bootstrap(image or Image(), self, cache=str(self.cache), node=2, progress=progress.append)

    async def failing(self, image: Image | None = None) -> BootstrapError:
        """The error that bootstrapping it ends in."""
        with pytest.raises(BootstrapError) as raised:
            await self.prepare(image)
        assert raised.value.node == 2
        return raised.value

    def stand_in_uv(self, pip: str = "") -> None:
        """A uv that makes an environment with nothing in it, and does ``pip`` for "uv pip"."""
        self.add("uv", f'{ENVIRONMENT}\nif [ "$1" = pip ]; then {pip or ":"}; fi')

    def real_uv(self) -> None:
        """The real one, and the Python that it needs."""
        path = self.folder / "bin" / "uv"
        path.unlink(missing_ok=True)
        path.symlink_to(package_sources.client_uv() or "")
        python = self.folder / "bin" / f"python3.{sys.version_info.minor}"
        python.write_text(f'#!/bin/sh\nexec {quote(f"{sys.base_prefix}/bin/python3")} "$@"\n', encoding="utf-8")
        python.chmod(0o755)


ENVIRONMENT = f"""
for last; do :; done
case $1 in
--version) echo uv 0.9.0 ;;
venv)
    mkdir -p "$last/bin" "$last/lib/python3.{sys.version_info.minor}/site-packages"
    ln -s {quote(sys.executable)} "$last/bin/python"
    echo 'home = {sys.base_prefix}/bin' >"$last/pyvenv.cfg"
    ;;
esac
"""
"""A uv that makes an environment with nothing in it."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    monkeypatch.setattr(module, "engine_pins", tuple)
    code = tiny_code(tmp_path)
    monkeypatch.setattr(module, "own_wheel", lambda: code)
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(which(tool))
    machine = Machine(tmp_path)
    machine.stand_in_uv()
    return machine


def which(tool: str) -> str:
    found = [place for folder in ("/usr/bin", "/bin", "/usr/sbin") if os.access(place := f"{folder}/{tool}", os.X_OK)]
    return found[0]


def tiny_code(folder: Path) -> OwnWheel:
    path = folder / "code.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in ("", "node/", "node/supervisor/", "node/worker/", *(f"node/{program}" for program in PROGRAMS)):
            wheel.writestr(f"skyward/{name}{'__init__' if name.endswith('/') or not name else ''}.py", "")
    return OwnWheel(data=path.read_bytes(), digest="0123456789abcdef")


BUILD = Path(__file__).parents[3] / "build"


@pytest.fixture(scope="session")
def mirror() -> Mapping[str, str]:
    """What uv has to be told to get a Python: this one, packed once as the ones that uv downloads are."""
    version = platform.python_version()
    folder = BUILD / "python-mirror" / f"{version}-{hashlib.sha256(sys.base_prefix.encode()).hexdigest()[:8]}"
    if not folder.exists():
        making = folder.with_suffix(f".{os.getpid()}")
        making.mkdir(parents=True)
        archive = pack_python(making / "python.tar.gz")
        listing = {f"cpython-{version}-linux-{platform.machine()}-gnu": download(archive, folder / archive.name)}
        (making / "downloads.json").write_text(json.dumps(listing), encoding="utf-8")
        making.rename(folder)
    return {"UV_PYTHON_DOWNLOADS_JSON_URL": (folder / "downloads.json").as_uri()}


def pack_python(path: Path) -> Path:
    base, name = Path(sys.base_prefix), f"python3.{sys.version_info.minor}"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(os.path.realpath(base / "bin" / name), f"python/bin/{name}")
        alias = tarfile.TarInfo("python/bin/python3")
        alias.type, alias.linkname = tarfile.SYMTYPE, name
        archive.addfile(alias)
        archive.add(base / "lib" / name, f"python/lib/{name}", filter=needed)
        for library in (base / "lib").glob("libpython*.so*"):
            archive.add(library, f"python/lib/{library.name}")
    return path


def needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = set(Path(member.name).parts)
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "tkinter", "lib2to3"}
    leads_out = member.issym() and member.linkname.startswith("/")  # Debian's sitecustomize.py; uv refuses it
    return None if parts & left_out or member.name.endswith(".a") or leads_out else member


def download(archive: Path, place: Path) -> dict[str, Any]:
    major, minor, patch = map(int, platform.python_version_tuple())
    return {
        "name": "cpython",
        "os": "linux",
        "libc": "gnu",
        "arch": {"family": platform.machine(), "variant": None},
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "variant": None,
        "build": "20240101",
        "url": place.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
