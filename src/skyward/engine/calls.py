"""The calls of a pool that are not over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from skyward.engine.blobs import Stored
from skyward.engine.dispatch import CallState, WorkerId
from skyward.engine.futures import RawOutcome, RemoteFuture
from skyward.engine.packing import Parcel
from skyward.engine.receiving import Incoming
from skyward.wire.messages import CallHeader

__all__ = ["CallTable", "LiveCall"]


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall:
    """A call that is not over: its state for dispatch, what to send, whom to tell."""

    state: CallState
    parcel: Parcel
    header: CallHeader
    future: RemoteFuture
    incoming: Incoming
    held: list[Stored] = field(default_factory=list[Stored])
    shipping: object = None

    def let_go(self) -> None:
        """The call is on no worker now: its blobs may go, and what ships it there is in vain."""
        for stored in self.held:
            stored.users -= 1
        self.held = []
        self.shipping = None


class CallTable:
    """Finds calls by id, and completes each exactly once. Belongs to the event loop.

    Attributes:
        ended: how many calls have ended so far, failed ones included.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._calls: dict[int, LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self._calls.values()))

    def add(self, calls: Iterable[LiveCall]) -> None:
        """New calls."""
        self._calls.update((call.state.id, call) for call in calls)

    def get(self, call_id: int) -> LiveCall | None:
        """The call, unless it is over."""
        return self._calls.get(call_id)

    def waited_for_by(self, futures: set[Future[Any]]) -> list[LiveCall]:
        """The calls of these futures."""
        return [call for call in self._calls.values() if call.future in futures]

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """The call is over; its future is told, unless it was before."""
        if self._calls.pop(call.state.id, None) is not None:
            self.ended += 1
            call.let_go()
            call.future.deliver(raw)

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is no more: what it held of its calls, and had sent of their results, counts no more."""
        for call in self._calls.values():
            if call.state.worker == worker_id:
                call.let_go()
                call.incoming.reset()
