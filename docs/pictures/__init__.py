"""Pictures of the pages: drawn by programs, so that they change with the library."""

from __future__ import annotations

from pathlib import Path

from pictures import cast, life, logo, search, top

__all__ = ["draw_all"]


def draw_all(images: Path) -> None:
    """Write every picture into the folder ``images``. Takes the time of one run of ``first.py``."""
    drawn = {"top.svg": top.draw(), **logo.draw(), **life.draw(), **search.draw()}
    for name, picture in drawn.items():
        (images / name).write_text(picture, encoding="utf-8")
    cast.record_into(images / "cast.svg")
