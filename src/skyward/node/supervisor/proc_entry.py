"""Entry of this process below ``/proc``: the arguments and variables that other programs find there.

A fork shows those of the program that it was forked from, which lie in memory at fixed places. They are overwritten
there with text of the same length: ``prctl(PR_SET_MM_MAP)`` would allow any length, and is missing from many kernels.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["fits", "show_arguments", "show_variable"]

_FIRST_FIELD = 3
_ARG_START, _ENV_START = 48, 50
"""Numbers of fields of ``/proc/self/stat``, in proc(5); each is followed by the field of the area's end."""


def fits(arguments: Sequence[str | bytes]) -> bool:
    """Return whether this process and its forks can show ``arguments``."""
    return sys.platform == "linux" and len(_encoded(arguments)) < len(_read(_ARG_START))


def show_arguments(arguments: Sequence[str | bytes], path: str) -> None:
    """Show ``arguments`` and an absolute path from now on, in this process and its forks.

    The path has slashes put before it or loses its beginning, so that everything is as long as it was.

    Raises:
        ValueError: the arguments alone are longer.
    """
    old = _read(_ARG_START)
    new = _encoded(arguments)
    left = max(0, len(old) - len(new) - 1)
    encoded = os.fsencode(path)
    new += encoded[len(encoded) - left :] if len(encoded) > left else encoded.rjust(left, b"/")
    _overwrite(_ARG_START, 0, old, new + b"\0")


def show_variable(present: str, name: str, value: str) -> None:
    """Show ``name=value`` in the place of the environment variable called ``present``.

    Raises:
        ValueError: there is no such variable, or its text is not as long.
    """
    area = _read(_ENV_START)
    found = f"\0{present}=".encode()
    at = (b"\0" + area).find(found)
    if at < 0:
        raise ValueError(f"{present} was not in the environment when the program started")
    old = area[at : area.index(b"\0", at) + 1]
    _overwrite(_ENV_START, at, old, f"{name}={value}\0".encode())


def _encoded(arguments: Sequence[str | bytes]) -> bytes:
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def _bounds(field: int) -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = fields[field - _FIRST_FIELD : field - _FIRST_FIELD + 2]
    return int(start), int(end)


def _read(field: int) -> bytes:
    start, end = _bounds(field)
    return ctypes.string_at(start, end - start)


def _overwrite(field: int, offset: int, old: bytes, new: bytes) -> None:
    if len(new) != len(old):
        raise ValueError(f"{len(new)} bytes do not replace {len(old)} in the memory of this process")
    ctypes.memmove(_bounds(field)[0] + offset, new, len(new))
