"""Environment of a machine over SSH: a script runs there, step by step, through short losses of the connection."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import platform
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NoReturn, TypeVar

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.environment import package_sources
from skyward.environment.skyward_wheel import OwnWheel, engine_pins, own_wheel
from skyward.errors import AuthenticationError, BootstrapError, ConfigurationError, HostKeyError, UnreachableError
from skyward.machine.access import Completed, Transport
from skyward.request.checks import without_credentials
from skyward.request.image import ImageSettings

DEFAULT_ROOT = "/opt/skyward"
_HASH_LENGTH = 12
STEPS = ("uv", "apt", "deps", "skyward", "server", "volumes")
"""The steps' names, in their order."""


def quote(value: str) -> str:
    """Return ``value`` as one word of a POSIX shell: the only way for a value into a script."""
    if "\0" in value:
        raise ConfigurationError(f"a value in a script must not hold NUL, got {value!r}")
    return shlex.quote(value)


def render_bootstrap(
    image: ImageSettings,
    *,
    root: str,
    engine_pins: Sequence[str],
    code: str = "",
    ttl_s: int = 0,
    uv_platform: str = "",
    wheels: str | None = None,
    places: Sequence[str] | None = None,
) -> str:
    """Return the script that builds the image's environment below ``root``.

    Args:
        image: the environment to install. No value of its ``env`` gets into the script.
        root: absolute folder on the node.
        engine_pins: requirements installed besides the image's, e.g. ``"distributed==2026.8.0"``.
        code: digest of the client's own code: part of the environment's name.
        ttl_s: seconds until the machine shuts itself down, counted from the first run of this boot; 0 arms nothing.
        uv_platform: ``uname -sm`` of machines to which the client can send its uv; empty if it has none.
        wheels: digest of the wheels that the client sends; package sources are then variables of the script's
            environment. None: the script runs without a client, and the image's sources are options in it.
        places: the image's ``find_links`` with an empty text for folders whose wheels the client sends; None: as given.
    """
    if not root.startswith("/"):
        raise ConfigurationError(f"root must be an absolute path, got {root!r}")
    pins = sorted(engine_pins)
    return _template().substitute(
        root=quote(root),
        key=quote("-".join(part for part in (content_hash(image, pins=pins, find_links=places), code, wheels) if part)),
        python=quote(image.python_version),
        command=quote("python" + ".".join(image.python_version.split(".")[:2])),
        steps=_words(STEPS),
        wheel=quote(f"{root}/sent/skyward-{code}.whl"),
        wheels=quote(f"{root}/sent/wheels-{wheels}"),
        uv_platform=quote(uv_platform),
        ttl_minutes=-(-ttl_s // 60),
        apt=_words(image.apt),
        requirements=_words([*pins, *image.pip]),
        index_options=_words(_index_options(image) if wheels is None else ()),
        pins=_words(pins),
    )


def content_hash(image: ImageSettings, *, pins: Sequence[str], find_links: Sequence[str] | None = None) -> str:
    """Return the name of an installed environment; see :meth:`skyward.Image.content_hash`.

    Args:
        image: the environment's settings.
        pins: versions of the engine's packages.
        find_links: counts instead of the image's own, whose folders may be others with the same wheels.
    """
    parts = {
        "python": image.python_version,
        "pip": sorted(set(image.pip)),
        "apt": sorted(set(image.apt)),
        "indexes": [image.pip_index_url, image.pip_extra_index_url],
        "find_links": image.find_links if find_links is None else find_links,
        "pins": sorted(pins),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_HASH_LENGTH]


def render_env_file(env: Mapping[str, str]) -> str:
    """Return the text of ``ROOT/env``: shell assignments, one variable each. Secret: write it with mode 0600."""
    return "".join(f"{name}={quote(value)}\n" for name, value in env.items())


def _index_options(image: ImageSettings) -> list[str]:
    options = ["--index-url", image.pip_index_url] if image.pip_index_url else []
    options += ["--extra-index-url", image.pip_extra_index_url] if image.pip_extra_index_url else []
    for place in image.find_links:
        options += ["--find-links", place]
    return options


def _words(values: Sequence[str]) -> str:
    return " ".join(map(quote, values))


class _Template(Template):
    """Template with ``@@name`` instead of ``$name``, which is sh's own syntax."""

    delimiter = "@@"


@cache
def _template() -> Template:
    return _Template(files("skyward.environment").joinpath("bootstrap.sh").read_text(encoding="utf-8"))


# --- commands that outlive a short loss of the connection -----------------------------------------------------------

T = TypeVar("T")

GRACE_S = 30.0
"""Seconds beyond the machine's own deadline, so that its report of the cause arrives first."""

_AGAIN_S = 0.5
_LEAST_S = 1.0
_KNOCK_S = 2.5
_ANSWER_S = 90.0
_SHORTEST_SECRET = 8


async def persist(attempt: Callable[[float], Awaitable[T]], *, deadline_s: float, node: int, step: str) -> T:
    """Return the result of ``attempt``, which receives the seconds left; call it again when the link drops.

    Raises :class:`~skyward.errors.BootstrapError` past the deadline, and for files that cannot be read or written here.
    """
    started = SYSTEM_CLOCK.monotonic()

    async def once() -> T | NotYet:
        try:
            return await attempt(max(deadline_s - (SYSTEM_CLOCK.monotonic() - started), _LEAST_S))
        except UnreachableError as error:
            return NotYet(str(error))

    what = f"step {step!r} of preparing node {node}"
    try:
        return await wait_until(once, deadline_s=deadline_s + GRACE_S, interval_s=_AGAIN_S, what=what)
    except UnreachableError as error:
        why = f"its deadline of {deadline_s:g} s passed, and the machine gave no reason"
        raise failed_step(node, step, f"{why}. Check that it is up and reachable; {error}") from error
    except OSError as error:
        raise failed_step(node, step, f"{error}. Check the space and the permissions there") from error


def failed_step(node: int, step: str, why: str, *, tail: str = "", log_path: str = "") -> BootstrapError:
    """Return the error of a step of a node's preparation; ``tail`` is the end of its log."""
    text = f"preparing node {node} failed at step {step!r}: {why}" + (f"\n{tail}" if tail else "")
    return BootstrapError(text, node=node, step=step, log_tail=tail, log_path=log_path)


async def let_in(
    transport: Transport, *, within_s: float, node: int, refused_s: float = math.inf, other_key_s: float = math.inf
) -> None:
    """Wait until a new machine accepts our key; while it boots it may refuse keys and show another host key.

    Args:
        transport: the transport to it.
        within_s: seconds allowed; 0 skips the check.
        node: its rank, for the message.
        refused_s: seconds allowed from its first refusal on.
        other_key_s: seconds allowed from the first time on that it shows another host key.

    Raises:
        AuthenticationError: at a deadline it still refused the key, or showed another host key.
        UnreachableError: at the deadline it still did not answer.
    """
    refusals: list[AuthenticationError] = []
    first_at: dict[str, float] = {}

    async def knock() -> bool | NotYet:
        refusals.clear()
        try:
            await transport.run(["true"], timeout_s=_ANSWER_S)
        except AuthenticationError as error:
            other_key = isinstance(error, HostKeyError)
            did = "showed another host key than ordered" if other_key else "refused the login"
            limit_s, now = other_key_s if other_key else refused_s, SYSTEM_CLOCK.monotonic()
            if now - first_at.setdefault(did, now) >= limit_s:
                raise type(error)(f"node {node} {did} for {limit_s:g} s: {error}") from error
            refusals.append(error)
            return NotYet(str(error))
        except UnreachableError as error:
            return NotYet(str(error))
        return True

    if not within_s:
        return
    try:
        await wait_until(knock, deadline_s=within_s, interval_s=_KNOCK_S, what=f"node {node} to let us in")
    except UnreachableError as error:
        for refusal in refusals:
            raise type(refusal)(f"node {node} did not let us in for {within_s:g} s: {refusal}") from error
        raise


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` without credentials in URLs, and without values in ``secrets`` of 8 and more characters."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return without_credentials(text)


# --- the run of the script ------------------------------------------------------------------------------------------

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
    image: ImageSettings, transport: Transport, *, cache: str, node: int, progress: Callable[[str], None]
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
    wheel, wheelhouse = await asyncio.to_thread(lambda: (own_wheel(), package_sources.gather_wheels(image)))
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

    image: ImageSettings
    transport: Transport
    cache: str
    node: int
    wheel: OwnWheel
    wheelhouse: package_sources.Wheelhouse
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
                    await self._send(step, f"{self._wheels_folder}/{name}", package_sources.mapped_file(path), survey)
            case "skyward":
                await self._send(step, f"{self.cache}/sent/skyward-{self.wheel.digest}.whl", self.wheel.data, survey)
            case _:
                pass
        completed = await self._run(step, survey)
        if completed.exit_code == _SEND_UV and self.uv is not None:
            await self._send(
                step, f"{self.cache}/sent/uv", package_sources.mapped_file(self.uv), survey, mode=_PRIVATE_PROGRAM
            )
            completed = await self._run(step, survey)
        if completed.exit_code:
            self._fail(step, completed)
        after = _parsed(completed.stdout)
        return replace(survey, environment=after.environment, path=after.path)

    def error(self, step: str, why: str, tail: str, log_path: str = "") -> BootstrapError:
        """Return the error of a failed step, with the log's end and without secrets."""
        where = f"; the whole log is {log_path} on the machine" if log_path else ""
        shown = masked(tail.strip(), self.image.env.values())
        return failed_step(self.node, step, f"{why}. {_CHECK[step]}{where}", tail=shown, log_path=log_path)

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
        settings = {**survey.pip_settings, **package_sources.pip_variables(user)}
        sources = package_sources.package_sources(self.image, settings, self.wheelhouse.find_links(self._wheels_folder))
        uv = package_sources.variables_for_uv(sources, already_set=(*survey.variables, *user))
        return {**package_sources.variables_for_pip(sources), **uv, **user}

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
        pip_settings=package_sources.written_settings("\n".join(lines) for lines in files),
        environment="".join(words["ready"]),
        path="".join(words["path"]),
    )


def _platform() -> str:
    return f"{platform.system()} {platform.machine()}"


def _sendable_uv() -> Path | None:
    """Return this client's uv if it is a program; a script of that name, such as pyenv's, would not run elsewhere."""
    path = package_sources.client_uv()
    if path is None:
        return None
    with path.open("rb") as program:
        return path if program.read(2) != b"#!" else None
