"""Side effects of calls, in a module that is imported at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["note"]


def note(path: str, seconds: float = 0.0) -> int:
    """Leave a line with this process's id, print, and return the id after a while."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    print(f"noted by {os.getpid()}")
    time.sleep(seconds)
    return os.getpid()
