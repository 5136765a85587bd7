"""Failures of batches: a note on the exception names the failed call, its index and its arguments."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from skyward.client.display.escapes import harmless
from skyward.client.pending import PendingCompute
from skyward.engine.futures import CallBatch
from skyward.wire.code.exceptions import add_note

__all__ = ["ItemNotes", "kept", "note_call", "outline", "result_of"]

_LONGEST: Final = 200
_SHORT_TEXT: Final = 40


class _Outline(reprlib.Repr):
    """Representation of bounded length and cost: arrays by their shape, large bytes by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 3, _SHORT_TEXT, _SHORT_TEXT
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4

    def repr1(self, x: Any, level: int) -> str:
        """Return the outline of ``x``; its type where it has no representation."""
        kind = type(x).__name__
        try:
            if isinstance(x, type):
                return x.__name__
            if isinstance(x, bytes | bytearray) and len(x) > _SHORT_TEXT:
                return f"<{kind}, {len(x):,} bytes>"
            shape: Any = getattr(x, "shape", None)
            if isinstance(shape, tuple):
                return f"<{kind} {super().repr1(shape, level)}>"
            return super().repr1(x, level)
        except (Exception, SystemExit):  # a class of the user's may raise anything
            return f"<{kind}>"

    def repr_int(self, x: int, level: int) -> str:
        """Raise ValueError for more digits than Python shows: reprlib of 3.14 returns a text with an address."""
        str(x)
        return super().repr_int(x, level)


_OUTLINE: Final = _Outline()


def outline(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call as text in one line of at most 200 characters: ``train(3, lr=0.1)``. Never raises."""
    given = [_OUTLINE.repr(value) for value in args]
    given += [f"{key}={_OUTLINE.repr(value)}" for key, value in kwargs.items()]
    text = harmless(f"{name}({', '.join(given)})")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]}…)"


class _Elided:
    """Stand-in for an argument that is not kept."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


def kept(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return arguments for a later outline: small numbers and texts, other ones without their memory."""
    return tuple(value if _is_small(value) else _Elided(type(value).__name__) for value in args)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float | complex | None) or (isinstance(value, str) and len(value) <= _LONGEST)


class ItemNotes:
    """Notes on the failures of a ``map``.

    Args:
        name: the function.
        items: the arguments of each call, kept; their number where calls are chunks of them.
        size: number of items in a call.
    """

    def __init__(self, name: str, items: Sequence[tuple[Any, ...]] | int, size: int) -> None:
        self._name = name
        self._items = items
        self._size = size

    def add(self, error: BaseException, index: int) -> None:
        """Add a note to the exception of the call with this index."""
        if not isinstance(self._items, int):
            note_call(error, self._name, index, len(self._items), outline(self._name, self._items[index], {}))
            return
        first, last = index * self._size, min((index + 1) * self._size, self._items) - 1
        with suppress(Exception):
            add_note(error, f"in {harmless(self._name)}, one of the items with index {first} to {last}")


def note_call(error: BaseException, call: str, index: int, of: int, text: str = "") -> None:
    """Add a note to an exception that names its call: ``in train#2, index 2 of 5 calls: train(2)``.

    Args:
        error: the exception; its class and its text stay.
        call: name of the call.
        index: its index in the batch, from 0.
        of: number of calls in the batch.
        text: the call with its arguments; empty if they are unknown.
    """
    with suppress(Exception):  # a class of the user's may forbid notes
        add_note(error, f"in {harmless(call)}, index {index} of {of} calls" + (f": {text}" if text else ""))


def result_of(batch: CallBatch, index: int, calls: Sequence[PendingCompute[Any]]) -> Any:
    """Return the result of a call of a batch, once, or raise its exception, which names it."""
    name = batch.calls[index].name
    try:
        return batch.result(index)
    except Exception as error:
        call = calls[index]
        note_call(error, name, index, len(calls), outline(name.rpartition("#")[0], call.args, call.kwargs))
        raise
