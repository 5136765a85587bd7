"""Large results of workers on this machine: files in memory, mapped here until the last array on them is gone."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from skyward.base.platform import allocate_memory, run_around_forks
from skyward.wire.messages import ReleaseSegments, places_in_segment

_MOST_MAPPINGS: Final = 256
"""Mappings of this process. Each holds a descriptor, and many programs may have 1024, also after their pool."""

_mapping_count = itertools.count()
_mappings: set[int] = set()
_forks = [0]


class MappedResults:
    """Results of one worker's process, in memory that it gets back.

    Args:
        folder: folder of the worker's segments.
        release: gives segments back; called from any thread, between any two steps of the program.
    """

    def __init__(self, folder: str, release: Callable[[ReleaseSegments], None]) -> None:
        self._folder = Path(folder)
        self._release = weakref.WeakMethod(release)  # an array may outlive the pool, and must not keep it

    def open(self, name: str, part_bytes: Sequence[int]) -> list[memoryview]:
        """Map a segment, or copy it if many are mapped; return the parts of the result in it.

        A write to a mapped part copies a page.

        Raises:
            FileNotFoundError: the segment was removed.
            OSError: it cannot be mapped, as this process may hold no more memory or descriptors.
        """
        assert sys.platform != "win32"
        *places, nbytes = places_in_segment(part_bytes)
        try:
            descriptor = os.open(self._folder / Path(name).name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if len(_mappings) < _MOST_MAPPINGS:
                    memory = self._map(descriptor, name, nbytes)
                else:
                    memory = _copy(descriptor, nbytes)
                    self.give_back(name)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            self.give_back(name)
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"the result's memory cannot be mapped: {error}") from error
        whole = memoryview(memory)
        return [whole[place : place + part] for place, part in zip(places, part_bytes, strict=True)]

    def give_back(self, name: str) -> None:
        """Release a segment that is not mapped."""
        self._send(ReleaseSegments([name], reusable=True))

    def _map(self, descriptor: int, name: str, nbytes: int) -> mmap.mmap:
        mapping = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        number = next(_mapping_count)
        _mappings.add(number)
        finalize = weakref.finalize(mapping, self._let_go, name, number, os.getpid(), _forks[0])
        finalize.atexit = False  # its pool ends, too
        return mapping

    def _let_go(self, name: str, number: int, pid: int, forks: int) -> None:
        _mappings.discard(number)
        if os.getpid() == pid:
            # A forked child may read on after the last array is gone here: the worker must not write there again.
            self._send(ReleaseSegments([name], reusable=forks == _forks[0]))

    def _send(self, item: ReleaseSegments) -> None:
        if (release := self._release()) is not None:
            release(item)


def _copy(descriptor: int, nbytes: int) -> mmap.mmap:
    memory = allocate_memory(nbytes)
    with open(descriptor, "rb", buffering=0, closefd=False) as file, memoryview(memory) as view:
        read = 0
        while read < nbytes:
            if not (count := file.readinto(view[read:])):
                raise ValueError(f"it ends after {read} bytes")
            read += count
    return memory


def _note_fork() -> None:
    _forks[0] += 1


run_around_forks(_note_fork)
