"""One end of a lane: an ordered, resumable stream of numbered items (docs/decisions/002). Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CHUNK_BYTES", "BrokenSessionError", "Item", "Session"]

CHUNK_BYTES = 4 << 20
"""Size of the largest piece of a large result, in bytes."""
_WINDOW_BYTES = 32 << 20  # credit of bulk items (docs/decisions/002)
# A message is handed over as a whole: with larger ones the first items would wait for the last.
_MESSAGE_BYTES = 1 << 20
_MESSAGE_ITEMS = 4096
_ACK_EVERY_BYTES = 8 << 20  # a quarter of the window, so that a fast peer need not stop

Item = Sequence[Any]
"""Element of the stream: a list that msgpack can encode; it begins with a :class:`~skyward.wire.messages.Kind`."""


class BrokenSessionError(Exception):
    """Missing items: the two ends do not have the same session."""


@dataclass(slots=True)
class _Entry:
    item: Item
    nbytes: int
    bulk: bool


class Session:
    """Numbered items of both directions: sent ones until they are acknowledged, received ones without duplicates.

    Small items overtake bulk ones. Bulk items wait while 32 MiB of them are unacknowledged: the peer's
    acknowledgements are the credit.
    """

    def __init__(self) -> None:
        self._small: deque[_Entry] = deque()
        self._bulk: deque[_Entry] = deque()
        self._sent: deque[_Entry] = deque()
        self._first_unacked = 1
        self._resend = 0
        self._bulk_in_flight = 0
        self._unacked_bytes = 0
        self._ack_owed = False
        self.seen = 0
        self.kept_bytes = 0

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Enqueue an item; ``nbytes`` is its approximate size."""
        (self._bulk if bulk else self._small).append(_Entry(item, nbytes, bulk))
        self.kept_bytes += nbytes

    @property
    def ack_owed(self) -> bool:
        """True if the peer waits for an acknowledgement that no message has carried yet."""
        return self._ack_owed

    @property
    def ack_urgent(self) -> bool:
        """True if enough bytes are unacknowledged that the peer may be waiting for credit."""
        return self._unacked_bytes >= _ACK_EVERY_BYTES

    @property
    def has_unsent(self) -> bool:
        """True if items are queued or have to be sent again; bulk items may be waiting for credit."""
        return bool(self._small or self._bulk or self._resend)

    @property
    def drained(self) -> bool:
        """True if the peer has acknowledged all items."""
        return not (self._small or self._bulk or self._sent)

    def take(self) -> list[Any] | None:
        """Return the next message to write; None if no items are left to send."""
        # A message names the number of its first item only: the others follow from the order.
        first = self._first_unacked + len(self._sent) - self._resend
        items = self._take_unsent() if not self._resend else self._take_again()
        if not items:
            return None
        return [first, self._acknowledge(), items]

    def take_ack(self) -> list[Any]:
        """Return a message that carries an acknowledgement only."""
        return [0, self._acknowledge(), []]

    def receive(self, message: Sequence[Any], nbytes: int = 0) -> list[Item]:
        """Return the new items of a message, in order.

        Raises:
            BrokenSessionError: items before these are missing.
        """
        first, acknowledged, items = message
        self._forget(acknowledged)
        if not items:
            return []
        if first > self.seen + 1:
            raise BrokenSessionError(f"expected item {self.seen + 1}, got {first}")
        # After a reconnect the peer repeats items that it has no acknowledgement for: nothing may run twice.
        fresh = list(items[self.seen + 1 - first :])
        self.seen += len(fresh)
        self._ack_owed = True
        self._unacked_bytes += nbytes
        return fresh

    def resume(self, peer_seen: int) -> None:
        """Continue on a new connection: items after ``peer_seen`` are sent again."""
        self._forget(peer_seen)
        self._resend = len(self._sent)

    def _take_again(self) -> list[Item]:
        start = len(self._sent) - self._resend  # in their old order, small behind bulk: the numbers are given
        items: list[Item] = []
        size = 0
        for index in range(start, len(self._sent)):
            entry = self._sent[index]
            if items and (size + entry.nbytes > _MESSAGE_BYTES or len(items) >= _MESSAGE_ITEMS):
                break
            items.append(entry.item)
            size += entry.nbytes
        self._resend -= len(items)
        return items

    def _take_unsent(self) -> list[Item]:
        items: list[Item] = []
        size = 0
        # At least one item, however large: it could never be sent otherwise.
        while self._small and len(items) < _MESSAGE_ITEMS and (not items or size < _MESSAGE_BYTES):
            size += self._move(self._small, items)
        # One piece at a time, and only without small items: a small result never waits for more than 4 MiB.
        if not items and self._bulk and self._bulk_in_flight < _WINDOW_BYTES:
            self._move(self._bulk, items)
        return items

    def _move(self, queue: deque[_Entry], items: list[Item]) -> int:
        entry = queue.popleft()
        self._sent.append(entry)
        items.append(entry.item)
        if entry.bulk:
            self._bulk_in_flight += entry.nbytes
        return entry.nbytes

    def _forget(self, acknowledged: int) -> None:
        while self._sent and self._first_unacked <= acknowledged:
            entry = self._sent.popleft()
            self._first_unacked += 1
            self.kept_bytes -= entry.nbytes
            if entry.bulk:
                self._bulk_in_flight -= entry.nbytes
        self._resend = min(self._resend, len(self._sent))  # some of these may be acknowledged by now

    def _acknowledge(self) -> int:
        self._ack_owed = False
        self._unacked_bytes = 0
        return self.seen
