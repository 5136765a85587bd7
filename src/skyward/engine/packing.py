"""From an invocation to what travels: pickled once, large buffers named by content. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from blake3 import blake3

from skyward.engine.blobs import Blob, identify
from skyward.errors import SerializationError
from skyward.submission import ArgumentMemo, Invocation
from skyward.wire.messages import Payload
from skyward.wire.pickling import LARGE_BYTES, Packed, pack, pack_arguments

__all__ = ["FunctionSource", "PackedFunction", "Parcel", "Wrapped", "wrap"]

_OVERHEAD_BYTES = 16 << 10
"""Approximate size of a loaded function besides its pickle: code, globals, names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A pickle ready to travel.

    Attributes:
        payload: what goes onto the lane.
        blobs: what must lie on the node before.
    """

    payload: Payload
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """A function, pickled.

    Attributes:
        id: BLAKE3 of its pickle.
        label: its name, for messages.
        wrapped: what travels.
        lasting: whether only what the function refers to could make its pickle another one.
        imports_absent: whether it imports modules that are not found here, or not yet.
    """

    id: str
    label: str
    wrapped: Wrapped
    lasting: bool = True
    imports_absent: bool = False

    @property
    def nbytes(self) -> int:
        """Return about how many bytes it takes where it is kept, pickled or loaded."""
        return _OVERHEAD_BYTES + len(self.wrapped.payload.data) + sum(blob.view.nbytes for blob in self.wrapped.blobs)


@dataclass(slots=True, eq=False, kw_only=True)
class Parcel:
    """An invocation, pickled. Not frozen, as that doubles its price, and it is paid for every call.

    Attributes:
        label: what errors and progress call it.
        function: the function.
        data: the pickle of ``(args, kwargs)``, if it is small and needs no blobs.
        arguments: the same where it is not.
        retries: how many losses of its worker the call survives.
        gang: whether all workers that run it must run it together.
        blobs: what must lie on the node before.
    """

    label: str
    function: PackedFunction
    data: bytes = b""
    arguments: Payload | None = None
    retries: int
    gang: bool = False
    blobs: tuple[Blob, ...] = field(default=(), repr=False)


class FunctionSource(Protocol):
    """Knows functions that were pickled before."""

    def packed(self, fn: Callable[..., Any], pack: Callable[[], PackedFunction], /) -> PackedFunction:
        """``fn`` as it was pickled last, if it is the same still; else as ``pack`` does it now."""
        ...


def wrap(calls: Sequence[Invocation], memo: ArgumentMemo, known: FunctionSource) -> list[Parcel]:
    """Pickle calls; a function or an array that several of them share is pickled or hashed once.

    Raises:
        SerializationError: naming the function or argument, and the part of it.
    """
    functions: dict[int, PackedFunction] = {}
    parcels: list[Parcel] = []
    for call in calls:
        function = functions.get(id(call.fn))
        if function is None:
            function = known.packed(call.fn, partial(_wrap_function, call.fn, memo))
            functions[id(call.fn)] = function
        parcels.append(_wrap_one(call, function, memo))
    return parcels


def _wrap_one(call: Invocation, function: PackedFunction, memo: ArgumentMemo) -> Parcel:
    label = call.label or function.label
    packed = _pack_arguments(call, label)
    blobs = function.wrapped.blobs
    if len(packed.data) < LARGE_BYTES and not packed.buffers:
        return Parcel(
            label=label, function=function, data=packed.data, retries=call.retries, gang=call.gang, blobs=blobs
        )
    wrapped = _seal(packed, memo)
    return Parcel(
        label=label,
        function=function,
        arguments=wrapped.payload,
        retries=call.retries,
        gang=call.gang,
        blobs=blobs + wrapped.blobs,
    )


def _wrap_function(fn: Callable[..., Any], memo: ArgumentMemo) -> PackedFunction:
    # Its own name, not that of the call: many calls share it, and each may be called something else.
    label = str(getattr(fn, "__qualname__", type(fn).__name__)).removesuffix(".__wrapped__")
    packed = pack(fn, what=f"the function {label}")
    sealed = _seal(packed, memo)
    wrapped = replace(sealed, blobs=tuple(replace(blob, of_function=True) for blob in sealed.blobs))
    digest = blake3(packed.data)
    for blob in wrapped.blobs:
        digest.update(blob.id.encode())
    lasting = packed.self_contained and not wrapped.blobs
    return PackedFunction(
        id=digest.hexdigest(length=16),
        label=label,
        wrapped=wrapped,
        lasting=lasting,
        imports_absent=packed.imports_absent,
    )


def _pack_arguments(call: Invocation, label: str) -> Packed:
    try:
        return pack_arguments(call.args, call.kwargs, label)
    except SerializationError:
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            pack(value, what=f"argument {name!r} of {label}")
        raise


def _seal(packed: Packed, memo: ArgumentMemo) -> Wrapped:
    buffers = identify(packed.buffers, memo)
    names = tuple(blob.id for blob in buffers)
    if len(packed.data) < LARGE_BYTES:
        return Wrapped(payload=Payload(data=packed.data, buffer_blobs=names), blobs=buffers)
    (data,) = identify([memoryview(packed.data)], memo)
    return Wrapped(payload=Payload(data_blob=data.id, buffer_blobs=names), blobs=(data, *buffers))
