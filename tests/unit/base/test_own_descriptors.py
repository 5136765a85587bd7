from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from skyward.base.descriptors import Descriptors


def close(descriptor: int) -> None:
    os.close(descriptor)


def replace(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, descriptor)
    os.close(null)


@pytest.mark.parametrize("spoil", [close, replace])
def test_descriptors_that_other_code_closed_or_replaced_are_not_intact(spoil: Callable[[int], None]) -> None:
    read, write = os.pipe()
    kept = os.dup(read)
    descriptors = Descriptors(read, write)
    assert descriptors.intact
    spoil(read)
    assert not descriptors.intact
    os.dup2(kept, read)
    assert descriptors.intact
    for descriptor in (kept, read, write):
        os.close(descriptor)


def test_a_closed_descriptor_cannot_be_remembered() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Descriptors(-1)


def test_no_descriptors_are_intact() -> None:
    assert Descriptors().intact
