"""Items of a generator on their way to the client: what waits to be sent, and how far it may run ahead."""

from __future__ import annotations

import time

from skyward.wire.messages import STREAM_BYTES, STREAM_ITEMS

_GATHER_S = 0.001


class ItemStream:
    """Items of the generator that runs. The runner's lock guards :attr:`pending`.

    Args:
        call_id: the generator's call.

    Attributes:
        call_id: the generator's call.
        items: number of items so far.
        pending: pickles of small items that are not sent yet.
    """

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.items = 0
        self.pending: list[bytes] = []
        self._nbytes = 0
        self._items_read = 0
        self._bytes_read = 0
        self._sent_s = 0.0

    def count(self, nbytes: int) -> None:
        """Count an item of this size."""
        self.items += 1
        self._nbytes += nbytes

    def grant(self, items: int, nbytes: int) -> None:
        """Take note of what the client has read, all in all."""
        self._items_read, self._bytes_read = items, nbytes

    @property
    def has_room(self) -> bool:
        """True if the client has room for the next item."""
        return self.items - self._items_read < STREAM_ITEMS and self._nbytes - self._bytes_read < STREAM_BYTES

    def is_due(self) -> bool:
        """Return True, and begin to count again, once a millisecond has passed since the last items were sent."""
        # Each message costs an encryption, a system call and a wake-up: a million items go in some thousand of them.
        now = time.monotonic()
        if now - self._sent_s < _GATHER_S:
            return False
        self._sent_s = now
        return True
