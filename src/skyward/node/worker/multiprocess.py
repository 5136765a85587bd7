"""Multiprocessing inside calls: child processes receive the user's functions and classes by value.

The standard library pickles them by name. On a node that fails: the module they come from is the client's, and nothing
can import it. Child processes started by "spawn" or "forkserver" are new programs; the first such object that they
receive gives them the same ability, so that results may be instances of those classes.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, cast

from skyward.wire.modules import came_along, with_sources
from skyward.wire.pickling import pack

__all__ = ["allow_multiprocessing"]


def allow_multiprocessing() -> None:
    """Have multiprocessing work in this process, a worker, as in a program of the user's own.

    Its start method is undecided again (the process that forked it has handed its own down), and objects whose names
    mean nothing here go to child processes by value.
    """
    multiprocessing.set_start_method(None, force=True)
    _send_by_value()


def _send_by_value() -> None:
    cast("Any", ForkingPickler).reducer_override = _reduce


def _reduce(_: ForkingPickler, obj: object) -> Any:
    if not isinstance(obj, type | FunctionType) or obj.__module__ in (None, "builtins"):
        return NotImplemented
    module = sys.modules.get(obj.__module__)
    if module is None or not _is_in(module, obj):
        packed = pack(obj, what=obj.__qualname__)
        return _rebuild, (packed.data, *map(bytearray, packed.buffers))
    if came_along(module):
        return _rebuild, (with_sources(pickle.dumps(obj), (), (obj.__module__,)),)
    return NotImplemented


def _is_in(module: object, obj: type | FunctionType) -> bool:
    """Return whether pickle would find ``obj`` by its name."""
    try:
        return functools.reduce(getattr, obj.__qualname__.split("."), module) is obj
    except AttributeError:
        return False


def _rebuild(data: bytes, *buffers: bytearray) -> object:
    _send_by_value()
    return pickle.loads(data, buffers=buffers)
