"""``Image``: the environment that a node needs before it runs calls."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast
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
    whole_number,
    without_credentials,
)
from skyward.request.distribution_names import misnamed

if TYPE_CHECKING:
    from skyward.environment.image_mirror import ImageMirror

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


_HASH_LENGTH = 12
_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_PLAIN_REQUIREMENT = re.compile(r"[^/:@;]+(?:;.*)?$")
_DEBIAN_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(?::[a-z0-9]+)?(?:[=/][A-Za-z0-9.+:~-]+)?", re.ASCII)
_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?", re.ASCII)


def client_python() -> str:
    """Return the Python minor version of this process, e.g. ``"3.11"``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@explain_options
@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Image:
    """A node's environment. Lists are taken and kept as tuples; the repr masks ``env`` and credentials in URLs.

    Attributes:
        python: version such as ``"3.11"``; None means the client's minor version, the only one a pool accepts.
        mirrors: parameter ``mirror``: True if nodes also get the distributions that the program imports, in the
            versions installed here; :func:`dataclasses.replace` passes it as ``mirrors``. :meth:`mirror` returns an
            image with a choice of them instead.
        pip: requirements in pip's notation, without Skyward: nodes get the code that runs here. They are added to the
            mirrored distributions as ``pip install`` would here: a version that fits stays, another one is replaced.
        pip_extra_index_url: a further package index.
        apt: Debian packages.
        env: environment variables of every worker, set before user code.
        includes: local files and folders, each put into the workers' current folder under its own name, and imported
            from there. A pool reads them when it opens, without repositories' own files, environments, caches, and what
            git ignores; a path that is named itself is sent.
        pip_index_url: the package index instead of the default one. A ``file:`` URL means the node's files.
        find_links: places with wheels, first one first. A folder that exists here is sent to the nodes, its wheels
            only; URLs, and absolute paths that do not exist here, mean the node's own.
        outputs: patterns of files in the working folder of calls, such as ``"*.bin"`` or ``"models/"``; they are
            fetched before a node ends, into ``outputs/<pool id>/<node>/`` here.

    Raises:
        ConfigurationError: a parameter has the wrong type or form, or an index URL carries credentials.
    """

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
        return without_credentials(
            f"Image({', '.join(f'{name}={value!r}' for name, value in self._parameters().items())})"
        )

    @classmethod
    def mirror(cls, only: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> Image:
        """Return an image with the distributions of this environment, in their versions. Blocks.

        Distributions of a package index come from there; editable and local ones are built here as wheels, which are
        kept and sent. Labels of builds for processors or GPUs, such as ``+cpu``, are dropped: each node gets its own
        build. Skyward's requirements and tools such as pip are left out. The repr is a table of all. A pool
        adds nothing else of this environment to such an image.

        Args:
            only: names of distributions to take, with their requirements; None takes all.
            exclude: names of distributions to leave out, with everything that requires them.

        Raises:
            ConfigurationError: a name is not installed, an index lacks a distribution, two contradict each other, or a
                wheel cannot be built here or is for another system.
        """
        from skyward.environment.image_mirror import mirror_environment

        names = None if only is None else texts("only", only)
        return mirrored_image(mirror_environment(only=names, exclude=texts("exclude", exclude)))

    @property
    def python_version(self) -> str:
        """The Python version to install: ``python``, or the client's minor version."""
        return self.python or client_python()

    def content_hash(self, *, pins: Sequence[str] | None = None, find_links: Sequence[str] | None = None) -> str:
        """Return 12 hexadecimal characters that name the installed environment: Python, packages, indexes, engine pins.

        The order of ``pip`` and ``apt`` does not matter, that of ``find_links`` does. ``env`` and ``includes`` install
        nothing and are left out.

        Args:
            pins: versions of the engine's packages; None means those of this process.
            find_links: counts instead of the image's own, whose folders may be others with the same wheels.
        """
        from skyward.environment.distribution import engine_pins

        parts = {
            "python": self.python_version,
            "pip": sorted(set(self.pip)),
            "apt": sorted(set(self.apt)),
            "indexes": [self.pip_index_url, self.pip_extra_index_url],
            "find_links": self.find_links if find_links is None else find_links,
            "pins": sorted(engine_pins() if pins is None else pins),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_HASH_LENGTH]

    def bootstrap(self, ttl: int = 0) -> str:
        """Return the POSIX-sh script that prepares a machine; running it again changes nothing.

        It holds no value of ``env``: those travel in a separate file.

        Args:
            ttl: seconds until the machine shuts itself down, armed before anything else; 0 arms nothing.
        """
        from skyward.environment.bootstrap import DEFAULT_ROOT, render_bootstrap
        from skyward.environment.distribution import engine_pins, own_wheel

        ttl_s = whole_number("ttl", ttl, minimum=0)
        return render_bootstrap(
            self, root=DEFAULT_ROOT, engine_pins=engine_pins(), code=own_wheel().digest, ttl_s=ttl_s
        )

    def merged(
        self,
        *,
        pip: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        apt: Sequence[str] = (),
        includes: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> Image:
        """Return this image with further entries in its lists; variables in ``env`` override its own.

        Args:
            pip: further requirements.
            env: further environment variables.
            apt: further Debian packages.
            includes: further local files and folders.
            outputs: further patterns of files to fetch.
        """
        return self._changed(
            pip=tuple(dict.fromkeys((*self.pip, *texts("pip", pip)))),
            env=self.env | EnvVars(env),
            apt=tuple(dict.fromkeys((*self.apt, *texts("apt", apt)))),
            includes=(*self.includes, *texts("includes", includes)),
            outputs=(*self.outputs, *checked_patterns("outputs", outputs)),
        )

    def with_mirror(self, mirror: ImageMirror) -> Image:
        """Return this image with a mirror's packages; its own index, variables and places of wheels come first."""
        return self._changed(
            pip=tuple(dict.fromkeys((*mirror.requirements, *self.pip))),
            find_links=(*self.find_links, *mirror.wheel_folders),
            pip_index_url=self.pip_index_url or mirror.index_url,
            env=EnvVars(mirror.installers_variables) | self.env,
        )

    def without_mirror(self) -> Image:
        """Return this image, to which a pool adds nothing of this environment."""
        return self._changed(mirror=False)

    def anchored(self) -> Image:
        """Return this image with paths that do not depend on the current folder."""
        return self._changed(
            includes=[os.path.abspath(os.path.expanduser(path)) for path in self.includes],
            find_links=[os.path.abspath(place) if _is_local(place) else place for place in self.find_links],
        )

    def _changed(self, **changes: Any) -> Image:
        return Image(**self._parameters() | changes)

    def _parameters(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(Image)}
        return {"mirror" if name == "mirrors" else name: value for name, value in values.items()}


class _MirrorImage(Image):
    """Image of a mirror, whose repr is the mirror's table."""

    __slots__ = ("_table",)

    def __repr__(self) -> str:
        return self._table

    __str__ = __repr__


def mirrored_image(mirror: ImageMirror) -> Image:
    """Return the image that gives nodes a mirror's packages."""
    image = _MirrorImage(
        mirror=False,
        pip=mirror.requirements,
        find_links=mirror.wheel_folders,
        pip_index_url=mirror.index_url,
        env=mirror.installers_variables,
    )
    object.__setattr__(image, "_table", mirror.table())
    return image


def _is_local(place: str) -> bool:
    return "://" not in place


def _python(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _PYTHON.fullmatch(value):
        raise refusal("python", 'a version such as "3.11"', value)
    return value


def _requirements(value: object, *, own_index: bool) -> tuple[str, ...]:
    requirements = texts("pip", value)
    from skyward.environment.distribution import DISTRIBUTION

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
