"""Hint for calls that fail because they run on a node: where their files are looked up."""

from __future__ import annotations

import os
import re
import traceback

from skyward.shipping.pickling import add_note
from skyward.tracebacks import related

_NO_FILE = re.compile(r"no such file or directory|unable to (?:synchronously )?open file|file not found", re.IGNORECASE)


def add_hints(error: BaseException) -> None:
    """Add a note to an error of a call about a file that is missing."""
    note = next((note for each in related(error) if (note := _folder_hint(each))), "")
    if note and not _is_of_a_program(error):
        add_note(error, note)


def _folder_hint(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    if isinstance(name, str | bytes):
        if not isinstance(error, FileNotFoundError) or os.path.isabs(name):
            return ""
        subject = repr(os.fsdecode(name))
    elif isinstance(error, FileNotFoundError) or _NO_FILE.search(_text(error)):
        subject = "a relative path"
    else:
        return ""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return ""
    return (
        f"{subject} was looked up in {folder} on the node, the working folder of the pool's calls, not in your "
        "program's: send files along with Image(includes=[…]), or give an absolute path that exists there"
    )


def _is_of_a_program(error: BaseException) -> bool:
    """Return True if the missing file is a program, which is looked up elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.basename(frames[-1].filename) == "subprocess.py"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # user code may do anything here
        return ""
