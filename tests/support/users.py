"""Permissions as they hold for a user, where the tests run as root, for whom they do not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["OTHER_USER", "as_other_user"]

OTHER_USER = 65534


@contextmanager
def as_other_user(folder: Path) -> Generator[None]:
    """Have this thread read and write files as another user, who owns the folder. Use paths relative to it."""
    before = Path.cwd()
    os.chdir(folder)  # the other user may not enter those above
    is_root = os.geteuid() == 0
    kernel = ctypes.CDLL(None)
    try:
        if is_root:
            os.chown(".", OTHER_USER, OTHER_USER)
            kernel.setfsuid(OTHER_USER)
        yield
    finally:
        if is_root:
            kernel.setfsuid(0)
        os.chdir(before)
