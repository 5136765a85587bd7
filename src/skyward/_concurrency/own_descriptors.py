"""Descriptors that user code in the same process may close, or replace by others with the same numbers."""

from __future__ import annotations

import os

__all__ = ["Descriptors"]


class Descriptors:
    """Open descriptors of this process, remembered with the files that they refer to.

    Args:
        descriptors: their numbers.

    Raises:
        OSError: one is closed already.
    """

    def __init__(self, *descriptors: int) -> None:
        self._files = {descriptor: _file_of(descriptor) for descriptor in descriptors}

    @property
    def intact(self) -> bool:
        """True while each of them refers to the same file. Takes half a microsecond for each."""
        try:
            return all(_file_of(descriptor) == file for descriptor, file in self._files.items())
        except OSError:
            return False


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
