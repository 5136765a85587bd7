"""Package sources of a machine: the image's, then those of pip's configuration there."""

from __future__ import annotations

import configparser
import mmap
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from skyward.request.image import ImageSettings

PUBLIC_INDEX = "https://pypi.org/simple"
"""Index of an installer without a configuration."""

_DIGEST_BYTES = 8

_SECTIONS = ("global", "install", ":env:")
"""Of pip's configuration, the last one winning."""

_UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "no-index": ("UV_NO_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("ALL_PROXY",),  # uv has no variable of its own
}
"""pip's options of package sources, and uv's variables for each: the one to set, then its former name."""


def package_sources(
    image: ImageSettings, settings: Mapping[str, str], find_links: Sequence[str] | None = None
) -> Mapping[str, str]:
    """Return the image's sources, followed by those in pip's ``settings``, by pip's option names.

    A value of several words is a list. URLs may hold credentials and are passed in the environment only.

    Args:
        image: the image, whose sources come first.
        settings: option names of pip to values.
        find_links: the places of the image's wheels, if not its own ``find_links``.
    """
    links = map(_as_word, image.find_links if find_links is None else find_links)
    values = {
        **settings,
        "index-url": image.pip_index_url or settings.get("index-url", ""),
        "extra-index-url": f"{image.pip_extra_index_url or ''} {settings.get('extra-index-url', '')}",
        "find-links": " ".join([*links, settings.get("find-links", "")]),
        "no-index": "1" if settings.get("no-index", "").lower() in ("1", "true", "yes", "on", "t", "y") else "",
    }
    words = {name: " ".join(values.get(name, "").split()) for name in _UV_VARIABLES}
    return {name: value for name, value in words.items() if value}


def _as_word(place: str) -> str:
    """Return a place of wheels as one word, since pip splits lists at spaces and uv at commas."""
    return Path(place).as_uri() if place.startswith("/") else place


def variables_for_pip(sources: Mapping[str, str]) -> Mapping[str, str]:
    """Return environment variables that tell pip of the sources."""
    return {
        f"PIP_{name.upper().replace('-', '_')}": " ".join(map(_unnamed, value.split()))
        for name, value in sources.items()
    }


def variables_for_uv(sources: Mapping[str, str], already_set: Iterable[str] = ()) -> Mapping[str, str]:
    """Return environment variables for uv, which does not read pip's configuration; it then searches as pip does.

    Args:
        sources: the sources.
        already_set: variables of uv that the machine sets; they are left as they are.
    """
    kept = frozenset(already_set)
    variables = {} if "UV_INDEX_STRATEGY" in kept else {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in sources.items():
        if kept.isdisjoint(_UV_VARIABLES[name]):
            variables[_UV_VARIABLES[name][0]] = value.replace(" ", ",") if name == "find-links" else value
    return variables


def pip_settings(env: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return pip's options on this machine, by name: from its files, and above them from the variables in ``env``.

    Reads pip's files instead of asking pip, which an interpreter of a virtual environment made by uv does not have.
    """
    home = Path(env.get("HOME") or Path.home())
    system = [Path(folder) / "pip" for folder in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    user = [home / ".pip", Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip"]
    files = [folder / "pip.conf" for folder in (*system, Path("/etc"), *user, Path(sys.prefix))]
    own = env.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:  # pip reads no file then
        files = []
    elif own:
        files = [file for file in files if not Path(own).exists() or file.parent not in user]  # as pip does
        files.append(Path(own))
    # Only a comment can hold another encoding's bytes: indexes, hosts and options are ASCII.
    texts = (file.read_text(errors="replace") for file in files if os.access(file, os.R_OK) and file.is_file())
    return {**written_settings(texts), **pip_variables(env)}


def pip_variables(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of pip that ``env`` sets, by name."""
    return _filled({name.removeprefix("PIP_"): value for name, value in env.items() if name.startswith("PIP_")})


def uv_options(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the package sources that ``env`` sets for uv, by the names of pip's options."""
    options = {
        "index-url": _unnamed(env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL", "")),
        "extra-index-url": f"{env.get('UV_INDEX', '')} {env.get('UV_EXTRA_INDEX_URL', '')}".strip(),
        "find-links": env.get("UV_FIND_LINKS", "").replace(",", " "),
        "trusted-host": env.get("UV_INSECURE_HOST", ""),
        "no-index": env.get("UV_NO_INDEX", ""),
    }
    return {name: value for name, value in options.items() if value}


def _unnamed(index: str) -> str:
    """Return an index's URL without the name that uv lets it have: ``internal=https://…``."""
    return re.sub(r"^[\w-]+=(?=\w+:)", "", index)


def written_settings(files: Iterable[str]) -> Mapping[str, str]:
    """Return pip's options by name, from the texts of its configuration files; later ones override earlier ones."""
    merged = configparser.RawConfigParser(strict=False, interpolation=None)
    for text in files:
        alone = configparser.RawConfigParser(strict=False, interpolation=None)
        try:
            alone.read_string(text)
        except configparser.Error:  # a broken file stops pip there; it need not stop uv
            continue
        merged.read_dict({section: dict(alone[section]) for section in alone.sections()})
    settings: dict[str, str] = {}
    for section in _SECTIONS:
        if merged.has_section(section):
            settings |= _filled(merged[section])
    return settings


def _filled(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that have a value; pip ignores the others, which override nothing."""
    return {_option(name): value for name, value in options.items() if value}


def _option(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


def client_uv() -> Path | None:
    """Return the uv of this client: the program of the package ``uv``, else the first on ``PATH``."""
    try:
        from uv import find_uv_bin

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError):  # run from its sources, or the package was taken apart
        program = shutil.which("uv")
        return Path(program) if program else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheelhouse:
    """Places of an image's wheels, with this machine's wheels separated from the others.

    Attributes:
        digest: hash of the wheels' content; empty if there are none.
        wheels: file names to files of this machine; of two with one name the first place's counts.
        places: the image's ``find_links``, in order; empty text stands for the wheels.
    """

    digest: str
    wheels: Mapping[str, Path]
    places: tuple[str, ...]

    def find_links(self, folder: str) -> tuple[str, ...]:
        """Return the places as they are on the machine, with the wheels in ``folder``."""
        return tuple(place or folder for place in self.places)


def gather_wheels(image: ImageSettings) -> Wheelhouse:
    """Find the image's wheels in folders of this machine. Blocks: reads all of them."""
    wheels: dict[str, Path] = {}
    places: list[str] = []
    for place in image.find_links:
        folder = Path(place)
        ours = "://" not in place and folder.is_dir()
        if ours:
            wheels = {path.name: path for path in sorted(folder.glob("*.whl"))} | wheels
        if not ours or "" not in places:
            places.append("" if ours else place)
    return Wheelhouse(digest=_digest(wheels) if wheels else "", wheels=wheels, places=tuple(places))


def mapped_file(path: Path) -> memoryview:
    """Return a file's content, mapped into memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _digest(wheels: Mapping[str, Path]) -> str:
    digest = blake3()
    for name, path in sorted(wheels.items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update_mmap(path)
    return digest.hexdigest(_DIGEST_BYTES)
