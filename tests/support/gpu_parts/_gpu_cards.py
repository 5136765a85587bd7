"""What is known of GPU models: names, memory, parts (MIG user guide, "Supported MIG Profiles").

A GPU in MIG mode has eight memory slices. A part lies at one of a few places, and is numbered by size and place as the
nodes of a binary tree are: 0 is the whole GPU, 1 and 2 are its halves, and so on to 7 for the first eighth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CARDS", "COMPUTE_SLICES", "PROFILES", "Card", "Profile", "place_for"]

COMPUTE_SLICES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A model.

    Attributes:
        name: in the driver's words.
        memory_mib: as the driver reports it.
        hopper: whether its MIG mode changes without a reset.
    """

    name: str
    memory_mib: int
    hopper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A part that a GPU can be cut into.

    Attributes:
        id: the driver's number of it.
        name: e.g. ``"3g.40gb"``.
        compute: how many of seven compute slices it takes.
        size: how many of eight memory slices it takes.
        starts: memory slices that it can start at.
        memory_gib: its memory, as the driver lists it.
        multiprocessors: likewise.
        compute_id: the driver's number of the compute instance that takes all of it.
        index: NVML's constant for it, ``NVML_GPU_INSTANCE_PROFILE_…``.
    """

    id: int
    name: str
    compute: int
    size: int
    starts: tuple[int, ...]
    memory_gib: float
    multiprocessors: int
    compute_id: int
    index: int

    @property
    def total(self) -> int:
        """How many of it an empty GPU has place for."""
        return min(COMPUTE_SLICES // self.compute, len(self.starts))


CARDS: Mapping[str, Card] = {
    "A100-40": Card(name="NVIDIA A100-SXM4-40GB", memory_mib=40960),
    "A100-80": Card(name="NVIDIA A100-SXM4-80GB", memory_mib=81920),
    "H100-80": Card(name="NVIDIA H100 80GB HBM3", memory_mib=81559, hopper=True),
    "T4": Card(name="Tesla T4", memory_mib=15360),
}


def _profiles(gib: Sequence[int], memory: Sequence[float], processors: Sequence[int]) -> tuple[Profile, ...]:
    shapes = (
        (19, 1, 1, (0, 1, 2, 3, 4, 5, 6), 0, 0),
        (15, 1, 2, (0, 2, 4, 6), 0, 9),
        (14, 2, 2, (0, 2, 4), 1, 1),
        (9, 3, 4, (0, 4), 2, 2),
        (5, 4, 4, (0,), 3, 3),
        (0, 7, 8, (0,), 4, 4),
    )
    return tuple(
        Profile(
            id=number,
            name=f"{compute}g.{gib[size.bit_length() - 1]}gb",
            compute=compute,
            size=size,
            starts=starts,
            memory_gib=memory[size.bit_length() - 1],
            multiprocessors=processors[index],
            compute_id=compute_id,
            index=constant,
        )
        for index, (number, compute, size, starts, compute_id, constant) in enumerate(shapes)
    )


_AMPERE, _HOPPER = (14, 14, 28, 42, 56, 98), (16, 26, 32, 60, 64, 132)
PROFILES: Mapping[str, tuple[Profile, ...]] = {
    "A100-40": _profiles((5, 10, 20, 40), (4.75, 9.62, 19.5, 39.25), _AMPERE),
    "A100-80": _profiles((10, 20, 40, 80), (9.5, 19.5, 39.25, 79.0), _AMPERE),
    "H100-80": _profiles((10, 20, 40, 80), (9.62, 19.62, 39.5, 79.25), _HOPPER),
    "T4": (),
}
"""By card, the smallest first."""

_SHAPES = PROFILES["H100-80"]


def place_for(profile: Profile, taken: Sequence[tuple[int, int]]) -> int:
    """Where the driver puts a part beside those that are there (start and size): where it is least in others' way.

    Raises:
        LookupError: there is none.
    """
    places = [start for start in profile.starts if _is_free(start, profile.size, taken)]
    if not places:
        raise LookupError(profile.name)
    return max(places, key=lambda start: (_freedom([*taken, (start, profile.size)]), -start))


def _freedom(taken: Sequence[tuple[int, int]]) -> int:
    return sum(_is_free(start, shape.size, taken) for shape in _SHAPES for start in shape.starts)


def _is_free(start: int, size: int, taken: Sequence[tuple[int, int]]) -> bool:
    return all(start + size <= other or start >= other + length for other, length in taken)
