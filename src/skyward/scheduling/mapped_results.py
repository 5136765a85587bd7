"""Large results of workers on this machine: files in memory, mapped here until the last array on them is gone."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from skyward.base.platform import run_around_forks
from skyward.wire.messages import ReleaseSegments

_fork_count = itertools.count()
_forks = [next(_fork_count)]


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
        """Map a segment; return the parts of the result in it. A write to them copies a page.

        Raises:
            OSError: it cannot be mapped, as this process may hold no more memory or descriptors.
        """
        assert sys.platform != "win32"
        try:
            descriptor = os.open(self._folder / Path(name).name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(descriptor, sum(part_bytes), access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            self.give_back(name)
            raise OSError(f"the result's memory cannot be mapped: {error}") from error
        finalize = weakref.finalize(mapping, self._let_go, name, os.getpid(), _forks[0])
        finalize.atexit = False  # its pool ends, too
        ends = list(itertools.accumulate(part_bytes, initial=0))
        whole = memoryview(mapping)
        return [whole[start:end] for start, end in itertools.pairwise(ends)]

    def give_back(self, name: str) -> None:
        """Release a segment that was not mapped."""
        self._send(ReleaseSegments([name], reusable=True))

    def _let_go(self, name: str, pid: int, forks: int) -> None:
        if os.getpid() == pid:
            # A forked child may read on after the last array is gone here: the worker must not write there again.
            self._send(ReleaseSegments([name], reusable=forks == _forks[0]))

    def _send(self, item: ReleaseSegments) -> None:
        if (release := self._release()) is not None:
            release(item)


def _note_fork() -> None:
    _forks[0] = next(_fork_count)


run_around_forks(_note_fork)
