"""``ImageSettings``: the environment that a node needs before it runs calls, as checked values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, cast
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyward.errors import ConfigurationError
from skyward.request.checks import (
    checked_patterns,
    explain_options,
    flag,
    refusal,
    text,
    texts,
    without_credentials,
)
from skyward.request.distribution_names import DISTRIBUTION, misnamed

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class EnvVars(Mapping[str, str]):
    """Checked, immutable, hashable environment variables. The repr shows their names only.

    Args:
        values: names to values; None is none.
        parameter: its name in errors.

    Raises:
        ConfigurationError: a name is not a shell name, or a value is not text or holds a NUL. No value is quoted.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None, *, parameter: str = "env") -> None:
        self._values = {} if values is None else _checked(parameter, values)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __or__(self, other: Mapping[str, str]) -> EnvVars:
        return EnvVars({**self._values, **other})

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: '***'" for name in self._values) + "}"


def _checked(parameter: str, values: object) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{parameter} must be a dict of strings to strings, got {type(values).__name__}")
    checked: dict[str, str] = {}
    for name, value in cast("Mapping[object, object]", values).items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise refusal(parameter, "a dict whose names are letters, digits and underscores", name)
        if not isinstance(value, str) or "\0" in value:
            kind = "text with a NUL" if isinstance(value, str) else type(value).__name__
            raise ConfigurationError(f"{parameter}[{name!r}] must be text without NUL, got {kind}")
        checked[name] = value
    return checked


_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_PLAIN_REQUIREMENT = re.compile(r"[^/:@;]+(?:;.*)?$")
_DEBIAN_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(?::[a-z0-9]+)?(?:[=/][A-Za-z0-9.+:~-]+)?", re.ASCII)
_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?", re.ASCII)


def client_python() -> str:
    """Return the Python minor version of this process, e.g. ``"3.11"``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@explain_options
@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class ImageSettings:
    """Settings of a node's environment: the attributes of :class:`~skyward.Image`, which documents them."""

    python: str | None
    mirrors: bool
    pip: tuple[str, ...]
    pip_extra_index_url: str | None
    apt: tuple[str, ...]
    env: EnvVars
    includes: tuple[str, ...]
    pip_index_url: str | None
    find_links: tuple[str, ...]
    outputs: tuple[str, ...]

    def __init__(
        self,
        *,
        python: str | None = None,
        mirror: bool = True,
        pip: Sequence[str] = (),
        pip_extra_index_url: str | None = None,
        apt: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        includes: Sequence[str] = (),
        pip_index_url: str | None = None,
        find_links: Sequence[str] = (),
        outputs: Sequence[str] = (),
        mirrors: bool | None = None,
    ) -> None:
        values = {
            "python": _python(python),
            "mirrors": flag("mirror", mirror) if mirrors is None else flag("mirrors", mirrors),
            "pip": _requirements(pip, own_index=bool(pip_index_url or pip_extra_index_url or find_links)),
            "pip_extra_index_url": _index_url("pip_extra_index_url", pip_extra_index_url),
            "apt": _packages(apt),
            "env": EnvVars(env),
            "includes": texts("includes", includes),
            "pip_index_url": _index_url("pip_index_url", pip_index_url),
            "find_links": texts("find_links", find_links),
            "outputs": checked_patterns("outputs", outputs),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        parameters = [f"{'mirror' if name == 'mirrors' else name}={value!r}" for name, value in values.items()]
        return without_credentials(f"Image({', '.join(parameters)})")

    @property
    def python_version(self) -> str:
        """The Python version to install: ``python``, or the client's minor version."""
        return self.python or client_python()

    def merged(
        self,
        *,
        pip: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        apt: Sequence[str] = (),
        includes: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> Self:
        """Return this image with further entries in its lists; variables in ``env`` override its own.

        Args:
            pip: further requirements.
            env: further environment variables.
            apt: further Debian packages.
            includes: further local files and folders.
            outputs: further patterns of files to fetch.
        """
        return replace(
            self,
            pip=tuple(dict.fromkeys((*self.pip, *texts("pip", pip)))),
            env=self.env | EnvVars(env),
            apt=tuple(dict.fromkeys((*self.apt, *texts("apt", apt)))),
            includes=(*self.includes, *texts("includes", includes)),
            outputs=(*self.outputs, *checked_patterns("outputs", outputs)),
        )

    def anchored(self) -> Self:
        """Return this image with paths that do not depend on the current folder."""
        return replace(
            self,
            includes=[os.path.abspath(os.path.expanduser(path)) for path in self.includes],
            find_links=[place if "://" in place else os.path.abspath(place) for place in self.find_links],
        )


def _python(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _PYTHON.fullmatch(value):
        raise refusal("python", 'a version such as "3.11"', value)
    return value


def _requirements(value: object, *, own_index: bool) -> tuple[str, ...]:
    requirements = texts("pip", value)
    for i, requirement in enumerate(requirements):
        if _PLAIN_REQUIREMENT.match(requirement):  # an address or a path can only be checked by an installer
            _check_requirement(f"pip[{i}]", requirement)
        if not own_index and (meant := misnamed(requirement)):
            raise ConfigurationError(f"pip[{i}] must name a package, got the module of {meant}: write {meant!r}")
        name = _NAME.match(requirement)
        if name is not None and canonicalize_name(name[0]) in {DISTRIBUTION, "skyward"}:
            raise ConfigurationError(
                f"pip[{i}] must not be {without_credentials(requirement)!r}: nodes get the Skyward that runs here. "
                "List packages that it works with, such as joblib, by their own names"
            )
    return requirements


def _check_requirement(parameter: str, requirement: str) -> None:
    try:
        Requirement(requirement)
    except InvalidRequirement as error:
        why = str(error).splitlines()[0]
        raise refusal(parameter, f'a requirement such as "torch>=2.4,<3" ({why})', requirement) from None


def _packages(value: object) -> tuple[str, ...]:
    packages = texts("apt", value)
    for i, package in enumerate(packages):
        if not _DEBIAN_PACKAGE.fullmatch(package):
            raise refusal(f"apt[{i}]", 'the name of a Debian package such as "libgl1" or "git=1:2.39.5-0"', package)
    return packages


def _index_url(parameter: str, value: object) -> str | None:
    if value is None:
        return None
    url = urlsplit(text(parameter, value))
    if "@" in url.netloc:
        raise ConfigurationError(
            f"{parameter} must not carry credentials: they would show in logs and command lines; "
            "set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL, and UV_INDEX_URL or UV_EXTRA_INDEX_URL, in env instead"
        )
    if url.scheme not in ("http", "https", "file"):
        raise refusal(parameter, "an http, https or file URL", value)
    return url.geturl()
