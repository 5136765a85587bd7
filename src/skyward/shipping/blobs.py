"""Large arguments: named by their content, stored on each node once, mapped by all its workers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, Protocol, TypeAlias, get_args

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
# Nodes that are compared for each transfer, so that its cost does not grow with their number.
_CONSIDERED = 8
# Part of a bound that is made free at once, and that a blob has at most to count as small.
_SMALL_SHARE = 16
# Nodes that cannot reach each other are detected once, within three seconds (decision 011).
_TRIALS = 2


_Kind: TypeAlias = Literal["of_function", "in_memory"]
_KINDS: Final[tuple[_Kind, ...]] = get_args(_Kind)


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
        of_function: True for a part of a function; those have a bound of their own.
    """

    path: str
    nbytes: int
    in_memory: bool
    arriving: asyncio.Task[None] | None = None
    users: int = 0
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
        self._nbytes: Counter[_Kind] = Counter()

    def hold_present(self, blobs: Sequence[Blob]) -> list[Stored] | None:
        """Hold all of these blobs, for a call that is about to be sent; None if one has not arrived."""
        return [self.hold_stored(blob.id) for blob in blobs] if all(self.has(blob.id) for blob in blobs) else None

    def has(self, blob_id: str) -> bool:
        """Return True if the node has the whole blob."""
        stored = self._stored.get(blob_id)
        return stored is not None and stored.arriving is not None and stored.arriving.done()

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
            self._drop(blob_id)

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
        self._nbytes.update({kind: nbytes for kind in _KINDS if getattr(stored, kind)})
        stored.arriving = asyncio.ensure_future(self._arrive(blob, stored, evicted + more))

    async def _arrive(self, blob: Blob, stored: Stored, leaving: Sequence[str]) -> None:
        try:
            if leaving:
                await self._remove(leaving)
            await self._fill(blob, stored)
        except BaseException:
            if self._stored.get(blob.id) is stored:
                self._drop(blob.id)
            raise

    async def _fill(self, blob: Blob, stored: Stored) -> None:
        try:
            await self._bring(blob, stored)
        except OSError as error:
            if not stored.in_memory or error.errno != errno.ENOSPC:
                raise
            # Removed files may still be mapped for a moment, and other programs fill the same memory.
            stored.path, stored.in_memory = f"{self.node.ready.blob_dir_disk}/{blob.id}", False
            if self._stored.get(blob.id) is stored:
                self._nbytes["in_memory"] -= stored.nbytes
            await self._bring(blob, stored)

    async def _bring(self, blob: Blob, stored: Stored) -> None:
        if self._exchange is None:
            await self._send(blob, stored)
            return
        with self._exchange.spreading(blob.id, self) as spread:
            # The node compares the content with the name.
            if not await self._fetch(self._exchange, spread, stored):
                await self._send(blob, stored)

    async def _send(self, blob: Blob, stored: Stored) -> None:
        await self.node.transport.put(blob.view, stored.path)
        # Hashed again after it was sent: a changed buffer under the old name would reach later calls as their argument.
        if await asyncio.to_thread(_digest, blob.view) != blob.id:
            await self._remove([stored.path])
            raise SkywardError(
                "a large argument was changed after its call was submitted: change a copy, or wait for the call"
            )

    def _drop(self, blob_id: str) -> None:
        if (stored := self._stored.pop(blob_id, None)) is not None:
            self._nbytes.subtract({kind: stored.nbytes for kind in _KINDS if getattr(stored, kind)})

    def _make_room(self, nbytes: int, bound: int, kind: _Kind) -> tuple[list[str], bool]:
        """Evict blobs of a kind for one of ``nbytes``, the least recently used first, none in use.

        Return their files, and True if all of that kind then stay within ``bound``.
        """
        used = self._nbytes[kind]
        if used + nbytes <= bound or nbytes > bound:  # one larger than the bound evicts nothing: it goes to disk anyway
            return [], nbytes <= bound
        evicted: list[Stored] = []
        for blob_id, stored in [(key, each) for key, each in self._stored.items() if getattr(each, kind)]:
            left = bound - used - nbytes
            # Small ones go together: each removal is a command on the node.
            if left >= 0 and (left >= bound // _SMALL_SHARE or stored.nbytes > bound // _SMALL_SHARE):
                break
            if not stored.users:
                self._drop(blob_id)
                evicted.append(stored)
                used -= stored.nbytes
        return [each.path for each in evicted], used + nbytes <= bound

    async def _remove(self, paths: Sequence[str]) -> None:
        await self.node.transport.run(["rm", "-f", *paths], timeout_s=_REMOVE_TIMEOUT_S)

    async def _fetch(self, exchange: Exchange, spread: _Spread, stored: Stored) -> bool:
        """Have the node fetch a blob from another one; return False if the client has to send it.

        Raises:
            OSError: the node has no room for it.
            UnreachableError: the connection to the node was lost meanwhile.
        """
        tried: set[NodeBlobs] = set()

        def is_usable(other: NodeBlobs) -> bool:
            return other not in tried and exchange.reaches(self, other)

        while True:
            # Nothing is awaited between this look at the others and `begin`: otherwise two nodes could decide to wait
            # for each other.
            spread.stop(self)
            givers = spread.givers(is_usable, free=True)
            if not givers and spread.is_coming(is_usable):
                await spread.wait(is_usable, exchange.look_again_s)
                continue
            givers = givers or spread.givers(is_usable, free=False)
            spread.begin(self)
            if not givers:
                return False
            # The one with the fewest transfers comes first.
            best = sorted(givers, key=lambda giver: giver.giving.total())
            # One source until a first success: each that cannot be reached costs a connection's timeout.
            chosen = best[: _SOURCES if self.has_reached else 1]
            if await self._fetch_from(exchange, spread, chosen, stored):
                return True
            tried.update(chosen)

    async def _fetch_from(
        self, exchange: Exchange, spread: _Spread, givers: Sequence[NodeBlobs], stored: Stored
    ) -> bool:
        blob_id, sources = spread.blob_id, tuple(giver.node.ready.blobs for giver in givers)
        held = [giver.hold_stored(blob_id) for giver in givers]
        spread.give(givers[0], 1)
        try:
            order = Fetch(blob_id=blob_id, nbytes=stored.nbytes, path=stored.path, sources=sources)
            answer = await self.node.fetch(order)
        finally:
            spread.give(givers[0], -1)
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


class _Spread:
    """One blob on its way through a network, as long as nodes want it that lack it.

    A node that finds no other one free to give it waits for its turn. Each turn wakes as many nodes as have become free
    to give: were all woken, a fan-out to a thousand nodes would take half a million looks, at a thousand nodes each.

    Attributes:
        blob_id: the blob.
        wanted: number of nodes that want it.
    """

    def __init__(self, blob_id: str, members: Iterable[NodeBlobs]) -> None:
        self.blob_id = blob_id
        self.wanted = 0
        self._holders = {member: None for member in members if member.has(blob_id)}
        self._free = {member: None for member in self._holders if member.giving[blob_id] < _AT_ONCE}
        self._moving: dict[NodeBlobs, None] = {}
        self._turns: deque[asyncio.Future[None]] = deque()

    def givers(self, is_usable: Callable[[NodeBlobs], bool], *, free: bool) -> list[NodeBlobs]:
        """Return a few nodes that have it, connected ones if there are any.

        If they have to be ``free``, they give it to fewer than two.
        """
        having = [*islice(self._having(is_usable, free=free, linked=True), _CONSIDERED)]
        return having or [*islice(self._having(is_usable, free=free, linked=False), _CONSIDERED)]

    def _having(self, is_usable: Callable[[NodeBlobs], bool], *, free: bool, linked: bool) -> Iterator[NodeBlobs]:
        for other in self._free if free else self._holders:
            if other.node.linked is linked and other.has(self.blob_id) and is_usable(other):
                yield other

    def is_coming(self, is_usable: Callable[[NodeBlobs], bool]) -> bool:
        """Return True if a connected node is about to have it."""
        return any(other.node.linked and is_usable(other) for other in self._moving)

    async def wait(self, is_usable: Callable[[NodeBlobs], bool], look_again_s: float) -> None:
        """Wait until it is this node's turn, or until no connected node is about to have it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            while not turn.done() and self.is_coming(is_usable) and not self.givers(is_usable, free=True):
                await asyncio.wait((turn,), timeout=look_again_s)
        finally:
            turn.cancel()  # it wakes no one any more

    def begin(self, member: NodeBlobs) -> None:
        """Note that a node is sent it, or fetches it, from now on."""
        self._moving[member] = None

    def stop(self, member: NodeBlobs) -> None:
        """Note that a node has it, or has failed to get it."""
        if member in self._moving:
            del self._moving[member]
            if not self._moving:
                self._wake(len(self._turns))

    def arrive(self, member: NodeBlobs) -> None:
        """Note that a node has it."""
        self._holders[member] = self._free[member] = None
        self._wake(_AT_ONCE)

    def give(self, giver: NodeBlobs, change: int) -> None:
        """Note that a node gives it to one node more, or to one less."""
        giver.giving[self.blob_id] += change
        self._free.pop(giver, None)
        if giver.giving[self.blob_id] < _AT_ONCE:
            self._free[giver] = None  # the last to be taken
            self._wake(max(0, -change))

    def _wake(self, count: int) -> None:
        while count > 0 and self._turns:
            if not (turn := self._turns.popleft()).done():
                turn.set_result(None)
                count -= 1


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
        self._spreads: dict[str, _Spread] = {}
        self._has_complained = False

    def join(self, node: BlobNode) -> NodeBlobs:
        """Add a node; return its blobs."""
        blobs = self._members[node.rank] = NodeBlobs(node, self)
        return blobs

    def leave(self, rank: int) -> None:
        """Remove a node. Does nothing for a node that never joined."""
        self._members.pop(rank, None)

    @contextmanager
    def spreading(self, blob_id: str, member: NodeBlobs) -> Generator[_Spread]:
        """Yield the way of a blob to the nodes that want it; at the end of the block, ``member`` has it, or raises."""
        spread = self._spreads.get(blob_id)
        if spread is None:
            spread = self._spreads[blob_id] = _Spread(blob_id, self._members.values())
        spread.wanted += 1
        try:
            yield spread
            spread.arrive(member)
        finally:
            spread.stop(member)
            spread.wanted -= 1
            if not spread.wanted:
                del self._spreads[blob_id]

    def reaches(self, member: NodeBlobs, other: NodeBlobs) -> bool:
        """Return False for a node that ``member`` is known to be unable to reach, and for one that has left."""
        if other is member or self._members.get(other.node.rank) is not other:
            return False
        if len(member.unreached) >= _TRIALS and not member.has_reached:
            return False
        return other.node.ready.blobs not in member.unreached

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
