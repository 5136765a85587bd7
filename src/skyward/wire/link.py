"""Carries a :class:`~skyward.wire.session.Session` over one connection at a time, the same on both ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from skyward.wire.messages import Kind
from skyward.wire.session import Item, Session

__all__ = ["Link"]

log = logging.getLogger("skyward.wire")

_ACK_DELAY_S = 0.02


class Link:
    """Writes what the session has to send, hands over what comes, acknowledges.

    ``on_item`` runs on the event loop for every new item, in order, and must not block.
    """

    def __init__(self, session: Session, on_item: Callable[[Item], None]) -> None:
        self.session = session
        self._on_item = on_item
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """Queue an item; it is written at the loop's next turn, together with its neighbours."""
        self.session.push(item, nbytes, bulk=bulk)
        self._wake.set()

    async def run(self, comm: Any) -> None:
        """Serve one ``distributed`` comm until it is lost; returns then, and may be called with the next one.

        Raises:
            BrokenSessionError: the peer speaks of another session.
        """
        self._wake.set()
        reader = asyncio.ensure_future(self._read(comm))
        writer = asyncio.ensure_future(self._write(comm))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            comm.abort()
            self._cancel_ack_timer()
            for task in (reader, writer):
                task.cancel()
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                raise outcome

    async def _read(self, comm: Any) -> None:
        while True:
            message = await comm.read()
            nbytes = sum(len(item[-1]) for item in message[2] if item[0] == Kind.CHUNK)
            for item in self.session.receive(message, nbytes):
                self._hand_over(item)
            if self.session.ack_urgent or self.session.bulk_waits:
                self._cancel_ack_timer()
                self._wake.set()
            elif self.session.ack_owed and self._ack_timer is None:
                self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY_S, self._ack_late)

    def _hand_over(self, item: Item) -> None:
        try:
            self._on_item(item)
        except Exception:  # the items behind it count as seen: they must not be lost with it
            log.exception("an item of kind %s could not be handled", item[0])

    async def _write(self, comm: Any) -> None:
        while True:
            message = self.session.take()
            if message is None and self.session.ack_owed and self._ack_timer is None:
                message = self.session.take_ack()
            if message is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                self._cancel_ack_timer()
                await comm.write(message)

    def _ack_late(self) -> None:
        self._ack_timer = None
        self._wake.set()

    def _cancel_ack_timer(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
