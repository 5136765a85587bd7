"""Large arguments: named by their content, put onto a node once, mapped by all its workers."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from skyward.errors import SkywardError
from skyward.submission import ArgumentMemo
from skyward.transport.base import Transport

__all__ = ["Blob", "BlobPlace", "NodeBlobs", "identify"]

_REMOVE_TIMEOUT_S = 30.0
_THREADED_HASH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A large buffer of an argument, still in the caller's memory.

    Attributes:
        id: BLAKE3 of its content, in hex.
        view: its bytes.
    """

    id: str
    view: memoryview = field(repr=False)


class BlobPlace(Protocol):
    """What of :class:`~skyward.node.config.NodeReady` matters here."""

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
    key = (_address(view), view.nbytes)
    if key[0] and key in memo.ids:
        return Blob(id=memo.ids[key], view=view)
    blob = Blob(id=_digest(view), view=view)
    if key[0]:
        memo.ids[key] = blob.id
        memo.keepalive.append(view)
    return blob


def _digest(view: memoryview) -> str:
    threads = blake3.AUTO if view.nbytes >= _THREADED_HASH_BYTES else 1
    return blake3(view, max_threads=threads).hexdigest()


def _address(view: memoryview) -> int:
    """Where the buffer lies; 0 where that cannot be told without numpy."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    numpy = sys.modules.get("numpy")
    return int(numpy.frombuffer(view, dtype="u1").ctypes.data) if numpy else 0


@dataclass(slots=True)
class _Stored:
    path: str
    nbytes: int
    in_memory: bool
    users: int = 0


class NodeBlobs:
    """The blobs of one node, as the client, their only writer, knows them.

    The least recently used ones go first when the folder in memory is full; what does not fit there goes to disk.
    Used on the event loop only.
    """

    def __init__(self, place: BlobPlace, transport: Transport) -> None:
        self._place = place
        self._transport = transport
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._arriving: dict[str, asyncio.Future[None]] = {}

    def has(self, blobs: Sequence[Blob]) -> bool:
        """Whether all of them lie on the node."""
        return all(blob.id in self._stored for blob in blobs)

    def hold(self, blobs: Sequence[Blob]) -> None:
        """A call on the node uses them now: they must not go."""
        for blob in blobs:
            self._stored[blob.id].users += 1
            self._stored.move_to_end(blob.id)

    def release(self, blobs: Sequence[Blob]) -> None:
        """That call is over."""
        for blob in blobs:
            if blob.id in self._stored:
                self._stored[blob.id].users -= 1

    def forget(self, blob_ids: Iterable[str]) -> None:
        """The node does not have them after all."""
        for blob_id in blob_ids:
            self._stored.pop(blob_id, None)

    async def ensure(self, blobs: Sequence[Blob]) -> None:
        """Put onto the node what is not there yet; a blob on its way is waited for, not sent twice.

        Raises:
            SkywardError: a buffer was changed after its call was submitted.
            UnreachableError: the node did not answer.
        """
        for blob in blobs:
            if blob.id in self._stored:
                continue
            arriving = self._arriving.get(blob.id)
            if arriving is None:
                arriving = self._arriving[blob.id] = asyncio.ensure_future(self._put(blob))
                arriving.add_done_callback(lambda _, blob_id=blob.id: self._arriving.pop(blob_id, None))
            await asyncio.shield(arriving)

    async def _put(self, blob: Blob) -> None:
        nbytes = blob.view.nbytes
        in_memory = await self._make_room(nbytes)
        path = f"{self._place.blob_dir if in_memory else self._place.blob_dir_disk}/{blob.id}"
        await self._transport.put(blob.view, path)
        if await asyncio.to_thread(_digest, blob.view) != blob.id:
            await self._remove([path])
            raise SkywardError(
                "a large argument was changed after its call was submitted; leave it alone until the call is done"
            )
        self._stored[blob.id] = _Stored(path, nbytes, in_memory)

    async def _make_room(self, nbytes: int) -> bool:
        """Whether the blob goes into memory, after unused ones went for it."""
        budget = self._place.blob_budget_bytes
        if nbytes > budget:
            return False
        used = sum(stored.nbytes for stored in self._stored.values() if stored.in_memory)
        leaving: list[str] = []
        for blob_id, stored in self._stored.items():
            if used + nbytes <= budget:
                break
            if stored.in_memory and not stored.users:
                leaving.append(blob_id)
                used -= stored.nbytes
        if leaving:
            await self._remove([self._stored.pop(blob_id).path for blob_id in leaving])
        return used + nbytes <= budget

    async def _remove(self, paths: Sequence[str]) -> None:
        await self._transport.run(["rm", "-f", *paths], timeout_s=_REMOVE_TIMEOUT_S)
