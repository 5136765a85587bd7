"""Large arguments: named by their content, stored on each node once, mapped by all its workers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from blake3 import blake3

from skyward.errors import SkywardError
from skyward.machine.access import Transport
from skyward.submission import ArgumentMemo
from skyward.wire.control import Fetch, Fetched
from skyward.wire.node_config import NodeReady

log = logging.getLogger("skyward.scheduling")

_REMOVE_TIMEOUT_S = 30.0
# Below this the start of threads costs more than they save.
_THREADED_HASH_BYTES = 16 << 20
# Blobs of functions per node. They have a bound of their own, as functions made in a loop would evict arguments.
_FUNCTION_BYTES = 64 << 20
# A node sends a blob to two others at a time: it spreads as a tree, and no node's uplink is shared by many.
_AT_ONCE = 2
# Sources named in one order, so that a lost one costs no further round trip through the client.
_SOURCES = 3
# Nodes that cannot reach each other are detected once, within three seconds (decision 011).
_TRIALS = 2


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Blob:
    """Large buffer of an argument, still in the caller's memory.

    Attributes:
        id: BLAKE3 of its content, in hex.
        view: the content.
        of_function: True for a part of a function, False for a part of arguments.
    """

    id: str
    view: memoryview = field(repr=False)
    of_function: bool = False


def identify(views: Iterable[memoryview], memo: ArgumentMemo) -> tuple[Blob, ...]:
    """Name buffers by their content; a buffer that the memo holds at the same address is not hashed again."""
    return tuple(_identify(view, memo) for view in views)


def _identify(view: memoryview, memo: ArgumentMemo) -> Blob:
    place = (_address(view), view.nbytes)
    # The address alone is not enough: the memo holds blobs weakly, and the memory of a dead one may be in use again.
    known: Blob | None = memo.blobs.get(memo.ids.get(place, ""))
    if known is not None and place[0] and _address(known.view) == place[0]:
        return known
    memo.ids[place] = digest = _digest(view)
    return memo.blobs.setdefault(digest, Blob(id=digest, view=view))


def _digest(view: memoryview) -> str:
    threads = blake3.AUTO if view.nbytes >= _THREADED_HASH_BYTES else 1
    return blake3(view, max_threads=threads).hexdigest()


def _address(view: memoryview) -> int:
    """Return the buffer's address; 0 for a read-only buffer without numpy."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    numpy = sys.modules.get("numpy")
    return int(numpy.frombuffer(view, dtype="u1").ctypes.data) if numpy else 0


@dataclass(slots=True, eq=False)
class Stored:
    """Blob on a node, or on its way there.

    Attributes:
        path: path of the file.
        nbytes: size in bytes.
        in_memory: True if the file lies in the folder in memory.
        arriving: task that is done when the blob has arrived.
        users: number of calls that hold it, and of nodes that fetch it from this one; while positive it stays.
        moving: True while it is being sent or fetched; before, its node may wait for another node to get it.
        of_function: True for a part of a function; those have a bound of their own.
    """

    path: str
    nbytes: int
    in_memory: bool
    arriving: asyncio.Task[None] | None = None
    users: int = 0
    moving: bool = False
    of_function: bool = False


class BlobNode(Protocol):
    """Part of :class:`~skyward.fleet.node.Node` that its blobs use."""

    @property
    def rank(self) -> int:
        """The node's rank."""
        ...

    @property
    def linked(self) -> bool:
        """True while the node's supervisor is connected."""
        ...

    @property
    def ready(self) -> NodeReady:
        """The node's folders and ports."""
        ...

    @property
    def transport(self) -> Transport:
        """Transport to the node."""
        ...

    async def fetch(self, order: Fetch) -> Fetched:
        """Have the node get a blob from other nodes; raises UnreachableError when its connection is lost meanwhile."""
        ...


class NodeBlobs:
    """Blobs of one node, written by the client only.

    The least recently used ones are evicted when the folder in memory is full; blobs that do not fit there go to disk.
    Used on the event loop only.

    Args:
        node: the node.
        exchange: other nodes that may have a blob already; None where the client's own transport is the fastest.

    Attributes:
        node: the node.
        unreached: addresses of other nodes to which it failed to connect.
        has_reached: True once it has connected to any.
        giving: number of nodes that fetch from it now, by blob.
    """

    def __init__(self, node: BlobNode, exchange: Exchange | None = None) -> None:
        self.node = node
        self.unreached: set[str] = set()
        self.has_reached = False
        self.giving: Counter[str] = Counter()
        self._exchange = exchange
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def hold_present(self, blobs: Sequence[Blob]) -> list[Stored] | None:
        """Hold all of these blobs, for a call that is about to be sent; None if one has not arrived."""
        return [self.hold_stored(blob.id) for blob in blobs] if all(self.has(blob.id) for blob in blobs) else None

    def has(self, blob_id: str) -> bool:
        """Return True if the node has the whole blob."""
        stored = self._stored.get(blob_id)
        return stored is not None and stored.arriving is not None and stored.arriving.done()

    def moving(self, blob_id: str) -> asyncio.Task[None] | None:
        """Return the task of a blob that is being sent or fetched; None if it is not."""
        stored = self._stored.get(blob_id)
        return stored.arriving if stored is not None and stored.moving and not self.has(blob_id) else None

    def hold_stored(self, blob_id: str) -> Stored:
        """Hold a blob of this node, for a call or while another node fetches it; see :meth:`release`."""
        stored = self._stored[blob_id]
        stored.users += 1
        self._stored.move_to_end(blob_id)
        return stored

    async def hold(self, blobs: Sequence[Blob]) -> list[Stored]:
        """Put missing blobs onto the node, and hold all of them until the caller releases them.

        A blob on its way is waited for, not sent twice. The returned blobs go to :meth:`release`.

        Raises:
            SkywardError: a buffer was changed after its call was submitted.
            UnreachableError: the node did not answer.
        """
        held: list[Stored] = []
        try:
            for blob in blobs:
                if blob.id not in self._stored:
                    await self._begin(blob)
                stored = self.hold_stored(blob.id)
                held.append(stored)
                if stored.arriving is not None:
                    await asyncio.shield(stored.arriving)  # other calls wait for the same blob
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Iterable[Stored]) -> None:
        """Release held blobs, which may be evicted from now on."""
        for stored in held:
            stored.users -= 1

    def forget(self, blob_ids: Iterable[str]) -> None:
        """Remove the records of blobs that the node reports missing."""
        for blob_id in blob_ids:
            self._stored.pop(blob_id, None)

    async def close(self) -> None:
        """Cancel transfers under way."""
        tasks = [stored.arriving for stored in self._stored.values() if stored.arriving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, blob: Blob) -> None:
        """Reserve room for a blob, and start its transfer."""
        nbytes = blob.view.nbytes
        evicted, _ = self._make_room(nbytes, _FUNCTION_BYTES, "of_function") if blob.of_function else ([], True)
        more, in_memory = self._make_room(nbytes, self.node.ready.blob_budget_bytes, "in_memory")
        path = f"{self.node.ready.blob_dir if in_memory else self.node.ready.blob_dir_disk}/{blob.id}"
        stored = self._stored[blob.id] = Stored(path, nbytes, in_memory, of_function=blob.of_function)
        stored.arriving = asyncio.ensure_future(self._arrive(blob, stored, evicted + more))

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
            # Removed files may still be mapped for a moment, and other programs fill the same memory.
            stored.path, stored.in_memory = f"{self.node.ready.blob_dir_disk}/{blob.id}", False
            await self._bring(blob, stored)

    async def _bring(self, blob: Blob, stored: Stored) -> None:
        if self._exchange is not None and await self._fetch(self._exchange, blob.id, stored):
            return  # the node has compared the content with the name
        await self.node.transport.put(blob.view, stored.path)
        # Hashed again after it was sent: a changed buffer under the old name would reach later calls as their argument.
        if await asyncio.to_thread(_digest, blob.view) != blob.id:
            await self._remove([stored.path])
            raise SkywardError(
                "a large argument was changed after its call was submitted: change a copy, or wait for the call"
            )

    def _make_room(self, nbytes: int, bound: int, kind: Literal["of_function", "in_memory"]) -> tuple[list[str], bool]:
        """Evict blobs of a kind for one of ``nbytes``, the least recently used first, none in use.

        Return their files, and True if all of that kind then stay within ``bound``.
        """
        stored = [(blob_id, stored) for blob_id, stored in self._stored.items() if getattr(stored, kind)]
        used = sum(each.nbytes for _, each in stored)
        evicted: list[str] = []
        # A blob larger than the bound evicts nothing: it goes to disk anyway.
        for blob_id, unused in ((blob_id, each) for blob_id, each in stored if not each.users and nbytes <= bound):
            if used + nbytes <= bound:
                break
            del self._stored[blob_id]
            evicted.append(unused.path)
            used -= unused.nbytes
        return evicted, used + nbytes <= bound

    async def _remove(self, paths: Sequence[str]) -> None:
        await self.node.transport.run(["rm", "-f", *paths], timeout_s=_REMOVE_TIMEOUT_S)

    async def _fetch(self, exchange: Exchange, blob_id: str, stored: Stored) -> bool:
        """Have the node fetch a blob from another one; return False if the client has to send it.

        Raises:
            OSError: the node has no room for it.
            UnreachableError: the connection to the node was lost meanwhile.
        """
        tried: set[NodeBlobs] = set()
        while True:
            # Nothing is awaited between this look at the others and the change of `moving`: otherwise two nodes could
            # decide to wait for each other.
            stored.moving = False
            others = [other for other in exchange.others(self) if other not in tried]
            givers = [other for other in others if other.has(blob_id)]
            free = [giver for giver in givers if giver.giving[blob_id] < _AT_ONCE]
            coming = [task for other in others if other.node.linked and (task := other.moving(blob_id))]
            if coming and not free:
                await asyncio.wait(coming, timeout=exchange.look_again_s, return_when=asyncio.FIRST_COMPLETED)
                continue
            stored.moving = True
            if not givers:
                return False
            # A source without a connection may be lost; of the others, the one with the fewest transfers comes first.
            best = sorted(free or givers, key=lambda giver: (not giver.node.linked, giver.giving.total()))
            # One source until a first success: each that cannot be reached costs a connection's timeout.
            chosen = best[: _SOURCES if self.has_reached else 1]
            if await self._fetch_from(exchange, chosen, blob_id, stored):
                return True
            tried.update(chosen)

    async def _fetch_from(self, exchange: Exchange, givers: Sequence[NodeBlobs], blob_id: str, stored: Stored) -> bool:
        sources = tuple(giver.node.ready.blobs for giver in givers)
        held = [giver.hold_stored(blob_id) for giver in givers]
        givers[0].giving[blob_id] += 1
        try:
            order = Fetch(blob_id=blob_id, nbytes=stored.nbytes, path=stored.path, sources=sources)
            answer = await self.node.fetch(order)
        finally:
            givers[0].giving[blob_id] -= 1
            for giver, lent in zip(givers, held, strict=True):
                giver.release([lent])
        self.has_reached = self.has_reached or len(answer.unreached) < len(sources)
        if answer.unreached:
            self.unreached.update(answer.unreached)
            exchange.complain(self, answer)
        if answer.errno == errno.ENOSPC:
            raise OSError(answer.errno, answer.error)  # the caller stores it on disk then
        if answer.error:
            log.info("node %d did not get a large argument from another: %s", self.node.rank, answer.error)
        return not answer.error


class Exchange:
    """Blobs of all nodes that reach each other. Belongs to the event loop.

    The client sends a blob to the first node that needs it; other nodes wait, and fetch it from a node that has it.
    Each gives it to two at a time. An unreachable pair of nodes is remembered, and the client sends instead. A node
    that reached none of two others is taken to reach none.

    Args:
        look_again_s: interval in seconds at which a waiting node checks that its future source is still connected.
    """

    def __init__(self, *, look_again_s: float = 1.0) -> None:
        self.look_again_s = look_again_s
        self._members: dict[int, NodeBlobs] = {}
        self._has_complained = False

    def join(self, node: BlobNode) -> NodeBlobs:
        """Add a node; return its blobs."""
        blobs = self._members[node.rank] = NodeBlobs(node, self)
        return blobs

    def leave(self, rank: int) -> None:
        """Remove a node. Does nothing for a node that never joined."""
        self._members.pop(rank, None)

    def others(self, member: NodeBlobs) -> list[NodeBlobs]:
        """Return the nodes that ``member`` is not known to be unable to reach."""
        if len(member.unreached) >= _TRIALS and not member.has_reached:
            return []
        others = (other for other in self._members.values() if other is not member)
        return [other for other in others if other.node.ready.blobs not in member.unreached]

    def complain(self, member: NodeBlobs, answer: Fetched) -> None:
        """Log that nodes do not reach each other: the first time as a warning, later for debugging."""
        level = logging.DEBUG if self._has_complained else logging.WARNING
        self._has_complained = True
        log.log(
            level,
            "node %d cannot get large arguments from other nodes, so they are sent to it from here: %s",
            member.node.rank,
            answer.error or f"no connection to {', '.join(answer.unreached)}",
        )
