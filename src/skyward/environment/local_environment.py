"""Python environment of nodes on this machine: the running interpreter if it satisfies the image, else one built once.

The bootstrap script is not used here (docs/decisions/004): the user's machine needs no system packages and no
time-to-live, and its interpreter, Skyward's own files and pip's configuration are at hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from skyward.base.platform import try_lock
from skyward.base.waiting import wait_until
from skyward.environment.bootstrap import content_hash
from skyward.environment.installed import is_satisfied
from skyward.environment.package_sources import (
    client_uv,
    package_sources,
    pip_settings,
    pip_variables,
    variables_for_uv,
)
from skyward.environment.skyward_wheel import code_folders, engine_pins, own_wheel
from skyward.errors import BootstrapError, UnreachableError
from skyward.machine.access import Transport
from skyward.request.checks import without_credentials
from skyward.request.image import ImageSettings

_BUILD_TIMEOUT_S = 1800.0
_LOG_TAIL_LINES = 30
_FINISHED = ".finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """One environment to build: its folder, content, transport, and the node that needs it."""

    root: Path
    requirements: tuple[str, ...]
    image: ImageSettings
    transport: Transport
    node: int
    progress: Callable[[str], None]

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def log(self) -> Path:
        return self.root.with_suffix(".log")


async def prepare_environment(
    image: ImageSettings, transport: Transport, *, node: int, progress: Callable[[str], None]
) -> str:
    """Return the interpreter for a node on this machine; build a missing environment, once for all processes.

    ``progress`` receives each step as it begins. Raises :class:`~skyward.errors.BootstrapError` with the log's tail.
    """
    if await asyncio.to_thread(is_satisfied, image.pip):
        return sys.executable
    requirements = (*image.pip, *engine_pins())
    root = platformdirs.user_cache_path("skyward") / "envs" / await asyncio.to_thread(_key, image, requirements)
    build = _Build(root=root, requirements=requirements, image=image, transport=transport, node=node, progress=progress)
    async with _lock(root.with_suffix(".lock")):
        if not (root / _FINISHED).exists():
            await _run(build)
    return build.python


def _key(image: ImageSettings, requirements: Sequence[str]) -> str:
    """Return an environment's name, a hash of its whole content, Skyward's own files included."""
    parts = [content_hash(image, pins=engine_pins()), sys.version, sys.executable, own_wheel().digest, *requirements]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=10).hexdigest()


async def _run(build: _Build) -> None:
    """Build the environment; its marker is written last, so that an unfinished one is never used."""
    build.log.write_bytes(b"")
    uv, settings = await asyncio.to_thread(lambda: (client_uv(), pip_settings()))
    if uv is None:
        raise _failure(build, "uv", "there is no uv here; run `pip install uv`")
    user = {name: value for name, value in build.image.env.items() if name.startswith(("PIP_", "UV_"))}
    sources = package_sources(build.image, {**settings, **pip_variables(user)})
    environment = {**variables_for_uv(sources, already_set=user), **user}
    venv = [str(uv), "venv", "--clear", "--python", sys.executable, str(build.root)]
    install = [str(uv), "pip", "install", "--python", build.python, "--", *build.requirements]
    await _step(build, "uv", venv, environment)
    await _step(build, "deps", install, environment)
    build.progress("skyward")
    await asyncio.to_thread(_copy_code, build)
    (build.root / _FINISHED).touch()


async def _step(build: _Build, step: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    build.progress(step)
    try:
        completed = await build.transport.run(argv, env=environment, timeout_s=_BUILD_TIMEOUT_S)
    except UnreachableError as error:
        raise _failure(build, step, str(error)) from error
    with build.log.open("a", encoding="utf-8") as log:
        log.write(f"# {step}\n{completed.stdout}{completed.stderr}")
    if completed.exit_code:
        raise _failure(build, step, f"exit code {completed.exit_code}")


def _failure(build: _Build, step: str, why: str) -> BootstrapError:
    lines = build.log.read_text(encoding="utf-8").splitlines()
    tail = without_credentials("\n".join(lines[-_LOG_TAIL_LINES:]))
    return BootstrapError(
        f"preparing node {build.node} on this machine failed at step {step!r}: {why}. "
        f"Check the image's pip requirements and package indexes; the whole log is {build.log}\n{tail}",
        node=build.node,
        step=step,
        log_tail=tail,
        log_path=str(build.log),
    )


def _copy_code(build: _Build) -> None:
    """Copy this process's Skyward, never one of an index: both ends of a connection must run the same code."""
    site = next((build.root / "lib").glob("python3.*/site-packages"))
    for folder in code_folders():
        shutil.copytree(folder, site / folder.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


@asynccontextmanager
async def _lock(path: Path) -> AsyncGenerator[None, None]:
    """Lock ``path`` against other processes; the kernel unlocks it when a process dies."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("wb") as file:

        async def taken() -> bool | None:
            return await asyncio.to_thread(try_lock, file.fileno()) or None

        await wait_until(taken, deadline_s=_BUILD_TIMEOUT_S, interval_s=0.1, what=f"the lock {path}")
        yield
