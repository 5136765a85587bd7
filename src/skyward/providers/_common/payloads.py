"""Vendors' payloads, decoded into typed records at the edge: a renamed or missing field is an error, never 0 or ""."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from skyward.errors import UnreachableError
from skyward.providers.base import InstanceState

T = TypeVar("T")

_logger = logging.getLogger("skyward")


class VendorPayload(msgspec.Struct):
    """Base of a payload's type. A field without a default is required; other fields of the vendor are ignored."""


def decode(kind: type[T], payload: object, where: str) -> T:
    """Return a payload as ``kind``; numbers may be text. ``where`` is vendor and call: ``"Cloud: GET /v2/things"``.

    Raises:
        UnreachableError: it has another form.
    """
    try:
        return msgspec.convert(payload, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(
            f"{where} was answered in a form that this version of Skyward cannot read: {error}. Install a newer "
            "version, or report this"
        ) from error


def decode_list(payload: object, name: str, where: str) -> list[Any]:
    """Return the list that a payload has as ``name``, empty for null; raises as :func:`decode` if it has none."""
    return getattr(decode(_listing(name), payload, where), name) or []


@cache
def _listing(name: str) -> type[msgspec.Struct]:
    return msgspec.defstruct("Listing", [(name, list[Any] | None)])


def decode_rows(kind: type[T], rows: Iterable[object], where: str) -> list[T]:
    """Return the rows of a catalogue as ``kind``. A malformed one is left out; raises as :func:`decode` if all are."""
    found: list[T] = []
    malformed: UnreachableError | None = None
    for row in rows:
        try:
            found.append(decode(kind, row, where))
        except UnreachableError as error:
            _logger.debug("%s", error)
            malformed = malformed or error
    if malformed is not None and not found:
        raise malformed
    return found


def decode_state(states: Mapping[Any, InstanceState], word: str | None, where: str) -> InstanceState:
    """Return the state of a machine by the vendor's word for it; one with an unknown word is not ready, with a warning.

    ``where`` is that of :func:`decode`.
    """
    if word not in states:
        _warn_of_state(word, where)
    return states.get(word, InstanceState.PENDING)


@cache
def _warn_of_state(word: str | None, where: str) -> None:
    _logger.warning(
        "%s: this version of Skyward does not know the state %r: the machine counts as pending", where, word
    )
