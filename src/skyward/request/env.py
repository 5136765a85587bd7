"""Environment variables as an immutable value whose repr shows no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

from skyward.errors import ConfigurationError
from skyward.request.checks import refusal

__all__ = ["EnvVars"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


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
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refusal(parameter, "a dict whose names are letters, digits and underscores", name)
        if not isinstance(value, str) or "\0" in value:
            kind = "text with a NUL" if isinstance(value, str) else type(value).__name__
            raise ConfigurationError(f"{parameter}[{name!r}] must be text without NUL, got {kind}")
        checked[name] = value
    return checked
