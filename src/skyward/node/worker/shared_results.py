"""Large results for a client on this machine: written into memory that it maps, and written again once it lets go."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skyward.wire.messages import places_in_segment

_FREE_BYTES: Final = 1 << 30
_FREE_S: Final = 10.0
_MAPPED_BYTES: Final = 1 << 30
_MAPPED_SHARE: Final = 16
"""At most this part of the worker's memory is spent on mappings: they count as the worker's."""
_PIECE_BYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class _Segment:
    """File in memory with a result.

    Attributes:
        name: its name in the folder.
        nbytes: its size, which may be more than the result's.
        mapping: its memory in this process; None while it is not mapped.
        freed_s: time at which the client released it.
    """

    name: str
    nbytes: int
    mapping: mmap.mmap | None = None
    freed_s: float = 0.0


class SharedResults:
    """Segments of memory for one worker's results, each a file that the client finds under its name.

    A segment is the client's from the result's message until it is released. It is then used again: to clear fresh
    memory takes three times as long as to copy into it. Thread-safe.

    Args:
        folder: folder in memory, which the client reaches.
        prefix: beginning of the files' names, which no other worker of the node has.
    """

    # 500 MB took 230 ms in a fresh segment, 115 ms in one that was mapped again, 55 ms in one that had stayed mapped.

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._lock = threading.Lock()
        self._used: dict[str, _Segment] = {}
        self._free: list[_Segment] = []

    def store(self, parts: Sequence[memoryview], memory_limit_bytes: int = 0) -> str:
        """Copy the parts of a result into a segment.

        Args:
            parts: the parts.
            memory_limit_bytes: memory that this process may use; 0 is no limit.

        Returns:
            The segment's name; empty if there is no room for it.
        """
        *places, nbytes = places_in_segment([part.nbytes for part in parts])
        segment = self._take(nbytes) or self._create(nbytes)
        if segment is None:
            return ""
        mapping = segment.mapping or self._map(segment)
        if mapping is None:
            return ""
        _copy(parts, places, mapping)
        bound = min(_MAPPED_BYTES, memory_limit_bytes // _MAPPED_SHARE) if memory_limit_bytes else _MAPPED_BYTES
        with self._lock:
            segment.mapping = mapping if self._mapped_bytes() + segment.nbytes <= bound else None
            self._used[segment.name] = segment
        return segment.name

    def release(self, names: Iterable[str], *, reusable: bool) -> None:
        """Take segments back; those that are not ``reusable`` are removed."""
        with self._lock:
            for name in names:
                segment = self._used.pop(name, None)
                if segment is None:
                    continue
                segment.freed_s = time.monotonic()
                self._free.append(segment)
                if not reusable or sum(free.nbytes for free in self._free) > _FREE_BYTES:
                    self._remove(self._free.pop())

    def trim(self) -> None:
        """Remove segments that nothing has used for ten seconds."""
        if not self._free:
            return
        with self._lock:
            while self._free and time.monotonic() - self._free[0].freed_s > _FREE_S:
                self._remove(self._free.pop(0))

    def clear(self) -> None:
        """Remove all segments, and those of an earlier process in this worker's place: their client has ended."""
        with self._lock:
            self._used.clear()
            self._free.clear()
            for file in self._folder.glob(f"{self._prefix}*"):
                with suppress(OSError):
                    file.unlink()

    def _mapped_bytes(self) -> int:
        return sum(segment.nbytes for segment in (*self._used.values(), *self._free) if segment.mapping is not None)

    def _take(self, nbytes: int) -> _Segment | None:
        with self._lock:
            large_enough = [segment for segment in self._free if nbytes <= segment.nbytes <= 2 * nbytes]
            if not large_enough:
                return None
            chosen = min(large_enough, key=lambda segment: (segment.mapping is None, segment.nbytes))
            self._free.remove(chosen)
            if not (self._folder / chosen.name).exists():  # user code has removed it, perhaps while it stayed mapped
                return None
            return chosen

    def _create(self, nbytes: int) -> _Segment | None:
        if sys.platform != "linux":  # there is no folder in memory
            return None
        path = self._folder / f"{self._prefix}{uuid.uuid4().hex}"
        try:
            if nbytes > shutil.disk_usage(self._folder).free // 2:  # other programs use this memory, too
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # without it, a write to a full folder would end the process
                # The copy has it cleared, page by page. MAP_POPULATE would do so in one go, no sooner, and would keep
                # all other threads waiting meanwhile: up to 2.7 s for 1 GiB.
                return _Segment(path.name, nbytes, mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED))
            finally:
                os.close(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            return None

    def _map(self, segment: _Segment) -> mmap.mmap | None:
        if sys.platform != "linux":
            return None
        try:
            descriptor = os.open(self._folder / segment.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                return mmap.mmap(descriptor, segment.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(descriptor)
        except OSError:  # no address space or descriptor is left
            self._remove(segment)
            return None

    def _remove(self, segment: _Segment) -> None:
        with suppress(OSError):
            (self._folder / segment.name).unlink()


def _copy(parts: Sequence[memoryview], places: Sequence[int], mapping: mmap.mmap) -> None:
    with memoryview(mapping) as memory:
        for part, place in zip(parts, places, strict=True):
            for offset in range(0, part.nbytes, _PIECE_BYTES):  # in between, other threads run
                piece = part[offset : offset + _PIECE_BYTES]
                memory[place + offset : place + offset + piece.nbytes] = piece
