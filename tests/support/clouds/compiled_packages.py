"""Packages of test hosts' environments, compiled once for all environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["keep_compiled"]


def keep_compiled(folder: Path) -> None:
    """Store modules that the environments of ``folder`` have compiled in its uv's cache, from where uv links them.

    Each version of Skyward gets environments of its own: to compile their packages took each of them 8 to 15 s of
    processor time. uv links every file of a package from its cache; Python takes a compiled module for its source by
    the source's time and size, which links share.
    """
    fresh = [each for each in _folders(folder / "envs") if _claim(folder / "compiled" / each.name)]
    if not fresh:
        return
    cached = {path.stat().st_ino: path for path in (folder / "cache/uv").glob("archive-v*/**/*.py")}
    for environment in fresh:
        for compiled in environment.glob("lib/**/__pycache__/*.pyc"):
            source = compiled.parents[1] / f"{compiled.name.partition('.')[0]}.py"
            with suppress(FileNotFoundError, FileExistsError):
                if (path := cached.get(source.stat().st_ino)) is not None:
                    (path.parent / "__pycache__").mkdir(exist_ok=True)
                    os.link(compiled, path.parent / "__pycache__" / compiled.name)


def _folders(place: Path) -> Iterator[Path]:
    return place.iterdir() if place.exists() else iter(())


def _claim(mark: Path) -> bool:
    """Return True for the first process that asks."""
    mark.parent.mkdir(exist_ok=True)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
