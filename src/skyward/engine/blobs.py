"""Large arguments: named by their content, brought to a node once, mapped by all its workers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from skyward.errors import SkywardError
from skyward.submission import ArgumentMemo
from skyward.transport.base import Transport

__all__ = ["Blob", "BlobPlace", "NodeBlobs", "Peers", "Stored", "identify"]

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
