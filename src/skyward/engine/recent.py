"""Mapping of recently used entries, bounded by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Mapping whose least recently used entries go when their bytes exceed a bound; the newest always stays.

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
        """Add or replace an entry; return the keys of those that went."""
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
        """Drop everything."""
        self._entries.clear()
        self._bytes = 0
