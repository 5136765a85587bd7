"""Bootstrap script of an image (pure): one POSIX-sh text, idempotent, with every value quoted.

Without an argument it runs every step; with ``survey`` it reports the state of the machine; with ``STEP SECONDS`` it
runs one step. Its reports are lines on standard output::

    @skyward step NAME start
    @skyward step NAME done | cached | failed EXIT_CODE LOG_PATH
    @skyward ready ENVIRONMENT_FOLDER

and, with ``survey`` or one step::

    @skyward step NAME needed        (survey) the step has work to do
    @skyward machine SYSTEM ARCH     (survey)
    @skyward sent PATH               (survey) a file that is there already
    @skyward variable NAME           (survey) a variable of uv that is set there
    @skyward file PATH               (survey) the lines that follow are pip's configuration
    @skyward path PATH               the machine's search path for programs

On a failure the last lines of the step's log follow on standard error and the script exits with the step's exit code
(124: its deadline passed; 90: the machine has no uv, the client's own would run there). Its files, all below ``root``:
``env`` (the text of :func:`render_env_file`, 0600), ``sent`` (code, wheels and uv from clients),
``logs/ENVIRONMENT/STEP.log``, ``envs/ENVIRONMENT``, and the installers' ``cache`` and ``python``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    from skyward.request.image import Image

__all__ = ["DEFAULT_ROOT", "STEPS", "quote", "render_bootstrap", "render_env_file"]

DEFAULT_ROOT = "/opt/skyward"
STEPS = ("uv", "apt", "deps", "skyward", "server", "volumes")
"""The steps' names, in their order."""


def quote(value: str) -> str:
    """Return ``value`` as one word of a POSIX shell: the only way for a value into a script."""
    if "\0" in value:
        raise ConfigurationError(f"a value in a script must not hold NUL, got {value!r}")
    return shlex.quote(value)


def render_bootstrap(
    image: Image,
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
        key=quote("-".join(part for part in (image.content_hash(pins=pins, find_links=places), code, wheels) if part)),
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


def render_env_file(env: Mapping[str, str]) -> str:
    """Return the text of ``ROOT/env``: shell assignments, one variable each. Secret: write it with mode 0600."""
    return "".join(f"{name}={quote(value)}\n" for name, value in env.items())


def _index_options(image: Image) -> list[str]:
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
    return _Template(files("skyward.provision.preparing").joinpath("bootstrap.sh").read_text(encoding="utf-8"))
