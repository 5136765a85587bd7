"""Child processes of user code: forks end with their call; multiprocessing sends them functions and classes by value.

The standard library pickles functions and classes by name. On a node that fails: the module they come from is the
client's, and no process here can import it. Children started by "spawn" or "forkserver" are new programs. The first
such object that they receive gives them the same ability, so that results may be instances of those classes.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, NoReturn, cast

from skyward.shipping.definitions import found_under_its_name
from skyward.shipping.pickling import pack
from skyward.shipping.received_modules import is_received, with_sources


def call_in_this_process(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``function``; in a child that it forked, end the child instead of returning or raising.

    The child's exit status is the one it would have at the end of a program.
    """
    caller = os.getpid()
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != caller:
            _end(error)  # returning, the child would go on as a second worker on the same connections
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
        # Not sys.exit: the handlers at exit are the worker's.
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


def prepare_multiprocessing(folder: str) -> None:
    """Make multiprocessing work in this process, a worker, as in a program of the user's own.

    Functions and classes that child processes cannot import go to them by value.

    Args:
        folder: folder for its sockets. It goes with the node: a worker is killed, and removes nothing.
    """
    tempfile.tempdir = folder
    try:
        util.get_temp_dir()  # kept for the life of the process
    finally:
        tempfile.tempdir = None
    _send_by_value()


def _send_by_value() -> None:
    cast("Any", ForkingPickler).reducer_override = _reduce


def _reduce(_: ForkingPickler, obj: object) -> Any:
    if not isinstance(obj, type | FunctionType) or obj.__module__ in (None, "builtins"):
        return NotImplemented
    module = sys.modules.get(obj.__module__)
    # Children have their own main module.
    if module is None or obj.__module__ == "__main__" or not found_under_its_name(obj):
        packed = pack(obj, what=obj.__qualname__)
        return _rebuild, (packed.data, *map(bytearray, packed.buffers))
    if is_received(module):
        return _rebuild, (with_sources(pickle.dumps(obj), (), (obj.__module__,)),)
    return NotImplemented


def _rebuild(data: bytes, *buffers: bytearray) -> object:
    _send_by_value()  # this may be the child, which sends its results back the same way
    return pickle.loads(data, buffers=buffers)
