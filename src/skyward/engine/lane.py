"""Client's end of a lane: one persistent stream to one worker, redialled until it is closed."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from skyward._concurrency.descriptors import keep_from_forks
from skyward._concurrency.waiting import SystemClock, keep, wait_until
from skyward.engine.dispatch import WorkerId
from skyward.shipping.parcels import Recent
from skyward.shipping.sources import SentSources
from skyward.wire.connection import Connection
from skyward.wire.limits import HANDSHAKE_S
from skyward.wire.link import Link
from skyward.wire.messages import ToWorker
from skyward.wire.session import Item, Session

__all__ = ["Lane", "LaneOwner"]

log = logging.getLogger("skyward.engine.lane")

# Functions kept in one worker. It drops those evicted here (FORGET): functions made in a loop are otherwise unbounded.
_FUNCTION_BYTES = 64 << 20
_FIRST_PAUSE_S = 0.05  # pauses grow from this; a supervisor's report of a started worker ends the present one


class _Pauses(SystemClock):
    """Clock whose pauses end early when :attr:`nudged` is set."""

    def __init__(self) -> None:
        self.nudged = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.nudged.wait()
        self.nudged.clear()


class LaneOwner(Protocol):
    """Receiver of a lane's events, on the event loop. Nothing here may block; nothing is retried."""

    def lane_up(self, lane: Lane) -> None:
        """Use a worker process that holds no calls: the first one, or a replacement."""
        ...

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        """Record that the link is up, or down; all items received over it were delivered before."""
        ...

    async def lane_lost(self, lane: Lane) -> None:
        """Move the calls of a worker process that is gone; ``lane_up`` follows."""
        ...

    def lane_items(self, lane: Lane, items: Sequence[Item]) -> None:
        """Handle received items, in order."""
        ...

    def lane_failed(self, lane: Lane, why: str) -> None:
        """Report that the lane's task failed unexpectedly, and was started again."""
        ...


class Lane:
    """Lane to one worker's fixed address.

    A dropped link is redialled and the session resumed. Only a worker without the session counts as a new one.

    Attributes:
        worker_id: id of the worker.
        incarnation: identity of the worker process, empty before the first contact.
        functions: ids of the functions in this worker process; those evicted here are dropped there as well.
        sources: the sources of modules in this worker process.
        round_trip_s: round trip in seconds, measured when the link was made.
    """

    def __init__(self, worker_id: WorkerId, address: str, tls: ssl.SSLContext, owner: LaneOwner) -> None:
        self.worker_id = worker_id
        self.incarnation = ""
        self.functions: Recent[str, bool] = Recent(_FUNCTION_BYTES)
        self.sources = SentSources()
        self.round_trip_s = 0.0
        self._address = address
        self._tls = tls
        self._owner = owner
        self._session_id = uuid.uuid4().hex
        self._agreed = ("", "")  # session and incarnation that both ends have confirmed
        self._link = self._new_link()
        self._pauses = _Pauses()
        self._task = asyncio.ensure_future(keep(self._serve, what=f"the lane to {address}", report=self._report))

    def push(self, item: ToWorker) -> None:
        """Queue an item for the worker; :meth:`flush` sends it."""
        self._link.push(item.to_wire(), item.nbytes)

    def flush(self) -> None:
        """Send queued items."""
        self._link.flush()

    def nudge(self) -> None:
        """Dial again at once instead of after the present pause: the worker is reported to listen."""
        self._pauses.nudged.set()

    def cut(self) -> None:
        """Drop the link, as a network failure would; the lane dials again."""
        self._link.abort()

    def drop_link(self, incarnation: str) -> None:
        """Drop the link to a process that is gone, unless another one has answered since; the lane dials again."""
        if self.incarnation == incarnation:
            self.cut()

    async def close(self) -> None:
        """Close the link and dial no more. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _new_link(self) -> Link:
        return Link(Session(), lambda items: self._owner.lane_items(self, items))

    def _report(self, why: str) -> None:
        self._owner.lane_failed(self, why)

    async def _serve(self) -> None:
        """Dial and carry items until cancelled."""
        while True:
            connection = await wait_until(
                self._dial,
                deadline_s=math.inf,
                interval_s=_FIRST_PAUSE_S,
                what=f"worker {self.worker_id}",
                clock=self._pauses,
            )
            self._owner.lane_linked(self, linked=True)
            try:
                await self._link.run(connection)
            except Exception:  # a message made no sense; a lane that gave up would leave its calls waiting for ever
                log.exception(
                    "the lane to %s received a message that makes no sense, and starts a new session", self._address
                )
                self._session_id = uuid.uuid4().hex
            finally:
                self._owner.lane_linked(self, linked=False)

    async def _dial(self) -> Connection | None:
        try:
            connection = Connection(keep_from_forks(socket.socket()), self._tls)
        except OSError as error:  # no free descriptor (EMFILE): a passing lack must not end the lane
            log.warning("%s cannot be dialled yet: %s", self._address, error)
            return None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await connection.connect(self._address)
                await connection.handshake()
                await self._greet(connection)
        except OSError as error:
            log.debug("%s does not answer: %s", self._address, error)
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    async def _greet(self, connection: Connection) -> None:
        asked = time.perf_counter()
        await connection.exchange([self._session_id, self._link.session.seen])
        fresh, incarnation, seen = await connection.first_message()
        self.round_trip_s = time.perf_counter() - asked
        if fresh:
            if self.incarnation:
                await self._owner.lane_lost(self)
            self._link = self._new_link()
            self.functions.clear()
            self.sources = SentSources()
            self.incarnation = incarnation
            self._agreed = self._session_id, incarnation
            self._owner.lane_up(self)
        # The worker has this session, but the answer that confirmed it was lost: resumed, a call could run twice.
        elif self._agreed != (self._session_id, incarnation):
            self._session_id = uuid.uuid4().hex
            raise ConnectionResetError(
                "the worker opened the session, but its answer was lost; dialling again with a new one"
            )
        self._link.session.resume(seen)
