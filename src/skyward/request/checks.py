"""Checks of single parameters: each returns the value with its type, or raises an error with the allowed values."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Sequence
from typing import cast

from skyward.errors import ConfigurationError
from skyward.request.masking import without_credentials

__all__ = ["flag", "gibibytes", "positive_number", "refusal", "secret", "text", "texts", "web_address", "whole_number"]

_GIB_PER_UNIT = {"M": 1 / 1024, "G": 1.0, "T": 1024.0}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGT])i?B\s*", re.IGNORECASE | re.ASCII)


def refusal(parameter: str, allowed: str, given: object) -> ConfigurationError:
    """Return an error that names the parameter, its allowed values and the given one, without credentials in URLs."""
    shown = without_credentials(given) if isinstance(given, str) else given
    return ConfigurationError(f"{parameter} must be {allowed}, got {reprlib.repr(shown)}")


def whole_number(parameter: str, value: object, *, minimum: int = 1) -> int:
    """Return ``value`` if it is an int, no bool, of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise refusal(parameter, f"a whole number ≥ {minimum}", value)
    return value


def positive_number(parameter: str, value: object) -> float:
    """Return ``value`` as a float if it is an int or float above zero that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        huge = isinstance(value, int | float) and value > sys.float_info.max
        raise refusal(parameter, "a number > 0 and finite" if huge else "a number > 0", value)
    return float(value)


def flag(parameter: str, value: object) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise refusal(parameter, "True or False", value)
    return value


def text(parameter: str, value: object, *, allowed: str = "non-empty text") -> str:
    """Return ``value`` if it is a string that is not blank and can pass through a command line."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise refusal(parameter, allowed, value)
    return value


def web_address(parameter: str, value: object) -> str:
    """Return ``value`` if it is a URL of a server."""
    if not text(parameter, value).startswith(("http://", "https://")):
        raise refusal(parameter, "a URL such as 'http://127.0.0.1:5000'", value)
    return cast("str", value)


def secret(parameter: str, value: object) -> str:
    """Return ``value`` without blanks around it if it is printable ASCII in one word; the error does not repeat it."""
    found = value.strip() if isinstance(value, str) else ""
    if not found.isascii() or not found.isprintable() or len(found.split()) != 1:
        raise ConfigurationError(f"{parameter} must be text of printable ASCII characters without blanks")
    return found


def texts(parameter: str, value: object) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a sequence of strings, none of which looks like an option."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        example = f", as in {parameter}=[...]" if isinstance(value, str) else ""
        raise refusal(parameter, f"a list of strings{example}", value)
    items = tuple(text(f"{parameter}[{i}]", item) for i, item in enumerate(cast("Sequence[object]", value)))
    for i, item in enumerate(items):
        if item.lstrip().startswith("-"):
            raise refusal(f"{parameter}[{i}]", "a value, not an option", item)
    return items


def gibibytes(parameter: str, value: object) -> float:
    """Return a memory size such as ``"32GB"`` or ``"1.5 TiB"`` in GiB.

    "GB" is read as GiB, as machines and accelerators are sold: a machine never has less than the request.
    """
    match = _MEMORY.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise refusal(parameter, 'a size such as "32GB"', value)
    return float(match[1]) * _GIB_PER_UNIT[match[2].upper()]
