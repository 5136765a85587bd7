"""From an invocation to what travels: pickled once, large buffers named by content. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from skyward.engine.blobs import Blob, identify
from skyward.errors import SerializationError
from skyward.submission import ArgumentMemo, Invocation
from skyward.wire.messages import Payload
from skyward.wire.pickling import LARGE_BYTES, Packed, pack, pack_arguments

__all__ = ["Parcel", "Wrapped", "wrap"]


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
class Parcel:
    """An invocation, pickled.

    Attributes:
        label: the function's name, for messages.
        function_id: BLAKE3 of the function's pickle.
        function: the function.
        arguments: ``(args, kwargs)``.
        retries: how many losses of its worker the call survives.
    """

    label: str
    function_id: str
    function: Wrapped
    arguments: Wrapped
    retries: int
    blobs: tuple[Blob, ...] = field(repr=False)


def wrap(calls: Sequence[Invocation], memo: ArgumentMemo) -> list[Parcel]:
    """Pickle calls; a function or an array that several of them share is pickled or hashed once.

    Raises:
        SerializationError: naming the function or argument, and the part of it.
    """
    functions: dict[int, tuple[str, Wrapped]] = {}
    return [_wrap_one(call, functions, memo) for call in calls]


def _wrap_one(call: Invocation, functions: dict[int, tuple[str, Wrapped]], memo: ArgumentMemo) -> Parcel:
    label = call.label or getattr(call.fn, "__qualname__", None) or type(call.fn).__name__
    known = functions.get(id(call.fn))
    if known is None:
        known = functions[id(call.fn)] = _wrap_function(call.fn, label, memo)
    function_id, function = known
    arguments = _seal(_pack_arguments(call, label), memo)
    return Parcel(
        label=label,
        function_id=function_id,
        function=function,
        arguments=arguments,
        retries=call.retries,
        blobs=function.blobs + arguments.blobs if function.blobs else arguments.blobs,
    )


def _wrap_function(fn: Callable[..., Any], label: str, memo: ArgumentMemo) -> tuple[str, Wrapped]:
    packed = pack(fn, what=f"the function {label}")
    wrapped = _seal(packed, memo)
    digest = blake3(packed.data)
    for blob in wrapped.blobs:
        digest.update(blob.id.encode())
    return digest.hexdigest(length=16), wrapped


def _pack_arguments(call: Invocation, label: str) -> Packed:
    try:
        return pack_arguments(call.args, call.kwargs, what=f"the arguments of {label}")
    except SerializationError:
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            pack(value, what=f"argument {name!r} of {label}")
        raise


def _seal(packed: Packed, memo: ArgumentMemo) -> Wrapped:
    if len(packed.data) < LARGE_BYTES and not packed.buffers:
        return Wrapped(payload=Payload(data=packed.data))
    buffers = identify(packed.buffers, memo)
    names = tuple(blob.id for blob in buffers)
    if len(packed.data) < LARGE_BYTES:
        return Wrapped(payload=Payload(data=packed.data, buffer_blobs=names), blobs=buffers)
    (data,) = identify([memoryview(packed.data)], memo)
    return Wrapped(payload=Payload(data_blob=data.id, buffer_blobs=names), blobs=(data, *buffers))
