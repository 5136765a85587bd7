"""The calls of a pool that are not over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from skyward.engine.blobs import Stored
from skyward.engine.dispatch import CallState, WorkerId
from skyward.engine.futures import RawOutcome, Sink
from skyward.engine.gangs import Gang
from skyward.engine.packing import Parcel
from skyward.engine.receiving import Incoming
from skyward.events import Callback
from skyward.wire.messages import CallHeader

__all__ = ["CallTable", "LiveCall"]


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall(CallState):
    """A call that is not over: what to send, whom to tell.

    Attributes:
        parcel: what travels.
        sink: who waits for it.
        index: its number there.
        header: what it may know of itself; None for a call that is alone.
        callbacks: those in force where the call was made; they hear of its lines and events.
        incoming: what came of it so far, if anything did.
        gang: those it runs together with.
        renewals: how many processes were replaced because it could not begin in them.
        held: blobs that lie on its worker's node because of it.
        shipping: what puts them there at the moment.
    """

    parcel: Parcel
    sink: Sink
    index: int = 0
    header: CallHeader | None = None
    callbacks: tuple[Callback, ...] = ()
    incoming: Incoming | None = None
    gang: Gang | None = None
    renewals: int = 0
    held: Sequence[Stored] = ()
    shipping: object = None

    def arriving(self) -> Incoming:
        """Where to put what comes of it before its outcome."""
        if self.incoming is None:
            self.incoming = Incoming()
        return self.incoming

    def let_go(self) -> None:
        """The call is on no worker now: its blobs may go, and what ships it there is in vain."""
        if self.held:
            for stored in self.held:
                stored.users -= 1
            self.held = ()
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
        for call in calls:
            self._calls[call.id] = call

    def get(self, call_id: int) -> LiveCall | None:
        """The call, unless it is over."""
        return self._calls.get(call_id)

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """The call is over; who waits for it is told, unless that was done before."""
        if self._calls.pop(call.id, None) is not None:
            self.ended += 1
            call.let_go()
            call.sink.deliver(call.index, raw)

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is no more: what it held of its calls, and had sent of their results, counts no more."""
        for call in self._calls.values():
            if call.worker == worker_id:
                call.let_go()
                call.incoming = None
