"""Cache of functions' pickles, and the bounded mapping that it and the lanes use.

A function sent by value takes along the values of its globals and closure, which may differ at the next call. Pickling
it each time costs more than the rest of a small call. So its references are compared instead, by identity, and only
where nothing in it can be changed in place.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final, Generic, TypeVar, cast

from skyward.engine.blobs import Blob
from skyward.wire.code.modules import SourceSet
from skyward.wire.code.omissions import names_in
from skyward.wire.code.origins import found_under_its_name
from skyward.wire.code.ownership import search_path_state
from skyward.wire.code.pickling import PLAIN_TYPES, naming_state, travels_by_reference
from skyward.wire.messages import Payload

__all__ = ["CompleteError", "FunctionCache", "PackedFunction", "Recent", "Wrapped"]

K = TypeVar("K")
V = TypeVar("V")
# Approximate size of a loaded function besides its pickle: code, globals, names. Without it the bound on the bytes of
# functions would admit hundreds of thousands of tiny ones.
_OVERHEAD_BYTES = 16 << 10


class Recent(Generic[K, V]):
    """Mapping that evicts the least recently used entries when their bytes exceed a bound; the newest always stays.

    Args:
        bound_bytes: sum of the bytes of all entries, at most.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the entry and count that as a use; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, nbytes: int) -> list[K]:
        """Add or replace an entry; return the keys of evicted entries."""
        if (old := self._entries.pop(key, None)) is not None:
            self._bytes -= old[1]
        self._entries[key] = value, nbytes
        self._bytes += nbytes
        gone: list[K] = []
        while self._bytes > self._bound_bytes and len(self._entries) > 1:
            oldest, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
            gone.append(oldest)
        return gone

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._bytes = 0


CompleteError = Callable[[ModuleNotFoundError, Callable[..., Any]], ModuleNotFoundError]

_CONSTANT: Final = PLAIN_TYPES | {CodeType}
_ABSENT: Final = object()
# Functions made in a loop are all different; each keeps alive all that it refers to.
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """Pickle ready to be sent.

    Attributes:
        payload: the part for the lane.
        blobs: the blobs that must lie on the node before.
    """

    payload: Payload
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """Pickled function.

    Attributes:
        id: BLAKE3 of the pickle, its blobs and the editions of its sources, in hex.
        label: name for messages.
        wrapped: the pickle.
        lasting: True if the pickle stays valid as long as everything the function refers to is unchanged.
        sources: the sources that workers need before they load it; None if there are none.
        imports_absent: True if the function imports modules that are not found on this machine, or not yet.
        complete: returns a node's error with all packages that the function needs and nodes lack; None if nothing can.
    """

    id: str
    label: str
    wrapped: Wrapped
    lasting: bool = True
    sources: SourceSet | None = None
    imports_absent: bool = False
    complete: Callable[[ModuleNotFoundError], ModuleNotFoundError] | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes that the function takes where it is kept, pickled or loaded."""
        return _OVERHEAD_BYTES + len(self.wrapped.payload.data) + sum(blob.view.nbytes for blob in self.wrapped.blobs)


class FunctionCache:
    """Pickles of the functions that a pool has sent. Thread-safe.

    Args:
        complete: returns a node's error about a module with all packages that a function needs and nodes lack.
    """

    def __init__(self, complete: CompleteError | None = None) -> None:
        self.complete = complete
        self._lock = threading.Lock()
        self._known: Recent[FunctionType, _Known] = Recent(_KEPT_BYTES)

    def packed(self, fn: Callable[..., Any], pack: Callable[[], PackedFunction]) -> PackedFunction:
        """Return the last pickle of ``fn`` if it is still valid, otherwise the one that ``pack`` makes now."""
        if type(fn) is not FunctionType:  # a callable object may change in place, which identity cannot show
            return pack()
        with self._lock:
            known = self._known.get(fn)
        if known is not None and known.is_unchanged():
            return known.packed
        seen = _look(fn)  # before it is pickled: a change in between makes the entry invalid, not the pickle stale
        packed = pack()
        if seen is not None and packed.lasting:
            with self._lock:
                self._known.put(fn, _Known(seen, packed), packed.nbytes)
        return packed


class _Known:
    """Pickle of a function, with everything that it depends on."""

    __slots__ = ("_naming", "_search_path", "_seen", "packed")

    def __init__(self, seen: list[_Seen], packed: PackedFunction) -> None:
        self._seen = seen
        self.packed = packed
        self._naming = naming_state()
        self._search_path = search_path_state() if packed.imports_absent else None

    def is_unchanged(self) -> bool:
        for seen in self._seen:
            if not seen.is_unchanged():
                return False
        if self._search_path is not None and self._search_path != search_path_state():
            return False
        sources = self.packed.sources
        return self._naming == naming_state() and (sources is None or sources.is_current())


class _Seen:
    """Function, and everything that it referred to when it was pickled.

    Attributes:
        parts: values that go into the pickle and may refer to more.
    """

    __slots__ = ("_annotations", "_fn", "_globals", "_names", "parts")

    def __init__(self, fn: FunctionType) -> None:
        self._fn = fn
        self._globals = tuple(names_in(fn.__code__))
        self._names = fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__
        self._annotations = dict(fn.__annotations__)
        self.parts = self._parts()

    def is_unchanged(self) -> bool:
        parts, fn = self._parts(), self._fn
        return (
            len(parts) == len(self.parts)
            and all(map(is_, parts, self.parts))
            and (fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__) == self._names
            and fn.__annotations__ == self._annotations
        )

    def _parts(self) -> list[object]:
        fn, module = self._fn, self._fn.__globals__
        parts: list[object] = [
            fn.__code__,
            *(fn.__defaults__ or ()),
            *chain.from_iterable((fn.__kwdefaults__ or {}).items()),
            *chain.from_iterable(fn.__dict__.items()),
        ]
        parts += [_content(cell) for cell in fn.__closure__ or ()]
        parts += [module.get(name, _ABSENT) for name in self._globals]
        return parts


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT  # not filled yet, as in a function that refers to itself while it is defined


def _look(fn: FunctionType) -> list[_Seen] | None:
    """Return every function that goes into the pickle; None if something in it may be changed in place."""
    found: list[_Seen] = []
    known: set[int] = set()
    waiting: list[object] = [fn]
    while waiting:
        value = waiting.pop()
        if type(value) in _CONSTANT or id(value) in known or value is _ABSENT or _is_fixed(value):
            continue
        if type(value) is tuple:
            waiting += cast("tuple[object, ...]", value)
        elif type(value) is FunctionType:
            known.add(id(value))
            found.append(_Seen(value))
            waiting += found[-1].parts
        else:
            return None
    return found


def _is_fixed(value: object) -> bool:
    """Return True for a value whose pickle is a name under which the node finds the same object."""
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type | None):
        return False  # a method of an object that may change
    if not isinstance(value, type | ModuleType | BuiltinFunctionType | FunctionType) or not travels_by_reference(value):
        return False
    return value.__name__ in sys.modules if isinstance(value, ModuleType) else found_under_its_name(value)
