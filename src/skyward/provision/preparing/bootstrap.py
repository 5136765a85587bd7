"""Python environment of a remote machine, made by the bootstrap script.

The script and the variables of its installers go to the machine's ``sh`` as standard input: neither is stored there or
shows in a list of processes. The first run is a survey; a prepared machine needs no other.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from skyward.errors import BootstrapError
from skyward.provision.preparing.bootstrap_script import STEPS, render_bootstrap, render_env_file
from skyward.provision.preparing.commands import GRACE_S, masked, persist
from skyward.provision.preparing.distribution import OwnWheel, engine_pins, own_wheel
from skyward.provision.preparing.sources import (
    Wheelhouse,
    client_uv,
    gather_wheels,
    mapped_file,
    package_sources,
    pip_variables,
    written_settings,
)
from skyward.request.image import Image
from skyward.transport.access import Completed, Transport

__all__ = ["Environment", "bootstrap"]

_SURVEY_TIMEOUT_S = 60.0
_DEADLINES_S = {"uv": 300.0, "apt": 900.0, "deps": 1800.0, "skyward": 300.0, "server": 180.0, "volumes": 300.0}
_CHECK = {
    "uv": "Check that the machine's cache folder can be written, and that it has uv, or a network",
    "apt": "Check the names in apt=, the rights of the user there, and the machine's package sources",
    "deps": "Check the image's pip requirements, and that the machine reaches the package indexes",
    "skyward": "Check the space in the machine's cache folder",
    "server": "Check that the image asks for no other versions of what Skyward itself needs",
    "volumes": "Check the image's volumes",
}
_SEND_UV = 90
_PRIVATE_PROGRAM = 0o700
_FAILED = re.compile(r"^@skyward step (\w+) failed (\d+) ?(.*)$", re.MULTILINE)
_SHELLS_OWN = frozenset(("BASHOPTS", "EUID", "IFS", "PPID", "SHELLOPTS", "UID"))
"""Variables that a shell makes read-only, or that change its reading of the script."""
_LOGINS_OWN = (
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"),
    *("PIP_CONSTRAINT", "PIP_REQUIREMENT", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_CONSTRAINT"),
    *("UV_OVERRIDE", "UV_BUILD_CONSTRAINT", "UV_REQUIRE_HASHES", "UV_PROJECT", "UV_WORKING_DIRECTORY"),
)
"""Variables of a login that tell pip and uv where to install or what; those of package sources count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Interpreter and variables of a node's programs.

    Attributes:
        python: absolute path of the interpreter.
        env: variables for them, besides the machine's own.
        isolated: whether Python's variables of the machine's login, such as ``PYTHONPATH``, are not its own.
    """

    python: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    isolated: bool = True

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs the interpreter with these arguments."""
        return [self.python, *(("-I",) if self.isolated else ()), *arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """State of the machine as the script reported it."""

    needed: tuple[str, ...]
    sent: frozenset[str]
    variables: tuple[str, ...]
    pip_settings: Mapping[str, str]
    environment: str
    path: str


async def bootstrap(
    image: Image, transport: Transport, *, cache: str, node: int, progress: Callable[[str], None]
) -> Environment:
    """Give a machine the image's environment.

    Equal environments are built once below ``cache`` for all pools and nodes; a build in progress is waited for. Steps
    that a dropped link interrupts are repeated.

    Args:
        image: the environment to build.
        transport: the transport to the machine.
        cache: absolute folder there, which outlives the node.
        node: the node's rank, for errors.
        progress: receives the name of each step with work to do, as it begins; "server" is reported by the caller.

    Raises:
        BootstrapError: a step failed or passed its deadline; with the end of its log.
        UnreachableError: the machine cannot be reached to begin with.
    """
    wheel, wheelhouse = await asyncio.to_thread(lambda: (own_wheel(), gather_wheels(image)))
    machine = _Machine(
        image=image, transport=transport, cache=cache, node=node, wheel=wheel, wheelhouse=wheelhouse, uv=_sendable_uv()
    )
    survey = await machine.survey()
    for step in survey.needed:
        if step != "server":  # the start of the supervisor reports it
            progress(step)
        survey = await machine.do(step, survey)
    if not survey.environment:
        raise machine.error("server", "the environment was removed while it was made", "")
    folder = f"{survey.environment}/bin"
    return Environment(python=f"{folder}/python", env={"PATH": f"{folder}:{survey.path}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """Preparation of one machine with one image."""

    image: Image
    transport: Transport
    cache: str
    node: int
    wheel: OwnWheel
    wheelhouse: Wheelhouse
    uv: Path | None

    async def survey(self) -> _Survey:
        """Return the state of the machine."""
        completed = await self.transport.run(
            ["sh", "-s", "--", "survey"], stdin=self._script({}), timeout_s=_SURVEY_TIMEOUT_S
        )
        if completed.exit_code:
            self._fail("uv", completed)
        return _parsed(completed.stdout)

    async def do(self, step: str, survey: _Survey) -> _Survey:
        """Send the files that one step needs, and run it."""
        match step:
            case "deps":
                for name, path in self.wheelhouse.wheels.items():
                    await self._send(step, f"{self._wheels_folder}/{name}", mapped_file(path), survey)
            case "skyward":
                await self._send(step, f"{self.cache}/sent/skyward-{self.wheel.digest}.whl", self.wheel.data, survey)
            case _:
                pass
        completed = await self._run(step, survey)
        if completed.exit_code == _SEND_UV and self.uv is not None:
            await self._send(step, f"{self.cache}/sent/uv", mapped_file(self.uv), survey, mode=_PRIVATE_PROGRAM)
            completed = await self._run(step, survey)
        if completed.exit_code:
            self._fail(step, completed)
        after = _parsed(completed.stdout)
        return _Survey(
            needed=survey.needed,
            sent=survey.sent,
            variables=survey.variables,
            pip_settings=survey.pip_settings,
            environment=after.environment,
            path=after.path,
        )

    def error(self, step: str, why: str, tail: str, log_path: str = "") -> BootstrapError:
        """Return the error of a failed step, with the log's end and without secrets."""
        where = f"; the whole log is {log_path} on the machine" if log_path else ""
        shown = masked(tail.strip(), self.image.env.values())
        return BootstrapError(
            f"preparing node {self.node} failed at step {step!r}: {why}. {_CHECK[step]}{where}\n{shown}",
            node=self.node,
            step=step,
            log_tail=shown,
            log_path=log_path,
        )

    @property
    def _wheels_folder(self) -> str:
        return f"{self.cache}/sent/wheels-{self.wheelhouse.digest}"

    async def _run(self, step: str, survey: _Survey) -> Completed:
        script = self._script(self._installers_env(survey))

        async def attempt(left_s: float) -> Completed:
            argv = ["sh", "-s", "--", step, str(round(left_s))]
            return await self.transport.run(argv, stdin=script, timeout_s=left_s + GRACE_S)

        return await persist(attempt, deadline_s=_DEADLINES_S[step], node=self.node, step=step)

    async def _send(
        self, step: str, path: str, data: bytes | memoryview, survey: _Survey, *, mode: int = 0o600
    ) -> None:
        if path in survey.sent:
            return

        async def attempt(_left_s: float) -> bool:
            await self.transport.put(data, path, mode=mode)
            return True

        await persist(attempt, deadline_s=_DEADLINES_S[step], node=self.node, step=step)

    def _script(self, env: Mapping[str, str]) -> bytes:
        script = render_bootstrap(
            self.image,
            root=self.cache,
            engine_pins=engine_pins(),
            code=self.wheel.digest,
            uv_platform=_platform() if self.uv is not None else "",
            wheels=self.wheelhouse.digest,
            places=self.wheelhouse.places,
        )
        return f"unset {' '.join(_LOGINS_OWN)}\nset -a\n{render_env_file(env)}set +a\n{script}".encode()

    def _installers_env(self, survey: _Survey) -> Mapping[str, str]:
        """Return pip's and uv's variables: package sources of image and machine, overridden by the image's ``env``."""
        user = {name: value for name, value in self.image.env.items() if name not in _SHELLS_OWN}
        settings = {**survey.pip_settings, **pip_variables(user)}
        sources = package_sources(self.image, settings, self.wheelhouse.find_links(self._wheels_folder))
        return {**sources.for_pip(), **sources.for_uv(already_set=(*survey.variables, *user)), **user}

    def _fail(self, step: str, completed: Completed) -> NoReturn:
        failed = _FAILED.search(completed.stdout)
        name, code, log_path = failed.groups() if failed else (step, str(completed.exit_code), "")
        limit = f"its deadline of {_DEADLINES_S.get(name, 0):g} s passed" if code == "124" else f"exit code {code}"
        raise self.error(name if name in STEPS else step, limit, completed.stderr, log_path)


def _parsed(text: str) -> _Survey:
    words: dict[str, list[str]] = {"sent": [], "variable": [], "ready": [], "path": [], "needed": []}
    files: list[list[str]] = []
    for line in text.splitlines():
        kind, _, value = line.removeprefix("@skyward ").partition(" ")
        if not line.startswith("@skyward "):
            if files:
                files[-1].append(line)
        elif kind == "file":
            files.append([])
        elif kind == "step" and value.endswith(" needed"):
            words["needed"].append(value.removesuffix(" needed"))
        elif kind in words:
            words[kind].append(value)
    return _Survey(
        needed=tuple(words["needed"]),
        sent=frozenset(words["sent"]),
        variables=tuple(words["variable"]),
        pip_settings=written_settings("\n".join(lines) for lines in files),
        environment="".join(words["ready"]),
        path="".join(words["path"]),
    )


def _platform() -> str:
    here = os.uname()
    return f"{here.sysname} {here.machine}"


def _sendable_uv() -> Path | None:
    """Return this client's uv if it is a program; a script of that name, such as pyenv's, would not run elsewhere."""
    path = client_uv()
    if path is None:
        return None
    with path.open("rb") as program:
        return path if program.read(2) != b"#!" else None
