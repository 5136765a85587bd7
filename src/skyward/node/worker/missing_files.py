"""Hint for calls that look for a file of the client's under a relative path."""

from __future__ import annotations

import os
import traceback

__all__ = ["hint_at_folder"]


def hint_at_folder(error: BaseException) -> None:
    """Add a note to an error about a missing file: the folder of a relative path, and the way to send files along."""
    name = getattr(error, "filename", None)
    if not isinstance(error, FileNotFoundError) or not isinstance(name, str | bytes) or os.path.isabs(name):
        return
    frames = traceback.extract_tb(error.__traceback__)
    if frames and os.path.basename(frames[-1].filename) == "subprocess.py":  # a program, which is in no folder
        return
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return
    error.add_note(
        f"{os.fsdecode(name)!r} was looked up in {folder} on the node, the working folder of the pool's calls, not in "
        "your program's: send files along with Image(includes=[…]), or give an absolute path that exists there"
    )
