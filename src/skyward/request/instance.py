"""Machine types, and the choice of the smallest one that suffices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skyward.errors import ConfigurationError
from skyward.request.accelerators import Accelerator, AcceleratorLike, find_variant, fold_name, parse_accelerator
from skyward.request.checks import gibibytes, whole_number

_NEAREST = 3
_OTHER_ACCELERATOR = 4
_REPORTED_TOLERANCE = 0.07
"""APIs report usable memory: up to 7 % below the size an accelerator is sold as (A10G: 22.35 GiB for 24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """A machine type of a provider.

    Attributes:
        name: the provider's name for it, e.g. ``"p5.48xlarge"``.
        cpu: usable virtual cores.
        memory_gib: main memory.
        accelerator: catalogue name of its accelerators, e.g. ``"A100-40GB"``; None if it has none.
        accelerator_count: number of accelerators.
        accelerator_memory_gib: memory of each; None where the name carries it.
        price_on_demand: USD an hour on demand; None is unknown.
        price_spot: USD an hour on spot; None is unknown or not offered.
    """

    name: str
    cpu: int
    memory_gib: float
    accelerator: str | None = None
    accelerator_count: int = 0
    accelerator_memory_gib: float | None = None
    price_on_demand: float | None = None
    price_spot: float | None = None

    def __str__(self) -> str:
        held = f"{self.accelerator_count}x {self.accelerator}, " if self.accelerator else ""
        return f"{self.name} ({held}{self.cpu} cores, {self.memory_gib:g} GiB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceWish:
    """Minimum requirements of a machine; None requires nothing.

    Attributes:
        accelerator: kind, memory and count; a machine with more of the same kind will do.
        cpu: cores of the whole machine.
        memory_gib: main memory of the whole machine.
    """

    accelerator: Accelerator | None = None
    cpu: int | None = None
    memory_gib: float | None = None

    def shortfall(self, spec: InstanceSpec) -> int:
        """Return 0 when the machine satisfies the wish, else a number that grows with the mismatch."""
        short = (self.cpu or 0) > spec.cpu, (self.memory_gib or 0.0) > spec.memory_gib
        return sum(short) + (_accelerator_shortfall(self.accelerator, spec) if self.accelerator else 0)

    def __str__(self) -> str:
        parts = [str(self.accelerator)] if self.accelerator else []
        parts += [f"{self.cpu} cores"] if self.cpu else []
        parts += [f"{self.memory_gib:g} GiB"] if self.memory_gib else []
        return ", ".join(parts) or "anything"


def select_instance(
    available: Iterable[InstanceSpec],
    *,
    accelerator: AcceleratorLike | None = None,
    cpu: int | None = None,
    memory: str | None = None,
) -> InstanceSpec:
    """Return the smallest available machine type that satisfies the request.

    Smallest means fewest accelerators, then least accelerator memory, cores, main memory and price.

    Args:
        available: machine types to choose from.
        accelerator: name or :class:`Accelerator`; its count is the least number.
        cpu: least number of cores.
        memory: least main memory, e.g. ``"128GB"``.

    Raises:
        ConfigurationError: a parameter is wrong, or nothing matches; then the message names the nearest types.
    """
    wish = InstanceWish(
        accelerator=None if accelerator is None else parse_accelerator(accelerator),
        cpu=None if cpu is None else whole_number("cpu", cpu),
        memory_gib=None if memory is None else gibibytes("memory", memory),
    )
    ranked = sorted(available, key=lambda spec: (wish.shortfall(spec), _size(spec)))
    if ranked and not wish.shortfall(ranked[0]):
        return ranked[0]
    nearest = "; ".join(map(str, ranked[:_NEAREST])) or "there are no instance types to choose from"
    raise ConfigurationError(f"no instance type has {wish}; nearest: {nearest}")


def _accelerator_shortfall(wanted: Accelerator, spec: InstanceSpec) -> int:
    if not wanted.memory_gib:  # any: see any_accelerator
        return int(spec.accelerator_count < wanted.count)
    variant = find_variant(spec.accelerator or "")
    name = variant.model.name if variant else spec.accelerator or ""
    if fold_name(name) != fold_name(wanted.name):
        return _OTHER_ACCELERATOR
    memory_gib = spec.accelerator_memory_gib or (variant.memory_gib if variant else wanted.memory_gib)
    short = (
        abs(memory_gib - wanted.memory_gib) > _REPORTED_TOLERANCE * wanted.memory_gib,
        wanted.form_factor is not None and (variant is None or variant.form_factor != wanted.form_factor),
        spec.accelerator_count < wanted.count,
    )
    return sum(short)


def _size(spec: InstanceSpec) -> tuple[float | str, ...]:
    price = float("inf") if spec.price_on_demand is None else spec.price_on_demand
    memory_gib = spec.accelerator_memory_gib or 0.0
    return spec.accelerator_count, memory_gib, spec.cpu, spec.memory_gib, price, spec.name
