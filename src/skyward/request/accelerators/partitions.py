"""MIG: partitions of one GPU, within its 7 compute and its 8 memory slices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.errors import ConfigurationError
from skyward.request.accelerators.catalogue import Variant
from skyward.request.checks import refusal, texts

__all__ = ["COMPUTE_SLICES", "MEMORY_SLICES", "MigProfile", "plan_partitions"]

COMPUTE_SLICES = 7
MEMORY_SLICES = 8
_PROFILE = re.compile(r"([1-7])g\.(\d+)gb", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """One kind of partition of one GPU.

    Attributes:
        name: the profile's name in nvidia-smi, e.g. ``"3g.40gb"``.
        compute_slices: number taken of the GPU's 7.
        memory_slices: number taken of the GPU's 8.
    """

    name: str
    compute_slices: int
    memory_slices: int

    @classmethod
    def of(cls, name: str, gpu_memory_gib: float) -> MigProfile:
        """Read a profile's name: an eighth of the GPU's memory is a slice (names round it)."""
        match = _PROFILE.fullmatch(name)
        if match is None:
            raise refusal("mig", 'a profile such as "3g.40gb"', name)
        return cls(
            name=name,
            compute_slices=int(match[1]),
            memory_slices=max(1, round(int(match[2]) * MEMORY_SLICES / gpu_memory_gib)),
        )

    @property
    def most(self) -> int:
        """The number of such partitions that fit on one GPU."""
        return min(COMPUTE_SLICES // self.compute_slices, MEMORY_SLICES // self.memory_slices)


def plan_partitions(variant: Variant, mig: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the profiles to create on each GPU: as many as fit of a single one, or exactly those of a list.

    Raises:
        ConfigurationError: the GPU has no MIG, lacks a profile, or the list takes more slices than there are.
    """
    if mig is None:
        return ()
    profiles = [_profile(variant, name) for name in ((mig,) if isinstance(mig, str) else texts("mig", mig))]
    if isinstance(mig, str):
        return (profiles[0].name,) * profiles[0].most
    if not profiles:
        raise refusal("mig", "a profile or a list of at least one", mig)
    compute, memory = sum(p.compute_slices for p in profiles), sum(p.memory_slices for p in profiles)
    if compute > COMPUTE_SLICES or memory > MEMORY_SLICES:
        raise ConfigurationError(
            f"mig must fit {COMPUTE_SLICES} compute and {MEMORY_SLICES} memory slices; "
            f"{', '.join(p.name for p in profiles)} take {compute} and {memory}"
        )
    return tuple(p.name for p in profiles)


def _profile(variant: Variant, name: str) -> MigProfile:
    gpu = f"{variant.model.name}-{variant.memory_gib:g}GB"
    known = variant.model.mig.get(variant.memory_gib, ())
    if not known:
        raise ConfigurationError(f"mig must be None for {gpu}: it cannot be partitioned")
    if name.lower() not in known:
        raise refusal("mig", f"one of {', '.join(known)} for {gpu}", name)
    return MigProfile.of(name.lower(), variant.memory_gib)
