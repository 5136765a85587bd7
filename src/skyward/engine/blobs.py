"""Large arguments: named by their content, brought to a node once, mapped by all its workers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from skyward.errors import SkywardError
from skyward.submission import ArgumentMemo
from skyward.transport.base import Transport
from skyward.wire.control import Fetch, Fetched

__all__ = ["Blob", "BlobPlace", "Exchange", "ExchangeNode", "ExchangePlace", "NodeBlobs", "Peers", "Stored", "identify"]

_REMOVE_TIMEOUT_S = 30.0
_THREADED_HASH_BYTES = 16 << 20
_FUNCTION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Blob:
    """A large buffer of an argument, still in the caller's memory.

    Attributes:
        id: BLAKE3 of its content, in hex.
        view: its bytes.
        of_function: whether it is part of a function rather than of arguments.
    """

    id: str
    view: memoryview = field(repr=False)
    of_function: bool = False


class BlobPlace(Protocol):
    """What of :class:`~skyward.wire.node_config.NodeReady` matters here."""

    @property
    def blob_dir(self) -> str:
        """Folder in memory."""
        ...

    @property
    def blob_dir_disk(self) -> str:
        """Folder on disk."""
        ...

    @property
    def blob_budget_bytes(self) -> int:
        """How much may lie in memory."""
        ...


def identify(views: Iterable[memoryview], memo: ArgumentMemo) -> tuple[Blob, ...]:
    """Name buffers by their content; one that the memo has seen at the same address is not hashed again."""
    return tuple(_identify(view, memo) for view in views)


def _identify(view: memoryview, memo: ArgumentMemo) -> Blob:
    place = (_address(view), view.nbytes)
    known: Blob | None = memo.blobs.get(memo.ids.get(place, ""))
    if known is not None and place[0] and _address(known.view) == place[0]:
        return known
    memo.ids[place] = digest = _digest(view)
    return memo.blobs.setdefault(digest, Blob(id=digest, view=view))


def _digest(view: memoryview) -> str:
    threads = blake3.AUTO if view.nbytes >= _THREADED_HASH_BYTES else 1
    return blake3(view, max_threads=threads).hexdigest()


def _address(view: memoryview) -> int:
    """Where the buffer lies; 0 where that cannot be told without numpy."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    numpy = sys.modules.get("numpy")
    return int(numpy.frombuffer(view, dtype="u1").ctypes.data) if numpy else 0


@dataclass(slots=True, eq=False)
class Stored:
    """A blob on a node, or on its way there.

    Attributes:
        path: its file.
        nbytes: its size.
        in_memory: whether the file lies in the folder in memory.
        arriving: done when it is there.
        users: calls that hold it, and nodes that get it from this one; it does not go while there are any.
        moving: whether it is being sent or fetched; before, its node may wait for another one to have it.
        of_function: whether it is part of a function; those have a bound of their own.
    """

    path: str
    nbytes: int
    in_memory: bool
    arriving: asyncio.Task[None] | None = None
    users: int = 0
    moving: bool = False
    of_function: bool = False


class Peers(Protocol):
    """The other nodes, as one of them sees them."""

    async def fetch(self, blob_id: str, stored: Stored) -> bool:
        """Have the node get a blob from another one, to where it is to be stored; False if the client has to send it.

        Raises:
            OSError: the node has no room for it.
            UnreachableError: the connection to the node was lost meanwhile.
        """
        ...


class NodeBlobs:
    """The blobs of one node, as the client, their only writer, knows them.

    The least recently used ones go first when the folder in memory is full; what does not fit there goes to disk.
    Used on the event loop only.

    Args:
        place: the node's folders.
        transport: the way to the node.
        peers: who may have a blob already; None where the client's own way is the shortest.
    """

    def __init__(self, place: BlobPlace, transport: Transport, peers: Peers | None = None) -> None:
        self._place = place
        self._transport = transport
        self._peers = peers
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def hold_present(self, blobs: Sequence[Blob]) -> list[Stored] | None:
        """Hold all of them, for a call that is about to be sent; None if one is not there yet."""
        return [self._hold(blob.id) for blob in blobs] if all(self.has(blob.id) for blob in blobs) else None

    def has(self, blob_id: str) -> bool:
        """Whether the node has a blob, whole."""
        stored = self._stored.get(blob_id)
        return stored is not None and stored.arriving is not None and stored.arriving.done()

    def moving(self, blob_id: str) -> asyncio.Task[None] | None:
        """What ends when a blob that is being sent or fetched has arrived, or has not; None if none is."""
        stored = self._stored.get(blob_id)
        return stored.arriving if stored is not None and stored.moving and not self.has(blob_id) else None

    def lend(self, blob_id: str) -> Stored:
        """Hold a blob that the node has, for another node that gets it from here; see :meth:`release`."""
        return self._hold(blob_id)

    async def hold(self, blobs: Sequence[Blob]) -> list[Stored]:
        """Bring to the node what is not there yet, and hold all of them.

        A blob on its way is waited for, not sent twice. Whoever called gives what is returned to :meth:`release`.

        Raises:
            SkywardError: a buffer was changed after its call was submitted.
            UnreachableError: the node did not answer.
        """
        held: list[Stored] = []
        try:
            for blob in blobs:
                if blob.id not in self._stored:
                    await self._begin(blob)
                stored = self._hold(blob.id)
                held.append(stored)
                if stored.arriving is not None:
                    await asyncio.shield(stored.arriving)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Iterable[Stored]) -> None:
        """Who held them needs them no more."""
        for stored in held:
            stored.users -= 1

    def forget(self, blob_ids: Iterable[str]) -> None:
        """The node does not have them after all."""
        for blob_id in blob_ids:
            self._stored.pop(blob_id, None)

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks = [stored.arriving for stored in self._stored.values() if stored.arriving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hold(self, blob_id: str) -> Stored:
        stored = self._stored[blob_id]
        stored.users += 1
        self._stored.move_to_end(blob_id)
        return stored

    async def _begin(self, blob: Blob) -> None:
        """Reserve the blob's place, so that others count it from now on, and start to fill it."""
        leaving = self._leave_functions(blob.view.nbytes) if blob.of_function else []
        pushed_out, in_memory = self._make_room(blob.view.nbytes)
        leaving += pushed_out
        path = f"{self._place.blob_dir if in_memory else self._place.blob_dir_disk}/{blob.id}"
        stored = self._stored[blob.id] = Stored(path, blob.view.nbytes, in_memory, of_function=blob.of_function)
        stored.arriving = asyncio.ensure_future(self._arrive(blob, stored, leaving))

    async def _arrive(self, blob: Blob, stored: Stored, leaving: Sequence[str]) -> None:
        try:
            if leaving:
                await self._remove(leaving)
            await self._fill(blob, stored)
        except BaseException:
            if self._stored.get(blob.id) is stored:
                del self._stored[blob.id]
            raise

    async def _fill(self, blob: Blob, stored: Stored) -> None:
        try:
            await self._bring(blob, stored)
        except OSError as error:
            if not stored.in_memory or error.errno != errno.ENOSPC:
                raise
            # What was removed may still be mapped for a moment, and others fill the same memory.
            stored.path, stored.in_memory = f"{self._place.blob_dir_disk}/{blob.id}", False
            await self._bring(blob, stored)

    async def _bring(self, blob: Blob, stored: Stored) -> None:
        if self._peers is not None and await self._peers.fetch(blob.id, stored):
            return  # the node has looked at its content
        await self._transport.put(blob.view, stored.path)
        if await asyncio.to_thread(_digest, blob.view) != blob.id:
            await self._remove([stored.path])
            raise SkywardError(
                "a large argument was changed after its call was submitted; leave it alone until the call is done"
            )

    def _make_room(self, nbytes: int) -> tuple[list[str], bool]:
        """The files that go for it, and whether it then fits into memory."""
        budget = self._place.blob_budget_bytes
        used = sum(stored.nbytes for stored in self._stored.values() if stored.in_memory)
        unused = [blob_id for blob_id, stored in self._stored.items() if stored.in_memory and not stored.users]
        leaving: list[str] = []
        for blob_id in unused if nbytes <= budget else ():
            if used + nbytes <= budget:
                break
            stored = self._stored.pop(blob_id)
            leaving.append(stored.path)
            used -= stored.nbytes
        return leaving, used + nbytes <= budget

    def _leave_functions(self, nbytes: int) -> list[str]:
        """Return the files of functions that go for another one: least recently used first, none that a call holds."""
        functions = [(blob_id, stored) for blob_id, stored in self._stored.items() if stored.of_function]
        used = sum(stored.nbytes for _, stored in functions)
        leaving: list[str] = []
        for blob_id, stored in functions:
            if used + nbytes <= _FUNCTION_BYTES:
                break
            if not stored.users:
                leaving.append(self._stored.pop(blob_id).path)
                used -= stored.nbytes
        return leaving

    async def _remove(self, paths: Sequence[str]) -> None:
        await self._transport.run(["rm", "-f", *paths], timeout_s=_REMOVE_TIMEOUT_S)


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
        self._members: dict[int, _Peer] = {}
        self._has_complained = False

    def join(self, node: ExchangeNode) -> NodeBlobs:
        """The blobs of a new node."""
        member = self._members[node.rank] = _Peer(self, node)
        return member.blobs

    def leave(self, rank: int) -> None:
        """A node is gone. Silent when it never joined."""
        self._members.pop(rank, None)

    def others(self, member: _Peer) -> list[_Peer]:
        """Those that it may hope to reach, as far as is known."""
        if len(member.unreached) >= _TRIALS and not member.has_reached:
            return []
        others = (other for other in self._members.values() if other is not member)
        return [other for other in others if other.node.ready.blobs not in member.unreached]

    def complain(self, member: _Peer, answer: Fetched) -> None:
        """Say once that nodes do not reach each other."""
        level = logging.DEBUG if self._has_complained else logging.WARNING
        self._has_complained = True
        log.log(
            level,
            "node %d cannot get large arguments from other nodes, so they are sent to it from here: %s",
            member.node.rank,
            answer.error or f"no connection to {', '.join(answer.unreached)}",
        )


class _Peer:
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
        tried: set[_Peer] = set()
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

    async def _fetch_from(self, givers: Sequence[_Peer], blob_id: str, stored: Stored) -> bool:
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
