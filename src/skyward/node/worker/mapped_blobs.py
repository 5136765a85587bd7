"""Large arguments of calls: files of this node, mapped into the worker's memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

_PAGE_BYTES = mmap.PAGESIZE
_PAGES_PER_READ = 1 << 19
# Linux, Documentation/admin-guide/mm/pagemap.rst: 8 bytes a page; of the highest one's bits, 7 means present, 6
# swapped, 5 that the page is the file's. A page that was written to is neither absent nor the file's.
_PRISTINE = bytes(bits for bits in range(256) if bits >> 5 in {0b000, 0b101})


class MappedBlobs:
    """Mappings of a node's blobs in one of its workers: writable, and copied only where written.

    The mappings of a call are kept for the next one, unless it wrote to them or still holds them.

    Args:
        folders: folders of the blobs, by their content id.
    """

    # Calls often share a large array. A new mapping costs a fault for every page that is read: 22 ms for 200 MB, and
    # 0.5 ms where the last call's is kept (docs/decisions/007). A kept one holds memory, even of a removed file, so an
    # idle worker drops it after 50 ms.

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._kept: dict[str, mmap.mmap] = {}
        self._keeps = sys.platform == "linux" and _page_faults_are_counted()
        self._page_faults = 0

    def missing(self, blob_ids: Sequence[str]) -> list[str]:
        """Return the ids of blobs that are not here."""
        return [blob_id for blob_id in blob_ids if self._find(blob_id) is None]

    def map(self, blob_ids: Sequence[str]) -> list[memoryview]:
        """Return the memory of these blobs, for one call, which may write to it.

        Raises:
            FileNotFoundError: one of them is not here.
        """
        kept, self._kept = self._kept if self._keeps else {}, {}
        kept = {blob_id: kept[blob_id] for blob_id in kept.keys() & blob_ids if not _is_used(kept[blob_id])}
        # In this order: a thread that the call left behind may write until it drops its view. The first write to a page
        # is a fault; with no fault since, the look at the pages is spared.
        if _page_faults() != self._page_faults:
            kept = {blob_id: mapped for blob_id, mapped in kept.items() if _is_pristine(mapped)}
        views = [self._map(blob_id, kept) for blob_id in blob_ids]
        self._page_faults = _page_faults()
        return views

    @property
    def holds_any(self) -> bool:
        """True if mappings are kept."""
        return bool(self._kept)

    def let_go(self) -> None:
        """Drop the kept mappings."""
        self._kept.clear()

    def _map(self, blob_id: str, kept: dict[str, mmap.mmap]) -> memoryview:
        mapped = self._kept[blob_id] = kept.pop(blob_id, None) or self._map_file(blob_id)
        return memoryview(mapped)

    def _map_file(self, blob_id: str) -> mmap.mmap:
        path = self._find(blob_id)
        try:
            with open(path or blob_id, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise FileNotFoundError(blob_id) from None

    def _find(self, blob_id: str) -> Path | None:
        return next((path for folder in self._folders if (path := folder / blob_id).exists()), None)


def _page_faults() -> int:
    """Return the number of page faults of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def _page_faults_are_counted() -> bool:
    """Return True if the kernel counts page faults."""
    # One that only imitates Linux, such as gVisor's, may not: writes would go unnoticed there.
    before = _page_faults()
    with mmap.mmap(-1, _PAGE_BYTES) as fresh:
        fresh[0] = 1
    return _page_faults() > before


def _is_used(mapped: mmap.mmap) -> bool:
    """Return True if an array or a view still shares this memory."""
    try:
        mapped.resize(len(mapped))
    except BufferError:
        return True
    except TypeError:  # resize() checks for views first, and then refuses, as it must: the mapping is private
        pass
    return False


def _is_pristine(mapped: mmap.mmap) -> bool:
    """Return True if no page was written to; False where the kernel does not report it."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) // _PAGE_BYTES
    pages = -(-len(mapped) // _PAGE_BYTES)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            for start in range(0, pages, _PAGES_PER_READ):
                wanted = 8 * min(_PAGES_PER_READ, pages - start)
                entries = os.pread(table.fileno(), wanted, 8 * (first + start))
                if len(entries) < wanted or entries[7::8].translate(None, _PRISTINE):
                    return False
    except OSError:
        return False
    return True
