"""Patterns of files in the working folder of a node's calls."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from skyward.errors import ConfigurationError
from skyward.request.checks import texts

__all__ = ["checked_patterns", "is_matched"]


def checked_patterns(parameter: str, value: object) -> tuple[str, ...]:
    """Return patterns of files, such as ``"*.bin"`` or ``"models/"``, that cannot leave the folder.

    Raises :class:`~skyward.errors.ConfigurationError`.
    """
    patterns = texts(parameter, [value] if isinstance(value, str) else value)
    for pattern in patterns:
        path = PurePosixPath(pattern)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ConfigurationError(
                f"{parameter} must stay in the working folder of the node's calls, such as '*.bin', 'models/' or '**', "
                f"got {pattern!r}"
            )
    return patterns


def is_matched(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches a file of this name, or a folder that it is in."""
    parts = PurePosixPath(name).parts
    return "\0" not in name and any(
        _matches(parts[:count], PurePosixPath(pattern).parts) for pattern in patterns for count in range(len(parts) + 1)
    )


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if not any(each.startswith(".") for each in pattern) and any(each.startswith(".") for each in parts):
        return False  # hidden files, unless a pattern names one
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
