"""Program that lists and reads files of a node's working folder, as ordered on standard input.

Its source is sent to the node's Python, without Skyward: it starts for each piece of a file. It needs nothing but the
standard library.
"""

import base64
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

__all__ = ["listing", "main", "piece"]

_THERE = 20


def listing(folder: str, patterns: list[str]) -> dict[str, Any]:
    """Return the regular files that patterns match, below matched folders too; and the names of others if none does.

    Links are followed as long as they stay in the folder; others are in ``outside``.
    """
    top = os.path.realpath(folder)
    found: dict[str, Any] = {}
    outside: list[str] = []
    unmatched: list[str] = []
    for pattern in patterns:
        names = [name for match in _matches(top, pattern) for name in _files_below(top, match)]
        for name in names:
            real = os.path.realpath(os.path.join(top, name))
            if os.path.commonpath((top, real)) != top:
                outside.append(f"{name} leads to {real}")
            elif (facts := _facts(real)) is not None:
                found[name] = facts
        if not any(name in found for name in names):
            unmatched.append(pattern)
    there = sorted(os.listdir(top)) if unmatched and os.path.isdir(top) else []
    return {"files": found, "outside": outside, "unmatched": unmatched, "there": there[:_THERE], "all": len(there)}


def piece(folder: str, name: str, offset: int, length: int, facts: list[int]) -> dict[str, Any]:
    """Return a piece of a file in base64, or that it is no longer the file with these facts."""
    top = os.path.realpath(folder)
    real = os.path.realpath(os.path.join(top, name))
    if os.path.commonpath((top, real)) != top or _facts(real) != facts:
        return {"changed": True}
    with open(real, "rb") as file:
        file.seek(offset)
        data = file.read(length)
    if _facts(real) != facts or len(data) != length:
        return {"changed": True}
    return {"data": base64.b64encode(data).decode()}


def _matches(top: str, pattern: str) -> list[str]:
    """Return the names that match; hidden ones only if the pattern names one. ``**`` follows no link."""
    hidden = any(part.startswith(".") for part in pattern.split("/"))
    found = [path.relative_to(top) for path in Path(top).glob(pattern)]
    return sorted(str(name) for name in found if hidden or not any(part.startswith(".") for part in name.parts))


def _files_below(top: str, match: str) -> list[str]:
    path = os.path.join(top, match)
    if os.path.islink(path) or not os.path.isdir(path):
        return [match]
    return [
        os.path.relpath(os.path.join(here, name), top)
        for here, _, names in sorted(os.walk(path))
        for name in sorted(names)
    ]


def _facts(path: str) -> "list[int] | None":
    """Return size, time of change and inode of a regular file."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return [seen.st_size, seen.st_mtime_ns, seen.st_ino] if stat.S_ISREG(seen.st_mode) else None


def main() -> None:
    """Answer the order on standard input with JSON on standard output."""
    order = json.load(sys.stdin)
    answer = {"listing": listing, "piece": piece}[order.pop("verb")](**order)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
