"""Children that user code forks: each ends where the call that forked it ends, and never runs the worker's own code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["call_in_this_process"]


def call_in_this_process(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``function``; in a child that it forked, end the child instead of returning or raising.

    The child's exit status is the one it would have at the end of a program. Handlers at exit are not called: they are
    the worker's.
    """
    caller = os.getpid()
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != caller:
            _end(error)
        raise
    if os.getpid() != caller:
        _end(None)
    return result


def _end(error: BaseException | None) -> NoReturn:
    status = 1
    try:
        status = _exit_status(error)
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                with suppress(Exception):
                    stream.flush()
    finally:
        os._exit(status)


def _exit_status(error: BaseException | None) -> int:
    match error:
        case None | SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case SystemExit(code=message):
            sys.stderr.write(f"{message}\n")
        case _:
            sys.stderr.write("".join(traceback.format_exception(error)))
    return 1
