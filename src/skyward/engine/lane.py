"""The client's end of a lane: one persistent stream to one worker, redialled until it is closed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from contextlib import suppress
from typing import Any, Protocol

from skyward._waiting import SystemClock, wait_until
from skyward.engine.dispatch import WorkerId
from skyward.wire.link import Link
from skyward.wire.session import BrokenSessionError, Item, Session

__all__ = ["Lane", "LaneOwner"]

log = logging.getLogger("skyward.engine.lane")

_DIAL_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.05


async def _connect(address: str, connection_args: dict[str, Any]) -> Any:
    """One attempt; ``distributed.comm.connect`` would make more of them, for up to its timeout, behind our back."""
    from distributed.comm.addressing import parse_address
    from distributed.comm.registry import get_backend

    scheme, location = parse_address(address)
    connector: Any = get_backend(scheme).get_connector()
    async with asyncio.timeout(_DIAL_TIMEOUT_S):
        try:
            comm: Any = await connector.connect(location, deserialize=True, **connection_args)
        except ValueError as error:  # tornado's word for a connection that was reset before its TLS began
            raise ConnectionResetError(str(error)) from error
        comm.local_info = comm.handshake_info() | {"address": comm.local_address}
        await comm.write(comm.handshake_info())
        comm.remote_info = await comm.read() | {"address": comm.peer_address}
        comm.handshake_options = comm.handshake_configuration(comm.local_info, comm.remote_info)
    return comm


def _hang_up(connecting: asyncio.Future[Any]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().abort()


class _Pauses(SystemClock):
    """Pauses that a nudge ends."""

    def __init__(self) -> None:
        self.nudged = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.nudged.wait()
        self.nudged.clear()


class LaneOwner(Protocol):
    """Who is told what happens on a lane, on the event loop."""

    def lane_up(self, lane: Lane) -> None:
        """The worker is there and holds nothing: its first start, or it was replaced."""
        ...

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        """The link was made, or lost after all that came over it was handed over."""
        ...

    def lane_lost(self, lane: Lane) -> None:
        """The worker that held calls is no more; ``lane_up`` follows at once."""
        ...

    def lane_item(self, lane: Lane, item: Item) -> None:
        """Something came."""
        ...


class Lane:
    """A lane to one worker's fixed address.

    A dropped link is redialled and the session resumed; only a worker that does not know the session is a new one.

    Attributes:
        worker_id: the slot it leads to.
        incarnation: identity of the worker process, empty before the first contact.
        functions: ids of the functions that this worker process has.
        round_trip_s: as measured when the link was made.
        comm: the connection, while there is one.
    """

    def __init__(self, worker_id: WorkerId, address: str, connection_args: dict[str, Any], owner: LaneOwner) -> None:
        self.worker_id = worker_id
        self.incarnation = ""
        self.functions: set[str] = set()
        self.round_trip_s = 0.0
        self.comm: Any = None
        self._address = address
        self._connection_args = connection_args
        self._owner = owner
        self._session_id = uuid.uuid4().hex
        self._link = self._new_link()
        self._pauses = _Pauses()
        self._task = asyncio.ensure_future(self._serve())

    def push(self, item: Item, nbytes: int = 64) -> None:
        """Queue an item for the worker."""
        self._link.push(item, nbytes)

    def nudge(self) -> None:
        """The worker is said to listen now: dial again at once instead of after a growing pause."""
        self._pauses.nudged.set()

    def drop_link(self, incarnation: str) -> None:
        """Hang up on a worker that is no more, if it is still this one; the lane dials again."""
        if self.comm is not None and self.incarnation == incarnation:
            self.comm.abort()

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _new_link(self) -> Link:
        return Link(Session(), lambda item: self._owner.lane_item(self, item))

    async def _serve(self) -> None:
        while True:
            comm = await wait_until(
                self._dial,
                deadline_s=math.inf,
                interval_s=_FIRST_PAUSE_S,
                what=f"worker {self.worker_id}",
                clock=self._pauses,
            )
            self.comm = comm
            try:
                async with asyncio.timeout(_DIAL_TIMEOUT_S):
                    await self._greet(comm)
                self._owner.lane_linked(self, linked=True)
                await self._link.run(comm)
            except OSError as error:
                log.info("lane to %s dropped: %s", self._address, error)
            except BrokenSessionError:
                log.exception("lane to %s starts anew", self._address)
                self._session_id = uuid.uuid4().hex
            finally:
                self.comm = None
                comm.abort()
                self._owner.lane_linked(self, linked=False)

    async def _dial(self) -> Any | None:
        connecting = asyncio.ensure_future(_connect(self._address, self._connection_args))
        try:
            return await asyncio.shield(connecting)
        except OSError as error:
            log.debug("%s does not answer: %s", self._address, error)
            return None
        except asyncio.CancelledError:
            connecting.add_done_callback(_hang_up)  # cancelled itself, it would leave its socket to the collector
            raise

    async def _greet(self, comm: Any) -> None:
        asked = time.perf_counter()
        seen = self._link.session.seen
        await comm.write({"op": "lane", "reply": False, "client": self._session_id, "seen": seen})
        greeting = await comm.read()
        self.round_trip_s = time.perf_counter() - asked
        if greeting["fresh"]:
            if self.incarnation:
                self._owner.lane_lost(self)
            self._link = self._new_link()
            self.functions.clear()
            self.incarnation = greeting["incarnation"]
            self._owner.lane_up(self)
        self._link.session.resume(greeting["seen"])
