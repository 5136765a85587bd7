"""Remembers the pickles of functions that cannot have changed since.

A function that travels by value takes the values of its globals and of its closure along, which may be others at the
next call. Pickling it anew each time costs more than all the rest of a small call; so what it refers to is compared
instead, by identity, and only where nothing in it can be changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

from skyward.engine.packing import PackedFunction
from skyward.wire.pickling import PLAIN_TYPES, travels_by_reference

__all__ = ["FunctionCache"]


class FunctionCache:
    """The functions that a pool has sent."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[list[object], PackedFunction]] = WeakKeyDictionary()

    def packed(self, fn: Callable[..., Any], pack: Callable[[], PackedFunction]) -> PackedFunction:
        """``fn`` as it was pickled last, if it is the same still; else as ``pack`` does it now."""
        state = _state(fn) if type(fn) is FunctionType else None
        if state is None:
            return pack()
        known = self._known.get(fn)
        if known is not None and len(known[0]) == len(state) and all(map(_is, known[0], state)):
            return known[1]
        packed = pack()
        if packed.lasting:
            self._known[fn] = state, packed
        return packed


def _is(one: object, other: object) -> bool:
    return one is other


def _state(fn: FunctionType) -> list[object] | None:
    """All that the function's pickle depends on; None if some of it may be changed in place."""
    state: list[object] = []
    seen: set[int] = set()
    waiting: list[object] = [fn]
    while waiting:
        value = waiting.pop()
        state.append(value)
        if type(value) in PLAIN_TYPES or type(value) is CodeType or id(value) in seen or _is_fixed(value):
            continue
        if type(value) is tuple:
            waiting += cast("tuple[object, ...]", value)
        elif type(value) is FunctionType:
            seen.add(id(value))
            waiting += _parts(value)
        else:
            return None
    return state


def _is_fixed(value: object) -> bool:
    return isinstance(value, type | ModuleType | BuiltinFunctionType | FunctionType) and travels_by_reference(value)


def _parts(fn: FunctionType) -> Iterator[object]:
    yield fn.__code__
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    yield from fn.__dict__.values()
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield None
    module = fn.__globals__
    yield from (module[name] for name in _names(fn.__code__) if name in module)


def _names(code: CodeType) -> Iterator[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return chain(code.co_names, *inner)
