"""Tracebacks without the frames of Skyward and of the libraries under it; ``SKYWARD_TRACEBACK=full`` keeps them."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from skyward.errors import RemoteTraceback, SkywardError

__all__ = [
    "FULL",
    "add_lines",
    "from_callers_line",
    "hide_frames",
    "is_explained",
    "keeps_frames",
    "related",
    "without_frames",
]

P = ParamSpec("P")
T = TypeVar("T")

FULL = "SKYWARD_TRACEBACK"
"""Environment variable; ``full`` keeps all frames."""

_HIDDEN = {"asyncio", "concurrent", "distributed", "skyward", "skyward_dask", "skyward_joblib"}.union(
    ("tenacity", "threading", "tornado")
)

_WITHOUT_LINE = re.compile(r'^(  File "([^"\n]+)", line ([0-9]+), in .*\n)(?!    )', re.MULTILINE)


def add_lines(text: str) -> str:
    """Return a worker's traceback with the source lines that only this process has: of cells, and of the program."""

    # The worker has the lines of every file that is there: this never shows a line of another version.
    def with_line(match: re.Match[str]) -> str:
        frame, path, number = match.groups()
        line = linecache.getline(path, int(number)).strip()
        return f"{frame}    {line}\n" if line else frame

    return _WITHOUT_LINE.sub(with_line, text)


def keeps_frames() -> bool:
    """Return True if the user has asked for full tracebacks."""
    return os.environ.get(FULL, "").strip().lower() == "full"


def is_explained(error: BaseException) -> bool:
    """Return True if the frames of Skyward add nothing to an exception: it is a call's, an error of its own, a Ctrl-C.

    Any other one may be a defect of Skyward, which its frames show.
    """
    return isinstance(error, SkywardError | KeyboardInterrupt) or isinstance(error.__cause__, RemoteTraceback)


def hide_frames(error: BaseException) -> None:
    """Take the hidden frames out of the traceback of an exception, and of those that it is chained to or groups.

    Called by a function's ``except`` clause before a bare ``raise``, this takes that function's frame out, too.
    """
    # A bare raise adds no entry for its own frame (measured on 3.11): the caller's line is then the last one.
    if keeps_frames():
        return
    for each in related(error):
        each.with_traceback(_shown(each.__traceback__))  # no assignment: frozen classes refuse it


def without_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, with the hidden frames taken out of explained exceptions that it raises."""
    return _hiding(function, is_explained)


def from_callers_line(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, whose errors tell the caller what to write instead: their tracebacks end in its line."""
    return _hiding(function, lambda _: True)


def _hiding(function: Callable[P, T], is_hidden: Callable[[BaseException], bool]) -> Callable[P, T]:
    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if is_hidden(error):
                hide_frames(error)
            raise

    return called


def related(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then those that it is chained to or groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _shown(entry: TracebackType | None) -> TracebackType | None:
    """Return the entries of a traceback, from ``entry`` on, that are not hidden."""
    kept: list[TracebackType] = []
    while entry is not None:
        if str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _HIDDEN:
            kept.append(entry)
        entry = entry.tb_next
    following = None
    for each in reversed(kept):
        each.tb_next = following
        following = each
    return following
