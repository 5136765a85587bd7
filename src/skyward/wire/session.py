"""One end of a lane: an ordered, resumable stream of numbered items (docs/decisions/002). Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CHUNK_BYTES", "BrokenSessionError", "Item", "Session"]

CHUNK_BYTES = 4 << 20
"""The largest piece of a large result."""
_WINDOW_BYTES = 32 << 20
_MESSAGE_BYTES = 1 << 20
_MESSAGE_ITEMS = 4096
_ACK_EVERY_BYTES = 8 << 20

Item = Sequence[Any]
"""What travels: a list that msgpack can encode, its first element a :class:`~skyward.wire.messages.Kind`."""


class BrokenSessionError(Exception):
    """The peer skipped items: the two ends do not speak of the same session."""


@dataclass(slots=True)
class _Entry:
    item: Item
    nbytes: int
    bulk: bool


class Session:
    """Keeps what was sent until the peer has seen it; hands out what to write next; drops what came twice.

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
        self._unheard_bytes = 0
        self._ack_owed = False
        self.seen = 0
        self.kept_bytes = 0

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Queue an item; ``nbytes`` is about its size."""
        (self._bulk if bulk else self._small).append(_Entry(item, nbytes, bulk))
        self.kept_bytes += nbytes

    @property
    def ack_owed(self) -> bool:
        """Whether the peer waits for an acknowledgement that no message has carried yet."""
        return self._ack_owed

    @property
    def ack_urgent(self) -> bool:
        """Whether so much came unacknowledged that the peer may be waiting for credit."""
        return self._unheard_bytes >= _ACK_EVERY_BYTES

    @property
    def has_unsent(self) -> bool:
        """Whether items are queued, or are to be sent again; those that are bulk may be waiting for credit."""
        return bool(self._small or self._bulk or self._resend)

    @property
    def drained(self) -> bool:
        """Whether the peer has seen everything."""
        return not (self._small or self._bulk or self._sent)

    def take(self) -> list[Any] | None:
        """The next message to write, or None when there is nothing to send but perhaps an acknowledgement."""
        first = self._first_unacked + len(self._sent) - self._resend
        items = self._take_unsent() if not self._resend else self._take_again()
        if not items:
            return None
        return [first, self._acknowledge(), items]

    def take_ack(self) -> list[Any]:
        """A message that carries an acknowledgement only."""
        return [0, self._acknowledge(), []]

    def receive(self, message: Sequence[Any], nbytes: int = 0) -> list[Item]:
        """The items of a message that were not seen before, in order.

        Raises:
            BrokenSessionError: items are missing in between.
        """
        first, acknowledged, items = message
        self._forget(acknowledged)
        if not items:
            return []
        if first > self.seen + 1:
            raise BrokenSessionError(f"expected item {self.seen + 1}, got {first}")
        fresh = list(items[self.seen + 1 - first :])
        self.seen += len(fresh)
        self._ack_owed = True
        self._unheard_bytes += nbytes
        return fresh

    def resume(self, peer_seen: int) -> None:
        """A new link: the peer has seen items up to ``peer_seen``; the rest is sent again."""
        self._forget(peer_seen)
        self._resend = len(self._sent)

    def _take_again(self) -> list[Item]:
        start = len(self._sent) - self._resend
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
        while self._small and len(items) < _MESSAGE_ITEMS and (not items or size < _MESSAGE_BYTES):
            size += self._move(self._small, items)
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
        self._resend = min(self._resend, len(self._sent))

    def _acknowledge(self) -> int:
        self._ack_owed = False
        self._unheard_bytes = 0
        return self.seen
