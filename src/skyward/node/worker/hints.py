"""Hints for calls that fail because they run on a node: where their files are looked up, in which thread they run."""

from __future__ import annotations

import os
import re
import traceback

from skyward.shipping.pickling import add_note
from skyward.tracebacks import related

__all__ = ["add_hints"]

_NO_FILE = re.compile(r"no such file or directory|unable to (?:synchronously )?open file|file not found", re.IGNORECASE)
_MAIN_THREAD = re.compile(r"main thread|no current event loop in thread")
_THREAD_HINT = (
    "a call runs in a thread of its worker, whose main thread serves the node: instead of a signal handler or an alarm "
    "take timeout= of the call, for an event loop asyncio.run(), or run this part in a child process, whose main "
    "thread is yours: multiprocessing or subprocess"
)


def add_hints(error: BaseException) -> None:
    """Add notes to an error of a call: about a file that is missing, about a need of the main thread."""
    chain = list(related(error))
    if (note := next((note for each in chain if (note := _folder_hint(each))), "")) and not _is_of_a_program(error):
        add_note(error, note)
    if any(isinstance(each, ValueError | RuntimeError) and _MAIN_THREAD.search(_text(each)) for each in chain):
        add_note(error, _THREAD_HINT)


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
