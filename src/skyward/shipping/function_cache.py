"""Pickling of invocations, in the caller's thread: each function once, large buffers named by content.

A function sent by value takes along the values of its globals and closure, which may differ at the next call. Pickling
it each time costs more than the rest of a small call. So its references are compared instead, by identity, and only
where nothing in it can be changed in place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, Generic, TypeVar

from blake3 import blake3

from skyward.errors import ConfigurationError
from skyward.shipping.blobs import Blob, identify
from skyward.shipping.pickling import (
    LARGE_BYTES,
    PLAIN_TYPES,
    Packed,
    goes_by_name,
    naming_state,
    pack,
)
from skyward.shipping.project_modules import SourceSet
from skyward.shipping.references import function_parts, global_names, reached_from
from skyward.submission import ArgumentMemo
from skyward.wire.messages import Payload

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
        evicted: list[K] = []
        while self._bytes > self._bound_bytes and len(self._entries) > 1:
            oldest, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
            evicted.append(oldest)
        return evicted

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._bytes = 0


CompleteError = Callable[[Callable[..., Any], ModuleNotFoundError], ModuleNotFoundError]

_ABSENT: Final = object()
_CONSTANT: Final = PLAIN_TYPES | {CodeType}
# Functions made in a loop are all different; each keeps alive all that it refers to.
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """Pickled function.

    Attributes:
        id: BLAKE3 of the pickle, its blobs and the editions of its sources, in hex.
        label: name for messages.
        payload: the pickle, as it goes over the lane.
        blobs: the parts of it that must lie on the node before.
        sources: the sources that workers need before they load it; None if there are none.
        complete: returns a node's error with all packages that the function needs and nodes lack; None if nothing can.
    """

    id: str
    label: str
    payload: Payload
    blobs: tuple[Blob, ...] = ()
    sources: SourceSet | None = None
    complete: Callable[[ModuleNotFoundError], ModuleNotFoundError] | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes that the function takes where it is kept, pickled or loaded."""
        return _OVERHEAD_BYTES + len(self.payload.data) + sum(blob.view.nbytes for blob in self.blobs)


class FunctionCache:
    """Pickles of the functions that a pool has sent. Thread-safe.

    Args:
        complete: returns a node's error about a module with all packages that a function needs and nodes lack.
    """

    def __init__(self, complete: CompleteError | None = None) -> None:
        self.complete = complete
        self._lock = threading.Lock()
        self._known: Recent[FunctionType, _Known] = Recent(_KEPT_BYTES)

    def packed(self, fn: Callable[..., Any], memo: ArgumentMemo) -> PackedFunction:
        """Return the last pickle of ``fn`` if it is still valid, otherwise one that is made now.

        Raises:
            SerializationError: it cannot be pickled; names the part of it.
        """
        if type(fn) is not FunctionType:  # a callable object may change in place, which identity cannot show
            if not callable(fn):
                raise ConfigurationError(f"fn must be callable, got {type(fn).__name__}")
            return _pack_function(fn, memo, self)
        with self._lock:
            known = self._known.get(fn)
        if known is not None and known.is_unchanged():
            return known.packed
        states = _look(fn)  # before it is pickled: a change in between makes the entry invalid, not the pickle stale
        packed = _pack_function(fn, memo, self)
        # One with blobs is not kept: an array in its closure may be changed in place, which identity cannot show.
        if states is not None and not packed.blobs:
            with self._lock:
                self._known.put(fn, _Known(states, packed), packed.nbytes)
        return packed


class _Known:
    """Pickle of a function, with everything that it depends on: functions, their names, and what they refer to."""

    __slots__ = ("_naming", "_seen", "packed")

    def __init__(self, seen: list[_State], packed: PackedFunction) -> None:
        self._seen = seen
        self.packed = packed
        self._naming = naming_state()

    def is_unchanged(self) -> bool:
        for fn, names, facts in self._seen:
            now = _facts(fn, names)
            if len(now) != len(facts) or not all(map(is_, now, facts)):
                return False
        sources = self.packed.sources
        return self._naming == naming_state() and (sources is None or sources.is_current())


_State = tuple[FunctionType, tuple[str, ...], list[object]]
"""A function, the names of its globals, and its facts."""


def _facts(fn: FunctionType, names: tuple[str, ...]) -> list[object]:
    """Return everything that the pickle of a function depends on, to be compared by identity.

    Args:
        fn: the function.
        names: names of its globals; they follow from its code, whose hash costs more than all else here.
    """
    own = fn.__code__, fn.__defaults__, fn.__name__, fn.__qualname__, fn.__module__, fn.__doc__
    keywords, notes = fn.__kwdefaults__ or {}, fn.__annotations__
    values = map(fn.__globals__.get, names, repeat(_ABSENT))
    return [*own, len(keywords), *keywords, *notes, *notes.values(), *fn.__dict__, *function_parts(fn), *values]


def _state(fn: FunctionType) -> _State:
    names = (*global_names(fn.__code__),)
    return fn, names, _facts(fn, names)


def _look(fn: FunctionType) -> list[_State] | None:
    """Return every function that goes into the pickle; None if something in it may be changed in place."""
    states: list[_State] = []
    for value in reached_from(fn, _is_fixed):
        if type(value) is FunctionType:
            states.append(_state(value))
        elif type(value) is not tuple:
            return None
    return states


def _is_fixed(value: object) -> bool:
    """Return True for a constant, and for a value whose pickle is a name under which the node finds the same object."""
    if type(value) in _CONSTANT:
        return True
    if isinstance(value, BuiltinFunctionType):  # a method of an object may change with it
        return isinstance(value.__self__, ModuleType | type | None) and goes_by_name(value)
    return isinstance(value, type | ModuleType | FunctionType) and goes_by_name(value)


def _pack_function(fn: Callable[..., Any], memo: ArgumentMemo, known: FunctionCache) -> PackedFunction:
    # Its own name, not that of the call: many calls share the pickle, each with a label of its own.
    label = str(getattr(fn, "__qualname__", type(fn).__name__)).removesuffix(".__wrapped__")
    packed = pack(fn, what=f"the function {label}", apart=True)
    payload, blobs = seal(packed, memo)
    # The blobs count too: functions with equal code around different arrays would otherwise share one name.
    digest = blake3(packed.data)
    for blob in blobs:
        digest.update(blob.id.encode())
    if packed.sources is not None:  # a worker that kept the function of an older edition would go on using that
        digest.update(repr(packed.sources.editions).encode())
    return PackedFunction(
        id=digest.hexdigest(length=16),
        label=label,
        payload=payload,
        blobs=tuple(replace(blob, of_function=True) for blob in blobs),
        sources=packed.sources,
        complete=partial(known.complete, fn) if known.complete is not None else None,
    )


def seal(packed: Packed, memo: ArgumentMemo) -> tuple[Payload, tuple[Blob, ...]]:
    """Return a pickle as it goes over a lane, and its large parts, which must lie on the node before."""
    buffers = identify(packed.buffers, memo)
    names = tuple(blob.id for blob in buffers)
    if len(packed.data) < LARGE_BYTES:
        return Payload(data=packed.data, buffer_blobs=names), buffers
    (data,) = identify([memoryview(packed.data)], memo)
    return Payload(data_blob=data.id, buffer_blobs=names), (data, *buffers)
