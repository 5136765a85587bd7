"""Permissions as they hold for a user, where the tests run as root, for whom they do not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["OTHER_USER", "as_other_user"]

OTHER_USER = 65534


@contextmanager
def as_other_user(folder: Path) -> Iterator[None]:
    """Have this thread read and write files as another user, who owns the folder. Use paths relative to it."""
    before = Path.cwd()
    os.chdir(folder)  # the other user may not enter those above
    if os.geteuid():
        yield
    else:
        kernel = ctypes.CDLL(None)
        os.chown(".", OTHER_USER, OTHER_USER)
        kernel.setfsuid(OTHER_USER)
        try:
            yield
        finally:
            kernel.setfsuid(0)
    os.chdir(before)
