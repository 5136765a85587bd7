"""Named settings: pools described in ``skyward.toml`` or ``pyproject.toml``, of the project and then of the user."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import platformdirs

from skyward.environment.image import Image
from skyward.errors import ConfigurationError
from skyward.providers.base import Provider
from skyward.providers.registry import make_provider, provider_type, secret_parameters
from skyward.request.accelerators import Accelerator, Accelerators
from skyward.request.checks import closest, option_names, refusal, refuse_unknown, text, unknown_option
from skyward.request.volume import S3Volume

P = TypeVar("P")

_FILES: Final[Mapping[str, tuple[str, ...]]] = {"skyward.toml": (), "pyproject.toml": ("tool", "skyward")}
"""Names of the files, first one first, and the table of each that is Skyward's."""
_PLACE: Final = re.compile(r"(.*) \(at line (\d+), column \d+\)", re.DOTALL)
_BLAMED: Final = re.compile(r".* has no (?:option|parameter) '(\w+)'|(\w+)")
"""Beginning of an error about a parameter, which names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file with named settings.

    Attributes:
        path: the file.
        text: what is in it.
        table: names of the tables around Skyward's.
        settings: Skyward's table.
    """

    path: Path
    text: str
    table: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def pools(self) -> Mapping[str, Mapping[str, Any]]:
        """The tables of the pools, by name.

        Raises:
            ConfigurationError: something in the file is no pool.
        """
        if unknown := next((key for key in self.settings if key != "pools"), None):
            raise ConfigurationError(
                f"{self.at(unknown)}: {unknown!r} is unknown{closest(unknown, ['pools'])}: pools are tables such as "
                f"[{'.'.join((*self.table, 'pools', 'big'))}]"
            )
        pools = self.settings.get("pools", {})
        tables = cast("dict[str, Any]", pools) if isinstance(pools, dict) else {"": pools}
        for name, values in tables.items():
            if not isinstance(values, dict):
                raise ConfigurationError(
                    f"{self.at('pools', *filter(None, [name]))}: a pool is a table of its parameters"
                )
        return tables

    def at(self, *keys: str) -> str:
        """Return file and line of a key in Skyward's table, or of the nearest table around it."""
        for count in range(len(keys), 0, -1):
            if line := _line_of(self.text, (*self.table, *keys[:count])):
                return f"{self.path}:{line}"
        return str(self.path)


def settings_files() -> Sequence[SettingsFile]:
    """Return the files with settings of the current folder's project, then the user's; the first one counts.

    The project's are those of the first folder that has some: the current one, or one above.

    Raises:
        ConfigurationError: a file cannot be read, or is not TOML.
    """
    project: Sequence[SettingsFile] = ()
    for folder in _folders():
        if project := _read_folder(folder):
            break
    users = _read_folder(platformdirs.user_config_path("skyward"))
    known = {file.path for file in project}
    return [*project, *(file for file in users if file.path not in known)]


def _folders() -> Iterator[Path]:
    """Yield the current folder and those above, up to one in which every user can put files."""
    here = Path.cwd()
    yield here
    for folder in here.parents:
        if folder.stat().st_mode & stat.S_IWOTH:
            return
        yield folder


def _read_folder(folder: Path) -> list[SettingsFile]:
    files = [_read(folder / name, table) for name, table in _FILES.items()]
    return [file for file in files if file is not None]


def _read(path: Path, table: tuple[str, ...]) -> SettingsFile | None:
    """Return a file; None if it does not exist, or has nothing for Skyward."""
    import tomllib

    try:
        content = path.read_text(encoding="utf-8")
        found: Any = tomllib.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except tomllib.TOMLDecodeError as error:
        match = _PLACE.fullmatch(str(error))
        where, what = (f"{path}:{match[2]}", match[1]) if match else (str(path), str(error))
        raise ConfigurationError(f"{where}: this is not TOML: {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    for depth in range(1, len(table) + 1):
        found = cast("dict[str, Any]", found).get(table[depth - 1], {})
        if not isinstance(found, dict):
            line = _line_of(content, table[:depth])
            raise ConfigurationError(f"{path}:{line}: {'.'.join(table[:depth])} must be a table")
    if not found and table:
        return None
    return SettingsFile(path=path, text=content, table=table, settings=cast("dict[str, Any]", found))


def _line_of(text: str, keys: Sequence[str]) -> int:
    """Return the line of a key: the first one that names it and without which the key is not in the file; else 0."""
    import tomllib

    lines = text.splitlines(keepends=True)
    for start in (number for number, line in enumerate(lines) if keys[-1] in line):
        for end in range(start + 1, len(lines) + 1):  # a value may go on for some lines
            try:
                value: Any = tomllib.loads("".join(lines[:end]))
            except tomllib.TOMLDecodeError:
                continue
            for key in keys:
                value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
            if value is not None:
                return start + 1
            break
    return 0


# --- pools ----------------------------------------------------------------------------------------------------------


def make_named(make: Callable[..., P], name: str, changes: Mapping[str, Any]) -> P:
    """Return the pool that ``make`` makes of the settings of that name, with some of them changed.

    Raises:
        ConfigurationError: there are no such settings, or one is wrong; the message has file and line.
    """
    text("the name of a pool", name)
    files = settings_files()
    for file in files:
        if name in file.pools:
            return make_of(make, file, name, changes)
    known = sorted({each for file in files for each in file.pools if each})
    where = " and ".join(str(file.path) for file in files) or "no file"
    raise ConfigurationError(
        f"no pool is named {name!r} in the settings{closest(name, known)}. Read: {where}. Settings are tables such as "
        f"[tool.skyward.pools.{name}] of a pyproject.toml, or [pools.{name}] of a skyward.toml, in {Path.cwd()}, a "
        f"folder above it or {platformdirs.user_config_path('skyward')}"
    )


def make_of(make: Callable[..., P], file: SettingsFile, name: str, changes: Mapping[str, Any]) -> P:
    """Return the pool of that name in a file; see :func:`make_named`."""
    values = {key: value for key, value in file.pools[name].items() if key not in changes}
    for key, convert in _CONVERSIONS.items():
        if key in values:
            with _errors_of(file, name, key):
                values[key] = convert(values[key], file.path.parent)
    with _errors_of(file, name, changes=changes):
        if "self" in values:
            raise unknown_option(getattr(make, "__name__", "it"), ["self"], option_names(make))
        return make(**{**values, **changes})


@contextmanager
def _errors_of(file: SettingsFile, pool: str, *keys: str, changes: Mapping[str, Any] | None = None) -> Generator[None]:
    """Give errors the line of the parameter that they name, unless that is one of the ``changes``."""
    try:
        yield
    except (ConfigurationError, TypeError) as error:
        match = _BLAMED.match(str(error))
        blamed = (match[1] or match[2]) if match else ""
        if blamed in (changes or {}):
            raise
        image = file.pools[pool].get("image")
        if not keys and isinstance(image, dict) and blamed in image:  # a pool checks its image, too
            keys = ("image",)
        at = file.at("pools", pool, *keys, blamed)
        raise ConfigurationError(f"{at}: pool {pool!r}: {error}") from error


def _nodes(value: Any, _: Path) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _accelerator(value: Any, _: Path) -> Accelerators:
    """Return one accelerator or several; a table has the parameters of Accelerator, or, without a name, of its any."""
    if isinstance(value, dict):
        options = cast("dict[str, Any]", value)
        if "name" in options:
            return Accelerator(**options)
        refuse_unknown("an accelerator without a name", options, ["name", *option_names(Accelerator.any)])
        return Accelerator.any(**options)
    if not isinstance(value, list):
        return value
    several = [_accelerator(each, _) for each in cast("list[Any]", value)]
    return [one for each in several for one in (each if isinstance(each, tuple) else (cast("Any", each),))]


def _provider(value: Any, _: Path) -> Provider | list[Provider]:
    """Return one provider or several, each a name, or a table of its name and its settings."""
    if value == []:
        raise ConfigurationError('provider is an empty list: name a source of machines, as in provider = ["local"]')
    if isinstance(value, list):
        return [cast("Provider", _provider(each, _)) for each in cast("list[Any]", value)]
    settings: dict[str, Any] = {"name": value} if isinstance(value, str) else {**_table("provider", value)}
    if not isinstance(name := settings.pop("name", None), str):
        raise ConfigurationError('provider needs a name, as in provider = { name = "ssh", hosts = ["gpu1"] }')
    secrets = secret_parameters(provider_type(name))
    if secret := next((key for key in settings if key in secrets), None):
        raise ConfigurationError(
            f"{secret} is secret, and settings are often shared: put it where {name!r} finds it by itself, such as an "
            "environment variable (see the provider's page)"
        )
    return make_provider(name, settings)


def _image(value: Any, folder: Path) -> Image:
    """Return the image, whose paths are relative to the file's folder."""
    options = {**_table("image", value)}
    for key in ("includes", "find_links"):
        if isinstance(places := options.get(key), list):
            options[key] = [_place(each, folder) for each in cast("list[Any]", places)]
    return Image(**options)


def _place(path: Any, folder: Path) -> Any:
    if not isinstance(path, str) or "://" in path:
        return path
    return os.path.join(folder, os.path.expanduser(path))


def _on_event(_: Any, __: Path) -> Any:
    raise ConfigurationError("on_event is a function, which no file can hold: pass it in the program")


def _volume(value: Any, _: Path) -> list[S3Volume]:
    if not isinstance(value, list):
        raise refusal("volume", "a list of tables, each with mount_path and bucket", value)
    return [S3Volume(**_table("volume", each)) for each in cast("list[Any]", value)]


def _table(parameter: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal(parameter, "a table", value)
    return cast("dict[str, Any]", value)


_CONVERSIONS: Final[Mapping[str, Callable[[Any, Path], Any]]] = {
    "accelerator": _accelerator,
    "image": _image,
    "nodes": _nodes,
    "on_event": _on_event,
    "provider": _provider,
    "volume": _volume,
}
"""Parameters whose values TOML cannot express, with the functions that make them, or refuse them."""
