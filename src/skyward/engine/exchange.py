"""Nodes give large arguments to nodes, so that the client sends each of them once."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from skyward.engine.blobs import BlobPlace, NodeBlobs, Stored
from skyward.transport.base import Transport
from skyward.wire.control import Fetch, Fetched

__all__ = ["Exchange", "ExchangeNode", "ExchangePlace"]

log = logging.getLogger("skyward.engine")

_AT_ONCE = 2
_SOURCES = 3
_TRIALS = 2


class ExchangePlace(BlobPlace, Protocol):
    """What of :class:`~skyward.wire.node_config.NodeReady` matters here."""

    @property
    def blobs(self) -> str:
        """``host:port`` at which other nodes get this one's."""
        ...


class ExchangeNode(Protocol):
    """What of :class:`~skyward.provision.preparing.node_handle.NodeHandle` matters here."""

    @property
    def rank(self) -> int:
        """The node's rank."""
        ...

    @property
    def linked(self) -> bool:
        """Whether its supervisor is connected."""
        ...

    @property
    def ready(self) -> ExchangePlace:
        """Its folders and ports."""
        ...

    @property
    def transport(self) -> Transport:
        """The way to it."""
        ...

    async def fetch(self, order: Fetch) -> Fetched:
        """Have it get a blob from other nodes; raises UnreachableError when its connection is lost meanwhile."""
        ...


class Exchange:
    """The blobs of all nodes that reach each other. Belongs to the event loop.

    What nobody has, the client sends to the first node that needs it; those that need it meanwhile wait. Whoever has it
    gives it to two at a time, so that those who got it give it on. Where a node cannot reach another, that is
    remembered, and the client sends instead; after two of them, it is taken to reach none.

    Args:
        look_again_s: how often one that waits for another looks whether that one is still connected.
    """

    def __init__(self, *, look_again_s: float = 1.0) -> None:
        self.look_again_s = look_again_s
        self._members: dict[int, _Member] = {}
        self._has_complained = False

    def join(self, node: ExchangeNode) -> NodeBlobs:
        """The blobs of a new node."""
        member = self._members[node.rank] = _Member(self, node)
        return member.blobs

    def leave(self, rank: int) -> None:
        """A node is gone. Silent when it never joined."""
        self._members.pop(rank, None)

    def others(self, member: _Member) -> list[_Member]:
        """Those that it may hope to reach, as far as is known."""
        if len(member.unreached) >= _TRIALS and not member.has_reached:
            return []
        others = (other for other in self._members.values() if other is not member)
        return [other for other in others if other.node.ready.blobs not in member.unreached]

    def complain(self, member: _Member, answer: Fetched) -> None:
        """Say once that nodes do not reach each other."""
        level = logging.DEBUG if self._has_complained else logging.WARNING
        self._has_complained = True
        log.log(
            level,
            "node %d cannot get large arguments from other nodes, so they are sent to it from here: %s",
            member.node.rank,
            answer.error or f"no connection to {', '.join(answer.unreached)}",
        )


class _Member:
    """A node of an exchange; its blobs' :class:`~skyward.engine.blobs.Peers`.

    Attributes:
        node: the node.
        blobs: what is on it.
        unreached: where others give, and this one has tried to connect in vain.
        has_reached: whether it has connected to any.
        giving: how many nodes get which blob from it at the moment.
    """

    def __init__(self, exchange: Exchange, node: ExchangeNode) -> None:
        self._exchange = exchange
        self.node = node
        self.blobs = NodeBlobs(node.ready, node.transport, self)
        self.unreached: set[str] = set()
        self.has_reached = False
        self.giving: Counter[str] = Counter()

    async def fetch(self, blob_id: str, stored: Stored) -> bool:
        """See :class:`~skyward.engine.blobs.Peers`."""
        tried: set[_Member] = set()
        while True:
            # Nothing is awaited between looking around and saying what this one does: no two decide to wait for
            # each other.
            stored.moving = False
            others = [other for other in self._exchange.others(self) if other not in tried]
            givers = [other for other in others if other.blobs.has(blob_id)]
            free = [giver for giver in givers if giver.giving[blob_id] < _AT_ONCE]
            coming = [task for other in others if other.node.linked and (task := other.blobs.moving(blob_id))]
            if coming and not free:
                await asyncio.wait(coming, timeout=self._exchange.look_again_s, return_when=asyncio.FIRST_COMPLETED)
                continue
            stored.moving = True
            if not givers:
                return False
            best = sorted(free or givers, key=lambda giver: (not giver.node.linked, giver.giving.total()))
            chosen = best[: _SOURCES if self.has_reached else 1]
            if await self._fetch_from(chosen, blob_id, stored):
                return True
            tried.update(chosen)

    async def _fetch_from(self, givers: Sequence[_Member], blob_id: str, stored: Stored) -> bool:
        sources = tuple(giver.node.ready.blobs for giver in givers)
        held = [giver.blobs.lend(blob_id) for giver in givers]
        givers[0].giving[blob_id] += 1
        try:
            order = Fetch(blob_id=blob_id, nbytes=stored.nbytes, path=stored.path, sources=sources)
            answer = await self.node.fetch(order)
        finally:
            givers[0].giving[blob_id] -= 1
            for giver, lent in zip(givers, held, strict=True):
                giver.blobs.release([lent])
        self.has_reached = self.has_reached or len(answer.unreached) < len(sources)
        if answer.unreached:
            self.unreached.update(answer.unreached)
            self._exchange.complain(self, answer)
        if answer.errno == errno.ENOSPC:
            raise OSError(answer.errno, answer.error)
        if answer.error:
            log.info("node %d did not get a large argument from another: %s", self.node.rank, answer.error)
        return not answer.error
