"""The client's end of a lane: one persistent stream to one worker, redialled until it is closed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from skyward._waiting import wait_until
from skyward.engine.dispatch import WorkerId
from skyward.wire.link import Link
from skyward.wire.session import BrokenSessionError, Item, Session

__all__ = ["Lane", "LaneOwner"]

log = logging.getLogger("skyward.engine.lane")

_DIAL_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.05


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
        self._nudged = asyncio.Event()
        self._task = asyncio.ensure_future(self._serve())

    def push(self, item: Item, nbytes: int = 64) -> None:
        """Queue an item for the worker."""
        self._link.push(item, nbytes)

    def nudge(self) -> None:
        """The worker is said to listen now: dial again at once instead of after a growing pause."""
        self._nudged.set()

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _new_link(self) -> Link:
        return Link(Session(), lambda item: self._owner.lane_item(self, item))

    async def _serve(self) -> None:
        while True:
            comm = await wait_until(
                self._dial, deadline_s=math.inf, interval_s=_FIRST_PAUSE_S, what=f"worker {self.worker_id}"
            )
            self.comm = comm
            try:
                await self._greet(comm)
                self._owner.lane_linked(self, linked=True)
                await self._link.run(comm)
            except (OSError, BrokenSessionError) as error:
                log.info("lane to %s dropped: %s", self._address, error)
            finally:
                self.comm = None
                comm.abort()
                self._owner.lane_linked(self, linked=False)

    async def _dial(self) -> Any | None:
        from distributed.comm import core

        self._nudged.clear()
        dial = cast("Callable[..., Coroutine[Any, Any, Any]]", core.connect)
        dialling = asyncio.ensure_future(dial(self._address, timeout=_DIAL_TIMEOUT_S, **self._connection_args))
        nudged = asyncio.ensure_future(self._nudged.wait())
        try:
            await asyncio.wait((dialling, nudged), return_when=asyncio.FIRST_COMPLETED)
            return dialling.result() if dialling.done() else None
        except OSError as error:
            log.debug("%s does not answer: %s", self._address, error)
            return None
        finally:
            nudged.cancel()
            dialling.cancel()

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
