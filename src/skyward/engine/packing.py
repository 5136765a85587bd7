"""Pickling of invocations: each once, large buffers named by content. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from blake3 import blake3

from skyward.engine.blobs import Blob, identify
from skyward.engine.functions import CompleteError, FunctionCache, PackedFunction, Wrapped
from skyward.errors import SerializationError
from skyward.submission import ArgumentMemo, CallLimits, Invocation
from skyward.wire.code.modules import SourceSet
from skyward.wire.code.pickling import LARGE_BYTES, Packed, pack, pack_arguments
from skyward.wire.messages import Payload

__all__ = ["Parcel", "wrap"]


@dataclass(slots=True, eq=False, kw_only=True)
class Parcel:
    """Pickled invocation.

    Attributes:
        label: name for errors and progress.
        function: the function.
        data: the pickle of ``(args, kwargs)``, if it is small and needs no blobs.
        arguments: the payload of ``(args, kwargs)`` otherwise.
        sources: the sources that a worker needs before it unpickles the arguments; None if there are none.
        retries: number of lost workers that the call survives.
        gang: True if all workers run the call together.
        blobs: the blobs that must lie on the node before.
        work: see :class:`~skyward.submission.Invocation`.
        tasks: see :class:`~skyward.submission.Invocation`.
        limits: see :class:`~skyward.submission.Invocation`.
    """

    # Not frozen, as that doubles the price of an instance, and it is paid for every call.

    label: str
    function: PackedFunction
    data: bytes = b""
    arguments: Payload | None = None
    sources: SourceSet | None = None
    retries: int
    gang: bool = False
    blobs: tuple[Blob, ...] = field(default=(), repr=False)
    work: str = ""
    tasks: int = 1
    limits: CallLimits | None = None


def wrap(calls: Sequence[Invocation], memo: ArgumentMemo, known: FunctionCache) -> list[Parcel]:
    """Pickle calls; a function or an array that several of them share is pickled or hashed once.

    Raises:
        SerializationError: a function or an argument cannot be pickled; names it, and the part of it.
    """
    functions: dict[int, PackedFunction] = {}
    parcels: list[Parcel] = []
    for call in calls:
        function = functions.get(id(call.fn))
        if function is None:
            function = known.packed(call.fn, partial(_wrap_function, call.fn, memo, known))
            functions[id(call.fn)] = function
        parcels.append(_wrap_one(call, function, memo))
    return parcels


def _wrap_one(call: Invocation, function: PackedFunction, memo: ArgumentMemo) -> Parcel:
    label = call.label or function.label
    packed = _pack_arguments(call, label)
    blobs = function.wrapped.blobs
    parcel = Parcel(
        label=label,
        function=function,
        data=packed.data,
        sources=packed.sources,
        retries=call.retries,
        gang=call.gang,
        blobs=blobs,
        work=call.work,
        tasks=call.tasks,
        limits=call.limits,
    )
    if len(packed.data) >= LARGE_BYTES or packed.buffers:
        wrapped = _seal(packed, memo)
        parcel.data, parcel.arguments, parcel.blobs = b"", wrapped.payload, blobs + wrapped.blobs
    return parcel


def _wrap_function(fn: Callable[..., Any], memo: ArgumentMemo, known: FunctionCache) -> PackedFunction:
    # Its own name, not that of the call: many calls share the pickle, each with a label of its own.
    label = str(getattr(fn, "__qualname__", type(fn).__name__)).removesuffix(".__wrapped__")
    packed = pack(fn, what=f"the function {label}", apart=True)
    sealed = _seal(packed, memo)
    wrapped = replace(sealed, blobs=tuple(replace(blob, of_function=True) for blob in sealed.blobs))
    # The blobs count too: functions with equal code around different arrays would otherwise share one name.
    digest = blake3(packed.data)
    for blob in wrapped.blobs:
        digest.update(blob.id.encode())
    if packed.sources is not None:  # a worker that kept the function of an older edition would go on using that
        digest.update(repr(packed.sources.editions).encode())
    # A function with blobs is not cached: an array in its closure may be changed in place, which identity cannot show.
    lasting = not wrapped.blobs
    return PackedFunction(
        id=digest.hexdigest(length=16),
        label=label,
        wrapped=wrapped,
        lasting=lasting,
        sources=packed.sources,
        imports_absent=packed.imports_absent,
        complete=partial(_complete, known.complete, fn) if known.complete is not None else None,
    )


def _complete(complete: CompleteError, fn: Callable[..., Any], error: ModuleNotFoundError) -> ModuleNotFoundError:
    return complete(error, fn)


def _pack_arguments(call: Invocation, label: str) -> Packed:
    try:
        return pack_arguments(call.args, call.kwargs, label)
    except SerializationError:  # once more, one by one, to name the argument: costs nothing where all is well
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
